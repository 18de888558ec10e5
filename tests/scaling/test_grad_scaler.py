"""GradScaler against torch's class where both work, and right where torch's is not."""

import copy
import math
import pickle
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

import halfstep
from halfstep.errors import (
    ArgumentError,
    CallOrderError,
    HalfstepWarning,
    NonFiniteError,
    NotScaledError,
    SkippedStepWarning,
    StateError,
    UnsupportedError,
)
from halfstep.scaling import settings
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale, StaticScale
from halfstep.scaling.skips import StepOutcome

INF, NAN = float("inf"), float("nan")
SGD = torch.optim.SGD
quiet = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")


def scaler(**options):
    return halfstep.GradScaler("cpu", **{"init_scale": 1024.0, **options})


def weight(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def window(s, optimizer, loss):
    optimizer.zero_grad()
    s.scale(loss).backward()
    result = s.step(optimizer)
    s.update()
    return result


def four_parts(caught):
    assert re.search(r"\n  true: .*\n  why:  .*\n  fix:  ", str(caught.value)), str(caught.value)


# -- the same as torch -----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9),
    "sgd-fused": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "sgd-fused-dampening": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.3, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


def train(make_scaler, make_optimizer, bad_steps=(), clip=False, steps=25):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, s = make_optimizer(model.parameters()), make_scaler()
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean() * (INF if step in bad_steps else 1.0)
        s.scale(loss).backward()
        if clip:
            s.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        s.step(optimizer)
        s.update()
        scales.append(s.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


@quiet
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad_steps", [(), (3, 4, 11)], ids=["clean", "overflows"])
def test_weights_and_scales_equal_torchs_bit_for_bit(name, clip, bad_steps):
    options = {"init_scale": 2.0**13, "growth_interval": 4}
    ours = train(lambda: halfstep.GradScaler("cpu", **options), OPTIMIZERS[name], bad_steps, clip)
    theirs = train(lambda: torch.amp.GradScaler("cpu", **options), OPTIMIZERS[name], bad_steps, clip)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert ours[1] == theirs[1]


def test_a_scale_that_is_no_power_of_two_rounds_as_torch_rounds():
    ours = train(lambda: halfstep.GradScaler("cpu", init_scale=1000.0), OPTIMIZERS["adamw"])
    theirs = train(lambda: torch.amp.GradScaler("cpu", init_scale=1000.0), OPTIMIZERS["adamw"])
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_constructor_order_defaults_and_type():
    s = halfstep.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert isinstance(s, torch.amp.GradScaler)
    assert (s.get_scale(), s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()) == (8, 3, 0.25, 7)
    default, torchs = halfstep.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert torchs.state_dict().items() <= default.state_dict().items()
    assert default.is_enabled()


def test_the_settings_table_repeats_the_constructors_defaults():
    import inspect

    parameters = inspect.signature(halfstep.GradScaler.__init__).parameters
    assert {name: parameters[name].default for name in settings.DEFAULTS} == settings.DEFAULTS


def test_disabled_passes_through():
    s = halfstep.GradScaler("cpu", enabled=False)
    w = weight(1.0)
    optimizer = SGD([w], 0.1)
    loss = w.sum() * NAN
    assert s.scale(loss) is loss
    loss.backward()
    s.unscale_(optimizer)
    s.step(optimizer)
    s.update()
    assert math.isnan(w.item()), "torch's contract: a disabled scaler checks nothing"
    assert (s.get_scale(), s.state_dict(), s.is_enabled()) == (1.0, {}, False)
    s.load_state_dict({"scale": 4.0})
    assert repr(copy.deepcopy(s)) == "GradScaler(enabled=False)"


def test_cuda_without_cuda_warns_and_disables_as_torch_does():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not halfstep.GradScaler().is_enabled()


def test_scale_keeps_the_structure_of_its_outputs():
    s = scaler()
    one, two = torch.ones(3), torch.full((1,), 2.0)
    scaled = s.scale([one, (two, one)])
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert scaled[1][0].item() == 2048.0
    assert torch.equal(scaled[0], torch.full((3,), 1024.0))
    assert [t.item() for t in s.scale(iter([two]))] == [2048.0]


def test_private_names_that_other_libraries_touch():
    s, w = scaler(), weight(1.0)
    assert s._scale is None
    assert s._growth_tracker is None
    assert s._init_scale == 1024.0
    s._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert s._scale.item() == 1024.0
    assert s._growth_tracker.dtype == torch.int32
    s._scale = torch.tensor(64.0)
    assert s.get_scale() == 64.0
    assert s._get_scale_async() is s._scale
    optimizer = SGD([w], 0.1)
    s.scale(w.sum()).backward()
    assert s._per_optimizer_states[id(optimizer)] == {"stage": OptState.READY, "found_inf_per_device": {}}
    assert s._check_inf_per_device(optimizer)[torch.device("cpu")].item() == 0.0
    assert s._found_inf_per_device(optimizer)
    found = s._unscale_grads_(optimizer, torch.tensor(1 / 64), torch.zeros(()), False)
    assert found[torch.device("cpu")].item() == 0.0
    assert w.grad.item() == 1.0
    assert s._maybe_opt_step(optimizer, s._per_optimizer_states[id(optimizer)]) is None
    assert w.item() == pytest.approx(0.9)


class _OldContract(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        self.given = grad_scaler
        return super().step()


def test_the_older_contract_gets_the_scaler_itself():
    w = weight(1.0)
    optimizer, s = _OldContract([w], 0.1), scaler()
    s.scale(w.sum()).backward()
    with pytest.warns(FutureWarning, match="grad_scaler"):
        s.step(optimizer)
    assert optimizer.given is s


def test_a_grad_scale_that_the_user_set_is_respected():
    seen = []
    w = weight(1.0)
    optimizer = torch.optim.AdamW([w], 0.1, fused=True)
    optimizer.register_step_pre_hook(lambda o, *_: seen.append((o.grad_scale.item(), o.found_inf.item())))
    optimizer.grad_scale = torch.tensor(4.0)
    s = scaler()
    s.scale(w.sum()).backward()
    s.step(optimizer)
    assert seen == [(4096.0, 0.0)]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_step_returns_what_the_optimizer_returned():
    class Returns(SGD):
        def step(self, closure=None):
            super().step()
            return "returned"

    w = weight(1.0)
    assert window(scaler(), Returns([w], 0.1), w.sum()) == "returned"


def test_hooks_and_schedulers_see_the_step():
    w = weight(1.0)
    optimizer = SGD([w], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    window(scaler(), optimizer, w.sum())
    scheduler.step()  # warns, and so fails here, if optimizer.step was not seen
    assert optimizer.param_groups[0]["lr"] == 0.05


# -- half-precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_loss_is_scaled_in_fp32(dtype):
    s = halfstep.GradScaler("cpu")
    for loss in (torch.tensor(3.0, dtype=dtype), torch.tensor([3.0], dtype=dtype)):
        assert s.scale(loss).dtype == torch.float32
        assert s.scale(loss).item() == 3 * 2.0**16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_16_bit_parameters_step_in_fp32(dtype, name):
    """One step equals the step of an fp32 copy fed the same gradient, rounded once."""
    values, gradient = torch.randn(50).to(dtype), (torch.randn(50) * 1e-4).to(dtype)
    narrow, wide = nn.Parameter(values.clone()), nn.Parameter(values.float())
    narrow_optimizer, wide_optimizer = OPTIMIZERS[name]([narrow]), OPTIMIZERS[name]([wide])
    storage = narrow.data_ptr()
    s = scaler()
    for _ in range(2):
        s.scale((narrow.float() * gradient.float()).sum()).backward()
        assert narrow.grad.dtype == dtype
        wide.grad = narrow.grad.float() / 1024
        s.step(narrow_optimizer)
        s.update()
        wide_optimizer.step()
        assert torch.equal(narrow, wide.detach().to(dtype))
        wide.data.copy_(narrow.detach().float())  # both go on from the rounded weights
        narrow_optimizer.zero_grad()
    assert narrow.dtype == dtype
    assert narrow.data_ptr() == storage
    state = narrow_optimizer.state[narrow].values()
    assert all(v.dtype == torch.float32 for v in state if isinstance(v, torch.Tensor))


def test_fp16_adam_survives_zero_and_tiny_gradients():
    """Its eps and second moment would be zero in fp16: torch writes NaN and -inf here."""
    for g in (0.0, 1e-4, 1.0):
        w = weight(1.0, dtype=torch.float16)
        window(scaler(init_scale=1.0), torch.optim.Adam([w], lr=1e-3), (w * g).sum())
        assert w.item() == pytest.approx(1.0 if g == 0 else 0.999, abs=5e-4)


def test_a_weight_beyond_fp16_saturates_and_is_counted():
    w = weight(65504.0, -65504.0, 1.0, dtype=torch.float16)
    s = scaler(init_scale=1.0)
    window(s, SGD([w], lr=1e4), (w.float() * torch.tensor([-1.0, 1.0, 0.0])).sum())
    assert w.tolist() == [65504.0, -65504.0, 1.0]
    assert s.saturated_weights == 2


@quiet
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_skipped_16_bit_step_changes_no_bit(dtype):
    w = nn.Parameter(torch.randn(9).to(dtype))
    before = w.detach().clone()
    for make in OPTIMIZERS.values():
        window(scaler(), make([w]), w.sum() * INF)
        assert torch.equal(w, before)


def test_an_exception_in_the_step_gives_the_16_bit_weights_back():
    class Breaks(SGD):
        def step(self, closure=None):
            raise KeyError("inside")

    w = weight(1.0, dtype=torch.float16)
    storage = w.data_ptr()
    s = scaler()
    s.scale(w.float().sum()).backward()
    with pytest.raises(KeyError):
        s.step(Breaks([w], 0.1))
    assert (w.dtype, w.item(), w.data_ptr()) == (torch.float16, 1.0, storage)
    assert w.grad.dtype == torch.float16


def test_unscale_refuses_fp16_gradients_with_the_remedy():
    w = weight(1.0, dtype=torch.float16)
    s = scaler()
    s.scale(w.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        s.unscale_(SGD([w], 0.1))
    four_parts(caught)
    assert w.grad.item() == 1024.0, "nothing was changed"
    assert "to clip, use halfstep.Stepper(clip_norm=...)" in caught.value.fix
    own = halfstep.optim.AdamW([w], clip_norm=1.0)  # which clips by the true gradient
    with pytest.raises(ValueError, match=r"to clip, use AdamW\(clip_norm=...\)"):
        s.unscale_(own)


def test_mixed_dtypes_in_one_optimizer():
    ws = [weight(1.0, dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    window(scaler(), SGD(ws, 0.5), sum(w.double().sum() for w in ws))
    assert [w.item() for w in ws] == [0.5] * 4


# -- unusual gradients -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")  # torch's news about its own sparse tensors
def test_sparse_gradients_stay_sparse_and_equal_dense_ones():
    index = torch.tensor([1, 1, 3])
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(4, 2, sparse=sparse)
        optimizer, s = SGD(embedding.parameters(), 0.1), scaler()
        s.scale(embedding(index).sum()).backward()
        s.unscale_(optimizer)
        assert embedding.weight.grad.is_sparse == sparse
        s.step(optimizer)
        results.append(embedding.weight.detach().clone())
    # SGD adds duplicates one after the other: one rounding more than the dense sum.
    torch.testing.assert_close(*results, rtol=2**-22, atol=0)


def test_complex_parameters():
    w = nn.Parameter(torch.tensor([1 + 1j]))
    s = scaler()
    window(s, SGD([w], 0.1), w.abs().square().sum())
    assert w.item() == pytest.approx(0.8 + 0.8j)


@quiet
def test_a_complex_nan_in_the_imaginary_part_is_seen():
    w = nn.Parameter(torch.tensor([1 + 1j]))
    s, optimizer = scaler(), SGD([w], 0.1)
    s.scale(w.real.sum()).backward()
    w.grad = torch.tensor([complex(1, NAN)])
    s.step(optimizer)
    assert not s.was_step_applied(optimizer)


def test_gradients_whose_squares_overflow_are_applied_and_leave_finite_moments():
    """A finite gradient never skips, and never writes inf into a moment, though 3e38 squared is no fp32 number."""
    for name, make in OPTIMIZERS.items():
        w = weight(1.0)
        optimizer, s = make([w]), scaler(init_scale=1.0)
        for _ in range(3):
            s.scale(w.sum() * 0).backward()
            w.grad = torch.tensor([3e38])
            s.step(optimizer)
            s.update()
            assert s.was_step_applied(optimizer), name
            optimizer.zero_grad()
        state = [v for v in optimizer.state[w].values() if isinstance(v, torch.Tensor)]
        assert all(torch.isfinite(t).all() for t in [w, *state]), name
        assert w.item() < 1.0


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**-126])
def test_a_scale_below_one_does_not_turn_a_large_gradient_into_inf(scale):
    for make in OPTIMIZERS.values():
        w = weight(1.0)
        optimizer, s = make([w]), scaler(init_scale=scale)
        s.scale(w.sum() * 0).backward()
        w.grad = torch.tensor([3e38])  # unscaled, 5e42
        s.step(optimizer)
        assert torch.isfinite(w).all()


# -- several optimizers, none, closures ------------------------------------------------------------------------------


@quiet
def test_two_optimizers_one_update():
    a, b = weight(1.0), weight(1.0)
    oa, ob, s = SGD([a], 0.1), SGD([b], 0.1), scaler()
    s.scale(a.sum() * INF).backward()
    s.scale(b.sum()).backward()
    s.step(oa)
    s.step(ob)
    s.update()
    assert (a.item(), b.item()) == (1.0, pytest.approx(0.9))
    assert (s.outcome(oa).kind, s.outcome(ob).kind) == ("skipped", "applied")
    assert s.get_scale() == 512.0
    assert s.skipped_steps == 1


def test_an_optimizer_without_gradients_is_reported():
    a, b = weight(1.0), weight(1.0)
    oa, ob, s = SGD([a], 0.1), SGD([b], 0.1), scaler(growth_interval=1)
    s.scale(a.sum()).backward()
    s.step(oa)
    s.step(ob)
    s.update()
    assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)
    assert s.outcome(ob) == StepOutcome("no_gradients")
    assert not s.was_step_applied(ob)
    assert s.get_scale() == 2048.0, "growth is decided by the optimizers that had gradients"


def test_an_optimizer_that_never_has_gradients_is_mentioned_once():
    a, model = weight(1.0), nn.Linear(2, 1)
    oa, ob, s = SGD([a], 1e-9), SGD(model.parameters(), 0.1), scaler(model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            oa.zero_grad()
            s.scale(a.sum()).backward()
            s.step(oa)
            s.step(ob)
            s.update()
    (warning,) = caught
    assert issubclass(warning.category, HalfstepWarning)
    assert "no gradient for 100 steps" in str(warning.message)
    assert "weight, bias" in str(warning.message)
    assert warning.filename == __file__


def lbfgs_steps(how, bad_call=None, make_scaler=scaler, scaled=True):
    w = weight(0.0)
    optimizer, s, calls = torch.optim.LBFGS([w], lr=1.0, max_iter=5), make_scaler(), []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = (w - 3).square().sum() * (INF if len(calls) == bad_call else 1.0)
        scaled_loss = s.scale(loss)
        scaled_loss.backward()
        return scaled_loss if scaled else loss.detach()

    for _ in range(2):
        result = s.step(optimizer, closure) if how == "position" else s.step(optimizer, closure=closure)
        outcome = s.outcome(optimizer)
        s.update()
        if bad_call:
            break
    return w.item(), result, outcome, s


@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("scaled", [True, False])
def test_lbfgs_converges_with_either_call_and_either_loss(how, scaled):
    w, result, outcome, _ = lbfgs_steps(how, scaled=scaled)
    assert w == 3.0
    assert outcome.kind == "applied"
    assert float(result) == pytest.approx(0.0, abs=1e-9)


@quiet
@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("bad_call", [1, 2, 3])
def test_a_bad_evaluation_restores_weights_and_counts_as_a_skip(how, bad_call):
    w, result, outcome, s = lbfgs_steps(how, bad_call)
    assert w == 0.0
    assert result is None
    assert outcome.kind == "skipped"
    assert (s.get_scale(), s.skipped_steps) == (512.0, 1)


def test_a_closure_equals_no_scaler_for_every_optimizer():
    for name, make in OPTIMIZERS.items():
        a, b = weight(0.3, -0.2), weight(0.3, -0.2)
        oa, ob, s = make([a]), make([b]), scaler()

        def scaled(o=oa, w=a, s=s):
            o.zero_grad()
            loss = s.scale((w - 1).square().sum())
            loss.backward()
            return loss

        def plain(o=ob, w=b):
            o.zero_grad()
            loss = (w - 1).square().sum()
            loss.backward()
            return loss.detach()

        for _ in range(3):
            assert s.step(oa, scaled).item() == ob.step(plain).item(), name
            s.update()
        assert torch.equal(a, b), name


def test_a_closure_with_16_bit_parameters_is_refused_before_it_runs():
    w = weight(1.0, dtype=torch.float16)
    s = scaler()
    s.scale(w.float().sum()).backward()
    with pytest.raises(UnsupportedError, match="16-bit parameters") as caught:
        s.step(SGD([w], 0.1), lambda: pytest.fail("ran"))
    four_parts(caught)


# -- what happened, and who was at fault -----------------------------------------------------------------------------


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.value, None


def poisoned(place, value, num_layers=6, reverse=False):
    """A chain whose gradient turns bad below layer ``place``; layer ``place`` itself is the last good one."""
    layers = [nn.Linear(3, 3) for _ in range(num_layers)]
    model = nn.Module()
    for i in reversed(range(num_layers)) if reverse else range(num_layers):
        model.add_module(f"layer{i}", layers[i])
    x = torch.ones(2, 3)
    for i, layer in enumerate(layers):
        x = layer(x)
        if i == place:
            x = _Poison.apply(x, value)
    return model, x.sum()


@quiet
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "defined in reverse"])
def test_the_culprit_is_the_bad_parameter_nearest_the_loss(value, place, reverse):
    model, loss = poisoned(place, value, reverse=reverse)
    optimizer, s = SGD(model.parameters(), 0.1), scaler(model=model)
    s.scale(loss).backward()
    s.step(optimizer)
    culprit = s.outcome(optimizer).culprit
    assert culprit.name.startswith(f"layer{place}.")
    assert culprit.num_bad == 2 * (place + 1)
    s.update()
    assert s.culprit == culprit


@quiet
def test_inf_and_nan_are_told_apart_and_shapes_are_given():
    w = weight(1.0, 2.0)
    for bad, kind in ((INF, "inf"), (NAN, "nan")):
        s, optimizer = scaler(), SGD([w], 0.1)
        window(s, optimizer, (w * bad).sum())
        assert s.culprit.kind == kind
        assert s.culprit.shape == (2,)
        assert s.culprit.name == "parameter 0 of group 0"
    assert "(shape [2]) holds NaN" in str(s.culprit)


def test_skips_are_visible_and_do_not_flood():
    w = weight(1.0)
    s, optimizer = scaler(on_repeat="ignore"), SGD([w], 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(120):
            window(s, optimizer, w.sum() * INF)
    assert [re.search(r"Step (\d+)", str(c.message)).group(1) for c in caught] == ["1", "10", "100"]
    assert all(c.category is SkippedStepWarning for c in caught)
    assert all(c.filename == __file__ for c in caught), "the warning points at the caller's line"
    assert "parameter 0 of group 0" in str(caught[0].message)
    assert "from 1024 to 512" in str(caught[0].message)
    assert s.skipped_steps == 120


@quiet
def test_repeat_raises_or_calls_or_warns():
    w = weight(1.0)
    s = scaler(on_repeat="raise", repeat_after=4)
    for _ in range(3):
        window(s, SGD([w], 0.1), w.sum() * NAN)
    with pytest.raises(NonFiniteError, match="skips in a row: 4") as caught:
        window(s, SGD([w], 0.1), w.sum() * NAN)
    four_parts(caught)
    assert isinstance(caught.value, FloatingPointError)
    assert (s.skipped_steps, s.get_scale()) == (4, 64.0), "the books are right, and the loop can go on"
    calls = []
    s, optimizer = (
        scaler(on_repeat=lambda culprit, step: calls.append((culprit.kind, step)), repeat_after=3),
        SGD([w], 0.1),
    )
    for bad in (1, 1, 1, 1, 0, 1, 1, 1):
        window(s, optimizer, w.sum() * (NAN if bad else 1.0))
    assert calls == [("nan", 3), ("nan", 8)], "once for each run of skips"
    s = scaler(repeat_after=2)
    window(s, optimizer, w.sum() * NAN)
    with pytest.warns(SkippedStepWarning, match="lowering the scale cannot help"):
        window(s, optimizer, w.sum() * NAN)


def test_noscale_still_checks():
    w = weight(1.0, dtype=torch.bfloat16)
    s, optimizer = halfstep.GradScaler("cpu", scale=NoScale()), SGD([w], 0.1)
    with pytest.warns(SkippedStepWarning, match="the scale stays"):
        window(s, optimizer, (w * NAN).sum())
    assert w.item() == 1.0
    window(s, optimizer, w.sum())
    assert w.item() == pytest.approx(0.9, abs=4e-3)
    assert s.get_scale() == 1.0


@quiet
@pytest.mark.parametrize(
    "make", [NoScale, lambda: StaticScale(64), lambda: DynamicScale(64.0, growth_interval=2), AdaptiveScale]
)
def test_every_scale_trains(make):
    w = weight(1.0)
    s, optimizer = halfstep.GradScaler("cpu", scale=make()), SGD([w], 0.1)
    for step in range(5):
        window(s, optimizer, w.sum() * (INF if step == 1 else 1.0))
    assert w.item() == pytest.approx(0.6)
    assert s.skipped_steps == 1


def test_a_scale_that_is_passed_keeps_its_settings():
    """torch's constructor writes its own defaults into names that are views of the scale."""
    scale = DynamicScale(64.0, 4.0, 0.25, 3, min_scale=2.0**-3, max_scale=2.0**12, hysteresis=2, tolerance=0.1)
    before = scale.state_dict()
    s = halfstep.GradScaler("cpu", scale=scale)
    assert scale.state_dict() == before
    assert (s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()) == (4.0, 0.25, 3)


@pytest.mark.parametrize("make", [NoScale, lambda: StaticScale(8.0), AdaptiveScale])
def test_settings_that_a_scale_does_not_have_are_refused(make):
    s = halfstep.GradScaler("cpu", scale=make())
    for call in (lambda: s.set_growth_factor(3.0), lambda: s.set_backoff_factor(0.5), lambda: s.set_growth_interval(9)):
        with pytest.raises(ArgumentError, match="could not take effect"):
            call()


# -- bounds and setting the scale ------------------------------------------------------------------------------------


@quiet
def test_200_overflows_then_a_clean_step_is_applied_exactly():
    for make in OPTIMIZERS.values():
        a, b = weight(1.0), weight(1.0)
        oa, ob = make([a]), make([b])
        s = halfstep.GradScaler("cpu", on_repeat="ignore")
        for _ in range(200):
            window(s, oa, a.sum() * INF)
        assert a.item() == 1.0
        window(s, oa, a.sum())
        b.sum().backward()
        ob.step()
        assert torch.equal(a, b)
        assert s.get_scale() == 2.0**-14


def test_a_scale_that_the_user_sets_widens_default_bounds_only():
    s = halfstep.GradScaler("cpu", init_scale=2.0**30, growth_interval=1)
    w = weight(1.0)
    window(s, SGD([w], 1e-9), w.sum())
    assert s.get_scale() == 2.0**30, "as far as the user went, and no further"
    s.update(2.0**-20)
    assert s.get_scale() == 2.0**-20
    tight = scaler(max_scale=2048.0)
    tight.scale(w.sum())
    with pytest.raises(ArgumentError, match=r"new_scale=4096\.0"):
        tight.update(4096.0)
    assert tight.get_scale() == 1024.0


def test_update_with_a_new_scale():
    s = scaler()
    s.scale(torch.ones(1))
    for new, value in ((4.0, 4.0), (8, 8.0), (torch.tensor(16.0), 16.0), (torch.tensor([32.0]), 32.0)):
        s.update(new)
        assert s.get_scale() == value
    for bad in (INF, NAN, 0.0, -1.0, torch.tensor(NAN), torch.ones(2), torch.ones(1, requires_grad=True)):
        with pytest.raises(ArgumentError) as caught:
            s.update(bad)
        four_parts(caught)
        assert s.get_scale() == 32.0


def test_setters_refuse_what_the_constructor_refuses():
    s = scaler()
    for call in (
        lambda: s.set_growth_factor(1.0),
        lambda: s.set_backoff_factor(1.0),
        lambda: s.set_backoff_factor(0.0),
        lambda: s.set_growth_interval(0),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert s.state_dict() == scaler().state_dict()


def test_a_shorter_growth_interval_still_grows():
    """torch's kernel compares for equality: an interval set below the count would never be reached."""
    w = weight(1.0)
    s, optimizer = scaler(growth_interval=10), SGD([w], 1e-9)
    for _ in range(6):
        window(s, optimizer, w.sum())
    s.set_growth_interval(3)
    window(s, optimizer, w.sum())
    assert s.get_scale() == 2048.0


# -- order of calls and bad input ------------------------------------------------------------------------------------


def ready():
    w = weight(1.0)
    s, optimizer = scaler(), SGD([w], 0.1)
    s.scale(w.sum()).backward()
    return s, optimizer, w


def test_wrong_orders_say_what_to_do_and_change_nothing():
    s, optimizer, w = ready()
    s.unscale_(optimizer)
    with pytest.raises(CallOrderError, match=r"unscale_\(\) has already been called on this optimizer since") as caught:
        s.unscale_(optimizer)
    four_parts(caught)
    assert "SGD (parameters: 1, groups: 1)" in str(caught.value)
    assert w.grad.item() == 1.0
    s.step(optimizer)
    with pytest.raises(CallOrderError, match=r"step\(\) has already been called since the last update"):
        s.step(optimizer)
    with pytest.raises(CallOrderError, match=r"unscale_\(\) is being called after step\(\)"):
        s.unscale_(optimizer)
    assert w.item() == pytest.approx(0.9)
    s.update()
    with pytest.raises(NotScaledError, match="No inf checks were recorded prior to update") as caught:
        s.update()
    assert isinstance(caught.value, AssertionError)
    assert s.get_scale() == 1024.0


def test_before_the_first_scale():
    s, optimizer = scaler(), SGD([weight(1.0)], 0.1)
    for call in (lambda: s.step(optimizer), s.update, lambda: s.unscale_(optimizer)):
        with pytest.raises(AssertionError, match="_scale is None") as caught:
            call()
        four_parts(caught)
    with pytest.raises(CallOrderError, match="has not stepped that optimizer"):
        s.outcome(optimizer)


def test_step_before_backward():
    w = weight(1.0)
    s = scaler()
    s.scale(w.sum())
    with pytest.raises(CallOrderError, match=r"before backward\(\)") as caught:
        s.step(SGD([w], 0.1))
    four_parts(caught)


def test_a_frozen_model_is_named_as_such():
    model = nn.Linear(2, 1).requires_grad_(False)
    s = scaler()
    s.scale(model(torch.ones(1, 2)).sum())
    with pytest.raises(CallOrderError, match="frozen") as caught:
        s.step(SGD(model.parameters(), 0.1))
    four_parts(caught)


@pytest.mark.parametrize(
    ("loss", "text"),
    [(3.0, "a float"), (torch.ones(2, requires_grad=True), r"shape \(2,\)"), (torch.ones(()), "without a graph")],
)
def test_backward_says_what_is_wrong_with_the_loss(loss, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        scaler().backward(loss)
    four_parts(caught)


def test_backward_equals_scale_then_backward():
    w = weight(2.0)
    scaler().backward(w.square().sum(), retain_graph=True)
    assert w.grad.item() == 4 * 1024.0


@pytest.mark.parametrize("outputs", [3.0, None, "loss", object()])
def test_scale_of_no_tensor(outputs):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler().scale(outputs)


def test_a_parameter_in_two_optimizers():
    w = weight(1.0)
    s, one, two = scaler(), SGD([w], 0.1), SGD([w], 0.1)
    s.scale(w.sum()).backward()
    s.step(one)
    with pytest.raises(ArgumentError, match="belong to both optimizers") as caught:
        s.step(two)
    four_parts(caught)
    assert w.item() == pytest.approx(0.9)


def test_an_optimizer_without_parameters():
    s, _, _ = ready()
    with pytest.raises(ArgumentError, match="holds no parameters") as caught:
        s.step(SGD([{"params": []}], 0.1))
    four_parts(caught)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": -1.0}, "init_scale=-1.0"),
        ({"init_scale": INF}, "init_scale=inf"),
        ({"growth_factor": 1.0}, r"The growth factor must be > 1\.0"),
        ({"backoff_factor": 1.0}, r"The backoff factor must be < 1\.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"max_scale": 512.0}, "max_scale=512.0"),
        ({"scale": 3.0}, "scale=3.0"),
        ({"scale": NoScale(), "init_scale": 8.0}, "init_scale"),
        ({"scale": NoScale(), "init_scale": 2.0**16, "hysteresis": 2}, "hysteresis"),
        ({"model": "resnet"}, "model=str"),
        ({"on_repeat": "explode"}, "on_repeat='explode'"),
        ({"repeat_after": 0}, "repeat_after=0"),
    ],
)
def test_bad_settings(options, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        scaler(**options)
    four_parts(caught)


# -- state -----------------------------------------------------------------------------------------------------------


@quiet
def test_state_goes_both_ways_with_torch():
    s, optimizer, w = ready()
    s.step(optimizer)
    s.update()
    window(s, optimizer, w.sum() * INF)
    window(s, optimizer, w.sum())
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(s.state_dict())
    five = theirs.state_dict()
    assert five == {k: v for k, v in s.state_dict().items() if k != "halfstep"}
    ours = scaler(init_scale=4.0, hysteresis=2)
    ours.load_state_dict({**five, "scale": 2.0**40})
    assert ours.get_scale() == 2.0**40
    assert ours.state_dict()["_growth_tracker"] == 1
    assert s.state_dict()["halfstep"]["skipped_steps"] == 1


@quiet
def test_resume_in_a_new_process_repeats_the_run(tmp_path):
    script = """
import sys, torch, warnings, halfstep
warnings.simplefilter("ignore")
def run(start, stop, load, save):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1); opt = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    s = halfstep.GradScaler("cpu", growth_interval=3, hysteresis=2, tolerance=0.1)
    if load:
        state = torch.load(load)
        model.load_state_dict(state["m"]); opt.load_state_dict(state["o"]); s.load_state_dict(state["s"])
    for step in range(start, stop):
        opt.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        s.scale(model(x).square().mean() * (float("inf") if step in (2, 3, 17, 18, 23) else 1.0)).backward()
        s.step(opt); s.update(); print(s.get_scale(), s.skipped_steps)
    torch.save({"m": model.state_dict(), "o": opt.state_dict(), "s": s.state_dict()}, save)
start, stop, load, save = sys.argv[1:]
run(int(start), int(stop), load, save)
"""

    def run(start, stop, load, save):
        arguments = [sys.executable, "-c", script, str(start), str(stop), load, str(tmp_path / save)]
        return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout

    whole = run(0, 30, "", "whole")
    parts = run(0, 19, "", "half") + run(19, 30, str(tmp_path / "half"), "parts")
    assert whole == parts
    a, b = torch.load(tmp_path / "whole"), torch.load(tmp_path / "parts")
    assert a["s"] == b["s"]
    assert all(torch.equal(a["m"][k], b["m"][k]) for k in a["m"])


@pytest.mark.parametrize("name", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
@pytest.mark.parametrize("value", [INF, NAN, 0.0, -1.0, "missing", None, "x"])
def test_invalid_state_is_refused_whole(name, value):
    if (name, value) == ("_growth_tracker", 0.0):
        return  # a count of zero is a count
    s, optimizer, _ = ready()
    s.step(optimizer)
    s.update()
    before = s.state_dict()
    state = {**before, "growth_interval": 5, "scale": 2.0**12, name: value}
    if value == "missing":
        del state[name]
    with pytest.raises(StateError) as caught:
        s.load_state_dict(state)
    four_parts(caught)
    assert s.state_dict() == before


@pytest.mark.parametrize("entry", [{"skipped_steps": -1}, {"steps": 1.5}, {"kind": "static"}, {"hysteresis": 0}])
def test_invalid_halfstep_entries_are_refused_whole(entry):
    s = scaler()
    before = s.state_dict()
    with pytest.raises(StateError):
        s.load_state_dict({**before, "scale": 2.0, "halfstep": {**before["halfstep"], **entry}})
    assert s.state_dict() == before


def test_an_empty_state_is_refused_with_torchs_text():
    with pytest.raises(RuntimeError, match="The source state dict is empty") as caught:
        scaler().load_state_dict({})
    four_parts(caught)


@quiet
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("moment", ["fresh", "scaled", "unscaled", "stepped", "updated"])
def test_copies_at_any_moment(copier, moment):
    w = weight(1.0)
    s, optimizer = scaler(model=None, on_repeat="ignore"), SGD([w], 0.1)
    moments = {
        "fresh": lambda: None,
        "scaled": lambda: s.scale(w.sum() * INF).backward(),
        "unscaled": lambda: s.unscale_(optimizer),
        "stepped": lambda: s.step(optimizer),
        "updated": lambda: s.update(),
    }
    for name, act in moments.items():
        act()
        if name == moment:
            break
    other = copier(s)
    assert other.state_dict() == s.state_dict()
    assert len(other._per_optimizer_states) == 0
    assert other._scale is None, "shares no tensor"
    optimizer.zero_grad()
    assert window(other, optimizer, w.sum()) is None
    assert w.item() == pytest.approx(0.9)


def test_a_copy_can_be_given_names_again():
    model = nn.Linear(2, 1)
    s = copy.deepcopy(scaler(model=model))
    s.name_parameters(model)
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.warns(SkippedStepWarning, match="gradient of (weight|bias)"):
        window(s, optimizer, model(torch.ones(1, 2)).sum() * NAN)


def test_the_scaler_keeps_no_optimizer_alive():
    import gc
    import weakref

    s, optimizer, _ = ready()
    s.step(optimizer)
    s.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


# -- faults that a mutation once survived ------------------------------------------------------------------------------


def test_step_before_backward_is_seen_in_every_window():
    w = weight(1.0)
    s, optimizer = scaler(), SGD([w], 0.1)
    window(s, optimizer, w.sum())
    optimizer.zero_grad()
    s.scale(w.sum())
    with pytest.raises(CallOrderError, match=r"before backward\(\)"):
        s.step(optimizer)


@quiet
def test_tied_weights_arrive_last():
    """A weight used first and last in forward gets its gradient last: it is not the nearest to the loss."""
    tied, middle = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    x = _Poison.apply(middle(tied(torch.ones(2, 3))), NAN)
    loss = tied(x).sum()
    s = scaler()
    s._books.order.name(nn.ModuleDict({"tied": tied, "middle": middle}))
    optimizer = SGD([*tied.parameters(), *middle.parameters()], 0.1)
    s.scale(loss).backward()
    s.step(optimizer)
    assert s.outcome(optimizer).culprit.name == "middle.weight"


@quiet
def test_the_order_is_learned_from_every_loss_of_the_first_window():
    trunk, side, head = (nn.Linear(3, 3, bias=False) for _ in range(3))
    s = scaler()
    s._books.order.name(nn.ModuleDict({"head": head, "side": side, "trunk": trunk}))
    optimizer = SGD([*head.parameters(), *side.parameters(), *trunk.parameters()], 0.1)
    h = trunk(torch.ones(2, 3))
    s.scale(side(h).sum()).backward(retain_graph=True)
    s.scale(_Poison.apply(head(h), NAN).sum()).backward()
    s.step(optimizer)
    assert s.outcome(optimizer).culprit.name == "head.weight"


def test_an_idle_count_starts_again_after_a_gradient():
    a, b = weight(1.0), weight(1.0)
    oa, ob, s = SGD([a], 1e-9), SGD([b], 1e-9), scaler()
    for step in range(150):
        a.grad = b.grad = None
        s.scale((a + b).sum() if step == 75 else a.sum()).backward()
        s.step(oa)
        s.step(ob)
        s.update()  # a warning would be an error here


def test_the_repeat_names_the_scale_that_failed():
    w = weight(1.0)
    s, optimizer = scaler(repeat_after=2, on_repeat="raise"), SGD([w], 0.1)
    with pytest.warns(SkippedStepWarning):
        window(s, optimizer, w.sum() * NAN)
    with pytest.raises(NonFiniteError, match=r"even at scale 512(.|\n)*fell from 1024"):
        window(s, optimizer, w.sum() * NAN)
    static = halfstep.GradScaler("cpu", scale=StaticScale(8.0), repeat_after=1, on_repeat="raise")
    with pytest.raises(NonFiniteError, match="the scale does not move: it is too large for this model"):
        window(static, optimizer, w.sum() * NAN)


def test_a_users_subclass_of_a_fused_optimizer_is_widened_too():
    class Mine(torch.optim.AdamW):
        pass

    w = weight(1.0, dtype=torch.float16)
    optimizer = Mine([w], 1e-3, fused=True)
    window(scaler(), optimizer, (w.float() * 1e-4).sum())
    assert optimizer.state[w]["exp_avg_sq"].item() == pytest.approx(1e-11, rel=1e-2)


def test_the_private_growth_interval_does_not_pass_the_count_by():
    w = weight(1.0)
    s, optimizer = scaler(growth_interval=50), SGD([w], 1e-9)
    for _ in range(10):
        window(s, optimizer, w.sum())
    s._growth_interval = 3
    window(s, optimizer, w.sum())
    assert s.get_scale() == 2048.0
