"""MP-02: the scale doubles through a quiet phase. MP-41: the first scale is too large, so the first step is lost."""

import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
SGD = torch.optim.SGD


def train_step(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def quiet_phase(scaler, optimizer, p, steps=200):
    for _ in range(steps):
        train_step(scaler, optimizer, (p * 1e-30).sum())


def skips_until_a_step(scaler, optimizer, p):
    skipped = 0
    while True:
        before = p.clone()
        train_step(scaler, optimizer, (p.half() * 1).float().sum())  # an ordinary fp16 gradient of 1
        if not torch.equal(before, p):
            return skipped
        skipped += 1
        assert skipped < 200


def test_MP_02_the_scale_stays_below_its_maximum_and_comes_back_quickly(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 1e-3), make_scaler(growth_interval=1)
    quiet_phase(scaler, optimizer, p)
    assert scaler.get_scale() == 2.0**24
    # 2**15 is the largest power of two below fp16's 65504: nine halvings from 2**24
    assert skips_until_a_step(scaler, optimizer, p) == 9
    assert scaler.get_scale() == 2.0**16  # the step that was applied at 2**15 counts as clean


@pytest.mark.parametrize("make_optimizer", [
    lambda p: SGD([p], 1e-3, momentum=0.9),
    lambda p: torch.optim.AdamW([p], 1e-3, fused=True),
    lambda p: torch.optim.Adam([p], 1e-3, foreach=True),
    lambda p: torch.optim.Adagrad([p], 1e-3),
])  # fmt: skip
@pytest.mark.parametrize("growth_factor", [2.0, 3.0, 1e30])
def test_MP_02_no_optimizer_and_no_growth_factor_passes_the_maximum(make_scaler, param, make_optimizer, growth_factor):
    p = param([1.0, -2.0])
    optimizer, scaler = make_optimizer(p), make_scaler(growth_interval=1, growth_factor=growth_factor)
    quiet_phase(scaler, optimizer, p, steps=40)
    assert scaler.get_scale() == 2.0**24
    assert skips_until_a_step(scaler, optimizer, p) == 9
    assert p.isfinite().all()


def test_MP_02_the_maximum_can_be_chosen(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 1e-3), make_scaler(init_scale=2.0**4, growth_interval=1, max_scale=2.0**10)
    quiet_phase(scaler, optimizer, p, steps=20)
    assert scaler.get_scale() == 2.0**10
    assert skips_until_a_step(scaler, optimizer, p) == 0


def test_MP_02_the_other_end_two_hundred_overflows_leave_a_usable_scale(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.5), make_scaler()
    for _ in range(200):
        train_step(scaler, optimizer, (p * math.inf).sum())
    assert p.item() == 1.0
    assert scaler.get_scale() == 2.0**-14
    train_step(scaler, optimizer, p.sum())
    assert p.item() == 0.5


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 0.0, -1.0, 1e-60, 1e60, None, "big"])
def test_MP_02_a_scale_that_no_run_can_have_is_refused_whole(make_scaler, param, bad, is_used):
    scaler = make_scaler(init_scale=2.0**10, growth_factor=4.0, growth_interval=7)
    if is_used:
        p = param([1.0])
        train_step(scaler, SGD([p], 0.1), p.sum())
    before = scaler.state_dict()
    state = {**before, "scale": bad, "growth_factor": 8.0, "growth_interval": 3}
    with pytest.raises(ValueError, match="scale") as refusal:
        scaler.load_state_dict(state)
    assert isinstance(refusal.value, StateError)
    assert scaler.state_dict() == before


def half_product(weight):
    """The reported loss: a sum over an fp16 activation, whose gradient is therefore the scale itself, in fp16."""
    with torch.autocast("cpu", dtype=torch.half):
        return (torch.ones(2, 2) @ weight).sum()


def test_MP_41_halfsteps_own_first_scale_loses_no_step(make_scaler):
    a = nn.Parameter(torch.eye(2))
    optimizer, scaler = SGD([a], 0.1), make_scaler(scale=halfstep.DynamicScale())
    scaler.scale(half_product(a)).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(a.grad, torch.full((2, 2), 2.0))
    scaler.step(optimizer)
    assert scaler.was_step_applied(optimizer)
    assert torch.equal(a.detach(), torch.eye(2) - 0.1 * torch.full((2, 2), 2.0))
    scaler.update()
    assert scaler.skipped_steps == 0


@pytest.mark.parametrize(("log2_scale", "skips"), [(16, 2), (15, 1), (14, 0), (13, 0)])
def test_MP_41_which_first_scales_fit(make_scaler, log2_scale, skips):
    """The gradient of each weight is 2 * scale, a sum of two fp16 values: 2**15 + 2**15 is beyond 65504 too."""
    a = nn.Parameter(torch.eye(2))
    optimizer, scaler = SGD([a], 0.1), make_scaler(init_scale=2.0**log2_scale)
    for _ in range(3):
        if scaler.skipped_steps < skips:
            train_step(scaler, optimizer, half_product(a))
            assert torch.equal(a.detach(), torch.eye(2))
            assert scaler.culprit.kind == "inf"
    train_step(scaler, optimizer, half_product(a))
    assert scaler.skipped_steps == skips
    assert torch.allclose(a.detach(), torch.eye(2) - 0.2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("log2_scale", [14, 16, 24])
def test_MP_41_a_half_loss_is_scaled_in_fp32(make_scaler, shape, dtype, log2_scale):
    loss = torch.full(shape, 3.0, dtype=dtype, requires_grad=True)
    scaled = make_scaler(init_scale=2.0**log2_scale).scale(loss)
    assert scaled.dtype == torch.float32
    assert scaled.shape == shape
    assert scaled.item() == 3.0 * 2.0**log2_scale


@pytest.mark.parametrize("scale", [
    halfstep.DynamicScale(8.0, 4.0, 0.25, 2, min_scale=1.0, max_scale=64.0, hysteresis=2),
    halfstep.DynamicScale(growth_interval=500),
    halfstep.StaticScale(128.0),
], ids=lambda scale: scale.kind)  # fmt: skip
def test_MP_41_a_scale_that_is_passed_in_keeps_its_own_settings(make_scaler, scale):
    before = scale.state_dict()
    state = make_scaler(scale=scale).state_dict()
    assert scale.state_dict() == before
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert state[name] == before.get(name, state[name])
