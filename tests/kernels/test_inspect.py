"""inspect(): finite exactly when every element is, which gradient is inf or NaN, and the norm against fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ArgumentError
from halfstep.kernels.inspect import BLOCK, _norms_by_foreach, inspect, real_values

CPU = torch.device("cpu")
REL = 3e-5  # half of the 2**-14 that bounds a squared norm
INF, NAN = float("inf"), float("nan")


def norms(*gradients, **options):
    return inspect(gradients, **options).norms[CPU]


def exact(gradient):
    wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)
    return torch.linalg.vector_norm(wide).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_norm_against_fp64(dtype, size):
    g = torch.randn(size).to(dtype)
    assert norms(g)[0].item() == pytest.approx(exact(g), rel=REL)


def test_a_long_sum_keeps_its_bits():
    """16 M equal values: one fp32 sum is off by 1e-3 and more, blocks are not."""
    g = torch.full((2**24,), 0.1)
    assert norms(g)[0].item() == pytest.approx(math.sqrt(2**24 * float(torch.tensor(0.1)) ** 2), rel=REL)


@pytest.mark.parametrize(
    "values",
    [[3e19, 3e19], [1e-24, 1e-24], [3.4e38], [1e-45], [1e-45] * 5 + [1e-30], [0.0, -0.0]],
    ids=str,
)
@pytest.mark.parametrize("repeat", [1, BLOCK])
def test_finite_is_its_own_answer(values, repeat):
    """Squares that overflow or vanish in fp32 change neither the answer nor the norm."""
    g = torch.tensor(values * repeat)
    found = inspect([g])
    assert found.faults() == {}
    assert found.found_inf[CPU].item() == 0.0
    assert found.norms[CPU][0].item() == pytest.approx(exact(g), rel=REL)


def test_fp64_gradients_beyond_the_square_root_of_the_largest():
    g = torch.tensor([1e200, -2e200], dtype=torch.float64)
    assert norms(g)[0].item() == pytest.approx(math.sqrt(5) * 1e200)


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize(("bad", "kind"), [(INF, "inf"), (-INF, "inf"), (NAN, "nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_one_bad_element_anywhere(place, bad, kind, dtype):
    g = torch.randn(2 * BLOCK + 3).to(dtype)
    g[place] = bad
    found = inspect([torch.ones(3), g, torch.ones(70_000)])
    assert found.faults() == {1: kind}
    assert found.found_inf[CPU].item() == 1.0


def test_nan_wins_over_inf():
    assert inspect([torch.tensor([INF, NAN])]).faults() == {0: "nan"}
    assert inspect([torch.tensor([INF, -INF])]).faults() == {0: "inf"}


def test_every_half_value_is_judged_as_torch_judges_it():
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        found = inspect(list(every.split(1)))
        bad = {i for i, ok in enumerate(torch.isfinite(every).tolist()) if not ok}
        assert set(found.faults()) == bad


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_any_fp32_values(values):
    g = torch.tensor(values)
    found = inspect([g], largest=True)
    assert (found.faults() == {}) == bool(torch.isfinite(g).all())
    if found.faults() == {}:
        assert found.norms[CPU][0].item() == pytest.approx(exact(g), rel=REL)
        assert found.total_largest(CPU).item() == g.abs().max().item()


def test_found_inf_is_never_a_count():
    assert inspect([torch.tensor([INF])] * 5).found_inf[CPU].item() == 1.0


def test_none_and_empty_are_left_out():
    found = inspect([None, torch.ones(2), torch.empty(0), torch.full((1,), INF)])
    assert found.positions[CPU] == (1, 3)
    assert found.faults() == {3: "inf"}
    nothing = inspect([None, torch.empty(0, 3)])
    assert nothing.found_inf == {}
    assert nothing.total_norm(CPU).item() == 0.0


def test_layouts_that_are_not_contiguous():
    base = torch.randn(6, 300, 400)
    for g in (base.transpose(0, 2), base[:, ::2], base[:, :, 3:], torch.randn(3, 1).expand(3, 5), torch.tensor(2.0)):
        assert norms(g)[0].item() == pytest.approx(exact(g), rel=REL)
    channels_last = torch.randn(4, 8, 50, 60).to(memory_format=torch.channels_last)
    channels_last[1, 2, 3, 4] = NAN
    assert inspect([channels_last]).faults() == {0: "nan"}


# torch announces once a process that CSR is beta and that sparse invariants go unchecked; neither is about gradients.
ignore_sparse_news = pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")


@ignore_sparse_news
def test_sparse_duplicates_are_added_before_they_are_judged():
    index = torch.tensor([[1, 1, 2]])
    for dtype, expected in ((torch.float16, {0: "inf"}), (torch.float32, {})):
        g = torch.sparse_coo_tensor(index, torch.tensor([[40000.0], [40000.0], [1.0]], dtype=dtype), (4, 1))
        assert inspect([g]).faults() == expected
    assert norms(g)[0].item() == pytest.approx(math.hypot(80000, 1))


@ignore_sparse_news
def test_compressed_sparse_and_complex():
    assert norms(torch.eye(3).to_sparse_csr())[0].item() == pytest.approx(math.sqrt(3))
    z = torch.tensor([3 + 4j, 1j])
    assert norms(z)[0].item() == pytest.approx(math.sqrt(26))
    assert norms(z.conj())[0].item() == pytest.approx(math.sqrt(26))
    assert inspect([torch.tensor([complex(0, NAN)])]).faults() == {0: "nan"}


def test_total_norm_and_largest_over_several():
    g = [torch.tensor([3.0]), torch.tensor([-4.0], dtype=torch.float16), torch.zeros(2)]
    found = inspect(g, largest=True)
    assert found.total_norm(CPU).item() == 5.0
    assert found.total_largest(CPU).item() == 4.0


def test_the_foreach_path_agrees():
    """What accelerators run, run on the CPU: the same answers on every kind of value."""
    g = [torch.randn(70_000), torch.full((3,), 3e19), torch.full((2,), 1e-24), torch.tensor([INF]), torch.tensor([NAN])]
    g += [torch.randn(9).half(), torch.randn(9).bfloat16(), torch.tensor([1 + 2j]), torch.zeros(3)]
    by_foreach = _norms_by_foreach([real_values(x) for x in g])
    torch.testing.assert_close(by_foreach, norms(*g), rtol=REL, atol=0, equal_nan=True)


def test_a_device_without_fp64_judges_by_the_largest(monkeypatch):
    monkeypatch.setattr("halfstep.kernels.inspect.has_float64", lambda device: False)
    g = [torch.full((3,), 3e19), torch.tensor([INF]), torch.tensor([NAN, 1.0]), torch.tensor([3.0, 4.0])]
    found = _norms_by_foreach(g)
    assert found.dtype == torch.float32
    assert torch.isfinite(found).tolist() == [True, False, False, True]
    assert found[3].item() == 5.0


def test_nothing_is_written_and_little_is_allocated():
    g = torch.randn(2**22)
    before, version = g.clone(), g._version
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        inspect([g])
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiler.key_averages())
    assert allocated < g.nbytes / 100
    assert torch.equal(g, before)
    assert g._version == version


def test_integer_gradients_are_refused():
    with pytest.raises(ArgumentError, match=r"dtype torch.int64(.|\n)*true:(.|\n)*why:(.|\n)*fix:"):
        inspect([torch.ones(2, dtype=torch.int64)])


def test_largest_must_be_asked_for():
    with pytest.raises(ArgumentError, match="largest=True"):
        inspect([torch.ones(2)]).total_largest(CPU)
