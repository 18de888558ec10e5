"""inspect(): finite exactly when every element is, which gradient is inf or NaN, and the norm against fp64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ArgumentError
from halfstep.kernels import choose, host_norms
from halfstep.kernels import inspect as inspection
from halfstep.kernels.host_norms import BLOCK
from halfstep.kernels.inspect import _by_dtype, _norms_by_foreach, inspect, inspect_whole, real_values

CPU = torch.device("cpu")
REL = 3e-5  # half of the 2**-14 that bounds a norm; the worst that was measured is half of this again
LONG_SIZES = [2**20 - 1, 2**20, 2**20 + 1, 2**21 + 3]  # the first and the last leave elements over beside equal rows
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "numba"], autouse=True)
def executor(request, monkeypatch):
    """Few elements go through torch and many through a compiled loop; here each test asks both."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(inspection, "choose", lambda device, number: choose.Executor(request.param, ""))
    return request.param


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


# -- rows: each is judged by itself ------------------------------------------------------------------------------------


@pytest.fixture
def read_again(monkeypatch):
    """The sizes of what inspect() reads a second time."""
    monkeypatch.setattr(inspection, "choose", lambda device, number: choose.TORCH)
    sizes, look = [], host_norms.largest_of
    monkeypatch.setattr(host_norms, "largest_of", lambda vs: sizes.extend(v.numel() for v in vs) or look(vs))
    return sizes


