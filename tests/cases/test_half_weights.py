"""The cases of the scaler and the stepper once more, with 16-bit weights whose masters a MasterWeights holds.

The fixtures run each test with fp16 and with bf16 weights, and where both can do it by a GradScaler and by a Stepper.
The oracle is what the same optimizer makes of fp32 weights with the true gradients; a skipped step changes no bit of
weights, masters, moments and buffers. PrecisionWarnings are errors here: with masters there is nothing to warn about.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import CallOrderError, HalfstepWarning, NonFiniteError, SkippedStepWarning, UnsupportedError

quiet = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
SGD = torch.optim.SGD
OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, 0.1),
    "sgd momentum": lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_fault = pytest.mark.parametrize("bad", [math.nan, math.inf])


def weights(*values):
    return nn.ParameterList([nn.Parameter(torch.tensor(v)) for v in values])


def plain_sgd(ps):
    return SGD(ps, 0.1)


# -- MP-02, MP-41: the bounds of the scale, and its start -------------------------------------------------------------


@quiet
@every_optimizer
def test_MP_02_the_scale_stays_below_its_maximum_and_comes_back_quickly(half_run, make_optimizer):
    model = weights([1.0, -2.0])
    run = half_run(model, make_optimizer, scale=halfstep.DynamicScale(growth_interval=1))
    for _ in range(30):
        assert run.step(lambda: (model[0].float() * 1e-30).sum()) == "applied"
    assert run.scale == 2.0**24
    before, skipped = run.everything(), 0
    while run.step(lambda: (model[0].half() * 1).float().sum()) == "skipped":
        skipped += 1
        assert run.is_as(before)
        assert skipped < 20
    assert skipped == 9  # 2**15 is the largest power of two below 65504
    assert all(value.isfinite().all() for value in run.everything().values())


@quiet
def test_MP_02_two_hundred_overflows_leave_a_usable_scale(half_run):
    model = weights([1.0])
    run = half_run(model, lambda ps: SGD(ps, 0.5), scale=halfstep.DynamicScale())
    for _ in range(200):
        assert run.step(lambda: (model[0].float() * math.inf).sum()) == "skipped"
    assert (model[0].item(), run.scale) == (1.0, 2.0**-14)
    assert run.step(lambda: model[0].float().sum()) == "applied"
    assert (model[0].item(), run.master(model[0]).item()) == (0.5, 0.5)


def test_MP_41_the_first_step_is_not_lost(half_run):
    """A sum over a 16-bit product: the gradient that arrives there is the scale itself, in 16 bits."""
    model = nn.ParameterList([nn.Parameter(torch.eye(2))])
    run = half_run(model, plain_sgd)
    assert run.step(lambda: (torch.ones(2, 2, dtype=run.dtype) @ model[0]).sum()) == "applied"
    assert torch.equal(run.master(model[0]), torch.eye(2) - 0.1 * torch.full((2, 2), 2.0))


# -- MP-39, MP-52: bad batches, with a scale and without --------------------------------------------------------------


@quiet
@every_optimizer
@every_fault
@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later"])
def test_MP_39_a_bad_batch_changes_no_bit_of_weight_master_and_moment(half_run, make_optimizer, bad, is_first):
    model = weights([1.0, -2.0, 3.0], [1.0])
    run = half_run(model, make_optimizer)

    def good():
        return sum(p.float().square().sum() for p in model) / 4  # 6 * 2**14 would not fit into fp16

    if not is_first:
        assert run.step(good) == "applied"
    before = run.everything()
    assert run.step(lambda: (model[0].float() * bad).sum() + model[1].float().sum()) == "skipped"
    assert run.is_as(before)
    assert run.engine.culprit.name == "0"
    assert run.engine.skipped_steps == 1
    assert run.step(good) == "applied"
    assert not run.is_as(before)
    assert all(value.isfinite().all() for value in run.everything().values())


@every_optimizer
def test_MP_39_clean_steps_are_those_of_fp32_weights(half_run, make_optimizer):
    """Bit for bit: gradients that 16 bits hold exactly, a scale that is a power of two, the same optimizer."""
    model, plain = weights([1.0, -2.0, 0.5]), nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    run = half_run(model, make_optimizer, scale=halfstep.DynamicScale(2.0**8))  # 6 * 2**14 would not fit into fp16
    reference = make_optimizer([plain])
    for step in range(6):
        slope = torch.tensor([0.5, -2.0, step + 1.0])
        assert run.step(lambda slope=slope: (model[0].float() * slope).sum()) == "applied"
        plain.grad = slope.clone()
        reference.step()
        assert torch.equal(run.master(model[0]), plain.detach())
        torch.testing.assert_close(model[0].detach(), plain.detach().to(run.dtype), rtol=0, atol=0)


@quiet
def test_MP_39_bad_step_after_bad_step_is_an_error_where_asked(half_run):
    model = weights([1.0])
    run = half_run(model, plain_sgd, on_repeat="raise", repeat_after=3)
    for _ in range(2):
        run.step(lambda: (model[0].float() * math.nan).sum())
    with pytest.raises(NonFiniteError, match="the loss or the forward pass itself is inf or NaN"):
        run.step(lambda: (model[0].float() * math.nan).sum())
    assert run.master(model[0]).item() == 1.0


def test_MP_39_the_event_names_parameter_and_step(half_run):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    run = half_run(model, plain_sgd)
    x = torch.ones(1, 2, dtype=run.dtype)
    assert run.step(lambda: model(x).float().sum()) == "applied"
    with pytest.warns(SkippedStepWarning, match=r"Step 2 was skipped.*1\.(weight|bias).*NaN"):
        run.step(lambda: (model(x).float() * math.nan).sum())


@quiet
@every_optimizer
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("num", [1, 2])
def test_MP_52_groups_of_every_dtype_in_one_optimizer(make_optimizer, clip_norm, num):
    """fp16, bf16, fp32 and fp64 weights under one MasterWeights: two have masters, one norm, one decision."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ours = [nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)) for dtype in dtypes]
    plain = [nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32))) for p in ours]
    optimizer = halfstep.MasterWeights(make_optimizer([{"params": [p]} for p in ours]))
    reference = make_optimizer([{"params": [p]} for p in plain])
    options = {"scale": halfstep.DynamicScale(1024.0), "accumulate": num, "clip_norm": clip_norm}
    stepper = halfstep.Stepper(nn.ParameterList(ours), optimizer, policy="fp32", **options)
    for is_bad in (False, True, False):
        for i in range(num):
            with stepper.forward():
                loss = sum((p.double() * (k + 1)).sum() for k, p in enumerate(ours))
            stepper.backward(loss * (math.nan if is_bad and i == 0 else 1.0))
            outcome = stepper.step()
        assert outcome.is_skipped is is_bad
        if is_bad:
            continue
        for k, p in enumerate(plain):
            p.grad = torch.full_like(p, k + 1.0)
        if clip_norm:
            nn.utils.clip_grad_norm_(plain, clip_norm)
        reference.step()
    for p, q in zip(ours, plain, strict=True):
        master = optimizer.state[p].get("master", p.detach())
        torch.testing.assert_close(master, q.detach(), rtol=1e-6, atol=1e-7)


