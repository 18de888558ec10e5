"""The stepper's invariants, by their numbers in the design: 1, 2, 3, 9 and 11 (4 is test_resume, 10 test_no_host_read).

Gradients are broken by hooks on the parameters, so a fault can strike any micro-batch, just before it is added to what
the window has summed so far.
"""

import copy
import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import AdaptiveScale, DynamicScale, NoScale, StaticScale
from halfstep.errors import StateError
from halfstep.hardware import Hardware
from halfstep.kernels.gradients import gradient_of

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")

INF, NAN = float("inf"), float("nan")
VALUES = [INF, -INF, NAN, 3e38, -1e30, 1e20, 65504.0, 1e-45, 1e-30, 0.0]
FAULTS = [*VALUES, "all zero", "absent"]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "sgd-fused-dampening": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw-amsgrad-fused": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
}
# Policy, scale, clip_norm: each optimizer meets two of them by each path.
SETTINGS = [
    ("fp16-mixed", lambda: DynamicScale(growth_interval=3), None),
    ("fp32", lambda: StaticScale(8.0), 0.5),
    ("fp16-mixed", lambda: DynamicScale(growth_interval=3, hysteresis=2, tolerance=0.2), 0.5),
    ("fp32", NoScale, None),
    ("bf16-mixed", AdaptiveScale, 0.5),
]


