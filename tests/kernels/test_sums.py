"""Adding a 16-bit gradient to its fp32 sum: the executors give torch's bits, in pieces or whole, in every layout."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.kernels import torch_
from halfstep.kernels.choose import TORCH, Executor
from halfstep.kernels.gradients import add_to_fp32_sums, gradient_of

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "numba"], autouse=True)
def executor(request, monkeypatch):
    """Each executor, with pieces and parts of a few elements."""
    monkeypatch.setattr(torch_, "PIECE", 24)
    if request.param == "torch":
        return TORCH
    casts = pytest.importorskip("halfstep.kernels.numba_.casts")
    monkeypatch.setattr(casts, "_FEWEST_TO_ADD", 8)
    monkeypatch.setattr("halfstep.kernels.numba_.loops.FEWEST", 16)
    return Executor("numba", "test")


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("start", [0.0, -0.0, 1.0, -65504.0, 1e-40, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_pattern_is_added_as_fp32(executor, dtype, start):
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = torch.full((2**16,), start)
    executor.module.add([found], [half])
    assert_same(found, torch.full((2**16,), start) + half.float())


SHAPES = [(0,), (1,), (7,), (8,), (23,), (24,), (25,), (5, 7), (49, 3), (2, 3, 5, 4), ()]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "every other", "expanded"])
@pytest.mark.parametrize("dtype", HALVES)
def test_shapes_and_layouts(executor, dtype, layout):
    torch.manual_seed(0)
    sums, gradients = [], []
    for shape in SHAPES:
        half = torch.randn(shape).to(dtype)
        if layout == "transposed" and half.dim() == 2:
            half = half.T
        if layout == "channels last" and half.dim() == 4:
            half = half.contiguous(memory_format=torch.channels_last)
        if layout == "every other" and half.dim() > 0:
            half = torch.randn(2 * shape[0], *shape[1:]).to(dtype)[::2]
        if layout == "expanded":
            half = torch.randn(()).to(dtype).expand(shape)
        gradients.append(half)
        sums.append(torch.randn(half.shape))
    wanted = [wide + half.float() for wide, half in zip(sums, gradients, strict=True)]
    versions = [wide._version for wide in sums]
    executor.module.add(sums, gradients)
    for found, right in zip(sums, wanted, strict=True):
        assert_same(found, right)
    assert all(wide._version > version for wide, version in zip(sums, versions, strict=True) if wide.numel())


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_the_other_layout_than_their_gradient(executor, dtype):
    wide, half = torch.randn(30, 40), torch.randn(40, 30).to(dtype).T
    wanted = wide + half.float()
    executor.module.add([wide], [half])
    assert_same(wide, wanted)


def test_sparse_gradients(executor):
    embedding = nn.Embedding(40, 3, sparse=True).to(torch.bfloat16)
    wanted = torch.zeros(40, 3)
    for start in range(3):
        embedding(torch.tensor([start, 5, 5])).float().sum().backward()
        wanted += embedding.weight.grad.to_dense().float()
        add_to_fp32_sums([embedding.weight], executor)
        assert embedding.weight.grad is None
    assert_same(gradient_of(embedding.weight).to_dense(), wanted)


def test_a_window_is_the_same_by_either_executor(executor, monkeypatch):
    """Whole windows of a stepper: hooks, sums, step."""

    def train(one):
        monkeypatch.setattr("halfstep.training.fp32_sums.choose", lambda device, n: one)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer = halfstep.MasterWeights(torch.optim.SGD(model.parameters(), 0.1), "bf16")
        stepper = halfstep.Stepper(model, optimizer, policy="bf16-master", accumulate=4)
        for _ in range(8):
            with stepper.forward():
                loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            stepper.backward(loss)
            stepper.step()
        return [optimizer.state[p]["master"].clone() for p in model.parameters()]

    for found, wanted in zip(train(executor), train(TORCH), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_little_is_allocated_for_a_large_gradient(executor, monkeypatch, dtype):
    """torch alone would widen it whole: 4 bytes per element for a moment, which the ledger does not know."""
    monkeypatch.setattr(torch_, "PIECE", 2**14)
    wide, half = torch.zeros(2**20), torch.ones(2**20, dtype=dtype)
    executor.module.add([wide], [half])
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        executor.module.add([wide], [half])
    largest = max([0, *(event.self_cpu_memory_usage for event in profiler.events())])
    assert largest <= 4 * 2**14
    assert (wide == 2).all()
