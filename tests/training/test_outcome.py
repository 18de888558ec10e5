"""Outcomes: plain facts, lazily read, printable, comparable."""

import copy
import math
import pickle

import pytest

from halfstep.scaling.culprit import Culprit
from halfstep.training.outcome import Facts, Outcome

CULPRIT = Culprit("head.weight", "nan", (2, 3), 4)
APPLIED = Facts("applied", 7, 2, 1024.0, 2.5, 0.4)
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
    assert Outcome(APPLIED).metrics() == {"applied": 1.0, "grad_norm": 2.5, "clip_coefficient": 0.4, "scale": 1024.0}
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
