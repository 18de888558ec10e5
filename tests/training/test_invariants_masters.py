"""The invariants for 16-bit weights with masters, by their numbers in the design: 1, 2, 3, 4, 5 and 9.

Ten thousand random faults strike gradients of a model whose weights are fp16 or bf16, in any micro-batch of a window;
what the library must have summed is summed here once more, from what the hooks have handed to autograd. Each of the 40
cases is run once; every invariant has a test of its own that reads what the run has noted.
"""

import copy
import functools
import gc
import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch

import halfstep
from halfstep import AdaptiveScale, DynamicScale, MasterWeights, NoScale, StaticScale
from halfstep.kernels.gradients import gradient_of


def neighbour(name):
    """A file of this folder as a module, by its path: the tests are no package."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fp32, conftest = neighbour("test_invariants"), neighbour("conftest")

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")

INF, NAN = float("inf"), float("nan")
NUM_FAULTS = 250  # of each case
DTYPES = {"fp16-master": torch.float16, "bf16-master": torch.bfloat16}

# Each strikes the last element of a gradient, or all of it; an absent gradient is None.
HARD = [(value, whole) for value in (INF, -INF, NAN, 3e38) for whole in (False, True)]
SOFT = [
    *((value, whole) for value in (65504.0, 1e-45, 0.0) for whole in (False, True)),
    *((value, False) for value in (-65504.0, 6e-8, 2.0**-133)),
    *["absent"] * 4,
]
HUGE_IN_BF16 = [(value, whole) for value in (-1e30, 1e20) for whole in (False, True)]  # inf in fp16


class Lion(torch.optim.Optimizer):
    """An optimizer that nobody here has heard of: it makes its state when it likes."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


def muon_and_adamw(p):
    matrices = [one for one in p if one.dim() == 2]
    others = [one for one in p if one.dim() != 2]
    return [torch.optim.Muon(matrices, 0.02), *([torch.optim.AdamW(others, 1e-2, fused=True)] if others else [])]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd-fused-dampening": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, weight_decay=0.01),
    "lion": Lion,
    "muon": muon_and_adamw,
}
# Scale, clip_norm.
SETTINGS = {
    "fp16-master": [
        (lambda: DynamicScale(growth_interval=3), None),
        (lambda: DynamicScale(2.0**12, growth_interval=2, hysteresis=2, tolerance=0.2, max_scale=2.0**14), 0.5),
        (AdaptiveScale, 0.5),
        (lambda: StaticScale(64.0), None),
    ],
    "bf16-master": [(NoScale, 0.5), (NoScale, None), (lambda: StaticScale(8.0), 0.5)],
}
CASES = [
    pytest.param((path, policy, name, (i + j) % len(SETTINGS[policy])), id=f"{path}-{policy}-{name}")
    for j, path in enumerate(("host", "delayed"))
    for policy in DTYPES
    for i, name in enumerate(OPTIMIZERS)
]


class Fragile(fp32.Fragile):
    """The same model with 16-bit weights around an fp32 norm; it sums by itself what hooks hand to autograd."""

    def __init__(self, policy):
        super().__init__()
        halfstep.cast_model(self, policy)
        self.begin()

    def begin(self):
        self.sums = {}

    def _break(self, name, gradient):
        if self.faults.get(name) is not None:
            value, whole = self.faults[name]
            gradient = gradient.clone()
            (gradient if whole else gradient.view(-1)[-1:]).copy_(torch.tensor(value))  # 3e38 is inf in fp16
        wide = gradient.float()
        self.sums[name] = self.sums[name] + wide if name in self.sums else wide.clone()
        return gradient


