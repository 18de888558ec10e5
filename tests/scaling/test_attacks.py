"""Faults that hostile testing found: interruptions, parameters that join late, subclasses, flags made by others."""

import contextlib
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ArgumentError, CallOrderError, PrecisionWarning, StateError, UnsupportedError
from halfstep.kernels.inspect import inspect
from halfstep.scaling.scale import DynamicScale

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")

INF, NAN = float("inf"), float("nan")
SGD = torch.optim.SGD
HALVES = [torch.float16, torch.bfloat16]


def scaler(**options):
    return halfstep.GradScaler("cpu", **{"init_scale": 1024.0, **options})


def weight(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


# -- exceptions and interrupts in the middle of a step -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_can_be_tried_again_after_an_exception(dtype, fused):
    w = weight(1.0, dtype=dtype)
    optimizer, s, calls = SGD([w], 0.1, fused=fused), scaler(), []

    def fail_once(*_):
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("once")

    optimizer.register_step_pre_hook(fail_once)
    s.scale(w.float().sum()).backward()
    with pytest.raises(RuntimeError, match="once"):
        s.step(optimizer)
    assert w.dtype == dtype
    s.step(optimizer)
    assert w.item() == pytest.approx(0.9, abs=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_an_exception_after_the_step_leaves_weights_and_moments_in_step(dtype):
    w = weight(1.0, dtype=dtype)
    optimizer, s = torch.optim.Adam([w], 0.1), scaler()

    def fail(*_):
        raise RuntimeError("after")

    optimizer.register_step_post_hook(fail)
    s.scale(w.float().sum()).backward()
    with pytest.raises(RuntimeError, match="after"):
        s.step(optimizer)
    assert w.item() == pytest.approx(0.9, abs=4e-3)
    assert optimizer.state[w]["step"] == 1


INTERRUPTS = """
import signal, torch, halfstep
torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.ones(300, dtype=torch.float16)) for _ in range(40)]
optimizer, armed, interrupted = torch.optim.SGD(weights, 1e-4), False, 0

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for attempt in range(300):
    torch.set_grad_enabled(True)  # an interrupt inside torch.no_grad can leave it switched off
    scaler = halfstep.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for w in weights:
        w.grad = torch.ones_like(w)
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 2e-4 * (1 + attempt % 50))
        scaler.step(optimizer)
        armed = False
    except KeyboardInterrupt:
        armed, interrupted = False, interrupted + 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert all(w.dtype == w.grad.dtype == torch.float16 for w in weights), attempt
print(interrupted)
"""


def test_interrupts_at_any_moment_leave_16_bit_parameters_16_bit():
    result = subprocess.run([sys.executable, "-c", INTERRUPTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) > 10


def test_an_exception_in_a_closure_takes_no_half_step():
    w = weight(0.0)
    optimizer, s, calls = torch.optim.LBFGS([w], max_iter=5), scaler(), []

    def closure():
        calls.append(None)
        if len(calls) == 2:  # the first iteration has moved the weight already
            assert w.item() != 0.0
            raise KeyError("mine")
        optimizer.zero_grad()
        loss = s.scale((w - 3).square().sum() + w.pow(4).sum())
        loss.backward()
        return loss

    with pytest.raises(KeyError):
        s.step(optimizer, closure)
    assert w.item() == 0.0
    assert not optimizer.state[w]


def test_an_optimizer_that_swallows_exceptions_still_skips():
    class Swallows(SGD):
        def step(self, closure=None):
            with contextlib.suppress(BaseException):
                closure()
            return super().step()

    w = weight(1.0)
    optimizer, s = Swallows([w], 0.1), scaler()

    def closure():
        optimizer.zero_grad()
        loss = s.scale(w.sum() * NAN)
        loss.backward()
        return loss

    assert s.step(optimizer, closure) is None
    assert w.item() == 1.0
    assert s.outcome(optimizer).kind == "skipped"


# -- parameters and gradients that change within a window --------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_joins_before_the_step_is_unscaled_and_checked(fused):
    a, b = weight(1.0), weight(1.0)
    optimizer, s = SGD([a], 0.1, fused=fused), scaler()
    s.scale(a.sum())
    with pytest.raises(CallOrderError):
        s.step(optimizer)  # backward was forgotten
    optimizer.add_param_group({"params": [b]})
    s.scale((a + b).sum()).backward()
    s.step(optimizer)
    assert (a.item(), b.item()) == (pytest.approx(0.9), pytest.approx(0.9))


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_joins_after_unscale_is_refused(fused):
    a, b = weight(1.0), weight(1.0)
    optimizer, s = SGD([a], 0.1, fused=fused), scaler()
    s.scale((a + b).sum()).backward()
    s.unscale_(optimizer)
    optimizer.add_param_group({"params": [b]})
    with pytest.raises(CallOrderError, match="it held 1 parameters when its gradients were unscaled"):
        s.step(optimizer)
    assert (a.item(), b.item()) == (1.0, 1.0)


def test_update_inside_a_closure_is_refused():
    w = weight(1.0)
    optimizer, s = SGD([w], 0.1), scaler()

    def closure():
        optimizer.zero_grad()
        loss = (w * NAN).sum()
        s.scale(loss).backward()
        s.update(8.0)
        return loss

    with pytest.raises(CallOrderError, match=r"update\(\) inside a closure"):
        s.step(optimizer, closure)
    assert w.item() == 1.0
    assert s.get_scale() == 1024.0


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_parameters_that_overlap_are_refused(dtype):
    base = torch.zeros(3, dtype=dtype)
    a, b, c = nn.Parameter(base[:2]), nn.Parameter(base[1:]), nn.Parameter(base[:1])
    s = scaler(init_scale=1.0)
    s.scale(torch.ones(()))
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedError, match="overlap in memory"):
        s.step(SGD([a, b], 1.0))
    s.step(SGD([b, c], 1.0))  # parts of one buffer that do not overlap
    assert base.tolist() == [-1.0, -1.0, -1.0]


def test_a_skipped_16_bit_step_does_not_even_move_the_version():
    w = weight(-INF, NAN, 1.0, dtype=torch.float16)
    s, optimizer = scaler(), SGD([w], 0.1)
    s.scale(torch.ones(()))
    w.grad = torch.tensor([NAN, 0.0, 0.0], dtype=torch.float16)
    bits, version = w.detach().view(torch.int16).tolist(), w._version
    s.step(optimizer)
    assert w.detach().view(torch.int16).tolist() == bits
    assert w._version == version
    assert s.saturated_weights == 0


def test_fp16_state_rounded_by_a_load_is_mentioned():
    w = weight(1.0, dtype=torch.float16)
    optimizer, s = torch.optim.Adam([w], 1e-3), scaler()
    s.scale((w.float() * 1e-4).sum()).backward()
    s.step(optimizer)
    s.update()
    other = torch.optim.Adam([w], 1e-3)
    other.load_state_dict(optimizer.state_dict())
    with pytest.warns(PrecisionWarning, match="exp_avg, exp_avg_sq of Adam is 16-bit"):
        s.step(other)


# -- subclasses, private names and flags made by others ----------------------------------------------------------------


class UnscalesByItself(halfstep.GradScaler):
    """As torch's ShardedGradScaler does."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=False):
        for group in optimizer.param_groups:
            for p in group["params"]:
                found_inf.logical_or_(~torch.isfinite(p.grad).all())
                p.grad.mul_(inv_scale)
        return {found_inf.device: found_inf}


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("make_scale", [None, halfstep.AdaptiveScale])
def test_a_subclass_that_unscales_by_itself(bad, make_scale):
    options = {"init_scale": 4.0} if make_scale is None else {"scale": make_scale()}
    w, plain = weight(1.0), weight(1.0)
    optimizer, s = torch.optim.AdamW([w], 0.1, fused=True), UnscalesByItself("cpu", **options)
    s.scale(w.sum() * (NAN if bad else 1.0)).backward()
    s.unscale_(optimizer)
    s.step(optimizer)
    s.update()
    reference = torch.optim.AdamW([plain], 0.1, fused=True)
    plain.sum().backward()
    reference.step()
    assert w.item() == (1.0 if bad else plain.item())
    assert s.was_step_applied(optimizer) != bad


@pytest.mark.parametrize("flag", [0.5, 2.0, -1.0, NAN])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("fused", [False, True])
def test_flags_that_ranks_made_of_found_inf(flag, shape, fused):
    """All-reduced by sum, mean or anything else: whatever is not 0 skips, and the books agree with the weights."""
    for value in (flag, 0.0):
        w = weight(1.0)
        optimizer, s = SGD([w], 0.1, fused=fused), scaler()
        s.scale(w.sum()).backward()
        s.unscale_(optimizer)
        s._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): torch.full(shape, value)}
        s.step(optimizer)
        s.update()
        is_applied = value == 0.0
        assert s.was_step_applied(optimizer) == is_applied
        assert w.item() == (pytest.approx(0.9) if is_applied else 1.0)
        assert s.get_scale() == (1024.0 if is_applied else 512.0)


def test_a_scale_written_through_the_private_name_is_checked():
    s, w = scaler(), weight(1.0)
    for bad in (0.0, NAN, INF, -1.0):
        with pytest.raises(ArgumentError, match="_scale="):
            s._scale = torch.tensor(bad)
    s._scale = torch.tensor([8.0])
    optimizer = SGD([w], 0.1)
    s.scale(w.sum()).backward()
    s.step(optimizer)
    s.update()
    assert s.get_scale() == 8.0
    assert w.item() == pytest.approx(0.9)


def test_the_first_scale_can_be_set_by_torchs_private_name():
    s = scaler()
    s._init_scale = 64.0
    assert s.scale(torch.ones(())).item() == 64.0


def test_a_users_function_may_call_anything_a_variable():
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = 3
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    w = weight(1.0)
    scaler().scale(Named.apply(w).sum()).backward()
    assert w.grad.item() == 2048.0


def test_another_default_device_changes_nothing():
    big = torch.randn(140_000)
    with torch.device("meta"):
        assert inspect([big, big.half()]).faults() == {}
        s = scaler()
        assert s.saturated_weights == 0


def test_a_skip_counts_though_its_optimizer_is_gone():
    w, s = weight(1.0), scaler()
    s.scale(w.sum() * INF).backward()
    s.step(SGD([w], 0.1))
    s.update()
    assert s.skipped_steps == 1


# -- numbers at the edges ----------------------------------------------------------------------------------------------


def test_bounds_that_are_no_fp32_numbers():
    options = {"min_scale": 1e-4, "on_repeat": "ignore"}
    s, w = scaler(**options), weight(1.0)
    optimizer = SGD([w], 0.1)
    for _ in range(40):
        optimizer.zero_grad()
        s.scale(w.sum() * INF).backward()
        s.step(optimizer)
        s.update()
    other = scaler(**options)
    other.load_state_dict(s.state_dict())
    assert other.get_scale() == s.get_scale() == s.state_dict()["halfstep"]["min_scale"]
    assert DynamicScale(1e-4, min_scale=1e-4).bounds()[0] == torch.tensor(1e-4).item()


def test_adaptive_survives_fp64_gradients_and_refuses_impossible_states():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    s, optimizer = halfstep.GradScaler("cpu", scale=halfstep.AdaptiveScale()), SGD([w], 1e-50)
    for gradient in (1e60, 1.0, 1e300):
        s.scale(torch.ones(()))
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        s.step(optimizer)
        s.update()
        assert math.isfinite(s.get_scale())
        assert s.was_step_applied(optimizer)
    before = s.state_dict()
    for entry in ({"mean": 3e38}, {"mean": 1e300}, {"mean": NAN}, {"variance": -1.0}):
        with pytest.raises(StateError):
            s.load_state_dict({**before, "halfstep": {**before["halfstep"], "margin_log2": 5.0, **entry}})
        assert s.state_dict() == before


@pytest.mark.parametrize("gradient", [1e20, 1e60, -1e300])
def test_fp64_gradients_are_not_shrunk(gradient):
    for fused in (False, True):
        w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        s, optimizer = scaler(init_scale=1.0), SGD([w], 1.0, fused=fused)
        s.scale(torch.ones(()))
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        s.step(optimizer)
        assert w.item() == -gradient


@pytest.mark.parametrize(("size", "value"), [(200_000, 3e151), (4, 1.7e308), (1, 1.5e308)])
def test_huge_fp64_gradients_are_finite(size, value):
    g = torch.full((size,), value, dtype=torch.float64)
    found = inspect([g, g])
    assert found.faults() == {}
    assert found.found_inf[torch.device("cpu")].item() == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_adagrads_sum_stays_finite(fused):
    w = weight(1.0)
    optimizer, s = torch.optim.Adagrad([w], 0.01, fused=fused), scaler(init_scale=1.0)
    for _ in range(200):
        s.scale(torch.ones(()))
        w.grad = torch.tensor([3e38])
        s.step(optimizer)
        s.update()
    assert math.isfinite(optimizer.state[w]["sum"].item())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_parameter_that_joins_dampened_fused_sgd_later(maximize, weight_decay):
    options = {"maximize": maximize, "weight_decay": weight_decay}
    results = []
    for fused in (True, False):
        a, b = weight(1.0), weight(3.0)
        optimizer = SGD([a, b], 0.1, momentum=0.9, dampening=0.5, fused=fused, **options)
        s = scaler()
        for loss in (lambda a=a, b=b: a.sum(), lambda a=a, b=b: (a + b).sum(), lambda a=a, b=b: (a + b).sum()):
            optimizer.zero_grad()
            s.scale(loss()).backward()
            s.step(optimizer)
            s.update()
        results.append((a.item(), b.item()))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_growth_count_beyond_the_interval_still_grows():
    w = weight(1.0)
    s = scaler(growth_interval=5)
    s.load_state_dict({**s.state_dict(), "_growth_tracker": 7})
    late = scaler(growth_interval=50)
    late.load_state_dict({**late.state_dict(), "_growth_tracker": 40})
    late.set_growth_interval(10)
    for each in (s, late):
        optimizer = SGD([w], 1e-9)
        optimizer.zero_grad()
        each.scale(w.sum()).backward()
        each.step(optimizer)
        each.update()
        assert each.get_scale() == 2048.0


@pytest.mark.parametrize("state", [None, 5, [1], "x"])
def test_a_state_that_is_no_dict(state):
    with pytest.raises(StateError, match="a scaler state is a dict"):
        scaler().load_state_dict(state)


@pytest.mark.parametrize(
    "entries",
    [
        {"halfstep": 5},
        {"halfstep": "x"},
        {"scale": 10**400},
        {"growth_factor": 10**400},
        *[
            {"halfstep": {"kind": "dynamic", **entry}}
            for entry in (
                {"min_scale": 1e30},
                {"max_scale": 1.0, "min_scale": 2.0**-14},
                {"hysteresis": 2, "consecutive_hysteresis": "no"},
                {"hysteresis_tracker": 100},
                {"overflows_since_rescale": 5},
            )
        ],
    ],
    ids=str,
)
def test_contradictory_states_are_refused_whole(entries):
    s = scaler()
    before = s.state_dict()
    with pytest.raises(StateError):
        s.load_state_dict({**before, "growth_interval": 3, **entries})
    assert s.state_dict() == before


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": None},
        {"init_scale": 10**400},
        {"growth_factor": "x"},
        {"backoff_factor": "x"},
        {"tolerance": "x"},
    ],
    ids=str,
)
def test_settings_that_are_no_numbers(options):
    with pytest.raises(ArgumentError):
        scaler(**options)
