"""Through the Stepper: MP-06 norms beyond fp16; MP-39 and MP-52, what bf16 needs without a scale."""

import math
import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import NonFiniteError, PrecisionWarning, SkippedStepWarning

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


# -- MP-06 ------------------------------------------------------------------------------------------------------------


@meant
def test_MP_06_the_reported_norms():
    p = nn.Parameter(torch.zeros(1_000_000, dtype=torch.half))
    p.grad = torch.full_like(p, 100.0)
    assert nn.utils.clip_grad_norm_([p], 1.0).isinf(), "plain PyTorch"
    assert p.grad[0].item() == 0.0

    stepper = make_stepper([p], lambda ps: SGD(ps, 1.0), clip_norm=1.0)
    outcome = step(stepper, lambda: (p.float() * 100.0).sum())
    assert outcome.is_applied
    assert outcome.grad_norm == pytest.approx(100_000.0, rel=1e-6)
    assert outcome.clip_coefficient == pytest.approx(1e-5, rel=1e-6)
    assert torch.equal(p.detach(), torch.full_like(p, -1e-3))

    q = nn.Parameter(torch.zeros(1, dtype=torch.half))
    assert step(make_stepper([q]), lambda: (q.float() * 300.0).sum()).grad_norm == 300.0


@meant
@every_dtype
@pytest.mark.parametrize("make_optimizer", [
    lambda ps: SGD(ps, 1.0),
    lambda ps: SGD(ps, 1.0, momentum=0.9),
    lambda ps: SGD(ps, 1.0, fused=True),
], ids=["sgd", "momentum", "fused"])  # fmt: skip
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("log2_scale", [0, 5])
def test_MP_06_clipping_goes_by_the_true_norm_of_all_parameters(dtype, make_optimizer, num, log2_scale):
    """Gradients of 300 in 100 000 elements: the norm, 94868, is beyond fp16's largest value, and so is 300**2."""
    shapes = [(70_000,), (100, 200), (10_000, 1), ()]
    ps = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    scale = halfstep.StaticScale(2.0**log2_scale)
    stepper = make_stepper(ps, make_optimizer, clip_norm=1.0, accumulate=num, scale=scale)
    outcome = step(stepper, lambda: sum((p.float() * 300.0).sum() for p in ps))
    norm = 300.0 * math.sqrt(100_001)
    assert outcome.is_applied
    assert outcome.grad_norm == pytest.approx(norm, rel=2.0**-15)  # what the inspection promises
    assert outcome.clip_coefficient == pytest.approx(1 / norm, rel=2.0**-14)
    rtol = 2 * torch.finfo(dtype).eps + 2.0**-14
    for p in ps:
        torch.testing.assert_close(p.detach(), torch.full_like(p, -300.0 / norm), rtol=rtol, atol=0)


@meant
@pytest.mark.parametrize("num", [1, 2])
def test_MP_06_without_clipping_a_large_norm_is_no_overflow(num):
    p, scale = nn.Parameter(torch.zeros(100_000, dtype=torch.half)), halfstep.DynamicScale(32.0)
    stepper = make_stepper([p], lambda ps: SGD(ps, 2.0**-10), scale=scale, accumulate=num)
    outcome = step(stepper, lambda: (p.float() * 300.0).sum())
    assert (outcome.kind, outcome.clip_coefficient, scale.get()) == ("applied", 1.0, 32.0)
    assert torch.equal(p.detach(), torch.full_like(p, -300.0 * 2.0**-10))


@pytest.mark.parametrize("value", [3e19, 1e-24, 3e37])
def test_MP_06_squares_beyond_fp32_neither_overflow_nor_vanish(value):
    p = nn.Parameter(torch.zeros(100))
    outcome = step(make_stepper([p], clip_norm=1.0), lambda: (p * value).sum())
    assert outcome.is_applied
    assert outcome.grad_norm == pytest.approx(10 * value, rel=1e-6)
    assert p[0].item() == pytest.approx(-1e-3 * min(value, 0.1), rel=1e-5)


# -- MP-39, MP-52 -----------------------------------------------------------------------------------------------------


def bits(optimizer):
    """Everything a skipped step must leave alone: weights, moments and counters."""
    state = [value.clone() for s in optimizer.state.values() for value in s.values() if isinstance(value, torch.Tensor)]
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]] + state


