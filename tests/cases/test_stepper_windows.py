"""Through the Stepper: MP-03 unscale twice, MP-07 no gradients, MP-11 schedulers on skips, MP-20 short windows."""

import math
import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import CallOrderError, HalfstepWarning

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
SGD, schedulers = torch.optim.SGD, torch.optim.lr_scheduler

OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, 0.1),
    "sgd momentum fused": lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True),
    "adam foreach": lambda ps: torch.optim.Adam(ps, 0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def make_stepper(parameters, make_optimizer, **options):
    """A stepper with a scale that would be seen wherever it is not divided away again."""
    optimizer = make_optimizer(parameters)
    options = {"policy": "fp32", "scale": halfstep.DynamicScale(1024.0), **options}
    return halfstep.Stepper(nn.ParameterList(parameters), optimizer, **options), optimizer


def micro_batch(stepper, loss, weight=None):
    with stepper.forward():
        value = loss()
    stepper.backward(value, weight)
    return stepper.step()


def two(param):
    return [param([1.0, -2.0]), param([[3.0], [0.5]])]


def loss_of(parameters, i):
    """A loss whose gradient differs from micro-batch to micro-batch."""
    return sum(((i + 1.5) * p * (p + i)).sum() for p in parameters)


def test_MP_03_the_reported_loop(param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.1), torch.amp.GradScaler("cpu")
    for i in range(2):
        scaler.scale((p * 1.0).sum() / 4).backward()
        if i == 0:
            scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)

    p = param([1.0])
    stepper, _ = make_stepper([p], lambda ps: SGD(ps, 0.1), accumulate=4, clip_norm=10.0)
    kinds = [micro_batch(stepper, lambda: (p * 1.0).sum()).kind for _ in range(4)]
    assert kinds == ["accumulating"] * 3 + ["applied"]
    assert p.item() == pytest.approx(0.9)


@every_optimizer
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e4], ids=["not clipped", "clipped", "below the limit"])
@pytest.mark.parametrize("how", ["in the step", "unscale_", "flush"])
def test_MP_03_one_unscale_and_one_clip_a_window(param, make_optimizer, num, clip_norm, how):
    ours, plain = two(param), two(param)
    options = {"clip_norm": None if how == "unscale_" else clip_norm, "accumulate": None if how == "flush" else num}
    stepper, _ = make_stepper(ours, make_optimizer, **options)
    reference = make_optimizer(plain)
    for _ in range(3):
        reference.zero_grad()
        for i in range(num):
            with stepper.forward():
                loss = loss_of(ours, i)
            stepper.backward(loss)
            if how == "unscale_" and i == num - 1:
                stepper.unscale_()
                if clip_norm:
                    nn.utils.clip_grad_norm_(ours, clip_norm)
            outcome = stepper.step()
            (loss_of(plain, i) / num).backward()
        outcome = stepper.flush() if how == "flush" else outcome
        norm = nn.utils.clip_grad_norm_(plain, clip_norm or math.inf)
        reference.step()
        assert outcome.kind == "applied"
        assert outcome.num_micro_batches == num
        if how != "unscale_" or clip_norm is None:
            assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("num", [1, 2])
def test_MP_03_a_genuine_second_unscale_is_refused(param, num):
    p = param([1.0])
    stepper, _ = make_stepper([p], lambda ps: SGD(ps, 0.1), accumulate=num)
    for i in range(num):
        with stepper.forward():
            loss = p.sum()
        stepper.backward(loss)
        if i < num - 1:
            stepper.step()
    stepper.unscale_()
    with pytest.raises(CallOrderError, match=r"unscale_\(\) for the second time.*\n.*\n.*\n.*step\(\) ends the window"):
        stepper.unscale_()
    assert p.grad.item() == 1.0
    stepper.step()
    assert p.item() == pytest.approx(0.9)


def test_MP_03_unscale_inside_the_window_is_refused_at_the_next_micro_batch(param):
    p = param([1.0])
    stepper, _ = make_stepper([p], lambda ps: SGD(ps, 0.1), accumulate=4)
    micro_batch(stepper, p.sum)
    stepper.unscale_()
    with stepper.forward():
        loss = p.sum()
    with pytest.raises(CallOrderError, match=r"backward\(\) after unscale_\(\)"):
        stepper.backward(loss)
    assert stepper.flush().is_applied
    assert p.item() == pytest.approx(0.9)


