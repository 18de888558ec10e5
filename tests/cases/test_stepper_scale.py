"""Through the Stepper: MP-02 and MP-41, the bounds of the scale and its start; MP-13, resuming with it."""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import HalfstepWarning, StateError

quiet = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
meant = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")  # 16-bit weights without masters
SGD = torch.optim.SGD

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


def make_stepper(parameters, make_optimizer=lambda ps: SGD(ps, 1e-3), **options):
    optimizer = make_optimizer(parameters)
    return halfstep.Stepper(nn.ParameterList(parameters), optimizer, **{"policy": "fp32", **options})


def step(stepper, loss):
    """A window of equal micro-batches."""
    while True:
        with stepper.forward():
            value = loss()
        stepper.backward(value)
        outcome = stepper.step()
        if outcome.kind != "accumulating":
            return outcome


def half_gradient(p):
    """A loss whose gradient passes through fp16, where the scale has to fit."""
    return lambda: (p.half() * 1).float().sum()


# -- MP-02, MP-41 -----------------------------------------------------------------------------------------------------


@quiet
@every_optimizer
@pytest.mark.parametrize("num", [1, 2])
def test_MP_02_the_scale_stays_below_its_maximum_and_comes_back_quickly(param, make_optimizer, num):
    p, scale = param([1.0, -2.0]), halfstep.DynamicScale(growth_interval=1)
    stepper = make_stepper([p], make_optimizer, scale=scale, accumulate=num)
    for _ in range(40):
        assert step(stepper, lambda: (p * 1e-30).sum()).is_applied
    assert scale.get() == 2.0**24
    skipped = 0
    while step(stepper, half_gradient(p)).is_skipped:
        skipped += 1
        assert skipped < 20
    assert skipped == 9  # 2**15 is the largest power of two below 65504
    assert stepper.skipped_steps == 9
    assert p.isfinite().all()


@quiet
def test_MP_02_two_hundred_overflows_leave_a_usable_scale(param):
    p, scale = param([1.0]), halfstep.DynamicScale()
    stepper = make_stepper([p], lambda ps: SGD(ps, 0.5), scale=scale)
    for _ in range(200):
        assert step(stepper, lambda: (p * math.inf).sum()).is_skipped
    assert (p.item(), scale.get()) == (1.0, 2.0**-14)
    assert step(stepper, p.sum).is_applied
    assert p.item() == 0.5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 0.0, -1.0, 1e-60, 1e60, None, "big"])
def test_MP_02_a_scale_that_no_run_can_have_is_refused_whole(param, bad):
    p = param([1.0])
    stepper = make_stepper([p], scale=halfstep.DynamicScale(2.0**10, growth_factor=4.0, growth_interval=7))
    step(stepper, p.sum)
    before = stepper.state_dict()
    state = copy.deepcopy(before)
    state["scale"].update(scale=bad, growth_factor=8.0, growth_interval=3)
    state["counts"]["steps"] = 77
    with pytest.raises(StateError, match="scale"):
        stepper.load_state_dict(state)
    assert stepper.state_dict() == before


def test_MP_41_the_first_step_is_not_lost():
    a = nn.Parameter(torch.eye(2))
    with torch.autocast("cpu", dtype=torch.half):
        loss = (torch.ones(2, 2) @ a).sum()
    torch.amp.GradScaler("cpu").scale(loss).backward()
    assert a.grad.isinf().all(), "plain PyTorch"

    a = nn.Parameter(torch.eye(2))
    stepper = make_stepper([a], lambda ps: SGD(ps, 0.1), policy="fp16-mixed")
    with stepper.forward():
        loss = (torch.ones(2, 2) @ a).sum()
    assert loss.dtype == torch.half
    stepper.backward(loss)
    stepper.unscale_()
    assert torch.equal(a.grad, torch.full((2, 2), 2.0))
    assert stepper.step().is_applied
    assert torch.equal(a.detach(), torch.eye(2) - 0.1 * torch.full((2, 2), 2.0))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("log2_scale", [14, 15])
