"""The stall meter: the share of updates that round to nothing, for every kind of 16-bit weight."""

import copy
import math

import pytest
import torch

import halfstep
from halfstep.errors import ArgumentError, PrecisionWarning
from halfstep.optim import AdamW

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing keeps their full value", "ignore:.*keeps no masters")


def model_of(dtype=torch.bfloat16):
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(dtype)


def run(model, optimizer, policy, num_steps=1, **options):
    stepper = halfstep.Stepper(model, optimizer, policy=policy, on_overflow="ignore", **options)
    outcomes = []
    for _ in range(num_steps):
        with stepper.forward():
            loss = model(torch.randn(8, 16).to(next(model.parameters()).dtype)).float().square().mean()
        stepper.backward(loss)
        outcomes.append(stepper.step())
    return outcomes


@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, lambda p, **k: AdamW(p, master="none", **k)])
def test_bare_weights_against_the_definition(optimizer_of):
    """A small learning rate: what an fp32 step of the same gradients would have moved, and what has moved."""
    model = model_of()
    wide = copy.deepcopy(model).float()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_of(model.parameters(), lr=1e-4, weight_decay=0.0)
    gradients = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: gradients.__setitem__(p, p.grad.float()))
    with pytest.warns(PrecisionWarning, match="updates rounded to nothing"):
        (outcome,) = run(model, optimizer, "bf16-true", stall_every=1)
    theirs = torch.optim.AdamW(wide.parameters(), lr=1e-4, weight_decay=0.0)
    for p, w in zip(model.parameters(), wide.parameters(), strict=True):
        w.grad = gradients[p]
    theirs.step()
    updated = stalled = 0
    for old, w, p in zip(before, wide.parameters(), model.parameters(), strict=True):
        is_updated = w.detach() != old.float()
        updated, stalled = updated + is_updated.sum(), stalled + (is_updated & (p == old)).sum()
    assert outcome.stalled == pytest.approx(float(stalled / updated), abs=0.005)
    assert 0.3 < outcome.stalled < 1.0
    assert outcome.metrics()["stalled"] == outcome.stalled


@pytest.mark.parametrize("master", ["fp32", "split", "split8", "stochastic"])
def test_what_keeps_the_rest_loses_next_to_nothing(master):
    model = model_of()
    outcomes = run(
        model, AdamW(model.parameters(), lr=1e-4, master=master), f"bf16-master,master={master}", 4, stall_every=1
    )
    worst = max(outcome.stalled for outcome in outcomes)
    assert worst < {"fp32": 1e-3, "split": 1e-3, "split8": 0.05, "stochastic": 1.0}[master]


def test_only_every_so_many_windows_are_counted():
    model = model_of()
    outcomes = run(model, AdamW(model.parameters()), "bf16-master", 6, stall_every=3)
    assert [math.isnan(outcome.stalled) for outcome in outcomes] == [True, True, False] * 2
    assert "stalled" not in outcomes[0].metrics()
    (outcome,) = run(model, AdamW(model.parameters()), "bf16-master")
    assert math.isnan(outcome.stalled)


def test_fp32_weights_and_skipped_steps_have_nothing_to_count():
    model = model_of(torch.float32)
    (outcome,) = run(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", stall_every=1)
    assert math.isnan(outcome.stalled)
    model = model_of()
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    (outcome,) = run(model, AdamW(model.parameters()), "bf16-master", stall_every=1)
    assert outcome.is_skipped
    assert math.isnan(outcome.stalled)


def test_bad_values():
    model = model_of()
    with pytest.raises(ArgumentError, match="stall_every"):
        halfstep.Stepper(model, AdamW(model.parameters()), policy="bf16-master", stall_every=0)
