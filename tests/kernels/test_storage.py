"""Masters and moments in fewer bytes: exact where that is said, within the stated bound elsewhere."""

import math

import pytest
import torch

from halfstep.formats import FP16
from halfstep.kernels import storage

CPU = torch.device("cpu")
BF16, HALF = torch.bfloat16, torch.float16
CHUNK = 2**22


def pattern(bits):
    return bits.to(torch.int32).view(torch.float32)


def bits_of(values):
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def patterns(pytestconfig):
    """All magnitudes below the bound, in chunks; every 257th chunk's worth of them unless --exhaustive is given."""
    if pytestconfig.getoption("--exhaustive"):
        for start in range(0, storage.BF16_BOUND, CHUNK):
            yield torch.arange(start, min(start + CHUNK, storage.BF16_BOUND))
    else:
        yield torch.arange(0, storage.BF16_BOUND, 257)
        yield torch.arange(storage.BF16_BOUND - 2**17, storage.BF16_BOUND)


def test_split_gives_every_pattern_below_its_bound_back(pytestconfig):
    """Invariant 7."""
    for magnitude in patterns(pytestconfig):
        for sign in (0, 0x80000000):
            master = pattern(magnitude | sign)
            weight, rest = storage.split(master, BF16)
            assert weight.dtype == BF16
            assert rest.dtype == torch.int16
            assert torch.equal(storage.join(weight, rest).view(torch.int32), master.view(torch.int32))


def test_the_splits_weight_is_the_one_that_every_master_is_rounded_to():
    from halfstep.kernels.rounding import rounded

    master = pattern(torch.arange(0, storage.BF16_BOUND, 8191))
    for dtype in (BF16, HALF):
        assert torch.equal(storage.split(master, dtype)[0], rounded(master, dtype))


@pytest.mark.parametrize("split", [storage.split, storage.split8])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_above_the_bound_it_saturates(split, dtype):
    master = torch.tensor([torch.inf, -torch.inf, 3.4028e38, -3.4028e38])
    weight, rest = split(master, dtype)
    largest = torch.finfo(dtype).max
    assert weight.tolist() == [largest, -largest] * 2
    joined = storage.join(weight, rest)
    assert joined.isfinite().all()
    assert (joined.sign() == master.sign()).all()
    assert (joined.abs() >= largest * (1 - 2.0**-9)).all()


def test_split8_is_within_2_to_the_minus_16(pytestconfig):
    for magnitude in patterns(pytestconfig):
        master = pattern(magnitude[magnitude >= 0x00800000])  # normal numbers; below, the error is absolute
        weight, rest = storage.split8(master, BF16)
        assert weight.isfinite().all()
        below = master < pattern(torch.tensor(storage.BF16_BOUND - 0x80))  # the topmost 24-bit number
        error = ((storage.join(weight, rest).double() - master.double()) / master.double()).abs()[below]
        assert not below.any() or error.max() <= 2.0**-16
    weight, rest = storage.split8(torch.tensor([1.0 + 2.0**-20]), BF16)
    assert storage.join(weight, rest).item() == 1.0, "24 bits hold no 2**-20 beside 1: the test could see an error"


def fp16_masters():
    torch.manual_seed(0)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(HALF).float()
    halves = halves[halves.isfinite()]
    spread = torch.randn(200_000) * 2.0 ** torch.randint(-40, 16, (200_000,))
    between = halves + torch.rand(halves.shape) * halves.abs() * 2.0**-10
    ties = (halves[:-1] + halves[1:]) / 2
    masters = torch.cat([halves, spread, between, ties])
    return masters[masters.abs() <= FP16.largest]


def test_fp16_split_is_exact_in_its_range_and_bounded_below():
    master = fp16_masters()
    weight, rest = storage.split(master, HALF)
    error = (storage.join(weight, rest) - master).abs()
    assert torch.equal(weight, master.half())
    assert error[master.abs() >= 2.0**-16].max() == 0
    assert error.max() <= 2.0**-40
    assert error.max() > 0
    assert rest.abs().max() == 2**14


def test_fp16_split8_is_bounded():
    master = fp16_masters()
    weight, rest = storage.split8(master, HALF)
    error = (storage.join(weight, rest) - master).abs()
    normal = master.abs() >= FP16.smallest_normal
    assert (error / master.abs())[normal].max() <= 2.0**-18
    assert error[~normal].max() <= 2.0**-32


# ---- chance ---------------------------------------------------------------------------------------------------------


def test_random_bits_are_a_function_of_seed_step_tensor_and_element():
    key = storage.random_key(1, 2, 3)
    whole = storage.random_bits(key, 0, 1000, CPU)
    assert torch.equal(storage.random_bits(key, 400, 600, CPU), whole[400:])
    assert len({storage.random_key(*k) for k in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3))}) == 5
    assert whole.min() >= 0
    assert whole.max() < 2**32


