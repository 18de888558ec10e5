"""Between storage and fp32 inside a Triton program: the compiled form of ``kernels/storage.py``.

Blocks are ``[groups, GROUP]``; a group is 32 neighbours of one tensor. 16-bit weights and moments are read and written
as ``uint16`` patterns, for three reasons: halfstep's bf16 rounding is not the hardware's, the interpreter's cast to
bf16 is not the hardware's either, and patterns take one or two integer instructions.

Arithmetic on fp32 is correctly rounded everywhere: divisions and roots are the ``_rn`` ones. What is scaled is scaled
by powers of two, which is exact, so a product stands where ``storage.py`` divides. Hopper issues 128 instructions per
multiprocessor and clock, half of them on integers, and moves 20 bytes in the time of about 120; so each of these
functions is as short as it can be without giving up a bit.
"""

# ruff: noqa: N803, SIM109, SIM300 - Triton's custom: compile-time arguments in capitals; it has no `in`

from typing import Any

import torch
import triton
import triton.language as tl

from halfstep.formats import BF16, FP16, FP32
from halfstep.kernels import storage
from halfstep.kernels.storage import BF16_BOUND, Master, Moment

V = Any
GROUP = tl.constexpr(storage.GROUP)

# What Triton's functions may know of a module are its constexprs.
MASTER_NONE = tl.constexpr(int(Master.NONE))
MASTER_FP32, STOCHASTIC = tl.constexpr(int(Master.FP32)), tl.constexpr(int(Master.STOCHASTIC))
SPLIT, SPLIT8 = tl.constexpr(int(Master.SPLIT)), tl.constexpr(int(Master.SPLIT8))
MOMENT_NONE, MOMENT_FP32 = tl.constexpr(int(Moment.NONE)), tl.constexpr(int(Moment.FP32))
MOMENT_BF16, MOMENT_INT8 = tl.constexpr(int(Moment.BF16)), tl.constexpr(int(Moment.INT8))


def _float(pattern: int) -> float:
    return float(torch.tensor(pattern, dtype=torch.int32, device="cpu").view(torch.float32))


LARGEST = tl.constexpr(FP32.largest)
_LARGEST_FIRST, _LARGEST_ROOT = tl.constexpr(storage.LARGEST_FIRST), tl.constexpr(storage.LARGEST_ROOT)
_UP_FROM_1, _UP_FROM_128 = tl.constexpr(storage.UP_FROM_1), tl.constexpr(storage.UP_FROM_128)
_FP16_LARGEST, _BF16_LARGEST = tl.constexpr(FP16.largest), tl.constexpr(BF16.largest)
_BF16_LIMIT = tl.constexpr(_float(BF16_BOUND - 1))  # the largest number that rounds to a finite bf16
_SPLIT8_LIMIT = tl.constexpr(_float(BF16_BOUND - 0x81))  # and the one whose upper 24 bits do
_NAN = tl.constexpr(storage._NAN)
SMALLEST_SCALE, LARGEST_SCALE = tl.constexpr(storage.SMALLEST_SCALE), tl.constexpr(storage.LARGEST_SCALE)
# Numbers below 2**22 plus this have their integer part, rounded to nearest, ties to even, in the lowest bits.
_ROUNDER, _ROUNDER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


# ---- addresses ------------------------------------------------------------------------------------------------------


