"""Invariant 10: ``step()`` reads nothing of its own window on the host; what lives on the host acts one step late.

Proved twice: on fake CUDA tensors, which have no values to read, and on CPU tensors that travel as a device's do.
"""

import random
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import AdaptiveScale, DynamicScale, NoScale
from halfstep.errors import NonFiniteError, SkippedStepWarning
from halfstep.hardware import Hardware

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")

INF = float("inf")
HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that needs a device value on the host, and on copies from a device to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} reads the device"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            target = out if name == "_to_copy" else args[0]
            assert not (source.device.type != "cpu" and target.device.type == "cpu"), f"{name} copies to the host"
        return out


def refuse_read(*args, **kwargs):
    raise AssertionError("tolist or numpy reads the device")


@contextmanager
def unreadable():
    """``NoHostRead``, and no way around the dispatcher either: CPU tensors hand out their memory without it."""
    with pytest.MonkeyPatch.context() as patch, NoHostRead():
        for name in ("tolist", "numpy", "__array__"):
            patch.setattr(torch.Tensor, name, refuse_read)
        yield


FUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3, fused=True),
}


# -- fake CUDA tensors ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch, patched):
    """CUDA tensors without values, on a machine without CUDA; autograd, which cannot run there, leaves gradients."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    # These two have no rule for tensors without values; they write in place and return nothing.
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "_fused_adagrad_", lambda *args, **kwargs: None)
    h200 = Hardware("cuda", "NVIDIA H200", capability=(9, 0))
    patched("probe", lambda device: h200)
    patched("check_loss", lambda loss: None)  # these losses have no graph
    with FakeTensorMode():
        yield torch.device("cuda")


class Sent:
    """Stands in for HostCopy: what is on its way, and who has read it. A fake tensor has nothing to read."""

    log: list

    def __init__(self, numbers):
        self.log.append(("sent", self.number()))

    def number(self):
        return sum(event == "sent" for event, _ in self.log)

    def read(self):
        read = sum(event == "read" for event, _ in self.log)
        self.log.append(("read", read))
        return [0.0, 8.0, 8.0, 8.0, 1.0, 8.0, 0.5]


def fake_run(monkeypatch, patched, device, name, **options):
    model = nn.Module()
    model.weights = nn.ParameterList([torch.empty(n, 4, device=device) for n in (3, 5)])
    log = []
    patched("HostCopy", type("Logged", (Sent,), {"log": log}))

    def leave_gradients(loss, inputs=None, retain_graph=None):
        log.append(("backward", None))
        for w in model.weights:
            w.grad = torch.empty_like(w)

    monkeypatch.setattr(torch.autograd, "backward", leave_gradients)
    optimizer = FUSED[name](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: log.append(("step", None)))
    return halfstep.Stepper(model, optimizer, **options), log


def micro_batch(stepper, loss, weight=None):
    with stepper.forward():
        pass
    stepper.backward(loss, weight)
    return stepper.step()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_invariant_10_a_step_on_tensors_without_values(
    monkeypatch, patched, fake_cuda, name, policy, clip_norm, accumulate
):
    stepper, log = fake_run(
        monkeypatch, patched, fake_cuda, name, policy=policy, clip_norm=clip_norm, accumulate=accumulate
    )
    loss = torch.empty((), device=fake_cuda)
    outcomes = []
    for step in range(3):
        del log[:-1]
        with NoHostRead():
            for _ in range(accumulate):
                outcome = micro_batch(stepper, loss)
        events = [event for event, _ in log if event != "backward"]
        assert events[-2:] == ["step", "sent"]
        assert ("read" in events) == (step > 0), "each step reads the one before, and none reads its own"
        outcomes.append(outcome)
        log[:] = log[-1:]
    assert stepper.skipped_steps == 0
    assert [outcome.kind for outcome in outcomes] == ["applied"] * 3


@pytest.mark.parametrize("scale", [DynamicScale, NoScale])
def test_invariant_10_several_optimizers_are_not_read_either(monkeypatch, patched, fake_cuda, scale):
    stepper, _ = fake_run(monkeypatch, patched, fake_cuda, "adamw", policy="bf16-mixed", scale=scale())
    first, second = stepper.model.weights
    optimizers = [FUSED["sgd"]([first]), FUSED["adam"]([second])]
    stepper = halfstep.Stepper(stepper.model, optimizers, policy="bf16-mixed", clip_norm=1.0, scale=scale())
    with NoHostRead():
        micro_batch(stepper, torch.empty((), device=fake_cuda))


def test_the_proof_can_fail(monkeypatch, patched, fake_cuda):
    """An optimizer that cannot skip by itself has to be told: one read a step, and it is caught."""
    stepper, _ = fake_run(monkeypatch, patched, fake_cuda, "adamw", policy="fp16-mixed")
    plain = torch.optim.SGD(stepper.model.parameters(), 0.1)
    stepper = halfstep.Stepper(stepper.model, plain, policy="fp16-mixed")
    with pytest.raises((AssertionError, RuntimeError)), NoHostRead():
        micro_batch(stepper, torch.empty((), device=fake_cuda))


# -- CPU tensors that travel: all of it, BatchNorm, EMA, scheduler and 16-bit weights included ------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.first = nn.Parameter(torch.randn(4, 3))
        self.second = nn.Parameter(torch.randn(2, 4).bfloat16())

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(self.norm(x), self.first))
        return nn.functional.linear(x, self.second.float()).float().square().mean()


def attached(name="adamw", model=None, **options):
    """A stepper with everything that acts at settle, or might read."""
    model = model or Net()
    optimizer = FUSED[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    options = {"policy": "fp16-mixed", "clip_norm": 1.0, "on_overflow": "ignore", "on_repeat": "ignore"} | options
    return halfstep.Stepper(model, optimizer, scheduler=scheduler, ema=halfstep.EMA(model, decay=0.9), **options)


def one_step(stepper, factor=1.0, weight=None):
    for _ in range(stepper.accumulate):
        with stepper.forward():
            loss = stepper.model(torch.randn(5, 3)) * factor
        stepper.backward(loss, weight)
        outcome = stepper.step()
    return outcome


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("scale", [DynamicScale, AdaptiveScale, NoScale])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_invariant_10_a_step_that_travels_with_everything_attached(delayed, name, scale, accumulate):
    stepper = attached(name, scale=scale(), accumulate=accumulate)
    for step in range(4):
        with unreadable():
            one_step(stepper)
        assert delayed.read == list(range(step)), "each step is read one step late"
        assert delayed.sent == list(range(step + 1))


def test_invariant_10_looking_at_gradients_reads_nothing(delayed):
    stepper = attached()
    with unreadable():
        with stepper.forward():
            loss = stepper.model(torch.randn(5, 3))
        stepper.backward(loss)
        stepper.unscale_()
        outcome = stepper.step()
        with stepper.forward():
            loss = stepper.model(torch.randn(5, 3))
        stepper.backward(loss)
        taken = stepper.take_gradients()
        with stepper.perturbed({p: g.to(p.dtype) for p, g in taken.items()}):
            with stepper.forward():
                loss = stepper.model(torch.randn(5, 3))
            stepper.backward(loss)
        stepper.step()
    assert delayed.read == [0]
    assert outcome.kind == "applied"


def test_the_second_proof_can_fail(delayed):
    with pytest.raises(AssertionError, match="reads the device"), unreadable():
        torch.ones(()).item()
    with pytest.raises(AssertionError, match="reads the device"), unreadable():
        torch.ones(2).tolist()
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_step_is_settled_behind_the_next_backward_and_before_the_next_step(delayed, monkeypatch):
    """The device has the forward and backward passes of the next window to do while the host waits."""
    stepper = attached(accumulate=2)
    events = delayed.events
    stepper.model.register_forward_pre_hook(lambda *_: events.append(("forward", None)))
    stepper.model.first.register_hook(lambda g: events.append(("backward", None)))
    stepper.optimizers[0].register_step_pre_hook(lambda *_: events.append(("step", None)))
    for _ in range(3):
        one_step(stepper)
    names = [event if number is None else f"{event} {number}" for event, number in events]
    passes = ["forward", "backward"] * 2
    assert names == [
        *passes, "step", "sent 0",
        *passes, "read 0", "step", "sent 1",
        *passes, "read 1", "step", "sent 2",
    ]  # fmt: skip


QUESTIONS = {
    "kind": lambda stepper, outcome: outcome.kind == "skipped",
    "is_skipped": lambda stepper, outcome: outcome.is_skipped,
    "scale": lambda stepper, outcome: outcome.scale == 2.0**14,
    "grad_norm": lambda stepper, outcome: not outcome.grad_norm < INF,
    "culprit": lambda stepper, outcome: outcome.culprit.name == "second",
    "metrics": lambda stepper, outcome: outcome.metrics()["applied"] == 0.0,
    "print": lambda stepper, outcome: repr(outcome).startswith("step 2 skipped: the gradient of second (shape [2, 4])"),
    "steps": lambda stepper, outcome: stepper.steps == 2,
    "skipped_steps": lambda stepper, outcome: stepper.skipped_steps == 1,
    "stepper's culprit": lambda stepper, outcome: stepper.culprit.name == "second",
    "settle": lambda stepper, outcome: stepper.settle() is None,
    "flush": lambda stepper, outcome: stepper.flush() is None,
    "state_dict": lambda stepper, outcome: stepper.state_dict()["counts"]["skipped_steps"] == 1,
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_settles_once(delayed, ask):
    told = []
    stepper = attached(on_overflow=told.append)
    one_step(stepper)
    outcome = one_step(stepper, factor=INF)
    assert delayed.read == [0]
    assert told == []
    assert ask(stepper, outcome)
    assert delayed.read == [0, 1]
    assert ask(stepper, outcome)
    stepper.settle()
    assert delayed.read == [0, 1]
    assert told == [outcome]


def test_invariant_10_a_weight_on_the_device_is_not_read(delayed):
    stepper = attached(accumulate=2)
    with unreadable():
        outcome = one_step(stepper, weight=torch.tensor(7.0))
    assert outcome.kind == "applied"


@pytest.mark.parametrize("weight", [0.0, -1.0, INF, float("nan")])
@pytest.mark.parametrize("position", [0, 1])
def test_a_bad_weight_on_the_device_skips_the_step(delayed, weight, position):
    stepper = attached(accumulate=2)
    before = {name: value.clone() for name, value in stepper.model.state_dict().items()}
    with unreadable():
        for number in range(2):
            with stepper.forward():
                loss = stepper.model(torch.randn(5, 3))
            stepper.backward(loss, torch.tensor(weight if number == position else 3.0))
            outcome = stepper.step()
    assert outcome.kind == "skipped"
    for name, value in stepper.model.state_dict().items():
        assert torch.equal(value, before[name]), name


# -- what acts at settle ----------------------------------------------------------------------------------------------


def lr_of(step):
    """A warm-up and a decay, so that no two steps have the same learning rate."""
    return min(1.0, (step + 1) / 15) * 0.97**step


def rates_of_a_loop_that_knows_at_once(bad):
    """The synchronous reference: each applied step's learning rates, with torch's scheduler and a look at the loss."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_of)
    rates = []
    for is_bad in bad:
        weight.grad = torch.full((1,), INF if is_bad else 0.01)
        if torch.isfinite(weight.grad).all():
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates, weight.detach()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_the_learning_rate_of_every_applied_step_is_that_of_a_synchronous_loop(delay, seed, accumulate, fused):
    rng = random.Random(seed)
    bad = [rng.random() < 0.1 + 0.12 * seed for _ in range(60)]
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_of)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    stepper = halfstep.Stepper(
        model,
        optimizer,
        policy="fp32",
        scheduler=scheduler,
        accumulate=accumulate,
        on_overflow="ignore",
        on_repeat="ignore",
    )
    rates, outcomes = [], []
    for is_bad in bad:
        for number in range(accumulate):
            with stepper.forward():
                loss = (model.weight * (INF if is_bad and number == seed % accumulate else 0.01)).sum()
            stepper.backward(loss)
            outcome = stepper.step()
        rates.append(seen.pop() if seen else None)
        assert not seen
        outcomes.append(outcome)
        if rng.random() < 0.1:
            stepper.settle()  # asking in between changes nothing
    assert [outcome.is_skipped for outcome in outcomes] == bad
    applied = [rate for rate, is_bad in zip(rates, bad, strict=True) if not is_bad]
    expected, weight = rates_of_a_loop_that_knows_at_once(bad)
    assert applied == expected
    torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-6, atol=0)
    assert scheduler.last_epoch == bad.count(False)