def test_MP_07_the_reported_run_goes_on(param):
    a, b = param([1.0]), param([1.0])
    oa, ob, scaler = SGD([a], 0.1), SGD([b], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale(a.sum()).backward()
    scaler.step(oa)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(ob)

    a, b = param([1.0]), param([1.0])
    oa, ob = SGD([a], 0.1), SGD([b], 0.1, momentum=0.9)
    stepper = halfstep.Stepper(nn.ParameterList([a, b]), [oa, ob], policy="fp32", scale=halfstep.DynamicScale())
    assert micro_batch(stepper, a.sum).is_applied
    assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)
    assert ob.state[b] == {}


@every_optimizer
@pytest.mark.parametrize("num", [1, 2])
def test_MP_07_a_window_without_any_gradient_counts_for_nothing(param, make_optimizer, num):
    used, frozen, elsewhere = param([1.0]), param([1.0]), param([1.0])
    frozen.requires_grad_(False)
    scale = halfstep.DynamicScale(1024.0, growth_interval=1)
    stepper, optimizer = make_stepper([used, frozen], make_optimizer, scale=scale, accumulate=num)
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    stepper = halfstep.Stepper(stepper.model, optimizer, policy="fp32", scale=scale, scheduler=schedule, accumulate=num)
    for _ in range(3):
        outcomes = [micro_batch(stepper, elsewhere.sum) for _ in range(num)]
        assert outcomes[-1].kind == "no_gradients"
        assert outcomes[-1].culprit is None
    assert (used.item(), scale.get(), stepper.skipped_steps, optimizer.param_groups[0]["lr"]) == (1.0, 1024.0, 0, 0.1)
    assert optimizer.state[used] == {}
    for _ in range(num):
        outcome = micro_batch(stepper, used.sum)
    assert outcome.is_applied
    assert used.item() != 1.0
    assert (frozen.item(), scale.get(), optimizer.param_groups[0]["lr"]) == (1.0, 2048.0, 0.05)


def test_MP_07_steppers_that_share_a_scale_leave_it_to_those_with_gradients(param):
    a, b, elsewhere = param([1.0]), param([1.0]), param([1.0])
    shared = halfstep.DynamicScale(256.0)
    first, second = (make_stepper([p], lambda ps: SGD(ps, 0.1), scale=shared)[0] for p in (a, b))
    for factor, scale in [(1.0, 256.0), (math.inf, 128.0), (math.nan, 64.0), (1.0, 64.0)]:
        assert micro_batch(second, elsewhere.sum).kind == "no_gradients"
        micro_batch(first, lambda factor=factor: (a * factor).sum())
        assert shared.get() == scale
    assert (a.item(), b.item()) == (pytest.approx(0.8), 1.0)


def test_MP_07_an_optimizer_that_never_gets_gradients_is_mentioned_once_by_name():
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "forgotten": nn.Linear(1, 1)})
    optimizers = [SGD(model[name].parameters(), 0.0) for name in ("used", "forgotten")]
    stepper = halfstep.Stepper(model, optimizers, policy="fp32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            micro_batch(stepper, lambda: model["used"](torch.ones(1, 1)).sum())
    texts = [str(w.message) for w in caught if issubclass(w.category, HalfstepWarning)]
    assert len(texts) == 1
    assert "forgotten.weight" in texts[0]
    assert "used.weight" not in texts[0]


def test_MP_11_the_reported_skip(param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 1.0), torch.amp.GradScaler("cpu")
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    scaler.scale((p * math.inf).sum()).backward()
    assert scaler.step(optimizer) is None, "plain PyTorch does not tell"
    scaler.update()
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    assert (p.item(), optimizer.param_groups[0]["lr"]) == (1.0, 0.5)

    p = param([1.0])
    optimizer = SGD([p], 1.0)
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    stepper = halfstep.Stepper(nn.ParameterList([p]), optimizer, policy="fp32", scheduler=schedule)
    outcome = micro_batch(stepper, lambda: (p * math.inf).sum())
    assert (outcome.kind, outcome.is_skipped, outcome.metrics()["applied"]) == ("skipped", True, 0.0)
    assert (p.item(), optimizer.param_groups[0]["lr"]) == (1.0, 1.0)
    assert micro_batch(stepper, p.sum).is_applied
    assert (p.item(), optimizer.param_groups[0]["lr"]) == (0.0, 0.5)


SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=20),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.ConstantLR(o)]),
    "several": lambda o: [schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 3, gamma=0.1)],
}