# -- MP-06: the true norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("log2_scale", [0, 5])
def test_MP_06_clipping_goes_by_the_true_norm_and_reaches_the_masters(half_stepper, num, log2_scale):
    """Gradients of 300 in 100 000 elements: the norm, 94868, is beyond fp16's largest value, and so is 300**2."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(70_000)), nn.Parameter(torch.zeros(300, 100))])
    options = {"clip_norm": 1.0, "accumulate": num, "scale": halfstep.StaticScale(2.0**log2_scale)}
    run = half_stepper(model, lambda ps: SGD(ps, 1.0), **options)
    for _ in range(num):
        with run.engine.forward():
            loss = sum((p.float() * 300.0).sum() for p in model)
        run.engine.backward(loss)
        outcome = run.engine.step()
    norm = 300.0 * math.sqrt(100_000)
    assert outcome.is_applied
    assert outcome.grad_norm == pytest.approx(norm, rel=2.0**-15)  # what the inspection promises
    for p in model:
        torch.testing.assert_close(run.master(p), torch.full(p.shape, -300.0 / norm), rtol=2.0**-14, atol=0)
        torch.testing.assert_close(p.detach(), run.master(p).to(run.dtype), rtol=0, atol=0)


def test_MP_06_a_large_norm_is_no_overflow(half_run):
    model = nn.ParameterList([nn.Parameter(torch.zeros(100_000))])
    run = half_run(model, lambda ps: SGD(ps, 2.0**-10), scale=halfstep.DynamicScale(32.0))
    assert run.step(lambda: (model[0].float() * 300.0).sum()) == "applied"
    assert torch.equal(run.master(model[0]), torch.full((100_000,), -300.0 * 2.0**-10))
    assert run.scale == 32.0


# -- MP-07, MP-10: several optimizers, closures -----------------------------------------------------------------------


@every_optimizer
def test_MP_07_an_optimizer_without_gradients(half_policy, make_optimizer):
    a, b = weights([1.0]), weights([1.0])
    model = nn.ModuleList([a, b])
    model.to({"fp16-master": torch.half, "bf16-master": torch.bfloat16}[half_policy])
    optimizers = [halfstep.MasterWeights(make_optimizer(part.parameters())) for part in model]
    before = copy.deepcopy(optimizers[1].state_dict())
    stepper = halfstep.Stepper(model, optimizers, policy=half_policy)
    scaler = halfstep.GradScaler("cpu", scale=halfstep.DynamicScale())
    with stepper.forward():
        loss = a[0].float().sum()
    stepper.backward(loss)
    assert stepper.step().is_applied
    scaler.scale(a[0].float().sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.outcome(optimizer).kind for optimizer in optimizers] == ["applied", "no_gradients"]
    scaler.update()
    assert a[0].item() != 1.0
    assert b[0].item() == 1.0
    after = optimizers[1].state_dict()["state"][0]
    assert all(torch.equal(value, after[name]) for name, value in before["state"][0].items())


def lbfgs(ps):
    return torch.optim.LBFGS(ps, lr=1.0, max_iter=5)


def test_MP_10_closures_with_16_bit_weights_are_refused_before_any_weight_moves(half_policy, half_run):
    """One of the two ways that the case allows: gradients of several evaluations would be divided in 16 bits."""
    model = weights([0.0])
    run, refusal = None, None
    try:
        run = half_run(model, lbfgs)
    except UnsupportedError as error:  # the Stepper, before anything has run
        refusal = str(error)
    if run is None:
        assert "16-bit weights are widened" in refusal
        assert model[0].item() == 0.0
        return
    assert isinstance(run.engine, halfstep.GradScaler)
    with pytest.raises(CallOrderError, match="LBFGS evaluates the loss itself"):
        run.step(lambda: (model[0].float() - 1).square().sum())
    with pytest.raises(UnsupportedError, match="closure"):
        run.engine.step(run.optimizer, lambda: run.engine.scale((model[0].float() - 3).square().sum()))
    assert (model[0].item(), run.master(model[0]).item()) == (0.0, 0.0)


def test_MP_10_without_a_scale_closures_run_with_the_16_bit_weights(half_policy):
    p = nn.Parameter(torch.zeros(1))
    optimizer = halfstep.MasterWeights(lbfgs([p]), {"fp16-master": "fp16", "bf16-master": "bf16"}[half_policy])

    def closure():
        optimizer.zero_grad()
        loss = (p.float() - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert p.item() == 3.0


# -- MP-03, MP-11, MP-20: windows -------------------------------------------------------------------------------------


def test_MP_03_looking_at_gradients_between_backward_and_step(half_policy, half_stepper):
    """bf16 gradients are divided in place; fp16 ones are refused, unless the window's fp32 sums hold them."""
    for num in (1, 2):
        model = weights([1.0, 2.0])
        run = half_stepper(model, plain_sgd, accumulate=num)
        for i in range(num):
            with run.engine.forward():
                loss = model[0].float().sum()
            run.engine.backward(loss)
            if i < num - 1:
                run.engine.step()
        if half_policy == "fp16-master" and num == 1:
            with pytest.raises(UnsupportedError, match=r"clip_norm|clip"):
                run.engine.unscale_()
        else:
            with (
                pytest.warns(HalfstepWarning, match="clip_grad_norm_ and the like see nothing")
                if num > 1
                else nullcontext()
            ):
                run.engine.unscale_()
            gradient = model[0].grad if num == 1 else model[0].fp32_grad
            assert gradient.tolist() == [1.0, 1.0]
        assert run.engine.step().is_applied
        assert run.master(model[0]).tolist() == pytest.approx([0.9, 1.9])


