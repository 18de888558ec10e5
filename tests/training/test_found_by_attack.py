"""What an attack on the Stepper found: silent wrong results first."""

import copy
import gc
import math
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import ArgumentError, CallOrderError, StateError, UnsupportedError

pytestmark = pytest.mark.filterwarnings(
    "ignore::halfstep.errors.PrecisionWarning", "ignore::halfstep.errors.SkippedStepWarning"
)
SGD = torch.optim.SGD


def make(model, optimizer=None, **options):
    optimizer = optimizer or SGD(model.parameters(), 1.0)
    return halfstep.Stepper(model, optimizer, **{"policy": "fp32", "scale": halfstep.DynamicScale(), **options})


def one(stepper, loss_of):
    with stepper.forward():
        loss = loss_of()
    stepper.backward(loss)
    return stepper.step()


def test_a_loop_inside_an_outer_autocast_runs_backward_and_step_in_fp32():
    model = nn.Linear(4, 1, bias=False)
    stepper = make(model, scale=halfstep.NoScale())
    with torch.autocast("cpu", dtype=torch.float16):
        outcome = one(stepper, lambda: (model(torch.ones(1, 4)) * 1e-8).sum())
    assert outcome.grad_norm == pytest.approx(2e-8)
    stepper = make(model, policy="bf16-mixed", scale=halfstep.NoScale())
    with torch.autocast("cpu", dtype=torch.float16):
        outcome = one(stepper, lambda: model(torch.ones(1, 4)).float().sum() * 1e6)
    assert outcome.is_applied, "a finite gradient never skips"


def test_a_parameter_that_is_listed_twice_is_refused_by_the_stepper_and_divided_once_by_the_scaler():
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = SGD([*a.parameters(), *b.parameters()], 0.1)
    with pytest.raises(ArgumentError, match="stands twice"):
        make(nn.ModuleList([a, b]), optimizer)
    scaler, before = halfstep.GradScaler("cpu"), a.weight.detach().clone()
    scaler.scale(a.weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(a.weight.grad, torch.ones(4, 4))
    scaler.step(optimizer)
    assert torch.allclose(a.weight, before - 0.2), "torch steps it twice"


class Wrapper(torch.optim.Optimizer):
    """Keeps an inner optimizer, as Lookahead and ZeroRedundancyOptimizer do."""

    def __init__(self, inner):
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 1.0})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step()

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


def test_16_bit_weights_under_an_optimizer_that_steps_past_the_stand_ins():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    stepper = make(nn.ParameterList([p]), Wrapper(SGD([p], 0.5)))
    with pytest.raises(UnsupportedError, match="keeps an inner optimizer"):
        one(stepper, lambda: p.float().sum())


def test_a_wrapper_that_answers_for_a_fused_inner_optimizer():
    p = nn.Parameter(torch.zeros(2))
    stepper = make(nn.ParameterList([p]), Wrapper(SGD([p], 1.0, fused=True)))
    assert one(stepper, lambda: (p * torch.tensor([3.0, 4.0])).sum()).is_applied
    assert torch.equal(p.detach(), torch.tensor([-3.0, -4.0]))


def test_a_state_that_was_saved_unfused_loads_into_a_fused_optimizer():
    model = nn.Linear(2, 1)
    plain = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    plain.step()
    fused = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    fused.load_state_dict(plain.state_dict())
    assert fused._step_supports_amp_scaling
    assert not fused.param_groups[0]["fused"]
    assert one(make(model, fused), lambda: model(torch.ones(1, 2)).sum()).is_applied
    scaler = halfstep.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(fused)


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_on_the_optimizer_see_true_gradients(fused):
    p = nn.Parameter(torch.zeros(2))
    optimizer, seen = SGD([p], 1.0, fused=fused), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad.clone()))
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_([p], 1.0))
    one(make(nn.ParameterList([p]), optimizer), lambda: (p * torch.tensor([3.0, 0.5])).sum())
    assert torch.equal(seen[0], torch.tensor([3.0, 0.5]))
    assert torch.equal(p.detach(), torch.tensor([-1.0, -0.5]))


