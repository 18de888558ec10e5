"""How masters and moments are kept in fewer bytes: the conversions to and from fp32, as torch operations.

These are the definitions. The compiled executors do the same, bit for bit, and are tested against this file.

Masters: a weight and what it lacks of its fp32 master.

    split   bf16   bits = (weight << 16) + rest, rest int16      | sign 1 | exponent 8 | mantissa 7 ~ 16 in the rest |
                   exact for every pattern whose magnitude is below 0x7F7F8000
    split   fp16   master = weight + rest * ulp(weight) * 2**-15, rest int16
                   exact for 2**-16 <= |master| <= 65504, else within 2**-40
    split8  bf16   the upper 24 bits of the pattern, rounded: (weight << 8) + rest, rest int8; within 2**-16 of itself
    split8  fp16   master = weight + rest * ulp(weight) * 2**-7, rest int8; within 2**-18 of the weight, else 2**-32
    stochastic     no rest: the weight is rounded up or down by chance, so that its mean is the master

A master beyond the largest 16-bit number saturates, whatever the storage, and is counted.

Moments: ``fp32``; ``bf16``, rounded by chance, since beta2 = 0.999 takes off less than half a unit in the last place,
where nearest rounding would stop; ``int8``, in groups with one 16-bit scale (see :func:`encode_first`).

Sources: DESIGN's integer split; Zamirai et al., *Revisiting BFloat16 Training*, 2020, section 3 (stochastic rounding);
Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, ICLR 2022, section 2; FlashOptim, arXiv 2602.23349,
section 3 (the residual in units of the last place, companding).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfstep._compat import rounded_sqrt


class Master(IntEnum):
    """What is kept beside a weight."""

    NONE = 0
    FP32 = 1
    SPLIT = 2
    SPLIT8 = 3
    STOCHASTIC = 4


class Moment(IntEnum):
    """How a moment is kept."""

    NONE = 0
    FP32 = 1
    BF16 = 2
    INT8 = 3


_Word = TypeVar("_Word", int, Tensor)
BF16_BOUND = 0x7F7F8000  # magnitudes from here on would round to bf16's infinity
_LARGEST_SPLIT = BF16_BOUND - 1
_NAN = 0x7FC00000  # whose upper half is a NaN too
# Of the 16 bits of a scale: 2**-100, so that 255 divided by it is finite and 0 is never divided by 0; and 2**126, so
# that it can be added to a value.
SMALLEST_SCALE, LARGEST_SCALE = 0x1B00, 0xFD00
LARGEST_FIRST = 2.0**126  # what is beyond becomes that
LARGEST_ROOT = 2.0**64 * (1 - 2.0**-24)  # of fp32's largest number
# In fp32 patterns: 1 or 128, and half of the last of the random bits that follow.
UP_FROM_1, UP_FROM_128 = 0x3F800800, 0x43000010

# ---- random bits ----------------------------------------------------------------------------------------------------


def random_key(seed: int | Tensor, step: _Word, tensor: _Word) -> _Word:
    """What a tensor's random bits of one step depend on, besides the element: 32 bits.

    Args:
        seed: of the run.
        step: how often the tensor was stepped, this step included; an int, or int64 numbers of many tensors.
        tensor: its number in the optimizer; likewise.
    """
    return with_tensor(step_key(seed, step), tensor)  # type: ignore[no-any-return]


def step_key(seed: Any, step: Any) -> Any:
    """The part of a key that all tensors share."""
    return _with_number(_with_number(0, seed), step)


def with_tensor(key: Any, tensor: Any) -> Any:
    """The key of a tensor, from that of the step."""
    return _with_number(key, tensor)


def _with_number(key: Any, number: Any) -> Any:
    for word in (number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF):
        key = _mixed(key ^ word)
    return key


def _mixed(word: _Word) -> _Word:
    """The two-round multiply-xorshift mixer "lowbias32" of C. Wellons (*hash-prospector*, 2018)."""
    word = word ^ word >> 16
    word = word * 0x7FEB352D & 0xFFFFFFFF
    word = word ^ word >> 15
    word = word * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


def random_bits(key: int | Tensor, first: int, number: int, device: torch.device) -> Tensor:
    """32 random bits for each of ``number`` elements from the ``first`` on, as int64: a function of key and index."""
    index = torch.arange(first, first + number, device=device)
    return _mixed((index * 0x9E3779B1 ^ key) & 0xFFFFFFFF)


# ---- masters --------------------------------------------------------------------------------------------------------


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _saturated(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The master with what the weight's dtype cannot hold made its largest number; NaN stays."""
    if dtype == torch.float16:
        return master.clamp(-65504.0, 65504.0)
    bits = _bits(master)
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    held = torch.where(magnitude > 0x7F800000, bits, magnitude.clamp(max=_LARGEST_SPLIT) | sign)
    return _floats(held)


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A 16-bit weight and an int16 rest."""
    master = _saturated(master, dtype)
    if dtype == torch.float16:
        return _split_fp16(master, 2.0**15, torch.int16)
    bits = torch.where(master.isnan(), _NAN, _bits(master))
    high = bits + 0x8000 >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The fp32 master that :func:`split` or :func:`split8` took apart.

    Whatever weight it is put beside, a rest stays below half a unit in its last place.
    """
    if weight.dtype == torch.float16:
        unit = _ulp_fp16(weight) * (2.0**-15 if rest.dtype == torch.int16 else 2.0**-7)
        return weight.float() + rest.float() * unit
    high = weight.contiguous().view(torch.int16).to(torch.int64)
    low = rest.to(torch.int64) << (0 if rest.dtype == torch.int16 else 8)
    magnitude = high & 0x7FFF
    low = torch.where(magnitude == 0, low.clamp(min=0), low)  # somebody has made the weight 0: below it is NaN
    return _floats((high << 16) + torch.where(magnitude >= 0x7F80, 0, low))