@quiet
@every_optimizer
@pytest.mark.parametrize("num", [1, 3])
def test_MP_11_the_schedule_moves_on_applied_steps_only_and_reaches_the_masters(half_policy, make_optimizer, num):
    model, plain = weights([1.0, -2.0]), nn.Parameter(torch.tensor([1.0, -2.0]))
    dtype = {"fp16-master": torch.half, "bf16-master": torch.bfloat16}[half_policy]
    optimizer, reference = halfstep.MasterWeights(make_optimizer(model.parameters()), dtype), make_optimizer([plain])
    schedule, expected = (torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference))
    stepper = halfstep.Stepper(model, optimizer, policy=half_policy, accumulate=num, scheduler=schedule)
    slope = torch.tensor([0.5, -2.0])
    for step, fault in enumerate([math.inf, 1.0, math.nan, 1.0, 1.0]):
        for i in range(num):
            with stepper.forward():
                loss = (model[0].float() * slope).sum() * (fault if i == step % num else 1.0)
            stepper.backward(loss)
            outcome = stepper.step()
        if math.isfinite(fault):
            plain.grad = slope.clone()
            reference.step()
            expected.step()
        assert outcome.is_applied is math.isfinite(fault)
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        torch.testing.assert_close(optimizer.state[model[0]]["master"], plain.detach(), rtol=1e-6, atol=1e-7)