class Odd(nn.Module):
    """Buffers that are made late, grow, change dtype or vanish."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(2, 2), kind
        self.register_buffer("a", None if kind == "lazy" else torch.zeros(2))

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.kind == "lazy" and self.a is None:
            self.a = mean
        elif self.kind == "grows":
            self.a = torch.cat([self.a, mean])[-20:]
        elif self.kind == "dtype":
            self.a = self.a.double() + mean
        elif self.kind == "vanishes":
            self.a = None
        elif self.kind == "new":
            self.register_buffer("late", mean)
        return self.linear(x)


@pytest.mark.parametrize("kind", ["lazy", "grows", "dtype", "vanishes", "new"])
def test_buffers_that_are_made_replaced_or_removed_are_what_they_were(kind):
    model = Odd(kind)
    stepper = make(model)
    before = {name: None if b is None else b.clone() for name, b in model._buffers.items()}
    assert one(stepper, lambda: model(torch.full((3, 2), math.inf)).sum()).is_skipped
    assert model._buffers.keys() == before.keys()
    for name, value in before.items():
        now = model._buffers[name]
        assert now is None if value is None else (now.dtype == value.dtype and torch.equal(now, value))


@pytest.mark.parametrize("make_buffer", [lambda: torch.eye(3).to_sparse(), lambda: torch.ones(1).expand(4)])
def test_buffers_that_cannot_be_compared_or_written(make_buffer):
    model = nn.Linear(2, 1)
    model.register_buffer("constant", make_buffer())
    stepper = make(model)
    assert one(stepper, lambda: model(torch.ones(1, 2)).sum()).is_applied
    assert one(stepper, lambda: model(torch.ones(1, 2)).sum() * math.inf).is_skipped


def test_a_scripted_model_has_its_buffers_guarded_too():
    model = nn.BatchNorm1d(2)
    try:
        scripted = torch.jit.script(model)
    except (DeprecationWarning, RuntimeError):
        pytest.skip("this torch does not script")
    stepper = make(scripted)
    assert one(stepper, lambda: scripted(torch.tensor([[math.inf, 1.0], [1.0, 2.0]])).sum()).is_skipped
    assert torch.equal(scripted.running_mean, torch.zeros(2))


def test_norms_that_were_frozen_at_the_first_forward_of_a_window():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stepper = make(model)
    model.eval()
    one(stepper, lambda: model(torch.randn(4, 2)).sum())
    with stepper.forward():
        model(torch.randn(4, 2))
    model.train()
    assert one(stepper, lambda: model(torch.full((4, 2), math.inf)).sum()).is_skipped
    assert torch.equal(model[1].running_mean, torch.zeros(2))
    assert model[1].num_batches_tracked == 0


def test_a_forward_pass_that_raises_leaves_no_trace():
    model = nn.BatchNorm1d(2)
    stepper = make(model)

    def fail():
        with stepper.forward():
            model(torch.full((3, 2), math.inf))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model.running_mean, torch.zeros(2))


def test_loading_drops_what_a_forward_pass_without_backward_remembered():
    model = nn.BatchNorm1d(2)
    stepper = make(model)
    saved = stepper.state_dict()
    with stepper.forward():
        model(torch.randn(3, 2))
    model.running_mean.fill_(5.0)  # loaded
    stepper.load_state_dict(saved)
    assert one(stepper, lambda: model(torch.full((3, 2), math.inf)).sum()).is_skipped
    assert torch.equal(model.running_mean, torch.full((2,), 5.0))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1e50, 1e160])
def test_fp64_gradients_are_clipped_to_the_true_norm_and_moments_stay_finite(fused, size):
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    stepper = make(nn.ParameterList([p]), scale=halfstep.NoScale(), clip_norm=1.0)
    assert one(stepper, lambda: (p * size).sum()).is_applied
    assert p.detach().norm().item() == pytest.approx(1.0)
    q = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    adam = torch.optim.Adam([q], 0.1, fused=fused)
    assert one(make(nn.ParameterList([q]), adam, scale=halfstep.NoScale()), lambda: (q * size).sum()).is_applied
    assert all(torch.isfinite(v).all() for v in adam.state[q].values())
    assert torch.isfinite(q).all()


def test_nothing_trains_on_swapped_averages():
    model = nn.Linear(2, 1)
    ema = halfstep.EMA(model, 0.5)
    stepper = make(model, ema=ema)
    with ema.swapped():
        with pytest.raises(CallOrderError, match=r"forward\(\) inside ema.swapped"), stepper.forward():
            pass
        with pytest.raises(CallOrderError, match=r"discard\(\) inside ema.swapped"):
            stepper.discard()
        with torch.no_grad(), stepper.forward():
            model(torch.ones(1, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["schedulers"][0].update(gamma=math.nan),
        lambda s: s["schedulers"][0].pop("step_size"),
        lambda s: s["schedulers"][0].update(base_lrs=[1.0, 1.0]),
        lambda s: s["counts"].update(skipped_steps=5, steps=1),
    ],
)
def test_states_of_another_set_up_are_refused_whole(change):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 1.0)
    stepper = make(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    state = copy.deepcopy(stepper.state_dict())
    before = copy.deepcopy(state)
    change(state)
    with pytest.raises(StateError):
        stepper.load_state_dict(state)
    assert stepper.state_dict() == before


def test_what_cannot_be_replaced_says_so():
    stepper = make(nn.Linear(2, 1))
    for name in ("scale", "ema", "model", "optimizers", "policy"):
        with pytest.raises(AttributeError):
            setattr(stepper, name, None)


def test_warnings_as_errors_leave_the_optimizer_whole():
    model = nn.Linear(2, 1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    stepper = make(model, optimizer)
    one(stepper, lambda: model(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum())
    optimizer.load_state_dict(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(halfstep.errors.PrecisionWarning):
            one(stepper, lambda: model(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum())
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert one(stepper, lambda: model(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum()).is_applied


def test_callbacks_find_the_window_closed():
    model = nn.Linear(2, 1)
    saved = []
    stepper = make(model, on_overflow=lambda outcome: saved.append((outcome.step, stepper.state_dict())))
    one(stepper, lambda: model(torch.ones(1, 2)).sum() * math.inf)
    assert saved[0][0] == saved[0][1]["counts"]["skipped_steps"] == 1


def test_an_optimizer_that_raises_leaves_buffers_as_they_were():
    model = nn.BatchNorm1d(2)
    optimizer = SGD(model.parameters(), 1.0)

    def fail(*_):
        raise MemoryError

    stepper = make(model, optimizer)
    optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        one(stepper, lambda: model(torch.randn(3, 2)).sum())
    assert model.num_batches_tracked == 0
    assert stepper.guarded_bytes == 0


def test_backward_outside_grad_mode_works_as_in_torch():
    model = nn.Linear(2, 1)
    stepper = make(model)
    with stepper.forward():
        loss = model(torch.ones(1, 2)).sum()
    with torch.no_grad():
        stepper.backward(loss)
    assert stepper.step().is_applied


def test_two_steppers_can_use_one_forward_pass():
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    first, second = make(nn.ModuleList([a, b]), SGD(a.parameters(), 1.0)), make(b)
    with first.forward(), second.forward():
        out = b(a(torch.ones(1, 2))).sum()
    first.backward(out, inputs=list(a.parameters()), retain_graph=True)
    second.backward(out, inputs=list(b.parameters()))
    assert first.step().is_applied
    assert second.step().is_applied


def test_the_optimizers_state_is_saved_with_the_right_learning_rate(delayed):
    """Saved before the stepper's: the scheduler that was due moves first."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 1.0)
    stepper = make(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(3):
        one(stepper, lambda: model(torch.ones(1, 2)).sum())
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.125


def test_copies_of_masks_go_once_the_device_has_told(delayed):
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.ones(100))
    stepper, held = make(model), []
    for _ in range(4):
        with stepper.forward():
            loss = model(torch.ones(1, 2)).sum()
        held.append(stepper.guarded_bytes)
        stepper.backward(loss)
        stepper.step()
    assert held == [400, 400, 0, 0], "known when the second step settles the first"


