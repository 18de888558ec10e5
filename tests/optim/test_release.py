"""Released gradients: the same steps, one gradient alive at a time, and what happens where something is not finite."""

import copy
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import ArgumentError, CallOrderError, SkippedStepWarning, StateError, UnsupportedError
from halfstep.optim import SGD, AdamW, Lion, packed, packed_numbers, release, release_gradients
from halfstep.training.stepper import Stepper


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.second.weight  # tied

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(model, seed=0, factor=1.0):
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return (model(x).float() * factor).square().mean()


OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2, policy="bf16-master", master="split8", moments="int8"),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9, policy="bf16-master"),
    "lion": lambda p: Lion(p, lr=1e-3, policy="bf16-master", master="stochastic", moments="bf16"),
}


def assert_same(model, optimizer, other_model, other_optimizer):
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, other_optimizer.state[q][name]), name


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """On a device nothing is read on the host; here its path runs on the CPU."""
    if request.param == "device":
        for module in (packed, packed_numbers, release):
            monkeypatch.setattr(module, "is_host", lambda device: False)
    return request.param


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_ordinary_steps(name, where):
    model = Net()
    other = copy.deepcopy(model)
    optimizer, ordinary = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    with release_gradients(model, optimizer) as release:
        for seed in range(5):
            outcome = release.backward(loss_of(model, seed))
            loss = loss_of(other, seed)
            loss.backward()
            norm = torch.linalg.vector_norm(torch.stack([p.grad.float().norm() for p in other.parameters()]))
            assert outcome.is_applied
            assert outcome.loss == loss.item()
            assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            assert "applied" in repr(outcome)
            ordinary.step()
            ordinary.zero_grad()
            assert all(p.grad is None for p in model.parameters())
    assert_same(model, optimizer, other, ordinary)
    loss_of(model).backward()  # removed: gradients stay again, and the ordinary step is back
    optimizer.step()


def test_one_gradient_at_a_time():
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    release = release_gradients(model, OPTIMIZERS["adamw"](model.parameters()))
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    release.backward(loss_of(model))
    assert alive == [0] * 12  # ours ran before, and has freed the only one


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_loss_leaves_every_bit(bad):
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    release = release_gradients(model, optimizer)
    release.backward(loss_of(model))
    other = copy.deepcopy(model)
    before = {p: {name: value.clone() for name, value in optimizer.state[p].items()} for p in model.parameters()}
    with pytest.warns(SkippedStepWarning, match="the loss is"):
        outcome = release.backward(loss_of(model, factor=bad))
    assert (outcome.kind, outcome.culprits) == ("skipped", ())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, before[p][name]) for name, value in optimizer.state[p].items())
    assert all(p.grad is None for p in model.parameters())
    assert release.backward(loss_of(model)).is_applied


def test_a_bad_gradient_behind_a_good_loss_is_partial():
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    release = release_gradients(model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = model.first.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.warns(SkippedStepWarning, match=r"first\.weight"):
        outcome = release.backward(loss_of(model))
    handle.remove()
    assert (outcome.kind, outcome.culprits, outcome.is_applied) == ("partial", ("first.weight",), False)
    assert math.isnan(outcome.grad_norm)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert "first.weight" not in moved
    assert "second.weight" in moved
    assert optimizer.state[model.first.weight]["step"] == 0
    assert optimizer.state[model.second.weight]["step"] == 1


def gradients_seen(clip_by, steps, clip_norm=0.5):
    """What plain descent with lr 1 moved each weight by, and the gradients."""
    model = nn.Linear(24, 24).bfloat16().float()
    optimizer = SGD(model.parameters(), lr=1.0)
    release = release_gradients(model, optimizer, clip_norm=clip_norm, clip_by=clip_by)
    for factor in steps:
        before = [p.detach().clone() for p in model.parameters()]
        loss = (model(torch.ones(2, 24)) * factor).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        release.backward(loss)
        yield [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)], gradients


def test_clipping_by_each_parameters_own_norm():
    for moved, gradients in gradients_seen("parameter", [3.0, 1e-3]):
        for change, gradient in zip(moved, gradients, strict=True):
            wanted = gradient * min(1.0, 0.5 / (gradient.norm().item() + 1e-6))
            torch.testing.assert_close(change, wanted, rtol=1e-3, atol=1e-6)


def test_clipping_by_the_step_before():
    norms = []
    for number, (moved, gradients) in enumerate(gradients_seen("previous", [3.0, 5.0, 1e-4, 2.0])):
        for change, gradient in zip(moved, gradients, strict=True):
            by = gradient.norm().item() if number == 0 else norms[-1]
            torch.testing.assert_close(change, gradient * min(1.0, 0.5 / (by + 1e-6)), rtol=1e-2, atol=1e-5)
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())


@pytest.mark.filterwarnings("ignore:Released gradients, skipped")
@pytest.mark.parametrize("first", [math.nan, math.inf, 1.0])
def test_a_bad_step_is_no_step_before(first, where):
    """The next one is clipped by the last good norm, or where there is none by each parameter's own."""
    model = nn.Linear(24, 24)
    released = release_gradients(model, SGD(model.parameters(), lr=1e-3), clip_norm=1.0)
    released.backward(model(torch.full((2, 24), first)).sum())
    previous = released._previous.clone()
    assert released.backward(model(torch.full((2, 24), math.inf)).sum()).kind == "skipped"
    assert torch.equal(released._previous.nan_to_num(-1.0), previous.nan_to_num(-1.0))
    assert released.backward(model(torch.ones(2, 24)).sum()).is_applied
    assert all(p.isfinite().all() for p in model.parameters())