def test_schedulers_of_several_optimizers_all_wait_for_the_settle(delay):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizers = [torch.optim.SGD(one.parameters(), 1.0, fused=True) for one in model]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=gamma)
        for one, gamma in zip(optimizers, (0.5, 0.25), strict=True)
    ]
    stepper = halfstep.Stepper(model, optimizers, policy="fp32", scheduler=schedulers, on_overflow="ignore")
    for factor in (1.0, INF, 1.0):
        with stepper.forward():
            loss = (model[1](model[0](torch.ones(1, 2))) * factor).sum()
        stepper.backward(loss)
        stepper.step()
    stepper.settle()
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.25, 0.0625]


def skips(stepper, number, start=0):
    return [one_step(stepper, factor=INF) for _ in range(number)]


@pytest.mark.parametrize("later", ["good", "bad"])
def test_on_repeat_is_called_one_step_late_with_the_right_number(delay, later):
    told = []
    stepper = attached(on_repeat=lambda culprit, step: told.append((culprit.name, culprit.kind, step)), repeat_after=3)
    one_step(stepper)
    skips(stepper, 2)
    one_step(stepper)  # breaks the row
    skips(stepper, 3)
    assert told == ([] if delay else [("second", "nan", 7)])
    one_step(stepper, factor=1.0 if later == "good" else INF)
    assert told == [("second", "nan", 7)]
    skips(stepper, 4)
    stepper.settle()
    assert len(told) == (2 if later == "good" else 1), "once for each row of skips"