def test_a_window_without_gradients_keeps_what_it_wrote_and_drops_its_copies():
    model = nn.BatchNorm1d(2)
    stepper = make(model)
    x = torch.randn(3, 2, requires_grad=True)
    with stepper.forward():
        loss = model(x).sum()
    assert stepper.guarded_bytes > 0
    stepper.backward(loss, inputs=[x])
    assert stepper.step().kind == "no_gradients"
    assert stepper.guarded_bytes == 0
    assert model.num_batches_tracked == 1


def test_a_first_buffer_that_is_registered_in_a_skipped_window_goes():
    model = nn.Linear(2, 1)
    stepper = make(model)

    def loss_of():
        model.register_buffer("seen", torch.full((1,), math.inf))
        return model(torch.ones(1, 2)).sum() * math.inf

    assert one(stepper, loss_of).is_skipped
    assert "seen" not in model._buffers
    model.register_buffer("mine", torch.ones(1))
    stepper.discard()  # no forward pass has run since: nothing of the user's is taken away
    assert "mine" in model._buffers


@pytest.mark.parametrize("on_instance", [True, False])
def test_16_bit_weights_are_left_to_an_optimizer_that_announces_support(on_instance):
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            if on_instance:
                self._step_supports_amp_scaling = True

        def step(self, closure=None):
            seen.append([p.dtype for p in self.param_groups[0]["params"]])

    if not on_instance:
        Own._step_supports_amp_scaling = True
    seen, p = [], nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    one(make(nn.ParameterList([p]), Own([p])), lambda: p.float().sum())
    assert seen == [[torch.bfloat16]]


