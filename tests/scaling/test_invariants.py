"""Ten thousand random faults: a skip changes nothing, nothing non-finite is written, the scale stays sound."""

import math
import random

import pytest
import torch

import halfstep
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale, StaticScale

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")

INF, NAN = float("inf"), float("nan")
FAULTS = [INF, -INF, NAN, 3e38, -1e30, 1e20, 65504.0, 1e-45, 1e-30, 0.0, -0.0, 1.0, -2.5]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "sgd-fused-dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adamw-amsgrad-fused": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, fused=True),
}
SCALES = {
    "dynamic": lambda: DynamicScale(growth_interval=3),
    "hysteresis": lambda: DynamicScale(growth_interval=3, hysteresis=2, tolerance=0.2),
    "adaptive": AdaptiveScale,
    "static": lambda: StaticScale(8.0),
    "none": NoScale,
}


def tensors_of(optimizer, weights):
    """Everything that a skipped step must leave alone. A missing momentum and a zero one are the same momentum."""
    state = {(i, k): v for i, w in enumerate(weights) for k, v in optimizer.state.get(w, {}).items()}
    return {("weight", i): w.detach() for i, w in enumerate(weights)} | {
        k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.any()
    }


def bits(tensors):
    return {k: (t.dtype, t.contiguous().view(torch.uint8).tolist() if t.ndim else t.item()) for k, t in tensors.items()}


def set_random_gradients(rng, weights):
    """Gradients with faults of every kind, some absent; returns whether any is inf or NaN."""
    bad = False
    for w in weights:
        w.grad = None
        if rng.random() < 0.15:
            continue
        g = torch.randn(w.shape, dtype=torch.float32)
        if rng.random() < 0.4:
            g.view(-1)[rng.randrange(g.numel())] = rng.choice(FAULTS)
        w.grad = g.to(w.dtype)
        bad |= not torch.isfinite(w.grad).all()
    return bad


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", SCALES)
def test_ten_thousand_random_faults(name, scale):
    """250 windows for each of 8 optimizers x 5 scales: 10 000 windows, on fp32, fp16 and bf16 weights."""
    rng = random.Random(f"{name} {scale}")
    torch.manual_seed(rng.randrange(2**31))
    weights = [
        torch.nn.Parameter(torch.randn(shape).to(dtype))
        for shape, dtype in (
            ((3, 4), torch.float32),
            ((5,), torch.float32),
            ((2, 2), torch.float16),
            ((3,), torch.bfloat16),
        )
    ]
    optimizer = OPTIMIZERS[name](weights)
    scaler = halfstep.GradScaler("cpu", scale=SCALES[scale](), on_repeat="ignore")
    scaler.scale(torch.ones(()))
    skipped = 0
    for _ in range(250):
        bad = set_random_gradients(rng, weights)
        if all(w.grad is None for w in weights):
            continue
        before = bits(tensors_of(optimizer, weights))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.was_step_applied(optimizer) == (not bad)
        after = tensors_of(optimizer, weights)
        if bad:
            skipped += 1
            assert bits(after) == before
        assert all(torch.isfinite(t).all() for t in after.values())
        value = scaler.get_scale()
        low, high = scaler._rule.bounds()
        assert math.isfinite(value)
        assert 0 < low <= value <= high
    assert scaler.skipped_steps == skipped
    assert 20 < skipped < 230


@pytest.mark.parametrize("momentum_state", ["first step", "later"])
def test_fused_sgd_whose_first_step_is_skipped_stays_finite(momentum_state):
    """torch leaves its momentum uninitialised there; fill freed memory with NaN to make that show."""
    for _ in range(20):
        garbage = [torch.full((1000,), NAN) for _ in range(8)]
        del garbage
        w = torch.nn.Parameter(torch.ones(1000))
        reference = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([w], 0.1, momentum=0.9, fused=True)
        plain = torch.optim.SGD([reference], 0.1, momentum=0.9)
        scaler = halfstep.GradScaler("cpu")
        pattern = (INF, 1.0, 1.0) if momentum_state == "first step" else (1.0, INF, 1.0)
        for factor in pattern:
            optimizer.zero_grad()
            scaler.scale((w * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if math.isfinite(factor):
                reference.grad = torch.ones(1000)
                plain.step()
        torch.testing.assert_close(w, reference, rtol=1e-6, atol=0)


def test_a_parameter_that_joins_fused_sgd_later():
    """torch hands its kernel a list with a hole in it when only some parameters have momentum, and dies."""
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], 0.1, momentum=0.9, fused=True)
    scaler = halfstep.GradScaler("cpu")
    for loss in (lambda: a.sum(), lambda: (a + b).sum()):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(b, torch.full((2,), 0.9))
