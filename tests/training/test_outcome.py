"""Outcomes: plain facts, lazily read, printable, comparable."""

import copy
import math
import pickle

import pytest
import torch

import halfstep
from halfstep.scaling.culprit import Culprit
from halfstep.training.outcome import Facts, Outcome

CULPRIT = Culprit("head.weight", "nan", (2, 3), 4)
APPLIED = Facts("applied", 7, 2, 1024.0, 2.5, 0.4, loss=0.5)
SKIPPED = Facts("skipped", 8, 1, 1024.0, math.inf, culprit=CULPRIT)


def test_nothing_is_read_before_somebody_asks_and_then_once():
    asked = []
    outcome = Outcome(settle=lambda: asked.append(1) or APPLIED)
    assert asked == []
    assert (outcome.kind, outcome.grad_norm, outcome.scale) == ("applied", 2.5, 1024.0)
    assert asked == [1]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (APPLIED, "step 7 applied: gradient norm 2.5 clipped by 0.4, scale 1024"),
        (APPLIED._replace(clip_coefficient=1.0), "step 7 applied: gradient norm 2.5, scale 1024"),
        (SKIPPED, "step 8 skipped: the gradient of head.weight (shape [2, 3]) holds NaN, and 3 more behind it; at scale"
                  " 1024"),
        (SKIPPED._replace(culprit=None), "step 8 skipped: a gradient is inf or NaN; at scale 1024"),
        (Facts("accumulating", 3, 2), "step 3 accumulating: micro-batches so far: 2"),
        (Facts("no_gradients", 3, 1), "step 3: no parameter had a gradient"),
    ],
)  # fmt: skip
def test_printing_settles_and_says_what_happened(facts, text):
    assert repr(Outcome(settle=lambda: facts)) == text


def test_metrics_are_plain_numbers():
    numbers = {"applied": 1.0, "grad_norm": 2.5, "clip_coefficient": 0.4, "scale": 1024.0, "loss": 0.5}
    assert Outcome(APPLIED).metrics() == numbers
    assert Outcome(SKIPPED).metrics()["applied"] == 0.0
    assert Outcome(Facts("accumulating", 1, 1)).metrics() == {}
    assert "grad_norm" not in Outcome(Facts("no_gradients", 1, 1)).metrics()


def test_outcomes_compare_copy_and_travel_as_what_they_say():
    lazy = Outcome(settle=lambda: APPLIED)
    assert lazy == Outcome(APPLIED)
    assert lazy != Outcome(SKIPPED)
    assert copy.deepcopy(lazy) == lazy == pickle.loads(pickle.dumps(lazy))
    with pytest.raises(TypeError):
        hash(lazy)


def test_questions_in_one_word():
    assert (Outcome(APPLIED).is_applied, Outcome(APPLIED).is_skipped) == (True, False)
    assert (Outcome(SKIPPED).is_applied, Outcome(SKIPPED).is_skipped) == (False, True)
    assert Outcome(SKIPPED).culprit == CULPRIT
    assert (Outcome(SKIPPED).step, Outcome(APPLIED).num_micro_batches) == (8, 2)


def test_loss_is_the_windows_mean_by_weight_in_wide_numbers():
    """A mean in bf16 would stop at 256 ones; fp16 would overflow."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = halfstep.MasterWeights(torch.optim.SGD([weight], lr=0.0))
    stepper = halfstep.Stepper(model, optimizer, policy="bf16-master", accumulate=None)
    losses, weights = [60000.0, 3.0, 5.0, float(2**15)], [1, 2, 500, 7]
    for number, (value, share) in enumerate(zip(losses, weights, strict=True), 1):
        with stepper.forward():
            loss = (weight.sum() + value).float()
        stepper.backward(loss, weight=share)
        so_far = sum(v * w for v, w in zip(losses[:number], weights[:number], strict=True)) / sum(weights[:number])
        if number < len(losses):
            assert stepper.step().loss == pytest.approx(float(so_far), rel=2.0**-8)
    outcome = stepper.flush()
    exact = sum(torch.tensor(v).bfloat16().item() * w for v, w in zip(losses, weights, strict=True)) / sum(weights)
    assert outcome.loss == pytest.approx(exact, rel=1e-7)
    assert outcome.metrics()["loss"] == outcome.loss


def test_loss_of_a_skipped_window_and_of_run():
    model = torch.nn.Linear(2, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    outcome = stepper.run(lambda: model(torch.ones(1, 2)).sum() * 0 + 4)
    assert outcome.loss == 4
    with pytest.warns(halfstep.errors.SkippedStepWarning):
        outcome = stepper.run(lambda: model(torch.full((1, 2), torch.inf)).sum())
    assert outcome.is_skipped
    assert not math.isfinite(outcome.loss)
