"""MP-39: without a scaler, as bf16 runs are, one bad batch writes NaN into every weight. A scale of 1 still checks."""

import math
import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import NonFiniteError, SkippedStepWarning

SGD = torch.optim.SGD
quiet = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")

OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, 0.1),
    "sgd momentum": lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16], ids=str)


def unscaled(**options):
    return halfstep.GradScaler("cpu", scale=halfstep.NoScale(), **options)


def window(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def bits(optimizer):
    """Everything a skipped step must leave alone: weights, moments and counters."""
    state = [value.clone() for s in optimizer.state.values() for value in s.values() if isinstance(value, torch.Tensor)]
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]] + state


@quiet
@every_dtype
@every_optimizer
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_MP_39_a_bad_batch_changes_nothing(make_optimizer, dtype, bad):
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
    optimizer, scaler = make_optimizer([p]), unscaled()
    window(scaler, optimizer, p.float().pow(2).sum())
    assert scaler.was_step_applied(optimizer)
    before = bits(optimizer)
    window(scaler, optimizer, (p.float() * bad).sum())
    assert scaler.outcome(optimizer).kind == "skipped"
    after = bits(optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
    assert (scaler.get_scale(), scaler.skipped_steps) == (1.0, 1)
    window(scaler, optimizer, p.float().pow(2).sum())
    assert scaler.was_step_applied(optimizer)
    assert p.isfinite().all()


@every_optimizer
def test_MP_39_a_bad_first_batch_leaves_a_clean_start(make_optimizer):
    p, fresh = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, untouched, scaler = make_optimizer([p]), make_optimizer([fresh]), unscaled()
    with pytest.warns(SkippedStepWarning):
        window(scaler, optimizer, (p * math.nan).sum())
    window(scaler, optimizer, p.pow(2).sum())
    fresh.pow(2).sum().backward()
    untouched.step()
    assert torch.equal(p, fresh)


def test_MP_39_the_event_names_parameter_and_step():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).bfloat16()
    optimizer, scaler = SGD(model.parameters(), 0.1), unscaled(model=model)
    x = torch.ones(1, 2).bfloat16()
    window(scaler, optimizer, model(x).float().sum())
    with pytest.warns(SkippedStepWarning, match=r"Step 2 was skipped.*1\.(weight|bias).*NaN"):
        window(scaler, optimizer, (model(x).float() * math.nan).sum())
    assert scaler.culprit.name in ("1.weight", "1.bias")
    assert scaler.culprit.kind == "nan"
    assert scaler.culprit.num_bad == 4


def test_MP_39_bad_step_after_bad_step_is_an_error_where_asked():
    p = nn.Parameter(torch.ones(1))
    optimizer, scaler = SGD([p], 0.1), unscaled(on_repeat="raise", repeat_after=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        for _ in range(2):
            window(scaler, optimizer, (p * math.nan).sum())
        window(scaler, optimizer, p.sum())  # a clean step: the count starts again
        for _ in range(2):
            window(scaler, optimizer, (p * math.nan).sum())
        with pytest.raises(NonFiniteError, match="the loss or the forward pass itself is inf or NaN"):
            window(scaler, optimizer, (p * math.nan).sum())
    assert p.item() == pytest.approx(0.9)
    assert scaler.skipped_steps == 5


@quiet
def test_MP_39_clean_runs_are_those_without_a_scaler():
    p, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer, reference, scaler = torch.optim.Adam([p], 0.1), torch.optim.Adam([plain], 0.1), unscaled()
    for step in range(5):
        window(scaler, optimizer, (p * torch.arange(4) * (step + 1)).pow(2).sum())
        reference.zero_grad()
        (plain * torch.arange(4) * (step + 1)).pow(2).sum().backward()
        reference.step()
        assert torch.equal(p, plain)
    assert scaler.skipped_steps == 0