def test_random_bits_are_even():
    """Every bit is set half the time, alone and together with its neighbour, for the seeds and steps of a run."""
    number = 2**16
    for step in range(4):
        bits = storage.random_bits(storage.random_key(0, step, 0), 0, number, CPU)
        each = (bits.unsqueeze(1) >> torch.arange(32)) & 1
        sigma = 0.5 / math.sqrt(number)
        assert (each.double().mean(0) - 0.5).abs().max() < 5 * sigma
        together = (each[:, :-1] ^ each[:, 1:]).double().mean(0)
        assert (together - 0.5).abs().max() < 5 * sigma
        next_element = (each[1:] ^ each[:-1]).double().mean(0)
        assert (next_element - 0.5).abs().max() < 5 * sigma


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_rounding_by_chance_is_unbiased(dtype):
    """Within 4 sigma of the binomial that it should be, for normal and subnormal numbers of both signs."""
    number = 2**18
    for place, value in enumerate((1.001, -1.003, 3.3e-6, -7.1e-8, 0.3, 1e-9, 60001.0)):
        values = torch.full((number,), value)
        bits = storage.random_bits(storage.random_key(7, place, 0), 0, number, CPU) & 0xFFFF
        rounded = storage.round_by_chance(values, dtype, bits).double()
        low, high = rounded.min().item(), rounded.max().item()
        exact = values[0].double().item()
        assert low <= exact <= high
        share = (exact - low) / (high - low)
        sigma = math.sqrt(share * (1 - share) / number)
        found = (rounded == high).double().mean().item()
        assert abs(found - share) <= 4 * sigma + 2.0**-16  # the last: 16 random bits know no finer share


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_rounding_by_chance_goes_to_a_neighbour_and_leaves_what_fits(dtype):
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = exact[exact.isfinite()]
    for bits in (0, 1, 0x8000, 0xFFFF):
        chance = torch.full(exact.shape, bits)
        assert torch.equal(
            storage.round_by_chance(exact.float(), dtype, chance).view(torch.int16), exact.view(torch.int16)
        )
    values = torch.randn(10_000) * 2.0 ** torch.randint(-24, 10, (10_000,))
    bits = storage.random_bits(3, 0, 10_000, CPU) & 0xFFFF
    rounded = storage.round_by_chance(values, dtype, bits)
    nearest = values.to(dtype)
    step = (rounded.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
    assert step.max() == 1
    assert ((rounded.float() - values).sign() * values.sign()).unique().numel() >= 2, "up and down both happen"
    infinite = storage.round_by_chance(torch.tensor([torch.inf, -torch.inf]), dtype, torch.tensor([0xFFFF, 0]))
    assert infinite.tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]


# ---- moments --------------------------------------------------------------------------------------------------------


def groups():
    """From gradients that fp16 could not scale to ones it could not hold."""
    torch.manual_seed(0)
    return torch.randn(3000, storage.GROUP) * 10 ** torch.linspace(-25, 15, 3000).view(-1, 1)


def test_the_scale_keeps_9_bits_of_every_magnitude():
    largest = groups().abs().amax(-1)
    scale = storage.decode_scale(storage.encode_scale(largest))
    assert ((scale - largest) / largest).abs().max() <= 2.0**-9
    assert torch.equal(storage.decode_scale(storage.encode_scale(scale)), scale)
    assert storage.decode_scale(storage.encode_scale(torch.zeros(1))).item() == 2.0**-100


def test_first_moments_are_stable_monotone_and_bounded():
    values = groups()
    codes, scale = storage.encode_first(values)
    decoded = storage.decode_first(codes, scale)
    again, scale_again = storage.encode_first(decoded)
    assert torch.equal(again, codes)
    assert torch.equal(scale_again, scale)
    order = values.argsort(-1)
    assert (codes.gather(-1, order).int().diff(dim=-1) >= 0).all()
    assert torch.equal(decoded.sign() * values.sign() >= 0, torch.ones_like(values, dtype=torch.bool))
    largest = values.abs().amax(-1, keepdim=True)
    share = (values / largest).abs()
    # Half a code, (1 + x)**2 / 508, and the rounding of the scale.
    bound = (1 + share) ** 2 / 508 * 1.01 + share * 2.0**-8
    assert ((decoded - values).abs() / largest <= bound).all()


def test_every_code_of_both_moments_comes_back():
    first = torch.arange(-127, 128).to(torch.int8)
    codes, _ = storage.encode_first(storage.decode_first(first, storage.encode_scale(torch.tensor(0.37))))
    assert torch.equal(codes, first)
    second = torch.arange(256).to(torch.uint8)
    codes, _ = storage.encode_second(storage.decode_second(second, storage.encode_scale(torch.tensor(0.37))))
    assert torch.equal(codes, second)


def test_second_moments_are_never_negative_nor_rounded_to_zero():
    values = groups()[1000:].square()  # above: smaller ones have squares that fp32 does not hold
    values[::7, ::5] = 0
    values[:, 3] *= 1e-9
    codes, scale = storage.encode_second(values)
    decoded = storage.decode_second(codes, scale)
    assert (decoded >= 0).all()
    assert decoded.isfinite().all()
    assert torch.equal(decoded > 0, values > 0)
    again, scale_again = storage.encode_second(decoded)
    assert torch.equal(again, codes)
    assert torch.equal(scale_again, scale)
    order = values.argsort(-1)
    assert (codes.gather(-1, order).int().diff(dim=-1) >= 0).all()


def test_groups_of_zeros_stay():
    zeros = torch.zeros(4, storage.GROUP)
    for encode, decode in (
        (storage.encode_first, storage.decode_first),
        (storage.encode_second, storage.decode_second),
    ):
        assert torch.equal(decode(*encode(zeros)), zeros)
