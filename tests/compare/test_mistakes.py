"""Each mistaken loop does what its name says and nothing else; beside it, the Stepper's number for the same data.

One weight per tensor and gradients that are set by the data, so that every update has a closed form: the loss
``sum(x * w)`` has the gradient ``x``.
"""

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from halfstep.compare import mistakes
from halfstep.compare.mistakes import GROWTH_INTERVAL, INIT_SCALE, Mistake, MistakenLoop
from halfstep.compare.regimes import REGIMES
from halfstep.compare.tasks import TASKS
from halfstep.compare.train import train
from halfstep.compare.trainer import StepperLoop
from halfstep.scaling.scale import DynamicScale
from halfstep.training.stepper import Stepper

LR, SCALE = 0.5, 2.0**16
OVERFLOW = 2.0**127  # finite, and inf once it is multiplied by the scale
EXACT = {"rel": 1e-6}  # clip_grad_norm_ divides by the norm plus 1e-6


class TwoWeights(nn.Module):
    """Two tensors of one element, the loss linear in both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, first, second):
        return (first * self.first + second * self.second).sum()


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def mistaken(mistake, *, clip_norm=None, schedule=None):
    model = TwoWeights()
    loop = MistakenLoop(
        mistake,
        model.parameters(),
        build_optimizer=partial(torch.optim.SGD, lr=LR),
        build_scheduler=schedule,
        clip_norm=clip_norm,
        autocast=nullcontext,
    )
    return model, loop


def right(*, clip_norm=None, schedule=None):
    """The same on the Stepper, both optimizers in one window."""
    model = TwoWeights()
    optimizers = [torch.optim.SGD([parameter], lr=LR) for parameter in model.parameters()]
    schedulers = [schedule(optimizer) for optimizer in optimizers] if schedule else None
    stepper = Stepper(
        model,
        optimizers,
        policy="fp16-mixed",
        scale=DynamicScale(INIT_SCALE, growth_interval=GROWTH_INTERVAL),
        clip_norm=clip_norm,
        scheduler=schedulers,
        on_overflow="ignore",
        on_repeat="ignore",
    )
    return model, StepperLoop(stepper)


def go(model, loop, *gradients):
    """Steps on data with these gradients; returns what each step said."""
    applied = []
    for first, second in gradients:
        loop.backward(lambda first=first, second=second: model(torch.tensor([first]), torch.tensor([second])))
        applied.append(loop.step())
    return applied


def moved(model):
    return [-parameter.item() / LR for parameter in model.parameters()]


def rates(loop):
    optimizers = loop.stepper.optimizers if isinstance(loop, StepperLoop) else loop.optimizers
    return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


# ---- clip before unscale --------------------------------------------------------------------------------------------


def test_clipping_before_unscaling_shrinks_the_step_by_the_scale():
    wrong, right_one = mistaken(Mistake.CLIP_SCALED, clip_norm=1.0), right(clip_norm=1.0)
    for pair in (wrong, right_one):
        assert go(*pair, (3.0, 4.0)) == [True]
    assert moved(right_one[0]) == pytest.approx([0.6, 0.8], **EXACT)
    assert moved(wrong[0]) == pytest.approx([0.6 / SCALE, 0.8 / SCALE], **EXACT)


def test_it_shrinks_a_gradient_that_needed_no_clipping():
    wrong, right_one = mistaken(Mistake.CLIP_SCALED, clip_norm=1.0), right(clip_norm=1.0)
    for pair in (wrong, right_one):
        go(*pair, (0.03, 0.04))
    assert moved(right_one[0]) == pytest.approx([0.03, 0.04], **EXACT)
    assert moved(wrong[0]) == pytest.approx([0.6 / SCALE, 0.8 / SCALE], **EXACT)


# ---- update between two optimizers ----------------------------------------------------------------------------------


def test_an_update_between_doubles_the_second_step_after_an_overflow_of_the_first():
    wrong, right_one = mistaken(Mistake.UPDATE_BETWEEN), right()
    for pair in (wrong, right_one):
        assert go(*pair, (OVERFLOW, 3.0)) == [False]
        assert pair[1].scale() == SCALE / 2
    assert moved(right_one[0]) == [0.0, 0.0]  # one window, one decision
    assert moved(wrong[0]) == [0.0, 6.0]


def test_an_update_between_halves_the_second_step_where_the_scale_grows(monkeypatch):
    monkeypatch.setattr(mistakes, "GROWTH_INTERVAL", 3)  # two updates a step: the third is that of the second step
    wrong = mistaken(Mistake.UPDATE_BETWEEN)
    assert go(*wrong, (1.0, 3.0)) == [True]
    assert moved(wrong[0]) == [1.0, 3.0]
    assert go(*wrong, (1.0, 3.0)) == [True]
    assert moved(wrong[0]) == [2.0, 3.0 + 1.5]
    assert wrong[1].scale() == 2 * SCALE


def test_an_update_between_does_everything_else_right():
    """Clipping by the norm of both parts, a schedule each, and a step of both where nothing moves the scale."""
    wrong, right_one = (
        make(clip_norm=1.0, schedule=halving) for make in (partial(mistaken, Mistake.UPDATE_BETWEEN), right)
    )
    for pair in (wrong, right_one):
        assert go(*pair, (3.0, 4.0), (0.3, 0.4)) == [True, True]
        assert moved(pair[0]) == pytest.approx([0.6 + 0.15, 0.8 + 0.2], **EXACT)
        assert rates(pair[1]) == [LR / 4, LR / 4]


def test_an_overflow_of_one_part_does_not_erase_the_other_by_clipping():
    """An infinite norm is no norm to clip by: the mistake shows in full."""
    wrong = mistaken(Mistake.UPDATE_BETWEEN, clip_norm=100.0)
    go(*wrong, (OVERFLOW, 3.0))
    assert moved(wrong[0]) == [0.0, 6.0]


def test_the_second_of_two_optimizers_may_overflow_alone():
    wrong = mistaken(Mistake.UPDATE_BETWEEN, schedule=halving)
    assert go(*wrong, (3.0, OVERFLOW)) == [False]
    assert moved(wrong[0]) == [3.0, 0.0]
    assert rates(wrong[1]) == [LR / 2, LR]  # each schedule moves with its own optimizer


# ---- schedule on skip -----------------------------------------------------------------------------------------------


def test_a_schedule_on_skip_moves_the_learning_rate_with_a_skipped_step():
    wrong = mistaken(Mistake.SCHEDULE_SKIPPED, clip_norm=10.0, schedule=halving)
    right_one = right(clip_norm=10.0, schedule=halving)
    for pair in (wrong, right_one):
        assert go(*pair, (OVERFLOW, 1.0), (3.0, 4.0)) == [False, True]
    assert moved(right_one[0]) == [3.0, 4.0]
    assert rates(right_one[1]) == [LR / 2, LR / 2]
    assert moved(wrong[0]) == [1.5, 2.0]
    assert rates(wrong[1]) == [LR / 4]


@pytest.mark.parametrize("mistake", [Mistake.CLIP_SCALED, Mistake.UPDATE_BETWEEN])
def test_the_other_mistakes_leave_the_schedule_alone(mistake):
    wrong = mistaken(mistake, clip_norm=1.0, schedule=halving)
    assert go(*wrong, (OVERFLOW, OVERFLOW)) == [False]
    assert set(rates(wrong[1])) == {LR}


def test_without_an_overflow_a_schedule_on_skip_is_the_right_loop():
    wrong = mistaken(Mistake.SCHEDULE_SKIPPED, clip_norm=1.0, schedule=halving)
    right_one = right(clip_norm=1.0, schedule=halving)
    for pair in (wrong, right_one):
        go(*pair, (3.0, 4.0), (0.3, 0.4), (0.0, 1.0))
    assert moved(wrong[0]) == pytest.approx(moved(right_one[0]), **EXACT)
    assert rates(wrong[1])[0] == rates(right_one[1])[0] == LR / 8


# ---- as regimes of the study ----------------------------------------------------------------------------------------


def test_every_mistake_is_a_regime_and_starts_from_torchs_scale():
    wrong = {regime.mistake: regime for regime in REGIMES.values() if regime.mistake is not None}
    assert wrong.keys() == set(Mistake)
    for regime in wrong.values():
        assert regime.name == f"wrong-{regime.mistake.value}"
        if regime.mistake is Mistake.HALF_SUMS:  # of bf16, which needs no scale
            continue
        assert regime.build_scale().get() == INIT_SCALE == torch.amp.GradScaler("cpu").state_dict()["scale"]
        assert regime.scale_settings()["growth_interval"] == GROWTH_INTERVAL


def test_with_sgd_clipping_too_early_stops_the_training_and_the_right_order_does_not():
    task = dataclasses.replace(TASKS["digits-sgd"], epochs=2)
    runs = {
        name: train(task, REGIMES[name], 0, num_epochs=2)
        for name in ("fp32", "fp16-dynamic", "wrong-clip-before-unscale")
    }
    first, last = ({name: run.curve[i].loss for name, run in runs.items()} for i in (0, -1))
    assert last["fp32"] < 0.5 * first["fp32"]
    assert last["fp16-dynamic"] < 0.5 * first["fp16-dynamic"]
    assert last["wrong-clip-before-unscale"] > 0.9 * first["wrong-clip-before-unscale"]
    assert runs["fp16-dynamic"].skipped[:3] == (0, 1, 2)
