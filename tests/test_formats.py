"""Formats against torch.finfo, torch's own casts (exhaustively) and closed forms."""

import doctest
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import formats
from halfstep.errors import ArgumentError
from halfstep.formats import (
    BF16,
    FORMATS,
    FP8_E4M3FN,
    FP8_E5M2,
    FP16,
    FP32,
    TF32,
    FloatFormat,
    dtype_of,
    format_of,
    formats_table,
    round_to,
    saturating_cast,
)

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
STORED = [FP16, BF16, FP8_E4M3FN, FP8_E5M2]
NARROW = [TF32, *STORED]
TORCH_SATURATES_E4M3FN = not torch.tensor(1e9).to(torch.float8_e4m3fn).float().isnan().item()


def names(fmt):
    return fmt.name


def every_value(fmt: FloatFormat) -> torch.Tensor:
    """Every bit pattern of a stored format (or of tf32), as fp32: inf and NaN included."""
    if fmt is TF32:
        return (torch.arange(2**19, dtype=torch.int64) << 13).to(torch.uint32).view(torch.float32)
    size = fmt.dtype.itemsize
    patterns = torch.arange(2 ** (8 * size), dtype=torch.int32).to(INTEGERS[size])
    return patterns.view(fmt.dtype).float()


def neighbourhoods(fmt: FloatFormat) -> torch.Tensor:
    """Each value, the midpoint to its neighbour, and one fp32 ulp either side of both; and what lies beyond."""
    values = every_value(fmt)
    finite = values[values.isfinite()].unique()
    # The midpoint of two neighbours is exact in fp64, and in fp32 because fp32 has at least one bit more.
    middles = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    limit = fmt.largest + fmt.ulp(fmt.largest) / 2  # rounds to the next power of two: overflow
    edges = torch.tensor([limit, 2 * limit, math.inf, 3.4028235e38])
    centres = torch.cat([values, middles, edges, -edges])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat([centres, torch.nextafter(centres, up), torch.nextafter(centres, down)])


def random_fp32(count: int = 1_000_000) -> torch.Tensor:
    """Uniform over bit patterns: every exponent, subnormals, inf and NaN."""
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, so that -0.0 is not 0.0; any NaN equals any other."""
    assert actual.dtype == expected.dtype == torch.float32
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(actual[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def round_in_fp64(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The closed form, where nothing can be subnormal or inexact: x / 2**e, round half to even, times 2**e."""
    exponent = (torch.frexp(x.double()).exponent - 1).clamp(min=fmt.smallest_exponent) - fmt.mantissa_bits
    step = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent.double())
    whole = (x.double() / step).round() * step
    return torch.where(whole.abs() > fmt.largest, whole * math.inf, whole).float()


# --- limits


@pytest.mark.parametrize("fmt", [FP32, *STORED], ids=names)
def test_limits_are_those_of_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.largest, fmt.smallest_normal, fmt.epsilon) == (info.max, info.smallest_normal, info.eps)
    first = torch.tensor([1], dtype=INTEGERS[fmt.dtype.itemsize]).view(fmt.dtype)
    assert fmt.smallest_subnormal == first.double().item()
    assert fmt.bits == 8 * fmt.dtype.itemsize


def test_tf32_is_fp32s_range_with_fp16s_mantissa():
    values = every_value(TF32)
    values = values[values.isfinite()]
    assert TF32.bits == 19
    assert TF32.largest == values.max().item()
    assert TF32.smallest_subnormal == values[values > 0].min().item()
    assert (TF32.smallest_normal, TF32.epsilon) == (FP32.smallest_normal, FP16.epsilon)


def test_limits_of_a_format_nobody_typed_in():
    """fp4 e2m1 (OCP MX 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and no code for infinity.

    Its all-ones code is a number, so without NaN the largest would be 6; here that code is NaN, which leaves 4.
    """
    fmt = FloatFormat("e2m1", exponent_bits=2, mantissa_bits=1, has_inf=False)
    assert (fmt.bias, fmt.smallest_subnormal, fmt.smallest_normal, fmt.largest) == (1, 0.5, 1.0, 4.0)
    assert fmt.meaning.endswith("is NaN beyond 4.")


def test_fp8_e4m3fn_has_no_infinity_and_ends_at_448():
    values = every_value(FP8_E4M3FN)
    assert not values.isinf().any()
    assert not FP8_E4M3FN.has_inf
    assert FP8_E4M3FN.largest == values.nan_to_num().max().item() == 448.0