def split8(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A 16-bit weight and an int8 rest."""
    master = _saturated(master, dtype)
    if dtype == torch.float16:
        return _split_fp16(master, 2.0**7, torch.int8)
    bits = _bits(master)
    magnitude = (bits & 0x7FFFFFFF).clamp(max=_LARGEST_SPLIT - 0x80)  # so that neither rounding reaches infinity
    bits = torch.where(bits & 0x7FFFFFFF > 0x7F800000, _NAN, magnitude | bits & 0x80000000)
    upper = bits + 0x80 >> 8  # rounded once to 24 bits, which then split exactly
    high = upper + 0x80 >> 8
    return high.to(torch.int16).view(torch.bfloat16), (upper - (high << 8)).to(torch.int8)


def _split_fp16(master: Tensor, parts: float, rest_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = master.half()
    rest = ((master - weight.float()) / _ulp_fp16(weight) * parts).round()
    return weight, rest.nan_to_num(0.0).to(rest_dtype)


def _ulp_fp16(weight: Tensor) -> Tensor:
    """The step to the next fp16 number, 2**-24 for subnormals; in fp32."""
    exponent = (weight.contiguous().view(torch.int16).to(torch.int64) >> 10 & 0x1F).clamp(min=1)
    return _floats(exponent - 25 + 127 << 23)  # 2**(exponent - 25)


def round_by_chance(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 to 16 bits, up with a probability that equals the part of the unit that is above.

    Args:
        values: fp32.
        dtype: bf16 or fp16; beyond its largest number the result is that.
        bits: int64 in [0, 2**16), random, of the same shape.
    """
    largest = torch.finfo(dtype).max
    if dtype == torch.bfloat16:
        pattern = _bits(values)
        rounded = _floats((pattern + bits) & 0xFFFF0000)
        return torch.where(values.isnan(), values, rounded).clamp(-largest, largest).bfloat16()
    # In units of the fp16 number below: exact, and fp16's subnormals need no rule of their own.
    magnitude = values.abs().clamp(max=largest)
    unit = _ulp_fp16(_toward_zero_fp16(magnitude))
    whole = magnitude / unit
    lower = whole.floor()
    up = ((whole - lower) * 2.0**16).floor() > bits  # floor: what is below 2**-16 of a unit never rounds up
    return ((lower + up) * unit).copysign(values).half()


def _toward_zero_fp16(magnitude: Tensor) -> Tensor:
    nearest = magnitude.half()
    return torch.where(nearest.float() > magnitude, _next_below(nearest), nearest)


def _next_below(positive: Tensor) -> Tensor:
    return (positive.view(torch.int16) - 1).view(torch.float16)


# ---- moments --------------------------------------------------------------------------------------------------------

GROUP = 32  # elements that share a scale: 2 bytes of scale on 32 of codes


def encode_scale(largest: Tensor, *, up: bool = False) -> Tensor:
    """An fp32 number that is not negative in 16 bits, int16: its pattern without the sign, with 8 bits of mantissa.

        | exponent 8 | mantissa 8 |      from 2**-100 on: what is smaller becomes that

    Rounded to nearest, or ``up`` to a number that is not smaller. fp16 would lose the gradients below 6e-5, and bf16 a
    bit: with 8, the largest of a group keeps the largest code, and what was decoded encodes to the same codes again.
    """
    pattern = _bits(largest) + (0x7FFF if up else 0x4000) >> 15
    return pattern.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.int16)


