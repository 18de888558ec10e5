"""Two optimizers, of which the first overflows: the second takes its right step, whatever happens to the scale."""

import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep import AdaptiveScale, DynamicScale

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")

INF = float("inf")
START, GRADIENT, LR = 1.0, 0.25, 0.5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, LR),
    "sgd-fused": lambda p: torch.optim.SGD(p, LR, fused=True),
}


class One(nn.Module):
    """One weight; its gradient is the factor it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([START]))

    def forward(self, factor):
        return (self.weight * factor).sum()


def stepper_of(scale, optimizer="sgd", **options):
    model = One()
    options = {"policy": "fp16-mixed", "scale": scale, "on_overflow": "ignore"} | options
    return halfstep.Stepper(model, OPTIMIZERS[optimizer](model.parameters()), **options)


def backward(stepper, factor):
    with stepper.forward():
        loss = stepper.model(factor)
    stepper.backward(loss)


def weight_of(stepper):
    return stepper.model.weight.item()


# -- Accelerate's order: both backward passes, then both steps --------------------------------------------------------


def test_torchs_scaler_doubles_the_second_step():
    """What the next test is about: update() after the first step halves the scale that the second one divides by."""
    first, second = One(), One()
    optimizers = [torch.optim.SGD(model.parameters(), LR) for model in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(first(INF)).backward()
    scaler.scale(second(GRADIENT)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert first.weight.item() == START
    assert second.weight.item() == START - 2 * LR * GRADIENT


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_second_stepper_takes_its_right_step_after_the_first_backed_off(delay, optimizer, accumulate):
    scale = DynamicScale(1024.0)
    first, second = (stepper_of(scale, optimizer, accumulate=accumulate) for _ in range(2))
    for number in range(accumulate):
        backward(first, INF if number == 0 else GRADIENT)
        backward(second, GRADIENT)
        outcomes = first.step(), second.step()
    assert weight_of(first) == START
    assert weight_of(second) == START - LR * GRADIENT
    assert [outcome.kind for outcome in outcomes] == ["skipped", "applied"]
    assert [outcome.scale for outcome in outcomes] == [1024.0, 1024.0]
    assert outcomes[1].grad_norm == GRADIENT
    assert scale.get() == 512.0
    assert (first.skipped_steps, second.skipped_steps) == (1, 0)


def test_a_scale_that_grows_between_two_micro_batches_changes_nothing_in_their_window(delay):
    scale = DynamicScale(1024.0, growth_interval=1)
    first, second = stepper_of(scale), stepper_of(scale, accumulate=2)
    backward(second, GRADIENT)
    second.step()
    backward(first, GRADIENT)
    first.step()
    assert scale.get() == 2048.0
    backward(second, GRADIENT)
    outcome = second.step()
    assert weight_of(second) == START - LR * GRADIENT
    assert outcome.scale == 1024.0


# -- one stepper with two optimizers: one decision --------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 1])
def test_one_stepper_skips_all_its_optimizers_or_none(delay, optimizer, bad):
    model = nn.ModuleList([One(), One()])
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in model]
    stepper = halfstep.Stepper(model, optimizers, policy="fp16-mixed", on_overflow="ignore")
    for factors in ([INF if bad == i else GRADIENT for i in range(2)], [GRADIENT, GRADIENT]):
        with stepper.forward():
            loss = sum(one(factor) for one, factor in zip(model, factors, strict=True))
        stepper.backward(loss)
        outcome = stepper.step()
        after = [one.weight.item() for one in model]
        if INF in factors:
            assert outcome.kind == "skipped"
            assert outcome.culprit.name == f"{bad}.weight"
            assert after == [START, START]
        else:
            assert outcome.kind == "applied"
            assert after == [START - LR * GRADIENT] * 2
    assert (stepper.steps, stepper.skipped_steps) == (2, 1)
    assert stepper.scale.get() == 2.0**13


def test_one_norm_of_all_optimizers_is_clipped(delay):
    model = nn.ModuleList([One(), One()])
    optimizers = [OPTIMIZERS["sgd"](one.parameters()) for one in model]
    stepper = halfstep.Stepper(model, optimizers, policy="fp16-mixed", clip_norm=1.0)
    with stepper.forward():
        loss = model[0](3.0) + model[1](4.0)
    stepper.backward(loss)
    outcome = stepper.step()
    assert outcome.grad_norm == 5.0
    assert model[0].weight.item() == pytest.approx(START - LR * 3 / 5, rel=1e-6)
    assert model[1].weight.item() == pytest.approx(START - LR * 4 / 5, rel=1e-6)


# -- a shared scale moves by what is news to it -----------------------------------------------------------------------


def without_value(scale):
    return {name: value for name, value in scale.state_dict().items() if name != "scale"}


@pytest.mark.parametrize("make", [DynamicScale, AdaptiveScale])
def test_an_overflow_at_a_scale_that_is_gone_does_not_lower_it_again(delay, make):
    scale = make(1024.0)
    steppers = [stepper_of(scale) for _ in range(3)]
    for stepper in steppers:
        backward(stepper, INF)
    assert [stepper.step().kind for stepper in steppers] == ["skipped"] * 3
    assert scale.get() == 512.0
    for stepper in steppers[:2]:  # at the present scale it does, once
        backward(stepper, INF)
    assert [stepper.step().scale for stepper in steppers[:2]] == [512.0, 512.0]
    assert scale.get() == 256.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicScale(1024.0, growth_interval=1),
        lambda: DynamicScale(1024.0, growth_interval=2),
        lambda: DynamicScale(1024.0, growth_interval=3, hysteresis=2, tolerance=0.1),
        lambda: AdaptiveScale(1024.0),
    ],
    ids=["growth_interval=1", "growth_interval=2", "hysteresis", "adaptive"],
)
def test_an_overflow_that_is_no_news_is_no_clean_step_either(delay, make):
    """It must not count towards growth: a scale that has just backed off would double because of an overflow."""
    scale = make()
    steppers = [stepper_of(scale) for _ in range(3)]
    for stepper in steppers:
        backward(stepper, INF)
    while scale.get() == 1024.0:  # with hysteresis it takes two
        steppers.pop(0).step()
    lowered, counters = scale.get(), without_value(scale)
    steppers.pop(0).step()
    assert scale.get() == lowered
    assert without_value(scale) == counters


def test_clean_steps_of_both_steppers_make_the_shared_scale_grow(delay):
    scale = DynamicScale(1024.0, growth_interval=4)
    steppers = [stepper_of(scale) for _ in range(2)]
    seen = []
    for _ in range(4):
        for stepper in steppers:
            backward(stepper, GRADIENT)
            stepper.step()
            seen.append(scale.get())
    assert seen == [1024.0] * 3 + [2048.0] * 4 + [4096.0]


def test_an_adaptive_scale_learns_from_a_window_at_an_older_scale_what_its_gradients_were(delay):
    """The same gradients teach the same, whether or not another stepper lowered the scale meanwhile."""
    alone, shared = AdaptiveScale(1024.0), AdaptiveScale(1024.0)
    single = stepper_of(alone)
    backward(single, GRADIENT)
    single.step()
    first, second = stepper_of(shared), stepper_of(shared)
    backward(first, INF)
    backward(second, GRADIENT)
    first.step()
    second.step()
    assert shared.number("mean", 0.0) == alone.number("mean", 0.0) == torch.tensor(GRADIENT).log2().item()


def test_each_stepper_reports_its_own_skips(delay):
    told = {"first": [], "second": []}
    scale = DynamicScale(1024.0)
    steppers = {
        name: stepper_of(scale, on_overflow=lambda outcome, name=name: told[name].append(outcome.step)) for name in told
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (GRADIENT, INF, GRADIENT, INF):
            backward(steppers["first"], factor)
            backward(steppers["second"], GRADIENT)
            for stepper in steppers.values():
                stepper.step()
        for stepper in steppers.values():
            stepper.settle()
    assert told == {"first": [2, 4], "second": []}