class Fragile(nn.Module):
    """fp32, fp16 and bf16 weights around a BatchNorm; ``faults`` says what happens to whose gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.BatchNorm1d(6)
        self.fp16 = nn.Parameter(torch.randn(5, 6).half())
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.spectator = nn.Parameter(torch.ones(()))  # in no optimizer, so that a loss always has a graph
        self.faults = {}
        self.breakable = {name: p for name, p in self.named_parameters() if name != "spectator"}
        for name, parameter in self.breakable.items():
            parameter.register_hook(functools.partial(self._break, name))

    def _break(self, name, gradient):
        fault = self.faults.get(name)
        if fault is None:
            return None
        if fault == "all zero":
            return torch.zeros_like(gradient)
        gradient = gradient.clone()
        gradient.view(-1)[-1] = fault
        return gradient

    def _used(self, name):
        parameter = self.breakable[name]
        return parameter.detach() if self.faults.get(name) == "absent" else parameter

    def forward(self, x):
        x = F.linear(x, self._used("first"))
        norm = self.norm
        tracked = (norm.running_mean, norm.running_var) if self.training else ()
        norm.num_batches_tracked.add_(1)
        x = F.batch_norm(x.float(), *tracked, self._used("norm.weight"), self._used("norm.bias"), training=True)
        x = F.linear(torch.tanh(x), self._used("fp16").float(), self._used("bf16").float())
        return (x - 1).square().mean() * self.spectator


def tensors_of(model, optimizers, ema):
    """Everything that a skipped step must leave alone. A missing momentum and a zero one are the same momentum."""
    found = dict(model.state_dict())
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            found |= {f"{names[p]}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor) and v.any()}
    if ema is not None:
        state = ema.state_dict()
        found |= {f"ema.{k}": v for part in ("averages", "buffers") for k, v in state[part].items()}
    return found


def bits(tensors):
    return {k: (t.dtype, t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) for k, t in tensors.items()}


def changes(before, after):
    """Names of what is not the same in two answers of ``Run.everything``."""
    (old, *old_host), (new, *new_host) = before, after
    changed = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    return sorted(changed) + [f"{a} is now {b}" for a, b in zip(old_host, new_host, strict=True) if a != b]


def host_state(ema, scheduler):
    return copy.deepcopy((ema.num_updates, ema.decay, scheduler.state_dict()))


def warm_up(step):
    return min(1.0, (step + 1) / 20) * 0.999**step


class Run:
    """A stepper with everything attached that a skip must leave alone."""

    def __init__(self, optimizer, policy, scale, clip_norm):
        self.model = Fragile()
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.breakable.values()))
        self.base_lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.ema = halfstep.EMA(self.model, decay=0.9)
        self.stepper = halfstep.Stepper(
            self.model,
            self.optimizer,
            policy=policy,
            clip_norm=clip_norm,
            scheduler=self.scheduler,
            ema=self.ema,
            scale=scale,
            on_overflow="ignore",
            on_repeat="ignore",
        )
        self.applied = 0
        hook = functools.partial(lambda *_: self.check_learning_rate())
        hook.is_halfsteps = True  # it looks at no gradient: the kernel may divide
        self.optimizer.register_step_pre_hook(hook)

    def check_learning_rate(self):
        assert self.optimizer.param_groups[0]["lr"] == self.base_lr * warm_up(self.applied)

    def tensors(self):
        return tensors_of(self.model, [self.optimizer], self.ema)

    def everything(self):
        self.stepper.settle()
        return bits(self.tensors()), host_state(self.ema, self.scheduler), self.optimizer.param_groups[0]["lr"]

    def micro_batch(self, x, faults):
        self.model.faults = faults
        with self.stepper.forward():
            loss = self.model(x)
        self.stepper.backward(loss)

    def gradients(self):
        found = {name: gradient_of(p) for name, p in self.model.breakable.items()}
        return {name: g for name, g in found.items() if g is not None}


# -- invariants 1, 2 and 3 under random faults ------------------------------------------------------------------------


def random_faults(rng, breakable):
    """Faults of one micro-batch: for most parameters none, now and then for all of them the same."""
    if rng.random() < 0.03:
        return dict.fromkeys(breakable, rng.choice(["absent", "all zero", NAN]))
    return {name: rng.choice(FAULTS) for name in breakable if rng.random() < 0.16}


def true_norm(gradients, divisor):
    return math.sqrt(sum(float((g.double() / divisor).square().sum()) for g in gradients.values()))


def one_window(run, rng, size):
    """A window of random faults: how many there were, and whether its sum is finite (None: no gradient at all)."""
    faults = 0
    run.stepper.accumulate = size
    for number in range(size):
        x = torch.randn(4, 4)
        broken = random_faults(rng, run.model.breakable)
        if rng.random() < 0.02:  # an activation that overflows: it reaches the running statistics before any gradient
            x[0, 0], broken = INF, {}
            faults += 1
        run.micro_batch(x, broken)
        faults += len(broken)
        if number < size - 1:
            assert run.stepper.step().kind == "accumulating"
    summed = run.gradients()
    return faults, all(bool(torch.isfinite(g).all()) for g in summed.values()) if summed else None


def tame(model, initial):
    """Weights that a huge but finite gradient has thrown far away come back, or no later window would be finite."""
    with torch.no_grad():
        for name, p in model.breakable.items():
            if p.abs().max() > 100:
                p.copy_(initial[name])


CASES = [
    pytest.param(path, name, *SETTINGS[(2 * i + 3 * j) % len(SETTINGS)], id=f"{path}-{name}")
    for j, path in enumerate(("host", "delayed"))
    for i, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("path", "optimizer", "policy", "scale", "clip_norm"), CASES)
def test_invariants_1_2_3_ten_thousand_random_faults(request, path, optimizer, policy, scale, clip_norm):
    """625 faults for each of 16 cases: 8 optimizers, each by the host's path and by the device's."""
    if path == "delayed":
        request.getfixturevalue("delayed")
    rng = random.Random(f"{path} {optimizer}")
    run = Run(optimizer, policy, scale(), clip_norm)
    stepper, initial = run.stepper, copy.deepcopy(run.model.state_dict())
    num_faults = steps = skipped = 0
    steps_of = dict.fromkeys(run.model.breakable, 0)
    while num_faults < 625:
        before = run.everything()
        faults, is_finite = one_window(run, rng, rng.randint(1, 4))
        num_faults += faults
        summed = {name: g.clone() for name, g in run.gradients().items()}
        outcome = stepper.step()
        steps += 1
        assert outcome.kind == {True: "applied", False: "skipped", None: "no_gradients"}[is_finite]
        assert not run.gradients()
        if outcome.kind == "applied":
            run.applied += 1
            for name in summed:
                steps_of[name] += 1
            norm = true_norm(summed, outcome.scale * outcome.num_micro_batches)
            assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
        elif outcome.kind == "skipped":
            skipped += 1
            assert not math.isfinite(outcome.grad_norm)
            assert not torch.isfinite(summed[outcome.culprit.name]).all()
            assert changes(before, run.everything()) == []
        stepper.settle()
        run.check_learning_rate()
        after = run.tensors()
        if outcome.kind != "skipped":  # those have the bits of before
            assert all(torch.isfinite(t).all() for t in after.values())
        low, high = stepper.scale.bounds()
        assert 0 < low <= stepper.scale.get() <= high < INF
        if "adam" in optimizer:
            assert all(after.get(f"{name}.step", 0) == number for name, number in steps_of.items())
        tame(run.model, initial)
    assert (stepper.steps, stepper.skipped_steps) == (steps, skipped)
    assert (run.ema.num_updates, run.scheduler.last_epoch) == (run.applied, run.applied)
    assert skipped > 50
    assert run.applied > 50


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_invariant_1_a_run_with_skips_is_the_run_without_those_batches(delay, optimizer, accumulate):
    """Not only at the moment of the skip: no later bit differs, counters and buffers included."""

    def train(bad_windows):
        torch.manual_seed(3)
        run = Run(optimizer, "fp16-mixed", StaticScale(256.0), 0.5)
        run.stepper.accumulate = accumulate
        kinds = []
        for window in range(8):
            batches = [torch.randn(4, 4) for _ in range(accumulate)]
            if window in bad_windows and bad_windows[window] == "left out":
                continue
            for number, x in enumerate(batches):
                is_bad = window in bad_windows and number == window % accumulate
                run.micro_batch(x, {"norm.weight": bad_windows[window]} if is_bad else {})
                outcome = run.stepper.step()
            kinds.append(outcome.kind)
            run.applied += kinds[-1] == "applied"
        return kinds, run.everything()

    kinds, mine = train({0: INF, 3: NAN, 4: -INF, 7: INF})
    assert kinds == ["skipped", "applied", "applied", "skipped", "skipped", "applied", "applied", "skipped"]
    kinds, reference = train(dict.fromkeys((0, 3, 4, 7), "left out"))
    assert kinds == ["applied"] * 4
    assert changes(reference, mine) == []


def test_invariant_1_buffers_of_all_micro_batches_return(delay):
    """The overflow comes last; the statistics of the good micro-batches before it go with it, the counter too."""
    run = Run("adamw-fused", "fp16-mixed", DynamicScale(), None)
    run.stepper.accumulate = 3
    norm = run.model.norm
    for x in (torch.randn(4, 4), torch.randn(4, 4), torch.full((4, 4), INF)):
        run.micro_batch(x, {})
        outcome = run.stepper.step()
    assert outcome.kind == "skipped"
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()


@pytest.mark.parametrize("pattern", [(INF, 1.0, 1.0), (1.0, INF, 1.0)], ids=["first step", "later"])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_invariant_2_fused_sgd_whose_step_is_skipped_stays_finite(delay, pattern, dampening):
    """torch leaves its momentum uninitialised there; fill freed memory with NaN to make that show."""
    for _ in range(20):
        garbage = [torch.full((1000,), NAN) for _ in range(8)]
        del garbage
        model, reference = (nn.Module() for _ in range(2))
        for one in (model, reference):
            one.w = nn.Parameter(torch.ones(1000))
        options = {"momentum": 0.9, "dampening": dampening}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True, **options)
        plain = torch.optim.SGD(reference.parameters(), 0.1, **options)
        stepper = halfstep.Stepper(model, optimizer, policy="fp16-mixed")
        for factor in pattern:
            with stepper.forward():
                loss = (model.w * factor).sum()
            stepper.backward(loss)
            stepper.step()
            if math.isfinite(factor):
                reference.w.grad = torch.ones(1000)
                plain.step()
        torch.testing.assert_close(model.w, reference.w, rtol=1e-6, atol=0)


# -- invariant 3: the scale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DynamicScale, AdaptiveScale])
@pytest.mark.parametrize("factor", [INF, 1e-8])
def test_invariant_3_the_scale_stays_within_its_bounds_for_ever(delay, make, factor):
    """40 overflows in a row, or 40 tiny gradients, cannot drive it out."""
    scale = make(16.0, min_scale=2.0, max_scale=64.0)
    if make is DynamicScale:
        scale.set_growth_interval(1)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = halfstep.Stepper(model, optimizer, policy="fp16-mixed", scale=scale)
    seen = []
    for _ in range(40):
        with stepper.forward():
            loss = model.weight.sum() * factor
        stepper.backward(loss)
        seen.append(stepper.step().scale)
    assert seen[-1] == scale.get() == (2.0 if factor == INF else 64.0)
    assert all(2.0 <= value <= 64.0 for value in seen)


def with_scale(value):
    return lambda state: state["scale"].update(scale=value)


@pytest.mark.parametrize(
    "damage",
    [
        *(with_scale(value) for value in (INF, NAN, 0.0, -4.0, 2.0**60, "eight", None)),
        lambda state: state["scale"].update(growth_tracker=-1),
        lambda state: state["scale"].pop("hysteresis_tracker"),
        lambda state: state["counts"].update(steps=-1),
        lambda state: state["counts"].update(skipped_steps=1.5),
        lambda state: state["schedulers"].append({}),
        lambda state: state.update(ema=None),
        lambda state: state["ema"]["averages"]["first"].fill_(NAN),
        lambda state: state["ema"].update(decay=2.0),
        lambda state: state.update(version=99),
        lambda state: state.pop("counts"),
    ],
)
def test_invariant_3_a_damaged_state_is_refused_whole(delay, damage):
    run = Run("adamw-fused", "fp16-mixed", DynamicScale(2.0**10, growth_interval=2), None)
    for fault in (None, INF, None):
        run.micro_batch(torch.randn(4, 4), {"first": fault})
        run.applied += run.stepper.step().kind == "applied"
    good = copy.deepcopy(run.stepper.state_dict())
    for _ in range(3):
        run.micro_batch(torch.randn(4, 4), {})
        run.stepper.step()
        run.applied += 1
    before, everything = copy.deepcopy(run.stepper.state_dict()), run.everything()
    bad = copy.deepcopy(good)
    damage(bad)
    with pytest.raises(StateError):
        run.stepper.load_state_dict(bad)
    assert changes(everything, run.everything()) == []
    after = run.stepper.state_dict()
    for key in ("scale", "counts", "schedulers"):
        assert after[key] == before[key]
    run.stepper.load_state_dict(good)  # what is sound does load
    assert (run.stepper.steps, run.stepper.skipped_steps, run.scheduler.last_epoch) == (3, 1, 2)


# -- invariant 9: clipping and finite gradients -----------------------------------------------------------------------


def weights(shape, dtype, value=1.0):
    model = nn.Module()
    model.w = nn.Parameter(torch.full(shape, value, dtype=dtype))
    return model


def step_with(model, gradient, optimizer=None, scale=None, **options):
    """One step with a gradient of this true value everywhere."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1.0)
    stepper = halfstep.Stepper(model, optimizer, policy="fp16-mixed", scale=scale, **options)
    with stepper.forward():
        loss = (model.w.float() * gradient).sum()
    stepper.backward(loss)
    return stepper.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-10])
