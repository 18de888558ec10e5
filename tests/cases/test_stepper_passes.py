"""Through the Stepper: MP-10 closures of LBFGS slip through unchecked; MP-48 SAM's two backward passes per step."""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import CallOrderError

pytestmark = pytest.mark.filterwarnings(
    "ignore::halfstep.errors.SkippedStepWarning",
    "ignore::halfstep.errors.PrecisionWarning",  # 16-bit weights without masters are meant, here
)
SGD, LBFGS = torch.optim.SGD, torch.optim.LBFGS


def make_stepper(parameters, optimizer, **options):
    options = {"policy": "fp32", "scale": halfstep.DynamicScale(64.0), **options}
    return halfstep.Stepper(nn.ParameterList(parameters), optimizer, **options)


# -- MP-10 ------------------------------------------------------------------------------------------------------------


def quadratic(p, *, bad_at=None, bad=math.inf):
    """``(p - 3)**2``; the evaluation number ``bad_at`` is multiplied by ``bad``."""
    evaluations = [0]

    def closure():
        evaluations[0] += 1
        return (p - 3).pow(2).sum() * (bad if evaluations[0] == bad_at else 1.0)

    return closure


def test_MP_10_the_reported_bad_evaluation(param):
    p = param([0.0])
    optimizer, scaler, evaluate = LBFGS([p], lr=1.0, max_iter=5), torch.amp.GradScaler("cpu"), quadratic(p, bad_at=2)

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(evaluate())
        loss.backward()
        return loss

    closure()
    scaler.step(optimizer, closure)
    scaler.update()
    assert (p.isnan().item(), scaler.get_scale()) == (True, 65536.0), "plain PyTorch"

    p = param([0.0])
    stepper = make_stepper([p], LBFGS([p], lr=1.0, max_iter=5), scale=halfstep.DynamicScale(1024.0))
    outcome = stepper.run(quadratic(p, bad_at=2))
    assert (outcome.kind, p.item(), stepper.skipped_steps, stepper.scale.get()) == ("skipped", 0.0, 1, 512.0)
    assert stepper.run(quadratic(p)).is_applied
    assert p.item() == pytest.approx(3.0, abs=1e-5)
    assert p.grad is None


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("shapes", [[(2,)], [(3,), (2, 2), ()]], ids=["one", "several"])
def test_MP_10_finite_evaluations_give_what_they_give_without_a_stepper(line_search, shapes):
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": line_search}
    reference, stepper = LBFGS(plain, **options), make_stepper(ours, LBFGS(ours, **options))

    def loss_of(parameters):
        return sum((p - 3).pow(2).sum() + p.pow(4).sum() / 8 for p in parameters)

    def closure():
        reference.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        return loss

    for _ in range(3):
        assert stepper.run(loss_of, ours).is_applied
        reference.step(closure)
        for p, q in zip(ours, plain, strict=True):
            assert torch.equal(p, q)  # 64 is a power of two: scaling and unscaling change no bit
    assert stepper.scale.get() == 64.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("bad_at", [1, 2, 3, 4])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_MP_10_a_bad_evaluation_at_any_place_undoes_the_whole_step(param, bad, bad_at, line_search):
    p = param([0.0, 7.0])
    optimizer = LBFGS([p], lr=0.1, max_iter=6, history_size=3, line_search_fn=line_search)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepper = make_stepper([p], optimizer, scheduler=schedule, scale=halfstep.DynamicScale(1024.0))

    def loss_of(fault):  # quartic: a line search needs several evaluations
        evaluations[0] += 1
        return ((p - 3).pow(4) / 100 + p.pow(2)).sum() * (fault if evaluations[0] == bad_at else 1.0)

    evaluations = [0]
    assert stepper.run(loss_of, 1.0).is_applied
    num_evaluations = evaluations[0]
    assert optimizer.param_groups[0]["lr"] == 0.05
    weights, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    evaluations = [0]
    outcome = stepper.run(loss_of, bad)
    if evaluations[0] < bad_at:  # the line search was content before that
        assert num_evaluations < bad_at or line_search
        assert outcome.is_applied
        return
    assert (outcome.kind, outcome.culprit.name) == ("skipped", "0")
    assert torch.equal(p, weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert (stepper.scale.get(), stepper.skipped_steps, optimizer.param_groups[0]["lr"]) == (512.0, 1, 0.05)


@pytest.mark.parametrize("call", ["step", "flush", "unscale_", "take_gradients"])
def test_MP_10_calls_that_would_bypass_the_closure_are_refused(param, call):
    p = param([0.0])
    stepper = make_stepper([p], LBFGS([p], lr=1.0, max_iter=5))
    with pytest.raises(
        CallOrderError, match=rf"{call}\(\) with LBFGS\n.*needs a closure\n.*\n.*stepper\.run\(closure\)"
    ):
        getattr(stepper, call)()
    assert stepper.run(quadratic(p)).is_applied
    assert p.item() == pytest.approx(3.0, abs=1e-5)


def test_MP_10_an_exception_in_an_evaluation_undoes_the_step(param):
    p = param([0.0, 7.0])
    stepper, evaluations = make_stepper([p], LBFGS([p], lr=0.1, max_iter=6)), [0]

    def closure():
        evaluations[0] += 1
        if evaluations[0] == 3:
            raise KeyError("the user's own")
        return (p - 3).pow(2).sum()

    with pytest.raises(KeyError, match="the user's own"):
        stepper.run(closure)
    assert p.tolist() == [0.0, 7.0]
    assert p.grad is None
    assert stepper.run(closure).is_applied


# -- MP-48 ------------------------------------------------------------------------------------------------------------

RHO = 0.05
EVERY = {
    "sgd": lambda ps: SGD(ps, 0.1),
    "momentum fused": lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}


def ascent(gradients):
    """SAM's shift: along the gradient, of length RHO."""
    norm = torch.stack([g.float().norm() for g in gradients.values()]).norm()
    return {p: RHO * g / norm for p, g in gradients.items()}


def accumulate(stepper, loss_of, num, faults):
    """Forward and backward of ``num`` micro-batches; the window is stepped behind the second pass."""
    for i in range(num):
        with stepper.forward():
            loss = loss_of(i) * faults.get(i, 1.0)
        stepper.backward(loss)


def sam_step(stepper, loss_of, num=1, first_faults=None, second_faults=None):
    accumulate(stepper, loss_of, num, first_faults or {})
    with stepper.perturbed(ascent(stepper.take_gradients())):
        accumulate(stepper, loss_of, num, second_faults or {})
    return stepper.step()


def plain_sam_step(optimizer, parameters, loss_of, num, clip_norm):
    """The method in plain fp32: no scale, no stepper."""
    weights = [p.detach().clone() for p in parameters]
    for is_second in (False, True):
        optimizer.zero_grad()
        (sum(loss_of(i) for i in range(num)) / num).backward()
        if not is_second:
            shifts = ascent({p: p.grad for p in parameters})
            with torch.no_grad():
                for p in parameters:
                    p.add_(shifts[p])
    with torch.no_grad():
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
    if clip_norm:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()


def test_MP_48_the_reported_step(param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale((p**2).sum()).backward()
    scaler.unscale_(optimizer)
    shift = 0.05 * p.grad / p.grad.norm()
    p.data += shift
    optimizer.zero_grad()
    scaler.scale((p**2).sum()).backward()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    p.data -= shift
    scaler.step(optimizer)
    assert p.item() == pytest.approx(-12.44, abs=1e-3), "plain PyTorch: a step 64 times too long"

    p = param([1.0])
    stepper = make_stepper([p], SGD([p], 0.1))
    outcome = sam_step(stepper, lambda i: (p**2).sum())
    assert outcome.is_applied
    assert p.item() == pytest.approx(1 - 0.1 * 2.1, abs=1e-6)
    assert outcome.grad_norm == pytest.approx(2.1, abs=1e-6)


@pytest.mark.parametrize("make_optimizer", EVERY.values(), ids=EVERY.keys())
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_MP_48_two_passes_are_those_of_fp32(make_optimizer, num, clip_norm):
    ours = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([[0.5]]))]
    plain = [nn.Parameter(p.detach().clone()) for p in ours]
    stepper = make_stepper(ours, make_optimizer(ours), clip_norm=clip_norm, accumulate=num)
    reference = make_optimizer(plain)

    def loss_of(parameters):
        return lambda i: sum((p**4 + (i + 1) * p).sum() for p in parameters)

    for _ in range(3):
        outcome = sam_step(stepper, loss_of(ours), num)
        plain_sam_step(reference, plain, loss_of(plain), num, clip_norm)
        assert outcome.is_applied
        assert outcome.num_micro_batches == num
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("fault", [math.inf, math.nan])
@pytest.mark.parametrize(("num", "at"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_MP_48_a_fault_in_either_pass_leaves_the_weights_bit_for_bit(dtype, which, fault, num, at, clip_norm):
    p, q = (nn.Parameter(torch.tensor(values).to(dtype)) for values in ([1.0, -2.3], [[0.7]]))
    optimizer = SGD([p, q], 0.1, momentum=0.9)
    stepper = make_stepper([p, q], optimizer, accumulate=num, clip_norm=clip_norm)

    def loss_of(i):
        return sum((w.float() ** 2).sum() for w in (p, q))

    before = [p.detach().clone(), q.detach().clone()]
    faults = {f"{one}_faults": {at: fault} for one in ("first", "second") if which in (one, "both")}
    outcome = sam_step(stepper, loss_of, num, **faults)
    assert outcome.is_skipped
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    assert optimizer.state[p].get("momentum_buffer") is None
    assert (stepper.scale.get(), stepper.skipped_steps) == (32.0, 1)
    assert sam_step(stepper, loss_of, num).is_applied, "the next step knows nothing of it"
    assert not torch.equal(p, before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_MP_48_sixteen_bit_weights_come_back_where_adding_and_subtracting_would_not(dtype):
    p = nn.Parameter(torch.linspace(0.1, 9.0, 257).to(dtype))
    shift = torch.full_like(p, 0.3)
    assert not torch.equal((p + shift) - shift, p), "plain PyTorch: `p += e; p -= e` rounds twice"
    stepper, before = make_stepper([p], SGD([p], 0.1)), p.detach().clone()
    with stepper.perturbed({p: shift.float()}):
        assert torch.equal(p, before + shift)
    assert torch.equal(p, before)


def test_MP_48_the_first_pass_hands_out_true_fp32_gradients_whatever_the_weights():
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    stepper = make_stepper([p], SGD([p], 0.1), scale=halfstep.StaticScale(2.0**14))
    accumulate(stepper, lambda i: (p.float() * 1e-7).sum(), 1, {})
    (gradient,) = stepper.take_gradients().values()
    assert gradient.dtype == torch.float32
    assert gradient.item() == pytest.approx(1e-7, rel=1e-3)  # 2 ** -10 at most: one rounding to fp16, scaled
    assert p.grad is None


def test_MP_48_an_exception_in_the_second_pass_puts_the_weights_back():
    p = nn.Parameter(torch.tensor([1.1], dtype=torch.bfloat16))
    stepper, before = make_stepper([p], SGD([p], 0.1)), p.detach().clone()
    accumulate(stepper, lambda i: (p.float() ** 2).sum(), 1, {})
    with pytest.raises(KeyError), stepper.perturbed(ascent(stepper.take_gradients())):
        raise KeyError
    assert torch.equal(p, before)


def test_MP_48_buffers_go_back_to_before_the_first_pass():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32", scale=halfstep.DynamicScale(64.0))
    x, before = torch.randn(5, 2), copy.deepcopy(model.state_dict())
    assert sam_step(stepper, lambda i: model(x).square().mean(), second_faults={0: math.nan}).is_skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fault", [math.inf, math.nan])
def test_MP_48_a_fault_in_the_first_pass_is_remembered_where_the_second_hides_it(param, fault):
    p = param([1.0])
    stepper = make_stepper([p], SGD([p], 0.1))
    accumulate(stepper, lambda i: (p**2).sum(), 1, {0: fault})
    shifts = {q: g.nan_to_num(0.0, 0.0, 0.0) for q, g in stepper.take_gradients().items()}
    with stepper.perturbed(shifts):
        accumulate(stepper, lambda i: (p**2).sum(), 1, {})
    assert stepper.step().is_skipped
    assert (p.item(), stepper.scale.get()) == (1.0, 32.0)
    assert sam_step(stepper, lambda i: (p**2).sum()).is_applied