@pytest.mark.parametrize("make_schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@every_optimizer
@pytest.mark.parametrize("num", [1, 3])
def test_MP_11_every_step_has_the_learning_rate_of_a_loop_that_knows_at_once(param, make_optimizer, make_schedule, num):
    ours, plain = two(param), two(param)
    optimizer, reference = make_optimizer(ours), make_optimizer(plain)
    schedule, expected = make_schedule(optimizer), make_schedule(reference)
    model = nn.ParameterList(ours)
    ema = halfstep.EMA(model)
    stepper = halfstep.Stepper(model, optimizer, policy="fp32", accumulate=num, scheduler=schedule, ema=ema)
    faults = [math.inf, 1.0, 1.0, math.nan, math.nan, 1.0, -math.inf, 1.0, 1.0]  # the very first one too
    for step, fault in enumerate(faults):
        is_bad = not math.isfinite(fault)
        for i in range(num):
            factor = fault if i == step % num else 1.0  # in any micro-batch of the window
            outcome = micro_batch(stepper, lambda i=i, factor=factor: loss_of(ours, i) * factor)
        assert outcome.kind == ("skipped" if is_bad else "applied")
        if not is_bad:
            reference.zero_grad()
            sum(loss_of(plain, i) for i in range(num)).div(num).backward()
            reference.step()
            for one in expected if isinstance(expected, list) else [expected]:
                one.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
    assert (ema.num_updates, stepper.skipped_steps, stepper.steps) == (5, 4, 9)


def test_MP_20_the_reported_epoch(param):
    p, seen = param([0.0]), []
    for i in range(10):
        (p * 1.0).sum().div(4).backward()
        if (i + 1) % 4 == 0 or i == 9:
            seen.append(p.grad.item())
            p.grad = None
    assert seen == [1.0, 1.0, 0.5], "plain PyTorch"

    stepper, _ = make_stepper([p], lambda ps: SGD(ps, 0.25), accumulate=4)
    outcomes = [micro_batch(stepper, p.sum) for _ in range(10)] + [stepper.flush()]
    assert [o.grad_norm for o in outcomes if o.is_applied] == [1.0, 1.0, 1.0]
    assert (p.item(), p.grad) == (-0.75, None)


@every_optimizer
@pytest.mark.parametrize("size", [1, 2, 3, 4, None])
@pytest.mark.parametrize("num", [1, 3, 7])
def test_MP_20_every_window_is_the_true_mean_and_nothing_leaks(param, make_optimizer, size, num):
    ours, plain = two(param), two(param)
    stepper, _ = make_stepper(ours, make_optimizer, accumulate=size)
    reference = make_optimizer(plain)
    for _ in range(2):  # two epochs
        outcomes = [micro_batch(stepper, lambda i=i: loss_of(ours, i)) for i in range(num)] + [stepper.flush()]
        for begin in range(0, num, size or num):
            window = range(begin, min(begin + (size or num), num))
            reference.zero_grad()
            sum(loss_of(plain, i) for i in window).div(len(window)).backward()
            reference.step()
        assert sum(o is not None and o.is_applied for o in outcomes) == math.ceil(num / (size or num))
        assert stepper.flush() is None
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_MP_20_token_weights_give_the_mean_over_all_tokens(as_tensor):
    """Windows of uneven micro-batches against one big batch, in fp64: the same but for its rounding."""
    tokens, sizes = torch.randn(23, 3, dtype=torch.float64), [5, 1, 9, 8]
    ours, big = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    stepper, _ = make_stepper([ours], lambda ps: SGD(ps, 0.1), accumulate=3)
    reference = SGD([big], 0.1)
    for first, last in [(0, 3), (3, 4)]:  # a full window, and a short last one
        for part in tokens.split(sizes)[first:last]:
            weight = torch.tensor(len(part)) if as_tensor else len(part)
            micro_batch(stepper, lambda part=part: (part @ ours).square().mean(), weight)
        stepper.flush()
        reference.zero_grad()
        (torch.cat(tokens.split(sizes)[first:last]) @ big).square().mean().backward()
        reference.step()
        torch.testing.assert_close(ours, big, rtol=1e-14, atol=1e-14)


def test_MP_20_the_scale_is_constant_inside_a_window_whoever_moves_it(param):
    p, q = param([0.0]), param([0.0])
    shared = halfstep.DynamicScale(1024.0, growth_interval=1)
    first, _ = make_stepper([p], lambda ps: SGD(ps, 0.25), accumulate=3, scale=shared)
    second, _ = make_stepper([q], lambda ps: SGD(ps, 0.25), scale=shared)
    # The third loss of the first window finds the scale where it was; stepping then doubles it to 2048.
    for factor, scale in [(math.inf, 512.0), (1.0, 1024.0), (math.inf, 1024.0)]:
        outcome = micro_batch(first, p.sum)
        assert outcome.scale == 1024.0
        micro_batch(second, lambda factor=factor: (q * factor).sum())
        assert shared.get() == scale
    assert (p.item(), outcome.kind, outcome.grad_norm) == (-0.25, "applied", 1.0)