class Run(fp32.Run):
    """A stepper over masters with everything attached that a skip must leave alone."""

    def __init__(self, policy, optimizer, setting):
        scale, clip_norm = SETTINGS[policy][setting]
        self.policy, self.clip_norm, self.setting, self.name = policy, clip_norm, setting, optimizer
        self.model = Fragile(policy)
        inner = OPTIMIZERS[optimizer](list(self.model.breakable.values()))
        self.optimizers = [MasterWeights(one) for one in (inner if isinstance(inner, list) else [inner])]
        self.optimizer = self.optimizers[0]
        self.base_lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, fp32.warm_up)
        self.ema = halfstep.EMA(self.model, decay=0.9)
        self.stepper = halfstep.Stepper(
            self.model,
            self.optimizers,
            policy=policy,
            clip_norm=clip_norm,
            scheduler=self.scheduler,
            ema=self.ema,
            scale=scale(),
            on_overflow="ignore",
            on_repeat="ignore",
        )
        self.applied = 0
        hook = functools.partial(lambda *_: self.check_learning_rate())
        hook.is_halfsteps = True  # it looks at no gradient: the kernel may divide
        self.optimizer.register_step_pre_hook(hook)

    def tensors(self):
        return fp32.tensors_of(self.model, self.optimizers, self.ema)

    def masters(self):
        """name -> (weight, master), of the 16-bit weights."""
        found = {}
        for name, p in self.model.breakable.items():
            for optimizer in self.optimizers:
                if p in optimizer._masters:
                    found[name] = p.detach(), optimizer.state[p]["master"]
        return found

    def resumed(self):
        """Another run that has loaded what this one saved."""
        saved = copy.deepcopy(
            (self.model.state_dict(), [o.state_dict() for o in self.optimizers], self.stepper.state_dict())
        )
        other = Run(self.policy, self.name, self.setting)
        other.model.load_state_dict(saved[0])
        for optimizer, state in zip(other.optimizers, saved[1], strict=True):
            optimizer.load_state_dict(state)
        other.stepper.load_state_dict(saved[2])
        other.applied = self.applied
        return other


ON_DEVICE = ("halfstep.optim.masters", "halfstep.optim.step_parts", "halfstep.kernels.rounding")


def play_device(patch):
    """The device's path: as for fp32 weights, and MasterWeights leaves skipping to the kernel, rounding looks not."""
    conftest.play_device(patch)
    for path, module in list(sys.modules.items()):
        if path in ON_DEVICE and hasattr(module, "is_host"):
            patch.setattr(module, "is_host", lambda device: False)


def random_faults(rng, run):
    """Faults of one micro-batch: for many parameters one, now and then for all of them the same."""
    hard = HARD + (HUGE_IN_BF16 if run.policy == "fp16-master" else [])
    soft = SOFT + (HUGE_IN_BF16 if run.policy == "bf16-master" else [])
    if rng.random() < 0.03:
        return dict.fromkeys(run.model.breakable, rng.choice(["absent", (0.0, True), (NAN, True)]))
    faults = {}
    for name in run.model.breakable:
        if rng.random() < 0.4:
            faults[name] = rng.choice(hard if rng.random() < 0.18 else soft)
    return faults


class Noted:
    """What one case has shown: violations by invariant, and what happened."""

    def __init__(self):
        self.violations = {number: [] for number in (1, 2, 3, 4, 5, 9)}
        self.kinds, self.struck, self.num_faults = [], set(), 0

    def expect(self, number, holds, text):
        if not holds:
            self.violations[number].append(f"window {len(self.kinds)}: {text}")


def one_window(run, rng, source, noted):
    """The micro-batches of a window, struck by random faults; all but the last are stepped."""
    run.stepper.accumulate = size = rng.randint(1, 4)
    run.model.begin()
    for number in range(size):
        x, faults = torch.randn(4, 4, generator=source), random_faults(rng, run)
        if rng.random() < 0.02:  # an activation that overflows: it reaches the running statistics before any gradient
            x[0, 0], faults = INF, {}
            noted.num_faults += 1
        run.micro_batch(x, faults)
        noted.num_faults += len(faults)
        noted.struck |= {(str(fault), number) for fault in faults.values()}
        if number < size - 1:
            run.stepper.step()