@triton.jit
def _pointers(address: "V", at: "V", TYPE: tl.constexpr, WIDTH: tl.constexpr) -> "V":
    base = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(base, WIDTH * TYPE.primitive_bitwidth // 8) + at


@triton.jit
def read(address: "V", at: "V", mask: "V", TYPE: tl.constexpr, WIDTH: tl.constexpr) -> "V":
    """Elements of a tensor, WIDTH at once; what is masked is 0."""
    return tl.load(_pointers(address, at, TYPE, WIDTH), mask=mask, other=0)


@triton.jit
def write(address: "V", at: "V", mask: "V", values: "V", TYPE: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """The same, back."""
    tl.store(_pointers(address, at, TYPE, WIDTH), values, mask=mask)


# ---- bits -----------------------------------------------------------------------------------------------------------


@triton.jit
def bits_of(values: "V") -> "V":
    """The patterns of fp32 values."""
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits: "V") -> "V":
    """The fp32 values of patterns."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def cut(values: "V", TOP: tl.constexpr) -> "V":
    """What is beyond, made the largest; NaN stays."""
    values = tl.minimum(values, TOP, propagate_nan=_ALL)
    return tl.maximum(values, -TOP, propagate_nan=_ALL)


@triton.jit
def _bits_or_nan(original: "V", values: "V") -> "V":
    """The patterns of ``values``, and for a NaN one that stays a NaN when its lower half is cut off."""
    return tl.where(original == original, bits_of(values), _NAN)


@triton.jit
def _rounded(values: "V") -> "V":
    """Magnitudes below 2**22 to the nearest int32, ties to even, in two cheap instructions."""
    return (bits_of(values + _ROUNDER) - _ROUNDER_BITS).to(tl.int32, bitcast=True)


# ---- weights and masters --------------------------------------------------------------------------------------------


@triton.jit
def widened(halves: "V", TYPE: tl.constexpr) -> "V":
    """The values of 16-bit patterns."""
    if TYPE == tl.float16:
        values = halves.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = float_of(halves.to(tl.uint32) << 16)
    return values


@triton.jit
def is_beyond(master: "V", TYPE: tl.constexpr) -> "V":
    """Where a value is saturated: ``torch_step._is_saturated``."""
    if TYPE == tl.float32:
        beyond = tl.abs(master) > LARGEST
    elif TYPE == tl.float16:
        beyond = tl.abs(master) > _FP16_LARGEST
    else:
        beyond = tl.abs(master) > _BF16_LIMIT
    return beyond


@triton.jit
def nearest(values: "V", TYPE: tl.constexpr) -> "V":
    """The 16-bit patterns that weights are written by: ``rounding.rounded``."""
    if TYPE == tl.float16:
        halves = cut(values, _FP16_LARGEST).to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        halves = ((_bits_or_nan(values, cut(values, _BF16_LIMIT)) + 0x8000) >> 16).to(tl.uint16)
    return halves


@triton.jit
def _power(halves: "V", TOP: tl.constexpr, SIGN: tl.constexpr) -> "V":
    """``2.0 ** (TOP + SIGN * e)``, where ``2.0 ** (e - 25)`` is the step from an fp16 number to the next."""
    exponent = tl.maximum((halves.to(tl.int32) >> 10) & 0x1F, 1)
    return float_of(((TOP + 127 + SIGN * exponent) << 23).to(tl.uint32, bitcast=True))


@triton.jit
def joined(halves: "V", rest: "V", TYPE: tl.constexpr, MASTER: tl.constexpr) -> "V":
    """The master of a 16-bit weight and what is kept beside it: ``torch_step.read_master``."""
    if MASTER == MASTER_FP32:
        master = tl.where(nearest(rest, TYPE) == halves, rest, widened(halves, TYPE))
    elif MASTER == SPLIT or MASTER == SPLIT8:
        if TYPE == tl.float16:
            unit = _power(halves, -40 if MASTER == SPLIT else -32, 1)
            master = widened(halves, TYPE) + rest.to(tl.float32) * unit
        else:
            low = rest.to(tl.int32) << (0 if MASTER == SPLIT else 8)
            magnitude = halves.to(tl.int32) & 0x7FFF
            low = tl.where(magnitude == 0, tl.maximum(low, 0), low)
            low = tl.where(magnitude >= 0x7F80, 0, low)
            master = float_of((halves.to(tl.uint32) << 16) + low.to(tl.uint32, bitcast=True))
    else:
        master = widened(halves, TYPE)
    return master


@triton.jit
def taken_apart(master: "V", random: "V", TYPE: tl.constexpr, MASTER: tl.constexpr) -> "V":
    """A 16-bit weight and its rest (if there is none, the weight again): ``torch_step._written_master``."""
    if MASTER == MASTER_FP32:
        halves, rest = nearest(master, TYPE), cut(master, LARGEST)
    elif MASTER == STOCHASTIC:
        chance = random & 0xFFFF
        halves = by_chance(master, chance) if TYPE == tl.bfloat16 else _fp16_by_chance(master, chance)
        rest = halves
    elif MASTER == SPLIT or MASTER == SPLIT8:
        if TYPE == tl.float16:
            halves, rest = _split_fp16(master, MASTER)
        else:
            halves, rest = _split_bf16(master, MASTER)
    else:
        halves = nearest(master, TYPE)
        rest = halves
    return halves, rest


@triton.jit
def _split_bf16(master: "V", MASTER: tl.constexpr) -> "V":
    """The rest is the lower part of the pattern: the weight's rounding has carried already."""
    if MASTER == SPLIT:
        bits = _bits_or_nan(master, cut(master, _BF16_LIMIT))
        halves, rest = ((bits + 0x8000) >> 16).to(tl.uint16), bits.to(tl.int16)
    else:
        upper = (_bits_or_nan(master, cut(master, _SPLIT8_LIMIT)) + 0x80) >> 8
        halves, rest = ((upper + 0x80) >> 8).to(tl.uint16), upper.to(tl.int8)
    return halves, rest


@triton.jit
def _split_fp16(master: "V", MASTER: tl.constexpr) -> "V":
    master = cut(master, _FP16_LARGEST)
    halves = master.to(tl.float16).to(tl.uint16, bitcast=True)
    parts = (master - widened(halves, tl.float16)) * _power(halves, 40 if MASTER == SPLIT else 32, -1)
    parts = tl.where(parts == parts, parts, 0.0)
    return halves, _rounded(parts).to(tl.int16 if MASTER == SPLIT else tl.int8)


# ---- chance ---------------------------------------------------------------------------------------------------------


@triton.jit
def random_bits(key: "V", index: "V") -> "V":
    """32 random bits for each element: ``storage.random_bits``."""
    word = index.to(tl.uint32) * 0x9E3779B1 ^ key
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def by_chance(values: "V", chance: "V") -> "V":
    """Stochastic rounding to bf16 patterns, by 16 random bits: cut at its largest, no carry reaches infinity."""
    return ((_bits_or_nan(values, cut(values, _BF16_LARGEST)) + chance) >> 16).to(tl.uint16)


@triton.jit
def _fp16_by_chance(values: "V", chance: "V") -> "V":
    """Likewise to fp16 patterns, in units of the number below; the pattern after it is the number above."""
    magnitude = tl.minimum(tl.abs(values), _FP16_LARGEST, propagate_nan=_ALL)
    lower = magnitude.to(tl.float16).to(tl.uint16, bitcast=True)
    lower -= (widened(lower, tl.float16) > magnitude).to(tl.uint16)
    share = (magnitude - widened(lower, tl.float16)) * _power(lower, 41, -1)  # of the unit, times 2**16
    lower += (share >= chance.to(tl.float32) + 1.0).to(tl.uint16)
    return lower | ((bits_of(values) >> 16) & 0x8000).to(tl.uint16)


# ---- moments --------------------------------------------------------------------------------------------------------


@triton.jit
def bf16_moment(values: "V", random: "V", IS_SECOND: tl.constexpr) -> "V":
    """The patterns of a moment, rounded by bits of its own: ``torch_step._written_moment``."""
    return by_chance(values, (random if IS_SECOND else random * 0x9E3779B1) >> 16)


@triton.jit
def _unit(scales: "V") -> "V":
    return float_of(scales.to(tl.uint32) << 15)[:, None]


@triton.jit
def decoded(codes: "V", scales: "V", IS_SECOND: tl.constexpr) -> "V":
    """int8 codes and their groups' scales: ``storage.decode_first`` and ``decode_second``."""
    unit = _unit(scales)
    if IS_SECOND:
        root = codes.to(tl.uint8, bitcast=True).to(tl.float32) * tl.div_rn(unit, tl.full(unit.shape, 255.0, tl.float32))
        values = root * root
    else:
        code = codes.to(tl.float32)
        values = tl.div_rn(code, 254.0 - tl.abs(code)) * unit
    return values


@triton.jit
def _scales(values: "V") -> "V":
    """``storage.encode_scale`` of each group's largest magnitude, rounded up."""
    magnitude = (bits_of(values) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((tl.max(magnitude, axis=1) + 0x7FFF) >> 15, SMALLEST_SCALE), LARGEST_SCALE)


@triton.jit
def encoded(values: "V", random: "V", IS_SECOND: tl.constexpr) -> "V":
    """Codes and scales of a moment, 0 in what no row has: ``storage.encode_first`` and ``encode_second``.

    What is added before the code is cut to an integer comes straight from the random bits: 1 or 128, and 11 of them.
    """
    if IS_SECOND:
        # The rule has this root already.
        values = tl.minimum(tl.sqrt_rn(values), _LARGEST_ROOT, propagate_nan=_ALL)
    else:
        values = cut(values, _LARGEST_FIRST)
    scales = _scales(values)
    unit = _unit(scales)
    if IS_SECOND:
        codes = values * tl.div_rn(tl.full(unit.shape, 255.0, tl.float32), unit)
        chance = float_of(((random >> 21) << 12) | _UP_FROM_1)
        codes = (codes + chance).to(tl.int32) - 1
        codes = tl.where(values > 0.0, tl.maximum(codes, 1), codes)
    else:
        codes = tl.div_rn(values, unit + tl.abs(values)) * 254.0
        chance = float_of((((random * 0x9E3779B1) >> 21) << 5) | _UP_FROM_128)
        codes = (codes + chance).to(tl.int32) - 128
    return codes.to(tl.int8), scales.to(tl.uint16)