@quiet
@meant
@every_dtype
@every_optimizer
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num", [1, 2])
def test_MP_39_a_bad_batch_changes_nothing(make_optimizer, dtype, bad, num):
    ps = [nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype)), nn.Parameter(torch.ones(1, dtype=dtype))]
    stepper = make_stepper(ps, make_optimizer, policy="bf16-mixed", accumulate=num)
    good = lambda: sum(p.float().pow(2).sum() for p in ps)  # noqa: E731
    assert step(stepper, good).is_applied
    before = bits(stepper.optimizers[0])
    outcome = step(stepper, lambda: (ps[0].float() * bad).sum() + ps[1].float().sum())
    assert (outcome.kind, outcome.culprit.name, outcome.scale) == ("skipped", "0", 1.0)
    after = bits(stepper.optimizers[0])
    assert len(after) == len(before)
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
    assert step(stepper, good).is_applied
    assert all(p.isfinite().all() for p in ps)


def test_MP_39_plain_pytorch_writes_nan(param):
    p = param([1.0], torch.bfloat16)
    (p * math.nan).sum().backward()
    SGD([p], 0.1).step()
    assert p.isnan().all()


@every_optimizer
def test_MP_39_a_bad_first_batch_leaves_a_clean_start(make_optimizer, param):
    p, fresh = param([1.0, 2.0]), param([1.0, 2.0])
    stepper, untouched = make_stepper([p], make_optimizer), make_optimizer([fresh])
    with pytest.warns(SkippedStepWarning):
        step(stepper, lambda: (p * math.nan).sum())
    step(stepper, lambda: p.pow(2).sum())
    fresh.pow(2).sum().backward()
    untouched.step()
    assert torch.equal(p, fresh)


def test_MP_39_the_event_names_parameter_and_step():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen = []
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="bf16-mixed")
    x = torch.ones(1, 2)
    step(stepper, lambda: model(x).float().sum())
    with pytest.warns(SkippedStepWarning, match=r"Step 2 was skipped.*1\.(weight|bias).*NaN"):
        outcome = step(stepper, lambda: (model(x).float() * math.nan).sum())
    assert stepper.culprit == outcome.culprit
    assert (outcome.culprit.name[0], outcome.culprit.kind, outcome.step) == ("1", "nan", 2)
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32", on_overflow=seen.append)
    assert step(stepper, lambda: (model(x) * math.nan).sum()) == seen[0]


@quiet
def test_MP_39_bad_step_after_bad_step_is_an_error_where_asked(param):
    p = param([1.0])
    stepper = make_stepper([p], lambda ps: SGD(ps, 0.1), on_repeat="raise", repeat_after=3)
    bad = lambda: (p * math.nan).sum()  # noqa: E731
    for _ in range(2):
        step(stepper, bad)
    assert step(stepper, p.sum).is_applied  # a clean step: the count starts again
    for _ in range(2):
        step(stepper, bad)
    with pytest.raises(NonFiniteError, match="the loss or the forward pass itself is inf or NaN"):
        step(stepper, bad)
    assert p.item() == pytest.approx(0.9)
    assert (stepper.skipped_steps, stepper.num_micro_batches) == (5, 0)
    assert step(stepper, p.sum).is_applied, "the error leaves a stepper that goes on"


def test_MP_39_fp16_without_scaling_warns(param):
    with pytest.warns(PrecisionWarning, match="fp16-mixed without loss scaling: gradients below 3e-8 become zero"):
        make_stepper([param([1.0])], policy="fp16-mixed", scale=halfstep.NoScale())


def test_MP_52_bf16_needs_no_scale_and_keeps_the_check():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        model = nn.Linear(2, 1).bfloat16()
        stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="bf16-mixed")
    outcome = step(stepper, lambda: model(torch.ones(1, 2).bfloat16()).sum())
    assert (outcome.kind, outcome.scale, isinstance(stepper.scale, halfstep.NoScale)) == ("applied", 1.0, True)


@meant
@quiet
@every_optimizer
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_MP_52_groups_of_every_dtype_in_one_optimizer(make_optimizer, num, clip_norm):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ours = [nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)) for dtype in dtypes]
    plain = [nn.Parameter(p.detach().double()) for p in ours]
    groups = [{"params": [p]} for p in ours]
    optimizer, reference = make_optimizer(groups), make_optimizer([{"params": [p]} for p in plain])
    options = {"policy": "fp32", "scale": halfstep.DynamicScale(1024.0), "accumulate": num, "clip_norm": clip_norm}
    stepper = halfstep.Stepper(nn.ParameterList(ours), optimizer, **options)
    for is_bad in (False, True, False):
        fault = math.nan if is_bad else 1.0
        outcome = step(
            stepper, lambda fault=fault: fault * sum((p.double() * (i + 1)).sum() for i, p in enumerate(ours))
        )
        assert outcome.is_skipped is is_bad
        if is_bad:
            continue
        for i, p in enumerate(plain):
            p.grad = torch.full_like(p, i + 1.0)
        if clip_norm:
            nn.utils.clip_grad_norm_(plain, clip_norm)
        reference.step()
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=4 * torch.finfo(p.dtype).eps + 1e-6, atol=1e-6)