@pytest.mark.parametrize("fmt", NARROW, ids=names)
def test_ulp_is_the_distance_to_the_next_value(fmt):
    values = every_value(fmt)
    values = values[values.isfinite() & (values >= 0)].unique().double()
    gaps = values[1:] - values[:-1]  # fp64: exact
    assert torch.equal(fmt.ulp(values[:-1]), gaps)
    assert torch.equal(fmt.ulp(-values[:-1].float()), gaps.float())
    assert fmt.ulp(fmt.largest) == gaps[-1].item()
    some = range(0, len(gaps), max(1, len(gaps) // 3000))
    assert [fmt.ulp(values[i].item()) for i in some] == [gaps[i].item() for i in some]


@pytest.mark.parametrize("fmt", FORMATS, ids=names)
@given(x=st.floats(width=32))
def test_ulp_of_a_float_and_of_a_tensor_agree(fmt, x):
    ours, tensors = fmt.ulp(x), fmt.ulp(torch.tensor(x)).item()
    assert ours == tensors or (math.isnan(ours) and math.isnan(tensors) and not math.isfinite(x))


def test_ulp_of_fp32_and_fp64_is_that_of_the_machine():
    x = random_fp32(10_000)
    x = x[x.isfinite() & (x > 0) & (x < FP32.largest)]
    assert torch.equal(FP32.ulp(x), torch.nextafter(x, torch.tensor(math.inf)) - x)
    # 1 - 2**-40 lies in the binade below 1 in fp64; rounding it to fp32 first would put it into the one above.
    assert FP16.ulp(torch.tensor(1 - 2.0**-40, dtype=torch.float64)).item() == FP16.epsilon / 2


def test_ulp_beyond_the_largest_is_that_of_the_top_binade():
    assert FP16.ulp(1e30) == FP16.ulp(torch.tensor(1e30)).item() == 32.0
    assert FP16.ulp(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [2.0**-10]


def test_ulp_refuses_what_has_no_binade():
    with pytest.raises(ArgumentError, match=r"fp16\.ulp of a tensor of torch\.int64[\s\S]*fix:  pass x\.float\(\)"):
        FP16.ulp(torch.tensor([1]))


# --- rounding to nearest


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E5M2], ids=names)
def test_nearest_is_torchs_cast_around_every_value(fmt):
    x = torch.cat([neighbourhoods(fmt), random_fp32()])
    assert_same_bits(round_to(x, fmt), x.to(fmt.dtype).float())


def test_nearest_is_torchs_cast_for_fp8_e4m3fn():
    """Up to 464, the tie above 448, all agree. Beyond, torch saturates since 2.13 and made NaN before; we do either."""
    x = torch.cat([neighbourhoods(FP8_E4M3FN), random_fp32()])
    expected = x.to(torch.float8_e4m3fn).float()
    assert_same_bits(round_to(x, FP8_E4M3FN, saturate=TORCH_SATURATES_E4M3FN), expected)
    x, expected = x[x.abs() <= 464], expected[x.abs() <= 464]
    assert_same_bits(round_to(x, FP8_E4M3FN), expected)


def test_fp8_e4m3fn_overflow_is_nan_or_saturates():
    x = torch.tensor([464.0, 464.01, 1e9, -500.0, math.inf, -math.inf, math.nan])
    nan = math.nan
    assert_same_bits(round_to(x, FP8_E4M3FN), torch.tensor([448.0, nan, nan, nan, nan, nan, nan]))
    saturated = torch.tensor([448.0, 448.0, 448.0, -448.0, 448.0, -448.0, nan])
    assert_same_bits(round_to(x, FP8_E4M3FN, saturate=True), saturated)


def test_nearest_to_tf32_is_the_closed_form():
    x = torch.cat([neighbourhoods(TF32), random_fp32()])
    assert_same_bits(round_to(x, TF32), round_in_fp64(x, TF32))


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=names)
def test_the_closed_form_is_right_where_torch_can_judge_it(fmt):
    x = neighbourhoods(fmt)
    assert_same_bits(round_in_fp64(x, fmt), x.to(fmt.dtype).float())


def test_nearest_to_fp32_changes_nothing_and_copies():
    x = random_fp32(1000)
    y = round_to(x, FP32)
    assert_same_bits(y, x)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("fmt", NARROW, ids=names)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_saturation_keeps_everything_finite(fmt, rounding):
    x = neighbourhoods(fmt)
    plain, saturated = (round_to(x, fmt, saturate=on) for on in (False, True))
    assert torch.equal(saturated.isnan(), x.isnan())
    assert saturated[~x.isnan()].abs().max().item() == fmt.largest
    fits = plain.isfinite()
    if rounding == "nearest":
        assert_same_bits(saturated[fits], plain[fits])
    clamped = saturated[~fits & ~x.isnan()]
    assert torch.equal(clamped, x[~fits & ~x.isnan()].sign() * fmt.largest)


