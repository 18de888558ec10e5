"""The compiled passes give the bits of torch's, for every 16-bit pattern, every size, every layout."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

from halfstep.kernels import choose, torch_
from halfstep.kernels.choose import TORCH, Executor

HALVES = [torch.bfloat16, torch.float16]
casts = pytest.importorskip("halfstep.kernels.numba_.casts")


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request, monkeypatch):
    """One thread, and two: with loops that share even a few elements."""
    monkeypatch.setattr("halfstep.kernels.numba_.loops.FEWEST", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def every_half(dtype):
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def wide_values():
    """Every fp32 pattern with one of a few low halves: each bf16 value, the ties beside it, and what is around them."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    return ((torch.arange(-(2**15), 2**15).view(-1, 1) << 16) + low).to(torch.int32).view(-1).view(torch.float32)


def assert_same_bits(found, wanted):
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


@pytest.mark.parametrize("divisor", [None, 1.0, 3.0, 2.0**14, 2.0**-24])
@pytest.mark.parametrize("dtype", HALVES)
def test_widen_every_pattern(dtype, divisor):
    half = every_half(dtype)
    divisor = None if divisor is None else torch.tensor(divisor)
    found, wanted = torch.empty(2**16), torch.empty(2**16)
    casts.widen([found], [half], divisor)
    torch_.widen([wanted], [half], divisor)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert wanted.isfinite().any()


@pytest.mark.parametrize("dtype", HALVES)
def test_round_values_around_every_bf16(dtype):
    wide = wide_values()
    found, wanted = (torch.empty(wide.shape, dtype=dtype) for _ in range(2))
    num_found = sum(casts.round_into([found], [wide], [None]))
    num_wanted = sum(torch_.round_into([wanted], [wide], [None]))
    assert_same_bits(found, wanted)
    assert num_found == num_wanted
    assert num_found > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_round_what_fp16_can_hardly_hold(dtype):
    half = every_half(torch.float16).float()
    wide = torch.cat([half, half * (1 + 2.0**-12), half * (1 + 2.0**-11), torch.randn(1000) * 2.0**-20])
    found, wanted = (torch.empty(wide.shape, dtype=dtype) for _ in range(2))
    casts.round_into([found], [wide], [None])
    torch_.round_into([wanted], [wide], [None])
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_many_tensors_of_all_sizes_and_layouts(dtype):
    torch.manual_seed(0)
    shapes = [(), (0,), (1,), (3, 0), (7, 5), (2, 3, 4, 5), (4097,), (129, 33)]
    wides = [torch.randn(shape) for shape in shapes]
    wides += [torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(6, 9).t()]
    wides += [torch.randn(10, 8)[:, ::2], torch.randn(1, 5).expand(3, 5).clone()]
    founds, wanteds = ([w.to(dtype).zero_() for w in wides] for _ in range(2))
    founds[-2] = torch.zeros(10, 4, dtype=dtype)  # dense beside a view with gaps
    casts.round_into(founds, wides, [None] * len(wides))
    torch_.round_into(wanteds, wides, [None] * len(wides))
    for found, wanted, wide in zip(founds, wanteds, wides, strict=True):
        assert torch.equal(found, wanted)
        assert not wide.numel() or found.any()
    widened = [torch.full_like(wide, -1.0) for wide in wides]
    casts.widen(widened, founds, torch.tensor(2.0))
    for wide, found in zip(widened, founds, strict=True):
        assert torch.equal(wide, found.float() / 2)


def test_fp32_among_the_gradients_is_copied():
    gradient, wide = torch.randn(100), torch.empty(100)
    casts.widen([wide], [gradient], torch.tensor(4.0))
    assert torch.equal(wide, gradient / 4)


@pytest.mark.parametrize("dtype", HALVES)
def test_saturated_values_are_counted_wherever_they_are(dtype, threads):
    wide = torch.zeros(5000)
    wide[[0, 2047, 2048, 4999]] = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38])
    wide[17] = torch.nan
    half = torch.empty(5000, dtype=dtype)
    assert sum(casts.round_into([half], [wide], [None])) == 4
    largest = torch.finfo(dtype).max
    assert half[[0, 2047, 2048, 4999]].tolist() == [largest, -largest, largest, -largest]
    assert half[17].isnan()