def test_invariant_9_clipping_sees_the_true_norm_whatever_the_scale(delay, scale, fused):
    model = weights((4, 4), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=fused)
    outcome = step_with(model, 3.0, optimizer, StaticScale(scale), clip_norm=1.0)
    assert outcome.grad_norm == 12.0
    assert outcome.clip_coefficient == pytest.approx(1 / 12, rel=1e-6)
    torch.testing.assert_close(model.w.detach(), torch.full((4, 4), 1 - 3 / 12), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_invariant_9_a_scaled_gradient_above_the_limit_is_not_clipped_if_the_true_one_is_below(delay, fused):
    model = weights((4, 4), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=fused)
    outcome = step_with(model, 0.125, optimizer, StaticScale(2.0**10), clip_norm=1.0)
    assert outcome.grad_norm == 0.5
    assert outcome.clip_coefficient == 1.0
    assert model.w.detach().eq(1 - 0.125).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_invariant_9_an_fp16_gradient_whose_norm_passes_65504_is_no_overflow(delay, fused, clip_norm):
    """128 x 128 elements of 2**14: their norm is 2**21, their squares are beyond fp16 twice over."""
    model = weights((128, 128), torch.float16, value=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-14, fused=fused)
    outcome = step_with(model, 2.0**4, optimizer, StaticScale(2.0**10), clip_norm=clip_norm)
    assert outcome.kind == "applied"
    assert outcome.grad_norm == 2.0**11
    expected = -(2.0**-10) if clip_norm is None else -(2.0**-21)
    assert model.w.detach().float().sub(expected).abs().max() <= abs(expected) * 2.0**-10 + 2.0**-25


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("gradient", [3e38, 1e30, 3e19, 1e-24, 1e-38, 1e-45, 0.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_invariant_9_a_finite_gradient_never_skips(delay, optimizer, gradient, clip_norm):
    """3e19 squared overflows and 1e-24 squared vanishes in fp32; neither makes an inf, a NaN or a wrong norm."""
    model = weights((3,), torch.float32)
    outcome = step_with(model, gradient, OPTIMIZERS[optimizer](model.parameters()), NoScale(), clip_norm=clip_norm)
    assert outcome.kind == "applied"
    value = torch.tensor(gradient).double().item()
    assert outcome.grad_norm == pytest.approx(math.sqrt(3) * value, rel=1e-5)
    assert 0 < outcome.clip_coefficient <= 1


# -- invariant 11: every choice has a reason --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "policy", "scale", "words"),
    [
        (Hardware("cpu", features=("avx512_bf16",)), "bf16-mixed", NoScale, ("bf16", "no loss scaling needed")),
        (Hardware("cuda", "Tesla V100", capability=(7, 0)), "fp16-mixed", DynamicScale, ("fp16", "loss scaling")),
        (Hardware("cpu"), "fp32", NoScale, ("fp32", "no fp16 instructions", "no bf16 instructions")),
    ],
)
def test_invariant_11_the_choice_of_auto_carries_its_reason(monkeypatch, hardware, policy, scale, words):
    monkeypatch.setattr("halfstep.training.setup.probe", lambda device: hardware)
    model = nn.Linear(2, 2)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1))
    assert str(stepper.policy) == policy
    assert type(stepper.scale) is scale
    assert all(word in stepper.policy.reason for word in words)


def test_invariant_11_what_the_user_chose_says_so():
    model = nn.Linear(2, 2)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16-mixed")
    assert "chosen by name" in stepper.policy.reason