@every_optimizer
@pytest.mark.parametrize("size", [1, 3, 4, None])
def test_MP_20_every_window_is_the_true_mean_and_nothing_leaks(half_stepper, make_optimizer, size):
    """Two epochs of seven micro-batches: short last windows too. 16 bits hold each gradient, and not their sums."""
    model, plain = weights([1.0, -2.0]), nn.Parameter(torch.tensor([1.0, -2.0]))
    scale = halfstep.DynamicScale(2.0**8)  # 9 * 2**14 would not fit into fp16
    run, reference = half_stepper(model, make_optimizer, accumulate=size, scale=scale), make_optimizer([plain])
    slopes = [torch.tensor([i + 1.0 + 2.0**-7 * (i == 0), 129.0 - 2 * i]) for i in range(7)]
    for _ in range(2):
        outcomes = []
        for slope in slopes:
            with run.engine.forward():
                loss = (model[0].float() * slope).sum()
            run.engine.backward(loss)
            outcomes.append(run.engine.step())
        outcomes.append(run.engine.flush())
        for begin in range(0, 7, size or 7):
            window = slopes[begin : begin + (size or 7)]
            plain.grad = sum(window) / len(window)
            reference.step()
        assert sum(o is not None and o.is_applied for o in outcomes) == math.ceil(7 / (size or 7))
        torch.testing.assert_close(run.master(model[0]), plain.detach(), rtol=2e-6, atol=2e-7)
    assert model[0].grad is None
    assert not hasattr(model[0], "fp32_grad")


