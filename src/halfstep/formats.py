"""What a float format can hold, and rounding to it.

A format is a sign bit, an exponent field and a mantissa field. Everything else follows from the two widths, the bias
and whether the top exponent is spent on infinity, and is derived here rather than typed in:

    bias               = 2**(exponent_bits - 1) - 1
    smallest_normal    = 2**(1 - bias)                        exponent field 1, mantissa 0
    smallest_subnormal = smallest_normal * 2**-mantissa_bits  exponent field 0, mantissa 1
    largest            = the last finite code below infinity (or below NaN, where there is no infinity)

A format with fp32's exponents (tf32, bf16) is reached by dropping mantissa bits from fp32's bit pattern. For one with
fewer exponents, rounding divides by the format's spacing at that value (a power of two: exact), rounds to an integer
and multiplies back. Both are the same on every device and are checked bit for bit against torch's casts.

Not here: arithmetic in a format (see ``emulate``), block-scaled formats, fp64.

Sources: IEEE 754-2019, section 3; Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3,
and OCP 8-bit Floating Point Specification 1.0 for the two fp8 formats; NVIDIA A100 whitepaper for TF32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import torch

from halfstep.errors import ArgumentError

# The bits of a fp32 and a fp64 number, as torch can view them: (integer dtype, mantissa bits, bias).
#   | sign 1 | exponent 8 or 11 | mantissa 23 or 52 |
_LAYOUTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}

# Stochastic rounding compares a fraction with this many random bits, so its bias is at most 2**-53 of one spacing.
_RANDOM_BITS = 53


@dataclass(frozen=True)
class FloatFormat:
    """A binary float format: how wide its fields are, and every limit that follows from them.

    Args:
        name: halfstep's name for it, such as ``"fp16"``.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field, without the implicit leading 1.
        has_inf: whether the top exponent is spent on infinity and NaN (IEEE 754). ``fp8_e4m3fn`` has no infinity: its
            top exponent holds ordinary numbers, and only the all-ones mantissa there is NaN.
        dtype: the torch dtype that stores it, or None (tf32 lives in fp32 storage).

    Example:
        >>> from halfstep.formats import FP16
        >>> FP16.largest, FP16.smallest_normal, FP16.smallest_subnormal
        (65504.0, 6.103515625e-05, 5.960464477539063e-08)
        >>> FP16.ulp(1.0), FP16.ulp(65504.0), FP16.ulp(1e-7)
        (0.0009765625, 32.0, 5.960464477539063e-08)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Bits that carry information: sign, exponent and mantissa (tf32 has 19, stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field to get the exponent."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def smallest_exponent(self) -> int:
        """Exponent (base 2) of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        """Exponent (base 2) of the largest finite number."""
        top_field = int(2**self.exponent_bits) - 1
        return (top_field - 1 if self.has_inf else top_field) - self.bias

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa_bits)

    @property
    def largest(self) -> float:
        """Largest finite value."""
        # Without infinity the all-ones mantissa of the top binade is NaN, so the last number sits one step lower.
        steps_below_two = 1 if self.has_inf else 2
        return float((2.0 - steps_below_two * self.epsilon) * 2.0**self.largest_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with all its mantissa bits: below it, precision is lost bit by bit."""
        return float(2.0**self.smallest_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value at all: half of it and less rounds to zero."""
        return self.smallest_normal * self.epsilon

    @overload
    def ulp(self, x: float) -> float: ...
    @overload
    def ulp(self, x: torch.Tensor) -> torch.Tensor: ...
    def ulp(self, x: float | torch.Tensor) -> float | torch.Tensor:
        """Spacing of the format's values in the binade of ``x`` (unit in the last place).

        Args:
            x: a number, or a tensor of any shape in a floating dtype. The sign does not matter.

        Returns:
            A float, or a tensor of the same shape (fp64 for fp64, else fp32). Zero and subnormals have the spacing of
            the subnormals. Finite values beyond ``largest`` have that of the top binade. inf and NaN have none: NaN.

        Raises:
            ArgumentError: ``x`` is a tensor of integers, booleans or complex numbers.
        """
        if isinstance(x, torch.Tensor):
            return self._tensor_ulp(x.detach())
        if not math.isfinite(x):
            return math.nan
        exponent = math.frexp(x)[1] - 1 if x else self.smallest_exponent
        return float(2.0 ** (self._clamp_exponent(exponent) - self.mantissa_bits))

    def _clamp_exponent(self, exponent: int) -> int:
        return min(max(exponent, self.smallest_exponent), self.largest_exponent)

    def _tensor_ulp(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            raise ArgumentError(
                asked=f"{self.name}.ulp of a tensor of {x.dtype}",
                true="spacing is a property of floating-point values",
                why="an integer or complex value has no binade",
                fix="pass x.float(), or the real and imaginary parts one by one",
            )
        wide = x if x.dtype in _LAYOUTS else x.float()
        return torch.where(wide.isfinite(), _spacing(wide, self), math.nan)

    @property
    def meaning(self) -> str:
        """What the limits mean for a gradient, in words; the numbers in them are the derived ones."""
        down = (
            f"keeps {self.mantissa_bits + 1} bits down to {self.smallest_normal:.3g} (smallest normal), loses them "
            f"one by one down to {self.smallest_subnormal:.3g} (smallest subnormal), is zero at half of that and less"
        )
        up = f"is {'inf' if self.has_inf else 'NaN'} beyond {self.largest:.6g}"
        advice = f" {_ADVICE[self.name]}" if self.name in _ADVICE else ""
        return f"A gradient {down}, {up}.{advice}"

    def __str__(self) -> str:
        """The name."""
        return self.name


FP32 = FloatFormat("fp32", exponent_bits=8, mantissa_bits=23, dtype=torch.float32)
TF32 = FloatFormat("tf32", exponent_bits=8, mantissa_bits=10)
FP16 = FloatFormat("fp16", exponent_bits=5, mantissa_bits=10, dtype=torch.float16)
BF16 = FloatFormat("bf16", exponent_bits=8, mantissa_bits=7, dtype=torch.bfloat16)
FP8_E4M3FN = FloatFormat("fp8_e4m3fn", exponent_bits=4, mantissa_bits=3, has_inf=False, dtype=torch.float8_e4m3fn)
FP8_E5M2 = FloatFormat("fp8_e5m2", exponent_bits=5, mantissa_bits=2, dtype=torch.float8_e5m2)

HALF_DTYPES = (torch.float16, torch.bfloat16)  # what weights may be in, beside fp32

FORMATS = (FP32, TF32, FP16, BF16, FP8_E4M3FN, FP8_E5M2)

_ADVICE = {
    "fp32": "What weights, masters and moments are kept in.",
    "tf32": "Tensor Cores read fp32 numbers so: fp32's range, so no loss scaling; storage stays fp32.",
    "fp16": "The smallest normal and the smallest subnormal are two numbers for two questions: where bits start to go, "
    "and where everything is gone. Range is what fp16 lacks: scale the loss.",
    "bf16": "fp32's range, so no loss scaling; with 8 bits small updates to a weight are lost, so keep masters.",
    "fp8_e4m3fn": "For weights and activations, with a scale per tensor or block.",
    "fp8_e5m2": "For gradients, with a scale per tensor or block.",
}

_ALIASES = {
    "float32": FP32, "float": FP32, "f32": FP32, "single": FP32, "full": FP32,
    "tensorfloat32": TF32,
    "float16": FP16, "f16": FP16, "half": FP16,
    "bfloat16": BF16,
    "float8_e4m3fn": FP8_E4M3FN, "e4m3fn": FP8_E4M3FN, "fp8_e4m3": FP8_E4M3FN, "e4m3": FP8_E4M3FN,
    "float8_e5m2": FP8_E5M2, "e5m2": FP8_E5M2,
}  # fmt: skip
_BY_NAME = {fmt.name: fmt for fmt in FORMATS} | _ALIASES
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS if fmt.dtype is not None}


def format_of(name: str | torch.dtype | FloatFormat) -> FloatFormat:
    """The format that a name, a torch dtype or a format stands for.

    Args:
        name: ``"fp16"``, ``"float16"``, ``"half"``, ``"torch.float16"`` (case does not matter), ``torch.float16``, or a
            FloatFormat, which is returned as it is.

    Returns:
        One of ``FORMATS``.

    Raises:
        ArgumentError: the name or dtype is none of halfstep's formats.

    Example:
        >>> format_of("half") is format_of(torch.float16) is FP16
        True
    """
    if isinstance(name, FloatFormat):
        return name
    found = None
    if isinstance(name, torch.dtype):
        found = _BY_DTYPE.get(name)
    elif isinstance(name, str):
        found = _BY_NAME.get(name.strip().lower().removeprefix("torch."))
    if found is None:
        raise ArgumentError(
            asked=f"the float format {name!r}",
            true=f"halfstep knows {', '.join(fmt.name for fmt in FORMATS)}",
            why="limits and rounding are defined for these only",
            fix='use one of these names, or their dtype, such as "bf16" or torch.bfloat16',
        )
    return found


def dtype_of(name: str | torch.dtype | FloatFormat) -> torch.dtype:
    """The torch dtype that stores a format.

    Args:
        name: as for ``format_of``.

    Returns:
        The dtype.

    Raises:
        ArgumentError: the format is unknown, or is tf32, which no dtype stores.

    Example:
        >>> dtype_of("bf16")
        torch.bfloat16
    """
    fmt = format_of(name)
    if fmt.dtype is None:
        raise ArgumentError(
            asked=f"the dtype of {fmt.name}",
            true="tf32 is how Tensor Cores read fp32 numbers; it is stored as fp32",
            why="no tensor can have this dtype",
            fix='use "fp32" for storage, and the policy "tf32" for the products',
        )
    return fmt.dtype


def formats_table() -> list[dict[str, str | int | float | bool | None]]:
    """Every format as a row of plain data, ready for a table or for JSON.

    Returns:
        One dict per format, with its name, dtype, field widths, limits, and what they mean for a gradient.

    Example:
        >>> [row["largest"] for row in formats_table() if row["name"].startswith("fp8")]
        [448.0, 57344.0]
    """
    return [
        {
            "name": fmt.name,
            "dtype": None if fmt.dtype is None else str(fmt.dtype),
            "bits": fmt.bits,
            "exponent_bits": fmt.exponent_bits,
            "mantissa_bits": fmt.mantissa_bits,
            "has_inf": fmt.has_inf,
            "largest": fmt.largest,
            "smallest_normal": fmt.smallest_normal,
            "smallest_subnormal": fmt.smallest_subnormal,
            "epsilon": fmt.epsilon,
            "meaning": fmt.meaning,
        }
        for fmt in FORMATS
    ]


def round_to(
    x: torch.Tensor,
    format: str | torch.dtype | FloatFormat,
    *,
    rounding: str = "nearest",
    saturate: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Round fp32 values to those that a format can hold; the result stays fp32.

    Args:
        x: fp32 tensor of any shape and strides. Rounding has derivative zero wherever it has one, so a tensor that
            asks for gradients is refused unless gradients are switched off.
        format: the format, by name, dtype or as a FloatFormat.
        rounding: ``"nearest"``, ties to even, as torch casts; or ``"stochastic"``, up or down to the two neighbours
            with the probability that makes the expected value ``x`` (exact values stay; the bias is at most 2**-53
            ulp). Above ``largest`` the upper neighbour is the value that overflows.
        saturate: what becomes of values that round beyond ``largest``, and of inf. False: inf, or NaN in a format
            without inf (OCP's non-saturating mode). True: the largest finite value with their sign. NaN stays NaN.
            torch's own cast to ``float8_e4m3fn`` saturates since 2.13 and gave NaN in earlier versions; its casts to
            fp16, bf16 and ``float8_e5m2`` give inf.
        generator: where stochastic rounding draws its bits from; by default torch's global one for the device.

    Returns:
        A new fp32 tensor of the shape of ``x``.

    Raises:
        ArgumentError: ``x`` is not fp32 or asks for gradients, the format or rounding is unknown, or a generator is
            given for nearest rounding.

    Example:
        >>> round_to(torch.tensor([1.0004, 65520.0, 3e-8]), "fp16")
        tensor([1.0000e+00,        inf, 5.9605e-08])
    """
    fmt = format_of(format)
    _check_round_arguments(x, rounding, generator)
    stochastic = rounding == "stochastic"
    round_finite = _drop_mantissa_bits if fmt.exponent_bits == FP32.exponent_bits else _round_to_spacing
    with torch.no_grad():
        return _handle_overflow(round_finite(x, fmt, stochastic, generator), fmt, saturate)


def _check_round_arguments(x: torch.Tensor, rounding: str, generator: torch.Generator | None) -> None:
    if x.dtype != torch.float32:
        raise ArgumentError(
            asked=f"round_to of a tensor of {x.dtype}",
            true="rounding starts from fp32 values",
            why="fp64 would be rounded twice, and the others are not fp32 values at all",
            fix="pass x.float() (exact for 16-bit tensors)",
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            asked="round_to of a tensor that requires grad",
            true="rounding is a staircase: its derivative is zero wherever it exists",
            why="every gradient behind it would be zero without a word",
            fix="pass x.detach(), or call it under torch.no_grad(); to train in a format use halfstep.emulate",
        )
    if rounding not in ("nearest", "stochastic"):
        raise ArgumentError(
            asked=f"rounding={rounding!r}",
            true="round_to rounds to nearest (ties to even) or stochastically",
            why="there is no other rule to follow",
            fix='pass rounding="nearest" or rounding="stochastic"',
        )
    if generator is not None and rounding == "nearest":
        raise ArgumentError(
            asked='a generator with rounding="nearest"',
            true="rounding to nearest draws no random bits",
            why="the generator could not take effect",
            fix='leave it out, or pass rounding="stochastic"',
        )


def _spacing(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Distance between the format's values around each ``x`` (fp32 or fp64), as a power of two of the same dtype."""
    integer, mantissa_bits, bias = _LAYOUTS[x.dtype]
    magnitude = x.view(integer) & torch.iinfo(integer).max  # the sign bit off
    field = (magnitude >> mantissa_bits).clamp(fmt.smallest_exponent + bias, fmt.largest_exponent + bias)
    field -= fmt.mantissa_bits
    bits = field.clamp(min=1) << mantissa_bits
    if fmt.smallest_exponent + bias - fmt.mantissa_bits < 1:
        # The spacing of bf16 and tf32 near zero is itself a subnormal of fp32: one mantissa bit, no exponent.
        bits = torch.where(field > 0, bits, torch.ones_like(bits) << (field + (mantissa_bits - 1)).clamp(min=0))
    return bits.view(x.dtype)


def _drop_mantissa_bits(
    x: torch.Tensor, fmt: FloatFormat, stochastic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    """Round to a format with fp32's exponents: in the bit pattern, neighbours are ``2**num_dropped`` apart.

    A carry out of the mantissa raises the exponent, which is right, and out of the top binade gives inf, which is right
    too. Subnormals need no case of their own, and survive ``torch.set_flush_denormal``.
    """
    num_dropped = FP32.mantissa_bits - fmt.mantissa_bits
    if num_dropped == 0:
        return x
    bits = x.view(torch.int32)
    sign, magnitude = bits & torch.iinfo(torch.int32).min, bits & torch.iinfo(torch.int32).max
    if stochastic:
        magnitude += torch.randint(2**num_dropped, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    else:
        is_odd = (magnitude >> num_dropped) & 1
        magnitude += (2 ** (num_dropped - 1) - 1) + is_odd  # just under half, or half where a tie must go up
    magnitude &= -(2**num_dropped)
    return torch.where(x.isnan(), x, (magnitude | sign).view(torch.float32))


def _round_to_spacing(
    x: torch.Tensor, fmt: FloatFormat, stochastic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    """Round to a format with fewer exponents than fp32, so that its spacing is a normal fp32 number everywhere."""
    spacing = _spacing(x, fmt)
    steps = x / spacing  # exact: the spacing is a power of two
    return (_round_stochastically(steps, generator) if stochastic else steps.round()) * spacing


def _round_stochastically(steps: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    size = steps.abs()  # of the magnitude, for the fraction of -1e-10 counted from -1 is not a fp32 number
    below = size.floor()
    fraction = size - below  # [0, 1), exact; NaN for inf, where the last line gives inf for either draw
    threshold = (fraction * 2.0**_RANDOM_BITS).to(torch.int64)
    draw = torch.randint(2**_RANDOM_BITS, steps.shape, generator=generator, device=steps.device, dtype=torch.int64)
    return (below + (draw < threshold)).copysign(steps)


def _handle_overflow(rounded: torch.Tensor, fmt: FloatFormat, saturate: bool) -> torch.Tensor:
    if saturate:
        return rounded.clamp(-fmt.largest, fmt.largest)  # clamp lets NaN through
    beyond = rounded.abs() > fmt.largest
    # Multiplying by inf keeps the sign of the value.
    return torch.where(beyond, rounded * math.inf if fmt.has_inf else math.nan, rounded)


def saturating_cast(x: torch.Tensor, dtype: str | torch.dtype) -> torch.Tensor:
    """Cast to fp16 or bf16 so that overflow becomes the largest finite value instead of inf.

    Args:
        x: floating tensor of any shape. Gradients flow through it, except where it was clamped.
        dtype: ``torch.float16`` or ``torch.bfloat16``, or their names.

    Returns:
        A tensor of that dtype: equal to torch's own cast wherever that is finite; the largest finite value with the
        sign of ``x`` where it would be inf (inf itself included); NaN where ``x`` is NaN.

    Raises:
        ArgumentError: ``dtype`` is not a 16-bit float, or ``x`` is not floating.

    Example:
        >>> saturating_cast(torch.tensor([1e6, -1e6, 0.5]), torch.float16)
        tensor([ 6.5504e+04, -6.5504e+04,  5.0000e-01], dtype=torch.float16)
    """
    fmt = format_of(dtype)
    if fmt not in (FP16, BF16) or not x.is_floating_point():
        raise ArgumentError(
            asked=f"saturating_cast of {x.dtype} to {fmt.name}",
            true="it casts floating tensors to fp16 or bf16",
            why="only these two store weights and can overflow on the way from fp32",
            fix="pass torch.float16 or torch.bfloat16; for fp8 use round_to(x, format, saturate=True)",
        )
    # In the narrower of two 16-bit dtypes the bound itself may not be representable, so clamp in fp32.
    wide = x if x.dtype in _LAYOUTS else x.float()
    return wide.clamp(-fmt.largest, fmt.largest).to(dtype_of(fmt))