def decode_scale(scale: Tensor) -> Tensor:
    """The fp32 number of :func:`encode_scale`'s 16 bits."""
    return _floats((scale.to(torch.int64) & 0xFFFF) << 15)


def encode_first(values: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The first moment in int8, in groups of at most 32: the last dimension of ``values``.

    A group is divided by its largest magnitude s, and x = v / s in [-1, 1] is companded to ``127 * 2 x / (1 + |x|)``,
    so that codes are four times as dense at 0 as at 1. Multiplied by s that is one division: ``254 * v / (s + |v|)``.

    Args:
        values: fp32, ``[..., GROUP]``.
        bits: int64 in [0, 2**16), random, of the same shape: a code is rounded up or down by chance, so that its mean
            is right. beta1 = 0.9 takes a tenth off: rounded to nearest, a code below 5 would stay for ever, and move a
            weight without a gradient as long as there are steps. None: to nearest.

    Returns:
        codes ``[..., GROUP]`` in int8 and scales ``[...]``, see :func:`encode_scale`.
    """
    values = values.clamp(-LARGEST_FIRST, LARGEST_FIRST)
    scale = encode_scale(values.abs().amax(-1), up=bits is not None)
    code = values / (decode_scale(scale).unsqueeze(-1) + values.abs()) * 254.0
    return _to_integers(code, bits, 128).to(torch.int8), scale


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    """The values that :func:`encode_first` gives back: ``x = y / (2 - |y|)`` with ``y = code / 127``."""
    code = codes.float()
    return code / (254.0 - code.abs()) * decode_scale(scale).unsqueeze(-1)


def encode_second(values: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The second moment in uint8: the square root, divided by the largest of its group.

    Args:
        values: fp32, not negative, ``[..., GROUP]``.
        bits: int64 in [0, 2**16), random, of the same shape: a code is rounded up or down by chance, so that its mean
            is the root. beta2 = 0.999 takes 5e-4 off a root, an eighth of a code at most: rounded to nearest, it would
            stay where it is for ever, and only grow. None: to nearest.

    What is not 0 never becomes 0, as long as fp32 holds the square of a 255th of the largest root.
    """
    root = rounded_sqrt(values)
    scale = encode_scale(root.amax(-1), up=bits is not None)
    unit = decode_scale(scale).unsqueeze(-1)
    code = _to_integers(root * torch.div(torch.full_like(unit, 255.0), unit), bits, 1)
    return torch.where(root > 0, code.clamp(min=1), code).to(torch.uint8), scale


def _to_integers(code: Tensor, bits: Tensor | None, shift: int) -> Tensor:
    """To nearest, or ``floor(code + u)`` with u from 2**-12 to 1 - 2**-12 in steps of 2**-11: up as often as it should.

    Within 2**-12 of an integer a code is what that integer was decoded to, and stays. ``shift``, which makes it
    positive, is added to u first: their sum is exact, and a compiled loop has it in two operations on bits.
    """
    if bits is None:
        return code.round()
    u = ((bits >> 5) * 2 + 1).to(torch.float32) * 2.0**-12 + shift
    return (code + u).to(torch.int32) - shift


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    """The values that :func:`encode_second` gives back."""
    unit = decode_scale(scale).unsqueeze(-1)
    # A tensor divided by a tensor is correctly rounded everywhere; by a number, CUDA multiplies by its reciprocal.
    root = codes.float() * torch.div(unit, torch.full_like(unit, 255.0))
    return root * root