@pytest.mark.parametrize("size", LONG_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_element_counts_once(size, dtype):
    assert norms(torch.ones(size, dtype=dtype))[0].item() == pytest.approx(math.sqrt(size), rel=1e-7)


@pytest.mark.parametrize("size", LONG_SIZES)
def test_one_element_alone_is_the_norm(size):
    length = host_norms._rows_of(size)[1]
    for place in (0, BLOCK - 1, BLOCK, length - 1, length, 2**20 - 2, size // length * length - 1, size - 1):
        g = torch.zeros(size)
        g[place] = -5.0
        assert norms(g)[0].item() == 5.0


@pytest.mark.parametrize("size", range(BLOCK + 1, 2**21, 99_991))
def test_rows_are_no_longer_than_a_block_and_leave_little_over(size):
    num_rows, length = host_norms._rows_of(size)
    assert length <= BLOCK
    assert 0 <= size - num_rows * length < num_rows


def test_a_zero_row_costs_one_more_read_of_that_row(read_again):
    g = torch.randn(8, BLOCK)
    g[3] = 0.0
    assert norms(g)[0].item() == pytest.approx(exact(g), rel=REL)
    assert read_again == [BLOCK]


def test_the_zero_rows_of_an_embedding_cost_one_more_read_of_each(read_again):
    g = torch.zeros(40, BLOCK)
    g[[7, 21]] = 2.0
    assert norms(g)[0].item() == pytest.approx(math.sqrt(2 * BLOCK * 4))
    assert read_again == [7 * BLOCK, 13 * BLOCK, 18 * BLOCK], "neighbours in one read"
    assert norms(torch.zeros(40, BLOCK))[0].item() == 0.0


@pytest.mark.parametrize(
    ("tiny", "others"), [(1e-40, 1e-38), (1e-45, 0.0), (1e-24, 1e-24), (1e-45, 1.0), (3e-15, 4e-15)]
)
def test_a_row_whose_squares_vanish_beside_others(tiny, others, read_again):
    g = torch.zeros(6, BLOCK)
    g[:, 0], g[2, 0] = others, tiny
    assert norms(g)[0].item() == pytest.approx(exact(g), rel=REL)
    if others == 1.0:
        assert set(read_again) == {BLOCK}, "only the doubtful row"


@pytest.mark.parametrize("huge", [3e19, 3.4e38])
def test_a_row_whose_squares_overflow_beside_normal_ones(huge, read_again):
    g = torch.randn(6, BLOCK)
    g[4] = huge
    found = inspect([g])
    assert found.faults() == {}
    assert found.norms[CPU][0].item() == pytest.approx(exact(g), rel=REL)
    assert set(read_again) == {BLOCK}


@pytest.mark.parametrize("size", [*LONG_SIZES, 3 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bad", "kind"), [(-INF, "inf"), (NAN, "nan")])
def test_one_bad_element_at_the_very_end(size, dtype, bad, kind):
    g = torch.ones(size, dtype=dtype)
    g[0], g[-1] = 3e19 if dtype == torch.float32 else 1.0, bad  # an overflow before it does not hide it
    assert inspect([g]).faults() == {0: kind}


def test_a_nan_row_wins_over_an_inf_row_before_it():
    g = torch.zeros(5, BLOCK)
    g[1, 1], g[4, 4] = INF, NAN
    assert inspect([g]).faults() == {0: "nan"}


def test_a_long_16_bit_gradient_of_every_kind_of_piece():
    g = torch.randn(2**20 + 5).bfloat16()
    g[: 2**17] = 0.0
    g[2**17 : 2**18] = 1e-30
    assert norms(g)[0].item() == pytest.approx(exact(g), rel=REL)
    g[2**18 : 2**18 + 100] = 3e38
    found = inspect([g])
    assert found.faults() == {}
    assert found.norms[CPU][0].item() == pytest.approx(exact(g), rel=REL)


def test_the_number_of_threads_changes_no_bit():
    g = [torch.randn(2**20 + 1), torch.randn(300, 500), torch.randn(2**18).half(), torch.randn(40_000)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = norms(*g)
        torch.set_num_threads(2)
        assert torch.equal(one, norms(*g))
    finally:
        torch.set_num_threads(before)


KINDS = [0.0, 1e-45, 1e-38, 1e-24, 1e-15, 1.0, 1e4, 3e19, 1e38, INF, NAN]


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    left=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_rows_of_any_kinds_against_fp64(kinds, left, dtype, seed):
    noise = torch.rand(len(kinds) * BLOCK + left, generator=torch.Generator().manual_seed(seed)) + 0.5
    sizes = torch.tensor(kinds).repeat_interleave(BLOCK)
    g = (noise * torch.cat([sizes, sizes.new_full((left,), kinds[-1])])).to(dtype)
    found = inspect([g], largest=True)
    norm, faults = found.norms[CPU][0].item(), found.faults()
    if torch.isfinite(g).all():
        assert faults == {}
        assert norm == pytest.approx(exact(g), rel=REL)
    else:
        assert faults == {0: "nan" if g.isnan().any() else "inf"}
    assert found.largest[CPU][0].item() == pytest.approx(g.abs().max().item(), rel=0, nan_ok=True)


# -- unusual views -----------------------------------------------------------------------------------------------------


def test_views_that_are_negated_conjugated_expanded_or_made_in_inference_mode():
    z = torch.randn(40_000, dtype=torch.complex64)
    with torch.inference_mode():
        made_there = torch.randn(40_000)
    for g in (z.conj(), z.conj().imag, torch.randn(300, 1).expand(300, 200), made_there, made_there.bfloat16()):
        found = inspect([g], largest=True)
        assert found.norms[CPU][0].item() == pytest.approx(exact(g.resolve_conj()), rel=REL)
        assert found.total_largest(CPU).item() == torch.maximum(*map(torch.abs, torch.aminmax(real_values(g)))).item()
    with torch.inference_mode():
        assert norms(z, torch.ones(3))[1].item() == pytest.approx(math.sqrt(3))


def test_a_gradient_with_a_graph_leaves_no_graph():
    g = torch.randn(20_000, requires_grad=True) * 2  # what create_graph=True leaves in .grad
    for gradient in (g, g.to(torch.complex64), torch.nn.Parameter(torch.ones(3))):
        found = inspect([gradient], largest=True)
        assert not any(t.requires_grad for t in (found.norms[CPU], found.largest[CPU], found.found_inf[CPU]))


def test_another_default_device_and_dtype_change_nothing():
    g = [torch.randn(70_000), torch.randn(100_000).half(), torch.zeros(3)]
    expected = inspect(g, largest=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = inspect(g, largest=True)
            assert found.total_norm(CPU).item() == expected.total_norm(CPU).item()
            assert found.total_largest(CPU).item() == expected.total_largest(CPU).item()
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("norms", "largest", "found_inf"):
        ours, theirs = getattr(found, name)[CPU], getattr(expected, name)[CPU]
        assert (ours.device, ours.dtype) == (CPU, theirs.dtype)
        assert torch.equal(ours, theirs)


# -- totals ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "device"])
def path(request, monkeypatch):
    """The totals as the CPU takes them, from numbers, and as accelerators do, from tensors; both on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(inspection, "is_host", lambda device: False)
        monkeypatch.setattr(inspection, "_norms", lambda device, values: _norms_by_foreach(values))
    return request.param


def test_totals_with_and_without_fp64(path):
    g = [torch.tensor([3.0]), torch.tensor([1e300], dtype=torch.float64), torch.tensor([-4.0]).half()]
    found = inspect(g, largest=True)
    assert found.total_norm(CPU, below_fp64=True).item() == 5.0
    assert found.total_largest(CPU, below_fp64=True).item() == 4.0
    assert found.total_norm(CPU).item() == pytest.approx(1e300)
    assert found.total_largest(CPU).item() == INF, "fp32 holds no 1e300"
    assert (found.total_norm(CPU).dtype, found.total_largest(CPU).dtype) == (torch.float64, torch.float32)
    assert found.found_inf[CPU].item() == 0.0
    assert found.found_inf[CPU].dtype == torch.float32
    only = inspect(g[1:2], largest=True)
    assert only.total_norm(CPU, below_fp64=True).item() == only.total_largest(CPU, below_fp64=True).item() == 0.0


def test_a_total_is_finite_exactly_when_every_gradient_is(path):
    huge = torch.full((2,), 1.5e308, dtype=torch.float64)
    assert math.isfinite(inspect([huge, huge]).total_norm(CPU).item())
    assert inspect([torch.zeros(3), torch.zeros(2)]).total_norm(CPU).item() == 0.0
    assert inspect([torch.ones(3), torch.tensor([INF])]).total_norm(CPU).item() == INF
    for nan_at in (0, 1):
        g = [torch.tensor([NAN if place == nan_at else INF]) for place in range(2)]
        found = inspect(g, largest=True)
        assert math.isnan(found.total_norm(CPU).item())
        assert math.isnan(found.total_largest(CPU).item())
        assert found.found_inf[CPU].item() == 1.0


def test_a_total_never_remembers_what_was_replaced(path):
    found = inspect([torch.ones(1), torch.ones(1)], largest=True)
    assert found.total_norm(CPU).item() == pytest.approx(math.sqrt(2))
    other = dataclasses.replace(
        found, norms={CPU: torch.tensor([6.0, 8.0]).double()}, largest={CPU: torch.tensor([7.0, NAN])}
    )
    assert other.total_norm(CPU).item() == 10.0
    assert math.isnan(other.total_largest(CPU).item())
    other.norms[CPU].fill_(0.0)
    assert other.total_norm(CPU).item() == 0.0


def test_the_largest_below_fp64_that_rounds_to_fp32():
    just_above = torch.tensor([3.4028235e38 * (1 + 1e-9)], dtype=torch.float64)
    assert inspect([just_above], norm=False, largest=True).total_largest(CPU).item() == just_above.float().item()


def test_an_accelerator_is_asked_once_per_dtype_and_answers_in_order():
    g = [torch.tensor([2.0**i]).to(d) for i, d in enumerate([torch.half, torch.float, torch.half, torch.bfloat16])]
    asked = []
    row = _by_dtype(g, lambda group: asked.append([v.dtype for v in group]) or [v.amax() for v in group])
    assert asked == [[torch.half] * 2, [torch.float], [torch.bfloat16]]
    assert row.tolist() == [1.0, 2.0, 4.0, 8.0]
    assert row.dtype == torch.float32
    assert _by_dtype([*g, torch.ones(1).double()], lambda vs: [v.amax() for v in vs]).dtype == torch.float64
    assert _by_dtype(g[:1], lambda vs: [v.amax() for v in vs]).dtype == torch.float32


def test_the_bits_of_a_norm_do_not_depend_on_threads(executor, monkeypatch):
    if executor == "numba":
        monkeypatch.setattr("halfstep.kernels.numba_.loops.FEWEST", 8)
    gradients = [torch.randn(size).bfloat16() for size in (5, 2048, 70_001, 300)]
    before = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found.append(norms(*gradients))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_gradients_are_inspected_alike(dtype, monkeypatch):
    """What optimizers ask, and what anybody may: also of empty ones, and of such as are not finite."""
    monkeypatch.setattr("halfstep.kernels.choose.FEWEST", 1)
    gradients = [torch.randn(size).to(dtype) for size in (1, 700, 33)]
    for odd in (None, torch.empty(0, dtype=dtype), torch.tensor([1.0, torch.inf]).to(dtype)):
        asked = gradients if odd is None else [gradients[0], odd, *gradients[1:]]
        ours, plain = inspect_whole(asked), inspect(asked)
        assert ours.positions == plain.positions
        assert ours.are_fp64 == plain.are_fp64
        assert ours.faults() == plain.faults()
        for home in plain.norms:
            assert torch.equal(ours.norms[home], plain.norms[home])
            assert torch.equal(ours.found_inf[home], plain.found_inf[home])