# --- properties of both roundings


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", FORMATS, ids=names)
def test_values_of_the_format_stay(fmt, rounding):
    values = every_value(fmt) if fmt is not FP32 else random_fp32(10_000)
    assert_same_bits(round_to(values, fmt, rounding=rounding), values)


@pytest.mark.parametrize("fmt", NARROW, ids=names)
def test_stochastic_never_leaves_the_two_neighbours(fmt):
    x = neighbourhoods(fmt)
    x = x[x.abs() <= fmt.largest]
    distance = (round_to(x, fmt, rounding="stochastic").double() - x.double()).abs()
    assert bool((distance < fmt.ulp(x).double()).all())


@pytest.mark.parametrize("fmt", NARROW, ids=names)
def test_stochastic_treats_both_signs_alike(fmt):
    x = random_fp32(100_000)
    ups, downs = (
        round_to(sign * x, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(1)) for sign in (1, -1)
    )
    assert_same_bits(-downs, ups)


@pytest.mark.parametrize("fmt", NARROW, ids=names)
@pytest.mark.parametrize("fraction", [2.0**-12, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("where", ["zero", "subnormal", "one", "top"])
def test_stochastic_is_unbiased(fmt, fraction, where):
    """Rounds up as often as the fraction says: within 4 sigma of the binomial, seeded."""
    below = {"zero": 0.0, "subnormal": fmt.smallest_subnormal, "one": -1.0, "top": fmt.largest - fmt.ulp(fmt.largest)}
    start = torch.tensor(below[where], dtype=torch.float64)
    sign = -1.0 if where == "one" else 1.0
    x = (start + sign * fraction * fmt.ulp(start)).float()
    true_fraction = ((x.double() - start) / fmt.ulp(start)).abs().item()  # fp32 may not hold the asked fraction exactly
    count = 50_000
    rounded = round_to(x.repeat(count), fmt, rounding="stochastic", generator=torch.Generator().manual_seed(7))
    num_up = int((rounded.double() != start).sum())
    sigma = math.sqrt(count * true_fraction * (1 - true_fraction))
    assert abs(num_up - count * true_fraction) <= 4 * sigma


def test_a_gradient_far_below_fp16_survives_in_the_mean():
    """1e-10 is 1/596 of fp16's smallest subnormal: nearest makes it zero, stochastic keeps its expected value."""
    x = torch.full((1_000_000,), 1e-10)
    assert round_to(x, FP16).count_nonzero() == 0
    chance = 1e-10 / FP16.smallest_subnormal
    kept = int(round_to(x, FP16, rounding="stochastic").count_nonzero())
    assert abs(kept - 1e6 * chance) <= 4 * math.sqrt(1e6 * chance)


@pytest.mark.parametrize("fmt", NARROW, ids=names)
def test_a_generator_makes_stochastic_repeatable(fmt):
    x = torch.randn(1000)
    first, again, other = (
        round_to(x, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    from_global = round_to(x, fmt, rounding="stochastic")
    torch.manual_seed(5)
    assert torch.equal(from_global, round_to(x, fmt, rounding="stochastic"))


@pytest.mark.parametrize("fmt", NARROW, ids=names)
@given(x=st.floats(width=32, allow_nan=False), y=st.floats(width=32, allow_nan=False))
def test_nearest_is_monotonic(fmt, x, y):
    low, high = round_to(torch.tensor([min(x, y), max(x, y)]), fmt, saturate=True)
    assert low <= high


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", FORMATS, ids=names)
def test_shapes_strides_and_empty(fmt, rounding):
    x = torch.randn(6, 8, 10)
    view = x.transpose(0, 2)[::2, 1::3]
    assert not view.is_contiguous()
    options = {"rounding": rounding}
    dense = view.contiguous()
    if rounding == "nearest":
        assert torch.equal(round_to(view, fmt), round_to(dense, fmt))
    else:
        assert bool(((round_to(view, fmt, **options) - dense).abs() < fmt.ulp(dense)).all())
    assert round_to(view, fmt, **options).shape == view.shape
    assert round_to(torch.tensor(1.3), fmt, **options).shape == ()
    assert round_to(torch.empty(0, 3), fmt, **options).shape == (0, 3)
    before = x.clone()
    round_to(x, fmt, **options)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", NARROW, ids=names)
def test_zeros_survive_flush_denormal(fmt):
    """Spacings near zero are subnormal in fp32 for bf16 and tf32; a division by one flushed to zero would give NaN."""
    x = torch.tensor([0.0, -0.0, 1e-37, 1.0, -3.0])
    expected = round_to(x, fmt)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = [round_to(x, fmt, rounding=rounding) for rounding in ("nearest", "stochastic")]
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(flushed[0], expected)
    assert_same_bits(flushed[1][:2], expected[:2])


# --- bad input


def test_a_gradient_is_not_dropped_silently():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"requires grad[\s\S]*derivative is zero[\s\S]*x\.detach\(\)"):
        round_to(x, FP16)
    with torch.no_grad():
        assert not round_to(x, FP16).requires_grad
    assert not round_to(x.detach(), FP16).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ArgumentError, match=rf"round_to of a tensor of {dtype}\n  true:.*fp32[\s\S]*x\.float\(\)"):
        round_to(torch.ones(2, dtype=dtype), FP16)


def test_unknown_rounding_and_useless_generator_are_refused():
    with pytest.raises(ArgumentError, match=r"rounding='up'\n  true:[\s\S]*why:[\s\S]*fix:.*\"stochastic\""):
        round_to(torch.ones(2), FP16, rounding="up")
    with pytest.raises(ArgumentError, match=r"generator with rounding=\"nearest\"[\s\S]*could not take effect"):
        round_to(torch.ones(2), FP16, generator=torch.Generator())


@pytest.mark.parametrize("bad", ["fp17", "", torch.float64, torch.int8, 16, None])
def test_unknown_formats_are_refused(bad):
    with pytest.raises(ArgumentError, match=r"the float format [\s\S]*true: halfstep knows fp32, tf32, fp16, bf16"):
        format_of(bad)
    with pytest.raises(ArgumentError):
        round_to(torch.ones(2), bad)


# --- names


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("fp16", FP16), ("Half", FP16), (" float16 ", FP16), ("torch.float16", FP16), (torch.float16, FP16),
        ("bf16", BF16), ("bfloat16", BF16), (torch.bfloat16, BF16),
        ("fp32", FP32), ("float", FP32), (torch.float32, FP32), ("TF32", TF32), (TF32, TF32),
        ("fp8_e4m3fn", FP8_E4M3FN), (torch.float8_e4m3fn, FP8_E4M3FN),
        ("e5m2", FP8_E5M2), (torch.float8_e5m2, FP8_E5M2),
    ],
)  # fmt: skip
def test_names_of_formats(name, fmt):
    assert format_of(name) is fmt


