"""Buffers that a skipped window changed come back bit for bit, and copies are made only of those that need one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.training.guards import BufferGuard


class Functional(nn.Module):
    """Running statistics that belong to no norm module; torch's batch norm moves no version counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))
        self.register_buffer("mask", torch.ones(1000))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True) * self.mask[0]


class Replacing(nn.Module):
    """A buffer that is replaced, not written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen = self.seen * 0.9 + x.detach().mean(0)
        return x * self.seen


MODELS = {
    "batch norm": lambda: nn.BatchNorm1d(2),
    "cumulative": lambda: nn.BatchNorm1d(2, momentum=None),
    "functional": Functional,
    "replacing": Replacing,
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
}


def bits(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("delayed", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("bad_window", [0, 1, 3])
def test_a_skipped_window_leaves_no_trace_and_an_applied_one_does(name, delayed, bad_window):
    model = MODELS[name]()
    guard = BufferGuard(model)
    for window in range(5):
        before = bits(model)
        guard.remember()
        for _ in range(2):
            model(torch.randn(4, 2) * (1e30 if window == bad_window else 1.0))
        assert any(not torch.equal(b, before[n]) for n, b in model.named_buffers()), "the test would prove nothing"
        after = bits(model)
        flag = float(window == bad_window)
        assert guard.finish(torch.tensor(flag) if delayed else flag) == []
        expected = before if flag else after
        assert all(torch.equal(b, expected[n]) for n, b in model.named_buffers())


def test_bytes_are_held_only_where_forward_writes():
    model = Functional()
    guard = BufferGuard(model)
    held = []
    for _ in range(3):
        guard.remember()
        held.append(guard.num_bytes)
        model(torch.randn(4, 2))
        guard.finish(0.0)
    assert held == [4 * 1004, 4 * 4, 4 * 4]
    assert guard.num_bytes == 0


def test_a_skipped_first_window_teaches_as_well():
    model = Functional()
    guard = BufferGuard(model)
    for _ in range(3):
        guard.remember()
        model(torch.randn(4, 2))
        guard.finish(1.0)
        assert torch.equal(model.mean, torch.zeros(2))


def test_frozen_norms_cost_nothing_until_they_train_again():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    guard = BufferGuard(model)
    for _ in range(2):
        guard.remember()
        held = guard.num_bytes
        model(torch.randn(4, 2))
        guard.finish(0.0)
    assert held == 0
    model.train()
    before = bits(model)
    guard.remember()
    model(torch.full((4, 2), math.inf))
    guard.finish(1.0)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_a_buffer_that_changes_for_the_first_time_later_is_named():
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.register_buffer("codebook", torch.zeros(3))
    guard = BufferGuard(model)
    guard.remember()
    guard.finish(0.0)
    guard.remember()
    model.inner.codebook.add_(1.0)
    assert guard.finish(1.0) == ["inner.codebook"]
    guard.remember()
    model.inner.codebook.add_(1.0)
    assert guard.finish(1.0) == []
    assert torch.equal(model.inner.codebook, torch.ones(3))


def test_a_module_that_two_others_share_and_one_that_is_none():
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    model.add_module("empty", None)
    guard = BufferGuard(model)
    guard.remember()
    norm(torch.full((3, 2), math.nan))
    guard.finish(1.0)
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_var, torch.ones(2))


def test_the_stepper_gives_buffers_back_when_backward_itself_raises():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise KeyError("out of memory, say")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", accumulate=2)
    before = bits(model)
    with stepper.forward():
        loss = model(torch.randn(3, 2)).square().mean()
    stepper.backward(loss)
    stepper.step()
    with stepper.forward():
        loss = Broken.apply(model(torch.randn(3, 2))).square().mean()
    with pytest.raises(KeyError):
        stepper.backward(loss)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    assert stepper.num_micro_batches == 0
    assert stepper.state_dict()["counts"]["steps"] == 0