def test_on_repeat_raise_comes_one_step_late_and_loses_nothing(delay):
    """It names the step that was at fault, and the window at whose door it comes can be stepped or flushed still."""
    stepper = attached(on_repeat="raise", repeat_after=2)
    skips(stepper, 1)
    if delay is None:
        with pytest.raises(NonFiniteError, match="step 2: skipped; skips in a row: 2"):
            skips(stepper, 1)
        outcome = one_step(stepper)
    else:
        skips(stepper, 1)
        with pytest.raises(NonFiniteError, match="step 2: skipped; skips in a row: 2"):
            one_step(stepper)
        assert stepper.num_micro_batches == 1
        outcome = stepper.step()
    assert outcome.kind == "applied"
    assert outcome.step == 3
    assert (stepper.steps, stepper.skipped_steps) == (3, 2)


def test_warnings_come_one_step_late_and_say_for_which_step(delay):
    stepper = attached(on_overflow="warn", on_repeat="warn", repeat_after=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(stepper)

    def expect(text, late):
        """Within ``late`` on a device, within the step itself on the host."""
        return (
            pytest.warns(SkippedStepWarning, match=text) if late == (delay is not None) else warnings.catch_warnings()
        )

    with expect("Step 2 was skipped", late=False):
        skips(stepper, 1)
    with expect("Step 2 was skipped", late=True), expect("step 3: skipped; skips in a row: 2", late=False):
        skips(stepper, 1)
    with expect("step 3: skipped; skips in a row: 2", late=True):
        one_step(stepper)


@pytest.mark.parametrize("asks", [True, False])
def test_on_overflow_is_told_each_skipped_outcome_once_and_in_order(delay, asks):
    told, rng = [], random.Random(5)
    bad = [rng.random() < 0.4 for _ in range(40)]
    stepper = attached(on_overflow=told.append)
    outcomes = []
    for is_bad in bad:
        outcomes.append(one_step(stepper, factor=INF if is_bad else 1.0))
        if asks and rng.random() < 0.5:
            assert outcomes[-1].is_skipped == is_bad
    stepper.flush()
    assert [outcome.step for outcome in told] == [i + 1 for i, is_bad in enumerate(bad) if is_bad]
    assert told == [outcome for outcome in outcomes if outcome.is_skipped]
    assert all(outcome.culprit.name == "second" for outcome in told)


def test_an_accumulating_outcome_waits_for_nothing(delayed):
    stepper = attached(accumulate=2)
    one_step(stepper)
    with stepper.forward():
        loss = stepper.model(torch.randn(5, 3))
    stepper.backward(loss)
    outcome = stepper.step()
    assert (outcome.kind, outcome.step, outcome.num_micro_batches) == ("accumulating", 2, 1)
    assert delayed.read == []