def test_a_window_that_the_program_ends_in_is_mentioned():
    code = (
        "import torch, halfstep\n"
        "def main():\n"
        "    m = torch.nn.Linear(1, 1)\n"
        "    s = halfstep.Stepper(m, torch.optim.SGD(m.parameters(), 1.0), policy='fp32', accumulate=4)\n"
        "    with s.forward(): loss = m(torch.ones(1, 1)).sum()\n"
        "    s.backward(loss); s.step()\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "The program ends, and a window is open: micro-batches so far: 1 of 4" in ended.stderr
    assert "Call flush()" in ended.stderr


def test_steppers_leave_no_hooks_on_an_optimizer():
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 1.0)
    for _ in range(3):
        make(model, optimizer)
    gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == 0


@pytest.mark.parametrize("on_host", [True, False])
def test_a_scale_that_the_user_moves_inside_a_window(on_host, request):
    if not on_host:
        request.getfixturevalue("delayed")
    model = nn.Linear(2, 1)
    stepper = make(model, scale=halfstep.DynamicScale(1024.0))
    with stepper.forward():
        loss = model(torch.ones(1, 2)).sum() * math.inf
    stepper.backward(loss)
    stepper.scale.set_(8.0)
    assert stepper.step().is_skipped
    assert stepper.scale.get() == 8.0


def test_numbers_of_numpy_are_weights():
    np = pytest.importorskip("numpy")
    model = nn.Linear(2, 1)
    stepper = make(model, accumulate=2)
    for weight in (np.int64(3), np.float32(1.0)):
        with stepper.forward():
            loss = F.mse_loss(model(torch.ones(1, 2)), torch.zeros(1, 1))
        stepper.backward(loss, weight)
        outcome = stepper.step()
    assert outcome.is_applied