def test_norms_that_fp32_cannot_square(where):
    model = nn.Linear(24, 24)
    released = release_gradients(model, SGD(model.parameters(), lr=1e-3), clip_norm=1.0)
    for _ in range(2):
        before = model.weight.detach().clone()
        outcome = released.backward((model(torch.ones(2, 24)) * 1e25).sum())
        assert outcome.is_applied
        assert 1e25 < outcome.grad_norm < 1e27
        assert not torch.equal(model.weight, before)


def test_what_is_refused_and_why():
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(UnsupportedError, match="before the others exist"):
        release_gradients(model, torch.optim.AdamW(model.parameters()))
    half = nn.Linear(2, 2).half()
    with pytest.raises(UnsupportedError, match="loss scaling"):
        release_gradients(half, AdamW(half.parameters()))
    with pytest.raises(ArgumentError, match="known when the first"):
        release_gradients(model, AdamW(model.parameters(), clip_norm=1.0))
    for wrong in (
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"clip_norm": "1"},
        {"clip_norm": True},
        {"clip_by": "this"},
    ):
        with pytest.raises(ArgumentError):
            release_gradients(model, optimizer, **wrong)
    assert not optimizer.is_released
    release = release_gradients(model, optimizer)
    with pytest.raises(CallOrderError, match="released already"):
        release_gradients(model, optimizer)
    with pytest.raises(CallOrderError, match="nothing left to step with"):
        optimizer.step()
    with pytest.raises(CallOrderError, match=r"the released parameter \w+\.\w+ of shape[\s\S]*release\.backward"):
        loss_of(model).backward()
    model.zero_grad()
    for wrong in (torch.ones(2, requires_grad=True), torch.ones(()), 3.0, torch.ones((), dtype=torch.int64)):
        with pytest.raises(ArgumentError, match="one floating number"):
            release.backward(wrong)
    model.first.weight.grad = torch.zeros_like(model.first.weight)
    with pytest.raises(CallOrderError, match="micro-batches"):
        release.backward(loss_of(model))
    model.zero_grad()
    with pytest.raises(CallOrderError, match="released"):
        Stepper(model, optimizer, policy="bf16-master")


def test_reentrant_checkpointing_that_brings_a_gradient_twice():
    layer = nn.Linear(24, 24)
    release = release_gradients(layer, SGD(layer.parameters(), lr=0.1))
    x = torch.ones(2, 24, requires_grad=True)
    for reentrant in (True, False):
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant)
        if reentrant:
            with pytest.raises(UnsupportedError, match=r"the parameter (weight|bias) of[\s\S]*use_reentrant=False"):
                release.backward(y.sum())
            layer.zero_grad()
        else:
            assert release.backward(y.sum()).is_applied


@pytest.mark.filterwarnings("ignore:.*nothing keeps their full value")
def test_schedulers_groups_unfreezing_and_the_meter():
    model = Net().bfloat16()
    model.first.bias.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2, master="none")
    release = release_gradients(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.count_stalled = True
    release.backward(loss_of(model))
    scheduler.step()  # no warning that optimizer.step() came later
    share = optimizer.stalled
    assert 0 <= share < 1
    model.first.bias.requires_grad_(True)
    before = model.first.bias.detach().clone()
    release.backward(loss_of(model))
    assert not torch.equal(model.first.bias, before)
    assert optimizer.state[model.first.bias]["step"] == 1


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
def test_save_and_resume_in_the_middle(clip_norm):
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    released = release_gradients(model, optimizer, clip_norm=clip_norm)
    for seed in range(3):
        released.backward(loss_of(model, seed))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), released.state_dict()))
    for seed in range(3, 6):
        released.backward(loss_of(model, seed))
    other = Net()
    resumed = OPTIMIZERS["adamw"](other.parameters())
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    again = release_gradients(other, resumed, clip_norm=clip_norm)
    again.load_state_dict(saved[2])
    for seed in range(3, 6):
        again.backward(loss_of(other, seed))
    assert_same(model, optimizer, other, resumed)
    for wrong in ({}, {"previous_norm": -1.0}, {"previous_norm": math.inf}, None):
        with pytest.raises(StateError, match="previous_norm"):
            again.load_state_dict(wrong)


def test_bytes_that_are_alive_in_the_backward_pass(monkeypatch):
    """State of split8 and int8 moments: at most 5.15 bytes per parameter with the weights, and one gradient."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    num_parameters = sum(p.numel() for p in model.parameters())
    kept = sum(p.numel() * p.element_size() for p in model.parameters()) + optimizer.num_bytes
    assert kept / num_parameters < 5.15
    released, used, seen, alive = release_gradients(model, optimizer), optimizer.step_alone, [], []

    def watched(index, p, gradient, *rest):
        # A storage's handle is alive as long as anybody holds its memory.
        alive.append(sum(handle() is not None for handle in seen))
        seen.append(weakref.ref(gradient))
        used(index, p, gradient, *rest)

    monkeypatch.setattr(optimizer, "step_alone", watched)
    released.backward(model(torch.randn(2, 256).bfloat16()).float().square().mean())
    assert alive == [0, 0, 0, 0]


def test_parameters_that_nobody_would_step():
    model = Net()
    with pytest.raises(ArgumentError, match=r"first\.weight and 1 more"):
        release_gradients(model, AdamW(model.second.parameters()))


def test_what_can_be_seen_before_the_backward_pass_stops_it_there():
    model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    release = release_gradients(model, optimizer)
    x = torch.randn(8, 33)
    release.backward(model(x).square().mean())
    before = copy.deepcopy(model.state_dict())
    optimizer.state[model[0].weight]["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(CallOrderError, match="freed"):
        release.backward(model(x).square().mean())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