def test_dtypes_of_formats():
    assert dtype_of("half") is torch.float16
    assert dtype_of(BF16) is torch.bfloat16
    with pytest.raises(ArgumentError, match=r"the dtype of tf32[\s\S]*stored as fp32"):
        dtype_of("tf32")


def test_formats_are_values():
    assert FloatFormat("fp16", 5, 10, dtype=torch.float16) == FP16
    assert len({*FORMATS, FP16}) == 6
    assert str(FP16) == "fp16"
    with pytest.raises(AttributeError):
        FP16.mantissa_bits = 11


# --- the table


def test_table_is_plain_data_with_the_derived_numbers():
    rows = formats_table()
    assert json.loads(json.dumps(rows)) == rows
    assert [row["name"] for row in rows] == [fmt.name for fmt in FORMATS]
    for row, fmt in zip(rows, FORMATS, strict=True):
        assert row["largest"] == fmt.largest
        assert f"{fmt.smallest_normal:.3g} (smallest normal)" in row["meaning"]
        assert f"{fmt.smallest_subnormal:.3g} (smallest subnormal)" in row["meaning"]


def test_fp16s_two_small_numbers_are_told_apart():
    assert "6.1e-05 (smallest normal)" in FP16.meaning
    assert "5.96e-08 (smallest subnormal)" in FP16.meaning
    assert "two questions" in FP16.meaning


# --- saturating cast


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=names)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_saturating_cast_is_torchs_cast_where_that_is_finite(fmt, source):
    x = neighbourhoods(fmt).to(source)
    ours, torchs = saturating_cast(x, fmt.dtype), x.to(fmt.dtype)
    assert ours.dtype == fmt.dtype
    overflowed = torchs.isinf()
    assert overflowed.any()
    assert_same_bits(ours[~overflowed].float(), torchs[~overflowed].float())
    assert torch.equal(ours[overflowed].float(), x[overflowed].sign().float() * fmt.largest)


def test_saturating_cast_lets_gradients_through():
    x = torch.tensor([1.0, 1e6, -1e6], requires_grad=True)
    saturating_cast(x, "half").float().sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("x", "dtype"), [(torch.ones(1), "fp8_e5m2"), (torch.ones(1), "tf32"), (torch.ones(1).int(), "fp16")]
)
def test_saturating_cast_refuses_other_dtypes(x, dtype):
    with pytest.raises(ArgumentError, match=r"saturating_cast of torch\.[\s\S]*fp16 or bf16[\s\S]*why:[\s\S]*fix:"):
        saturating_cast(x, dtype)


def test_examples_in_docstrings():
    assert doctest.testmod(formats).failed == 0