def test_MP_20_token_weights_give_the_mean_over_all_tokens(half_stepper):
    model = weights([0.0])
    run = half_stepper(model, lambda ps: SGD(ps, 1.0), accumulate=3)
    for slope, num_tokens in ((1.0, 4), (2.0, 1), (-3.0, 3)):
        with run.engine.forward():
            loss = (model[0].float() * slope).sum()
        run.engine.backward(loss, weight=num_tokens)
        outcome = run.engine.step()
    mean = (1.0 * 4 + 2.0 * 1 - 3.0 * 3) / 8
    assert outcome.grad_norm == pytest.approx(abs(mean), rel=1e-6)
    assert run.master(model[0]).item() == pytest.approx(-mean, rel=1e-6)


# -- MP-13: resuming --------------------------------------------------------------------------------------------------


def resumable(run_of, num_steps, state=None, start=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    scale = halfstep.DynamicScale(2.0**10, growth_interval=3)
    run = run_of(model, lambda ps: torch.optim.AdamW(ps, 0.01, fused=True), scale=scale)
    parts = {"model": model, "optimizer": run.optimizer, "engine": run.engine}
    if state:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    scales = []
    for i in range(start, start + num_steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).to(run.dtype)
        scales.append(run.scale)
        run.step(lambda i=i, x=x: model(x).float().square().mean() * (math.nan if i in (3, 4) else 1.0))
    return run, {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}, scales


@quiet
@pytest.mark.parametrize("cut", [3, 4, 7])
def test_MP_13_a_run_in_two_parts_is_the_run_in_one(half_run, cut):
    whole, _, scales = resumable(half_run, 10)
    _, saved, first = resumable(half_run, cut)
    resumed, _, second = resumable(half_run, 10 - cut, saved, start=cut)
    assert first + second == scales
    assert len(set(scales)) > 2
    assert resumed.is_as(whole.everything())
    assert resumed.engine.skipped_steps == 2


# -- MP-24: buffers ---------------------------------------------------------------------------------------------------


@quiet
@every_fault
@pytest.mark.parametrize("faulty", [0, 1])
def test_MP_24_a_fault_leaves_every_buffer_of_a_cast_model(half_policy, bad, faulty):
    """cast_model keeps BatchNorm in fp32, so that masters and fp32 weights stand in one optimizer."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    halfstep.cast_model(model, half_policy)
    dtype = model[0].weight.dtype
    assert (dtype, model[1].weight.dtype) == (
        {"fp16-master": torch.half, "bf16-master": torch.bfloat16}[half_policy], torch.float32,
    )  # fmt: skip
    optimizer = halfstep.MasterWeights(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
    stepper = halfstep.Stepper(model, optimizer, policy=half_policy, accumulate=2)

    def window(*batches):
        for x in batches:
            with stepper.forward():
                loss = model(x).float().square().mean()
            stepper.backward(loss)
            outcome = stepper.step()
        return outcome

    good, wrong = torch.randn(5, 3).to(dtype), torch.randn(5, 3).to(dtype)
    wrong[2, 1] = bad
    for _ in range(2):
        before = copy.deepcopy(dict(model.state_dict()))
        assert window(*((wrong, good) if faulty == 0 else (good, wrong))).is_skipped
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert window(good, good).is_applied
    assert model[1].num_batches_tracked.item() == 4


# -- MP-48, MP-18: weights that are others for a while ----------------------------------------------------------------


@quiet
@pytest.mark.parametrize("fault", [None, "first", "second"])
def test_MP_48_two_passes_keep_the_lower_bits_of_the_masters(half_stepper, fault):
    """The shift rounds 16-bit weights, and is undone; the masters never see it."""
    model = weights([1.001, -2.003])  # neither fp16 nor bf16 holds these
    run = half_stepper(model, plain_sgd, scale=halfstep.DynamicScale(64.0))
    p, master = model[0], run.master(model[0]).clone()
    assert not torch.equal(p.detach().float(), master)

    def backward(factor):
        with run.engine.forward():
            loss = p.float().square().sum() * factor
        run.engine.backward(loss)

    backward(math.nan if fault == "first" else 1.0)
    gradients = run.engine.take_gradients()
    shift = {q: 0.25 * g.nan_to_num(0.0) / g.nan_to_num(0.0).norm().clamp(min=1e-6) for q, g in gradients.items()}
    weight = p.detach().clone()
    with run.engine.perturbed(shift):
        seen = p.detach().float()
        backward(math.nan if fault == "second" else 1.0)
    assert torch.equal(p.detach(), weight)
    outcome = run.engine.step()
    assert outcome.is_skipped is (fault is not None)
    if fault:
        assert torch.equal(run.master(p), master)
        assert torch.equal(p.detach(), weight)
    else:
        torch.testing.assert_close(run.master(p), master - 0.1 * (2 * seen).to(run.dtype).float(), rtol=1e-6, atol=0)
    assert run.optimizer.adopted_weights == 0


def test_MP_18_an_evaluation_with_averages_keeps_the_lower_bits_of_the_masters(half_policy):
    model = weights([1.001])
    dtype = {"fp16-master": torch.half, "bf16-master": torch.bfloat16}[half_policy]
    optimizer = halfstep.MasterWeights(SGD(model.parameters(), 1e-5), dtype)
    ema = halfstep.EMA(model, decay=0.5)
    stepper = halfstep.Stepper(model, optimizer, policy=half_policy, ema=ema)
    for _ in range(100):
        with stepper.forward():
            loss = model[0].float().sum()
        stepper.backward(loss)
        assert stepper.step().is_applied
        with ema.swapped():
            assert model[0].dtype == dtype
    assert optimizer.state[model[0]]["master"].item() == pytest.approx(1.001 - 100e-5, abs=2e-6)
    assert optimizer.adopted_weights == 0


# -- MP-37, MP-53: unusual gradients, copies --------------------------------------------------------------------------


@quiet
def test_MP_37_duplicates_of_a_sparse_gradient_are_never_missed(half_run):
    """Two of 40000 in one row: fp16 cannot hold their sum, and that is flagged as an overflow; bf16 can."""
    model = nn.Embedding(4, 1, sparse=True)
    run = half_run(model, lambda ps: SGD(ps, 2.0**-14), scale=halfstep.StaticScale(1.0))
    before = run.master(model.weight).clone()
    rows, slope = torch.tensor([1, 1]), torch.full((2, 1), 40000.0).to(run.dtype)
    kind = run.step(lambda: (model(rows) * slope).float().sum())
    moved = before - run.master(model.weight)
    assert moved[[0, 2, 3]].eq(0).all()
    if run.dtype == torch.half:
        assert (kind, moved[1].item()) == ("skipped", 0.0)
        assert run.step(lambda: (model(rows) * slope / 2).float().sum()) == "applied"
        moved = 2 * (before - run.master(model.weight))
    assert moved[1].item() == pytest.approx(2 * slope[0].item() * 2.0**-14, rel=1e-6)


@quiet
@pytest.mark.parametrize("moment", ["scaled", "stepped", "updated"])
def test_MP_53_scaler_model_and_masters_are_copied_together_at_every_moment(half_policy, moment):
    model = weights([1.0])
    dtype = {"fp16-master": torch.half, "bf16-master": torch.bfloat16}[half_policy]
    both = {"model": model, "optimizer": halfstep.MasterWeights(SGD(model.parameters(), 0.1), dtype)}
    both["scaler"] = halfstep.GradScaler("cpu", init_scale=2.0**10)
    both["scaler"].scale(model[0].float().sum()).backward()
    if moment != "scaled":
        both["scaler"].step(both["optimizer"])
    if moment == "updated":
        both["scaler"].update()
    copied = copy.deepcopy(both)
    p, optimizer, scaler = copied["model"][0], copied["optimizer"], copied["scaler"]
    begin = optimizer.state[p]["master"].item()
    optimizer.zero_grad()
    scaler.scale(p.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[p]["master"].item() == pytest.approx(begin - 0.1)
    assert both["optimizer"].state[model[0]]["master"].item() == begin