def test_MP_41_a_loss_of_one_element_gives_the_true_gradient(param, shape, dtype, log2_scale):
    """Whatever its shape and dtype; 3 * 2**15 is beyond fp16, the largest scale that its gradient can hold is not."""
    p = param([1.5])
    stepper = make_stepper([p], scale=halfstep.StaticScale(2.0**log2_scale))
    with stepper.forward():
        loss = (p * 2).sum().to(dtype).reshape(shape)
    assert loss.item() == 3.0
    stepper.backward(loss)
    assert p.grad.item() == 2.0 * 2.0**log2_scale
    outcome = stepper.step()
    assert (outcome.kind, outcome.grad_norm) == ("applied", 2.0)


# -- MP-13 ------------------------------------------------------------------------------------------------------------


def run(num_steps, state=None, start=0):
    """A run with skips, schedule, average and BatchNorm; continued from ``state``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    stepper = halfstep.Stepper(
        *(model, optimizer),
        policy="fp32",
        scale=halfstep.DynamicScale(2.0**10, growth_interval=3),
        accumulate=2,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ema=halfstep.EMA(model, decay=0.9),
    )
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        stepper.load_state_dict(state["stepper"])
    scales = []
    for i in range(start, start + num_steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
        scales.append(
            step(stepper, lambda i=i, x=x: model(x).square().mean() * (math.nan if i in (3, 4, 10) else 1)).scale
        )
    parts = {"model": model, "optimizer": optimizer, "stepper": stepper}
    return {name: part.state_dict() for name, part in parts.items()}, scales


def assert_same(one, other):
    """Equal, bit for bit, through dicts and lists."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@quiet
@pytest.mark.parametrize("cut", [3, 4, 9])
def test_MP_13_a_run_in_two_parts_is_the_run_in_one(cut, tmp_path):
    """The cut lies before a skip, between two, and in the middle of a growth interval."""
    whole, scales = run(14)
    first, first_scales = run(cut)
    torch.save(first, tmp_path / "state.pt")
    second, second_scales = run(14 - cut, torch.load(tmp_path / "state.pt"), start=cut)
    assert first_scales + second_scales == scales
    assert len(set(scales)) > 2
    assert_same(second, whole)
    assert whole["stepper"]["counts"]["skipped_steps"] == 3


@quiet
def test_MP_13_the_reported_scale_comes_back(param):
    p = param([1.0])
    stepper = make_stepper([p], scale=halfstep.DynamicScale(65536.0))
    for _ in range(3):
        step(stepper, lambda: (p * math.inf).sum())
    naive = make_stepper([param([1.0])], scale=halfstep.DynamicScale(65536.0))
    assert naive.scale.get() == 65536.0
    naive.load_state_dict(stepper.state_dict())
    assert (naive.scale.get(), naive.skipped_steps) == (8192.0, 3)


@quiet
def test_MP_13_a_checkpoint_of_a_scaler_is_continued_and_one_without_is_refused(param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.1), torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((p * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    stepper = make_stepper([p], scale=halfstep.DynamicScale())
    with pytest.warns(HalfstepWarning, match="schedulers and EMA are as before"):
        stepper.load_state_dict(scaler.state_dict())
    assert stepper.scale.get() == 8192.0
    for state in ({}, optimizer.state_dict()):
        with pytest.raises(StateError, match="would have to be made up; nothing was loaded"):
            stepper.load_state_dict(state)
    assert stepper.scale.get() == 8192.0


def test_MP_02_a_state_from_torchs_quiet_phase_goes_on_at_the_bound():
    saved = {**torch.amp.GradScaler("cpu").state_dict(), "scale": 2.0**127}
    model = nn.Linear(1, 1)
    options = {"policy": "fp32", "scale": halfstep.DynamicScale()}
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), **options)
    with pytest.warns(HalfstepWarning, match="its bounds are"):
        stepper.load_state_dict(saved)
    assert stepper.scale.get() == 2.0**24
