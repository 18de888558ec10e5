"""Memory that somebody has freed, cut or exchanged behind a step: an error, never a crash or other numbers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from halfstep.errors import CallOrderError, StateError, UnsupportedError
from halfstep.kernels import choose
from halfstep.optim import SGD, AdamW, release_gradients

EXECUTORS = ["torch", "numba"] if choose._missing_numba() is None else ["torch"]


@pytest.fixture(params=EXECUTORS)
def executor(request):
    return request.param


def make(executor, dtype=torch.bfloat16, kind=AdamW, **options):
    p = nn.Parameter(torch.randn(64, 96).to(dtype))
    optimizer = kind([p], lr=1e-2, executor=executor, **options)
    p.grad = torch.randn_like(p)
    return p, optimizer


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_weight_whose_storage_is_freed(executor, size, is_first):
    p, optimizer = make(executor)
    if not is_first:
        optimizer.step()
    p.untyped_storage().resize_(size)
    with pytest.raises(CallOrderError, match="freed, or cut"):
        optimizer.step()
    assert optimizer.state[p]["step"] == float(not is_first)


@pytest.mark.parametrize("name", ["rest", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales"])
@pytest.mark.parametrize("how", ["storage", "cut", "resize", "shorter", "transposed", "data", "dtype"])
def test_a_state_that_is_changed_in_place(executor, name, how):
    p, optimizer = make(executor, moments="int8")
    optimizer.step()
    before, value = p.detach().clone(), optimizer.state[p][name]
    if how == "storage":
        value.untyped_storage().resize_(0)
    elif how == "cut":  # freed and filled again: it may be at its old address
        value.untyped_storage().resize_(0)
        value.untyped_storage().resize_(value.numel() * value.element_size() // 2)
    elif how == "resize":
        value.resize_(0)
    elif how == "shorter":
        value.resize_(10)
    elif how == "transposed":
        value.t_()
    elif how == "data":
        value.data = torch.zeros(1, dtype=value.dtype)
    else:
        value.data = value.data.to(torch.float64)
    with pytest.raises((CallOrderError, StateError)):
        optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["step"] == 1


def test_a_state_that_moved_in_place_is_followed(executor):
    (p, optimizer), (q, other) = make(executor), make(executor)
    with torch.no_grad():
        q.copy_(p)
        q.grad.copy_(p.grad)
    for value in optimizer.state[p].values():
        value.data = value.data.clone()
    for one in (optimizer, other, optimizer, other):
        one.step()
    assert torch.equal(p, q)


def test_a_gradient_whose_storage_is_freed(executor):
    p, optimizer = make(executor)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(CallOrderError, match="the gradient was freed"):
        optimizer.step()


def test_a_gradient_with_gaps_whose_storage_is_freed(executor):
    p, optimizer = make(executor)
    wide = torch.ones(64, 192, dtype=torch.bfloat16)
    p.grad = wide[:, :96]
    optimizer.step()
    wide.untyped_storage().resize_(0)
    with pytest.raises(CallOrderError, match="the gradient was freed"):
        optimizer.step()


def test_weights_that_come_to_share_memory(executor):
    ps = [nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(2)]
    optimizer = AdamW(ps, lr=0.1, executor=executor)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = ps[0].detach().clone()
    ps[1].data = ps[0].data
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="overlap in memory"):
            optimizer.step()
    assert torch.equal(ps[0], before)


def test_a_state_under_other_names(executor):
    p, optimizer = make(executor)
    optimizer.step()
    optimizer.state[p] = {"mine" if name == "exp_avg" else name: t for name, t in optimizer.state[p].items()}
    with pytest.raises(StateError, match="exp_avg"):
        optimizer.step()


def test_something_beside_a_state_is_let_be(executor):
    p, optimizer = make(executor)
    num_bytes = optimizer.num_bytes
    optimizer.state[p]["mine"] = 5
    optimizer.step()
    assert optimizer.num_bytes == num_bytes
    assert optimizer.state[p]["mine"] == 5


def test_a_momentum_that_begins_late_begins_everywhere_or_nowhere(executor):
    ps = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    optimizer = SGD(ps, lr=0.1, executor=executor)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.state[ps[1]]["step"] = 3
    with pytest.raises(StateError, match="step"):
        optimizer.step()
    assert [list(optimizer.state[p]) for p in ps] == [["step"]] * 2


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_step_counter_that_is_no_number(executor, moments):
    p, optimizer = make(executor, moments=moments)
    before = p.detach().clone()
    for wrong in (float("inf"), float("nan"), -1.0):
        optimizer.state[p]["step"].fill_(wrong)
        with pytest.raises(StateError):
            optimizer.step()
    assert torch.equal(p, before)


def test_the_negative_bit(executor):
    p, optimizer = make(executor, torch.float32, SGD)
    before = p.detach().clone()
    p.grad = torch._neg_view(torch.ones(64, 96))
    optimizer.step()
    torch.testing.assert_close(p.detach(), before + 1e-2)
    with pytest.raises(UnsupportedError):
        AdamW([nn.Parameter(torch._neg_view(torch.ones(4, 4)))])


def test_subclasses_that_are_no_plain_memory(executor):
    class Named(torch.Tensor):
        pass

    (p, optimizer), (q, other) = make(executor), make(executor)
    with torch.no_grad():
        q.copy_(p)
    q.grad = p.grad.as_subclass(Named)
    optimizer.step()
    other.step()
    assert torch.equal(p, q)


def test_a_saved_state_whose_memory_is_gone(executor):
    _, optimizer = make(executor, moments="int8")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_codes"].untyped_storage().resize_(0)
    with pytest.raises(StateError, match="was freed"):
        optimizer.load_state_dict(saved)


def test_the_own_state_in_another_order(executor):
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = SGD(parameters, momentum=0.9, executor=executor)
    for number, p in enumerate(parameters, 1):
        p.grad = torch.full((4, 4), float(number))
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = [1, 0]
    optimizer.load_state_dict(state)
    assert [optimizer.state[p]["momentum_buffer"][0, 0].item() for p in parameters] == [2.0, 1.0]
    state["param_groups"][0]["params"] = [1, 1]
    with pytest.raises(StateError, match="twice"):
        optimizer.load_state_dict(state)


def test_another_default_device(executor):
    _, optimizer = make(executor, moments="int8")
    torch.set_default_device("meta")
    try:
        optimizer.count_stalled = True
        optimizer.step()
        assert optimizer.saturated_weights == 0
        assert 0 <= optimizer.stalled < 1
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device(None)


def test_built_in_inference_mode(executor):
    p = nn.Parameter(torch.ones(4, 4))
    with torch.inference_mode():
        optimizer = AdamW([p], executor=executor)
    p.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_a_release_is_not_copied_and_ends():
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=1.0)
    release = release_gradients(model, optimizer)
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="copies"):
            make_copy(release)
    release.remove()
    second = release_gradients(model, optimizer)
    release.remove()
    assert optimizer.is_released
    with pytest.raises(CallOrderError, match="again"):
        release.backward(model(torch.ones(1, 4)).sum())
    assert second.backward(model(torch.ones(1, 4)).sum()).is_applied


@pytest.mark.skipif("numba" not in EXECUTORS, reason="needs numba")
def test_an_interrupt_while_loops_are_compiled_moves_nothing(monkeypatch):
    from halfstep.kernels.numba_ import executor as compiled

    a, b = nn.Parameter(torch.ones(64, 96)), nn.Parameter(torch.ones(64, 96).bfloat16())
    optimizer = AdamW([a, b], lr=0.1, executor="numba", master="split8")
    a.grad, b.grad = torch.ones(64, 96), torch.ones(64, 96).bfloat16()
    known, calls = compiled.address_of, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return known(*arguments)

    monkeypatch.setattr(compiled, "address_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert (a == 1).all()
    assert (b == 1).all()


@pytest.mark.skipif("numba" not in EXECUTORS, reason="needs numba")
def test_damaged_files_of_the_cache_are_dropped(tmp_path):
    from halfstep.kernels.numba_ import compiling

    whole, cut, empty = (tmp_path / name for name in ("a.nbc", "b.nbi", "c.nbc"))
    whole.write_bytes(pickle.dumps([1]))
    cut.write_bytes(pickle.dumps([1])[:-1])
    empty.write_bytes(b"")
    compiling._drop_damaged(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.nbc"]