def same(a, b):
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def rounding_of(master, dtype):
    """The weight of a master: saturating; fp16 ties to even, bf16 ties away from zero."""
    largest = torch.finfo(dtype).max
    clamped = master.clamp(-largest, largest)
    if dtype == torch.float16:
        return clamped.half()
    return ((clamped.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def check_outcome(noted, run, outcome, before):
    """Invariants 1 and 9."""
    sums = run.model.sums
    is_finite = all(bool(g.isfinite().all()) for g in sums.values()) if sums else None
    wanted = {True: "applied", False: "skipped", None: "no_gradients"}[is_finite]
    noted.expect(9, outcome.kind == wanted, f"{outcome.kind}, and the gradients' sum says {wanted}")
    if outcome.kind == "skipped":
        noted.expect(1, fp32.changes(before, run.everything()) == [], "a skip changed something")
        noted.expect(1, not sums[outcome.culprit.name].isfinite().all(), f"{outcome.culprit.name} is innocent")
    if outcome.kind == "applied":
        norm = fp32.true_norm(sums, outcome.scale * outcome.num_micro_batches)
        noted.expect(9, math.isclose(outcome.grad_norm, norm, rel_tol=1e-5), f"norm {outcome.grad_norm}, true {norm}")
        limits = [1.0, 2.0**52 / norm if norm else INF]  # beyond it the squares that Adam keeps would be inf
        limits += [] if run.clip_norm is None else [run.clip_norm / (norm + 1e-6)]
        coefficient = outcome.clip_coefficient
        noted.expect(9, math.isclose(coefficient, min(limits), rel_tol=1e-5), f"{coefficient} is not {min(limits)}")


def check_state(noted, run):
    """Invariants 2, 3 and 5."""
    run.stepper.settle()
    found, half = run.tensors(), DTYPES[run.policy]
    bad = [name for name, t in found.items() if not t.isfinite().all()]
    noted.expect(2, bad == [], f"not finite: {bad}")
    noted.expect(2, all(gradient_of(p) is None for p in run.model.breakable.values()), "gradients are left")
    pairs = run.masters()
    weights, masters = (torch.cat([one.flatten() for one in side]) for side in zip(*pairs.values(), strict=True))
    noted.expect(2, torch.equal(weights, rounding_of(masters, half)), "a weight is not its master's rounding")
    low, high = run.stepper.scale.bounds()
    noted.expect(3, 0 < low <= run.stepper.scale.get() <= high < INF, f"scale {run.stepper.scale.get()}")
    noted.expect(5, sorted(pairs) == ["bf16", "first", "fp16"] and weights.dtype == half, "masters for others")
    narrow = [n for n, t in found.items() if t.dtype in DTYPES.values() and n not in (*pairs, "spectator")]
    noted.expect(5, narrow == [], f"narrowed: {narrow}")


@functools.cache
def noted_of(case):
    """Run a case: 250 faults or more."""
    path, policy, optimizer, setting = case
    with pytest.MonkeyPatch.context() as patch:
        if path == "delayed":
            play_device(patch)
        return strike(Run(policy, optimizer, setting), str(case), NUM_FAULTS)


def strike(run, seed, num_faults, *, sabotage=lambda run: None, resumes=0.05):
    """Random faults until there were so many of them."""
    rng, source, noted = random.Random(seed), torch.Generator().manual_seed(5), Noted()
    initial = copy.deepcopy(run.model.state_dict())
    while noted.num_faults < num_faults:
        if rng.random() < resumes:
            other = run.resumed()
            noted.expect(4, fp32.changes(run.everything(), other.everything()) == [], "loaded, and not the same")
            run = other
        before = run.everything()
        one_window(run, rng, source, noted)
        for name, g in run.gradients().items():
            noted.expect(9, same(g.float(), run.model.sums[name]), f"the sum of {name} is not the sum")
        outcome = run.stepper.step()
        run.applied += outcome.kind == "applied"
        sabotage(run)
        check_outcome(noted, run, outcome, before)
        check_state(noted, run)
        run.check_learning_rate()
        noted.kinds.append(outcome.kind)
        fp32.tame(run.model, initial)
        for optimizer in run.optimizers:
            optimizer.adopt_weights()
    counts = run.stepper.steps, run.stepper.skipped_steps, run.ema.num_updates, run.scheduler.last_epoch
    kinds = noted.kinds
    wanted = len(kinds), kinds.count("skipped"), kinds.count("applied"), kinds.count("applied")
    noted.expect(1, counts == wanted, f"counts are {counts}, and should be {wanted}")
    noted.end = run.everything()
    return noted


# -- ten thousand random faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_invariant_1_a_skipped_step_changes_nothing(case):
    """Weights, masters, moments, counters, buffers, average, scheduler, bit for bit; and the culprit is guilty."""
    assert noted_of(case).violations[1] == []


@pytest.mark.parametrize("case", CASES)
def test_invariant_2_nothing_non_finite_is_ever_written(case):
    """And each weight is its master's rounding, which saturates."""
    assert noted_of(case).violations[2] == []


@pytest.mark.parametrize("case", CASES)
def test_invariant_3_the_scale_stays_within_its_bounds(case):
    assert noted_of(case).violations[3] == []


@pytest.mark.parametrize("case", CASES)
def test_invariant_4_a_state_that_is_loaded_between_two_windows_is_the_state_that_was_saved(case):
    """The run goes on from what was loaded, so that every other invariant is that of a resumed run, too."""
    assert noted_of(case).violations[4] == []


@pytest.mark.parametrize("case", CASES)
def test_invariant_5_masters_and_moments_are_never_narrowed(case):
    assert noted_of(case).violations[5] == []


@pytest.mark.parametrize("case", CASES)
def test_invariant_9_a_step_follows_the_true_fp32_sum_and_its_norm(case):
    """Applied if and only if the fp32 sum is finite; the norm is its norm; it is clipped by that."""
    assert noted_of(case).violations[9] == []


def test_the_faults_are_ten_thousand_and_of_every_kind():
    all_noted = [noted_of(*case.values) for case in CASES]
    assert sum(noted.num_faults for noted in all_noted) >= 10_000
    assert all(noted.kinds.count("skipped") >= 10 for noted in all_noted)
    assert all(noted.kinds.count("applied") >= 10 for noted in all_noted)
    struck = set().union(*(noted.struck for noted in all_noted))
    assert struck >= {(str(fault), number) for fault in HARD + SOFT + HUGE_IN_BF16 for number in range(4)}
    assert any("no_gradients" in noted.kinds for noted in all_noted)


def nudge_master(run):
    next(iter(run.masters().values()))[1].view(-1)[0] += 1e-3


def poison_moment(run):
    next(iter(run.optimizer.state.values()))["exp_avg"].view(-1)[0] = INF


def narrow_moment(run):
    p, state = next(iter(run.optimizer.state.items()))
    run.optimizer.state[p] = {**state, "exp_avg_sq": state["exp_avg_sq"].half()}


@pytest.mark.parametrize(
    ("sabotage", "number"),
    [
        (nudge_master, 1),
        (nudge_master, 2),
        (poison_moment, 2),
        (lambda run: run.stepper.scale.tensor("scale").fill_(2.0**15), 3),
        (narrow_moment, 5),
        (lambda run: setattr(run, "clip_norm", 1e-3), 9),
    ],
)
def test_what_is_noted_can_be_a_violation(sabotage, number):
    """One window, then something is broken: the invariant's own list says so."""
    is_skip = number == 1
    noted = strike(Run("fp16-master", "adamw-fused", 1), "d" if is_skip else "q", 1, sabotage=sabotage, resumes=0)
    assert noted.kinds == ["skipped" if is_skip else "applied"]
    assert noted.violations[number]


@pytest.fixture(params=["host", "delayed"])
def path(request, monkeypatch):
    """Both paths, one after the other."""
    if request.param == "delayed":
        play_device(monkeypatch)
    return request.param


@pytest.mark.parametrize(("policy", "optimizer"), list(zip(list(DTYPES) * len(OPTIMIZERS), OPTIMIZERS, strict=False)))
@pytest.mark.usefixtures("path")
def test_invariant_4_a_run_that_is_loaded_anew_now_and_then_is_the_run_that_is_not(policy, optimizer):
    ends = []
    for resumes in (0.0, 0.3):  # one rng decides on faults and resumes; it is asked for both in either run
        torch.manual_seed(0)
        noted = strike(Run(policy, optimizer, 0), "resumes", 40, resumes=resumes)
        ends.append((noted.end, noted.kinds))
    assert fp32.changes(ends[0][0], ends[1][0]) == []
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("path")
def test_invariant_1_a_run_with_skips_is_the_run_without_those_batches(optimizer, accumulate):
    """Not only at the moment of the skip: no later bit differs, counters and buffers included."""

    def train(bad_windows):
        torch.manual_seed(3)
        run = Run("fp16-master", optimizer, 3)
        run.stepper.accumulate = accumulate
        kinds = []
        for window in range(6):
            batches = [torch.randn(4, 4) for _ in range(accumulate)]
            if bad_windows.get(window) == "left out":
                continue
            for number, x in enumerate(batches):
                is_bad = window in bad_windows and number == window % accumulate
                run.micro_batch(x, {"fp16": (bad_windows[window], False)} if is_bad else {})
                outcome = run.stepper.step()
            kinds.append(outcome.kind)
            run.applied += kinds[-1] == "applied"
        return kinds, run.everything()

    kinds, mine = train({0: INF, 3: NAN, 5: -INF})
    assert kinds == ["skipped", "applied", "applied", "skipped", "applied", "skipped"]
    kinds, reference = train(dict.fromkeys((0, 3, 5), "left out"))
    assert kinds == ["applied"] * 3
    assert fp32.changes(reference, mine) == []


# -- one weight, and gradients of known size --------------------------------------------------------------------------


class Weights(torch.nn.Module):
    """A tensor of 16-bit weights whose gradient is what :meth:`window` says, element for element."""

    def __init__(self, shape, policy, value=0.0):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full(shape, value, dtype=DTYPES[policy]))
        self.policy = policy

    def stepper(self, optimizer, scale, **options):
        self.optimizer = MasterWeights(optimizer)
        return halfstep.Stepper(self, self.optimizer, policy=self.policy, scale=scale, **options)

    @property
    def master(self):
        return self.optimizer.state[self.w]["master"]


def window(stepper, gradients):
    """A window whose micro-batches have these true gradients everywhere."""
    for gradient in gradients:
        with stepper.forward():
            loss = (stepper.model.w.float() * gradient).sum()
        stepper.backward(loss)
        outcome = stepper.step()
    return outcome


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-10])
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.usefixtures("path")
def test_invariant_9_clipping_sees_the_true_norm_whatever_the_scale(policy, scale, fused):
    model = Weights((4, 4), policy, value=1.0)
    stepper = model.stepper(torch.optim.SGD([model.w], 1.0, fused=fused), StaticScale(scale), clip_norm=1.0)
    outcome = window(stepper, [3.0])
    assert outcome.grad_norm == 12.0
    assert outcome.clip_coefficient == pytest.approx(1 / 12, rel=1e-6)
    torch.testing.assert_close(model.master, torch.full((4, 4), 1 - 3 / 12), rtol=1e-6, atol=0)
    outcome = window(stepper, [0.125])
    assert (outcome.grad_norm, outcome.clip_coefficient) == (0.5, 1.0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.usefixtures("path")
def test_invariant_9_an_fp16_gradient_whose_norm_passes_65504_is_no_overflow(fused, clip_norm):
    """128 x 128 elements of 2**14: their norm is 2**21, their squares are beyond fp16 twice over."""
    model = Weights((128, 128), "fp16-master")
    optimizer = torch.optim.SGD([model.w], 2.0**-14, fused=fused)
    outcome = window(model.stepper(optimizer, StaticScale(2.0**10), clip_norm=clip_norm), [2.0**4])
    assert (outcome.kind, outcome.grad_norm) == ("applied", 2.0**11)
    torch.testing.assert_close(
        model.master, torch.full((128, 128), -(2.0**-10) if clip_norm is None else -(2.0**-21)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.usefixtures("path")
def test_invariant_9_a_window_whose_sum_passes_65504_is_no_overflow(fused):
    """Eight micro-batches of 65504, the largest that fp16 holds: their sum is finite in fp32, and so is their mean."""
    model = Weights((3,), "fp16-master")
    optimizer = torch.optim.SGD([model.w], 2.0**-16, fused=fused)
    outcome = window(model.stepper(optimizer, StaticScale(1.0), accumulate=8), [65504.0] * 8)
    assert outcome.kind == "applied"
    assert outcome.grad_norm == pytest.approx(math.sqrt(3) * 65504, rel=1e-6)
    assert torch.equal(model.master, torch.full((3,), -65504 * 2.0**-16))


FINITE = {
    "fp16-master": (65504.0, 1e-3, 2.0**-24, 0.0),
    "bf16-master": (3e38, 1e30, 3e19, 1e-24, 1e-38, 2.0**-133, 0.0),
}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("path")
def test_invariant_9_a_finite_gradient_never_skips(optimizer, policy, clip_norm):
    """3e19 squared overflows and 1e-24 squared vanishes in fp32; neither makes an inf, a NaN or a wrong norm."""
    model = Weights((3, 1), policy)
    inner = OPTIMIZERS[optimizer]([model.w])
    stepper = model.stepper(inner[0] if isinstance(inner, list) else inner, StaticScale(1.0), clip_norm=clip_norm)
    for gradient in FINITE[policy]:
        outcome = window(stepper, [gradient])
        value = torch.tensor(gradient, dtype=model.w.dtype).double().item()
        assert outcome.kind == "applied"
        assert outcome.grad_norm == pytest.approx(math.sqrt(3) * value, rel=1e-5)
        assert 0 < outcome.clip_coefficient <= 1
        assert all(t.isfinite().all() for t in (model.w, *model.optimizer.state[model.w].values()))


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.usefixtures("path")
def test_invariant_2_a_weight_that_its_format_cannot_hold_saturates_and_is_counted(policy):
    """The master goes on beyond it, and the weight follows as soon as the master is back within the format."""
    largest = torch.finfo(DTYPES[policy]).max
    model = Weights((3,), policy, value=largest)
    step = largest / 512  # beyond bf16's largest value there is room for that much in fp32, and for no more
    stepper = model.stepper(torch.optim.SGD([model.w], step), StaticScale(1.0))
    outcomes = [window(stepper, [g]) for g in (-1.0, 1.0, 1.0, 1.0)]
    assert all(outcome.is_applied for outcome in outcomes)
    assert model.optimizer.saturated_weights == 3
    torch.testing.assert_close(model.master, torch.full((3,), largest - 2 * step), rtol=1e-6, atol=0)
    assert torch.equal(model.w.detach(), rounding_of(model.master, model.w.dtype))
    assert (model.w < largest).all()


@pytest.mark.parametrize("policy", DTYPES)
def test_invariant_5_loading_keeps_the_moments_that_torchs_own_loading_rounds(policy):
    model = Weights((64,), policy, value=1.0)
    stepper = model.stepper(torch.optim.AdamW([model.w], 1e-2, fused=True), StaticScale(1.0))
    for number in range(3):
        window(stepper, [0.1 + number / 7])
    saved = copy.deepcopy(model.optimizer.state_dict())
    moment = saved["state"][0]["exp_avg"]
    plain = torch.optim.AdamW([torch.nn.Parameter(model.w.detach().clone())], 1e-2, fused=True)
    plain.load_state_dict(copy.deepcopy(saved))
    assert not torch.equal(next(iter(plain.state.values()))["exp_avg"].float(), moment), "torch's own loading"
    other = Weights((64,), policy, value=1.0)
    other.stepper(torch.optim.AdamW([other.w], 1e-2, fused=True), StaticScale(1.0))
    other.optimizer.load_state_dict(saved)
    found = other.optimizer.state_dict()["state"][0]
    assert found.keys() == saved["state"][0].keys()
    for name, value in saved["state"][0].items():
        assert (found[name].dtype, found[name].tolist()) == (torch.float32, value.tolist())


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def live_bytes():
    """Bytes of every storage that a tensor with dimensions holds alive, as far as Python knows; older ones apart."""
    gc.collect()
    gc.freeze()
    yield bytes_in_new_tensors
    gc.unfreeze()


def bytes_in_new_tensors():
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.dim() > 0]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("with_ema", [False, True])
@pytest.mark.parametrize("policy", DTYPES)
def test_bytes_per_parameter(live_bytes, policy, with_ema):
    """Weight 2, master 4, moments 8; gradient 2, or the fp32 sum of a window 4; an average 4."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    num_params = sum(p.numel() for p in model.parameters())
    halfstep.cast_model(model, policy)
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True))
    ema = halfstep.EMA(model) if with_ema else None
    stepper = halfstep.Stepper(model, optimizer, policy=policy, accumulate=2, ema=ema)

    def micro_batch():
        with stepper.forward():
            loss = model(torch.ones(1, 64, dtype=DTYPES[policy])).float().square().mean()
        stepper.backward(loss)
        del loss
        in_window = live_bytes() / num_params
        stepper.step()
        return in_window

    kept = 2 + 4 + 8 + 4 * with_ema
    for _ in range(2):
        assert [micro_batch(), micro_batch()] == [kept + 4, kept + 4]  # 18 without an average
        assert live_bytes() / num_params == kept  # gradients are freed as soon as they are used
    stepper.accumulate = 1
    assert micro_batch() == kept + 2  # 16 without an average