def test_autograd_sees_that_weights_were_written():
    weight = torch.ones(10, dtype=torch.bfloat16, requires_grad=True)
    output = (weight * weight).sum()
    casts.round_into([weight.detach()], [torch.zeros(10)], [None])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_several_threads_of_the_user_at_once():
    wide = torch.randn(10_000)
    halves = [torch.empty(10_000, dtype=torch.bfloat16) for _ in range(8)]
    workers = [threading.Thread(target=casts.round_into, args=([half], [wide], [None])) for half in halves]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(half, halves[0]) for half in halves)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_has_threads_of_its_own(threads):
    """A child of a process whose threads are running finds none of them, and must not wait for one."""
    code = (
        "import os, sys, torch; from halfstep.kernels.numba_ import casts, loops; loops.FEWEST = 8\n"
        f"torch.set_num_threads({threads})\n"
        "def run():\n"
        "    half = torch.empty(10000, dtype=torch.bfloat16)\n"
        "    casts.round_into([half], [torch.ones(10000)], [None]); return bool((half == 1).all())\n"
        "assert run()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if run() else 1)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "0", out.stderr


def test_what_is_chosen_and_why(monkeypatch):
    many = choose.FEWEST
    assert choose.choose(torch.device("cpu"), many).name == "numba"
    assert "too few" in choose.choose(torch.device("cpu"), many - 1).reason
    assert "triton" in choose.choose(torch.device("cuda"), many).reason
    monkeypatch.setattr(choose, "_missing_numba", lambda: "numba is not installed (pip install 'halfstep[cpu]')")
    without = choose.choose(torch.device("cpu"), many)
    assert without.name == "torch"
    assert "pip install" in without.reason
    assert without.module is torch_


def test_masters_step_alike_on_both(monkeypatch):
    """Whole steps of AdamW with masters: the executors differ in no bit of weight, master or moment."""
    from halfstep.optim.masters import MasterWeights

    def run(executor):
        monkeypatch.setattr("halfstep.optim.step_parts.choose", lambda device, n: executor)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((300, 40), (77,), (16, 3, 5, 5))]
        optimizer = MasterWeights(torch.optim.AdamW(parameters, lr=1e-2), torch.bfloat16)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**10), torch.tensor(0.0)
        for _ in range(5):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [tensor for p in parameters for tensor in (p.detach(), *optimizer.state[p].values())]

    for ours, wanted in zip(run(Executor("numba", "test")), run(TORCH), strict=True):
        assert torch.equal(ours, wanted)


def test_sources_decide_which_compiled_code_is_found(tmp_path, monkeypatch):
    from halfstep.kernels.numba_ import compiling

    assert compiling.cache_folder() == compiling.cache_folder.__wrapped__()
    copy = tmp_path / "kernels" / "numba_" / "compiling.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("changed")
    monkeypatch.setattr(compiling, "__file__", str(copy))
    assert compiling.cache_folder.__wrapped__().name != compiling.cache_folder().name


def test_compiled_code_is_kept_and_the_users_own_folder_is_left_alone(tmp_path, monkeypatch):
    import numba

    from halfstep.kernels.numba_ import compiling

    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / "kept")
    before = numba.config.CACHE_DIR
    function = compiling.compiled(numba.njit)(_twice)
    assert function(3) == 6
    assert list((tmp_path / "kept").rglob("*.nbi"))
    assert before == numba.config.CACHE_DIR
    beside = pathlib.Path(__file__).parent
    found = set(beside.rglob("*.nbi"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / "file" / "below")
    assert compiling.compiled(numba.njit)(_twice)(4) == 8
    # Not beside the source either, where numba would find what was compiled from other versions of its helpers.
    assert set(beside.rglob("*.nbi")) == found


def _twice(x):
    return 2 * x


def wrapped(tensor):
    """A gradient whose numbers are not where its address says, as an all-reduce in flight is."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(tensor, tensor.clone())


def test_what_has_no_plain_memory_goes_to_torch():
    half, wide = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64)
    casts.widen([wide], [wrapped(half)], None)
    assert wide.tolist() == [1.0] * 64
    casts.widen([wide], [torch._neg_view(half)], None)
    assert wide.tolist() == [-1.0] * 64
    freed = torch.ones(64, dtype=torch.bfloat16)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        casts.widen([wide], [freed], None)


def test_shapes_are_compared_and_not_only_strides():
    half, wide = torch.ones(4, 64, dtype=torch.bfloat16), torch.zeros(1, 64)
    with pytest.raises(RuntimeError):
        casts.add([wide], [half])


def test_a_parameter_that_has_grown_is_refused():
    from halfstep.errors import CallOrderError
    from halfstep.optim.masters import MasterWeights

    flat = torch.randn(80).bfloat16()
    p = torch.nn.Parameter(flat[:64].view(4, 16))
    optimizer = MasterWeights(torch.optim.SGD([p], lr=0.1))
    p.data = flat.view(5, 16)
    p.grad = torch.ones_like(p)
    with pytest.raises(CallOrderError, match="shape"):
        optimizer.step()
