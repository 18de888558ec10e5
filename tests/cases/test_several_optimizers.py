"""MP-07: an optimizer without any gradient aborts the run. MP-10: closures slip through unscaled and unchecked."""

import copy
import math
import warnings

import pytest
import torch

from halfstep.errors import HalfstepWarning

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
SGD = torch.optim.SGD

OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, 0.1),
    "sgd fused": lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True),
    "adam foreach": lambda ps: torch.optim.Adam(ps, 0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def tracker(scaler):
    return scaler.state_dict()["_growth_tracker"]


def test_MP_07_the_reported_run_goes_on(make_scaler, param):
    a, b = param([1.0]), param([1.0])
    oa, ob, scaler = SGD([a], 0.1), SGD([b], 0.1), make_scaler()
    scaler.scale(a.sum()).backward()
    scaler.step(oa)
    scaler.step(ob)
    assert (scaler.outcome(oa).kind, scaler.outcome(ob).kind) == ("applied", "no_gradients")
    assert scaler.outcome(ob).culprit is None
    assert scaler.was_step_applied(oa)
    assert not scaler.was_step_applied(ob)
    scaler.update()
    assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)
    assert (scaler.get_scale(), tracker(scaler), scaler.skipped_steps) == (65536.0, 1, 0)


@every_optimizer
def test_MP_07_the_optimizers_with_gradients_decide_the_scale(make_scaler, param, make_optimizer):
    a, b = param([1.0]), param([1.0])
    oa, ob, scaler = make_optimizer([a]), make_optimizer([b]), make_scaler(init_scale=256.0)
    for factor, scale, clean in [(1.0, 256.0, 1), (math.inf, 128.0, 0), (math.nan, 64.0, 0), (1.0, 64.0, 1)]:
        oa.zero_grad()
        scaler.scale((a * factor).sum()).backward()
        scaler.step(ob)  # the one without gradients first: the order does not matter
        scaler.step(oa)
        scaler.update()
        assert (scaler.get_scale(), tracker(scaler)) == (scale, clean)
    assert b.item() == 1.0
    assert ob.state[b] == {}, "a step that did not happen leaves no state"


@every_optimizer
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_ and step"])
def test_MP_07_a_window_without_any_gradient_counts_for_nothing(make_scaler, param, make_optimizer, unscales):
    a, frozen, elsewhere = param([1.0]), param([1.0]), param([1.0])
    frozen.requires_grad_(False)
    optimizer, scaler = make_optimizer([a, frozen]), make_scaler(growth_interval=2)
    for _ in range(5):
        scaler.scale(elsewhere.sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.outcome(optimizer).kind == "no_gradients"
        scaler.update()
    assert (a.item(), scaler.get_scale(), tracker(scaler), scaler.skipped_steps) == (1.0, 65536.0, 0, 0)


@every_optimizer
def test_MP_07_some_parameters_without_gradients_are_no_news(make_scaler, param, make_optimizer):
    used, unused, frozen = param([1.0]), param([1.0]), param([1.0])
    frozen.requires_grad_(False)
    optimizer, scaler = make_optimizer([unused, used, frozen]), make_scaler()
    scaler.scale(used.sum()).backward()
    scaler.step(optimizer)
    assert scaler.was_step_applied(optimizer)
    scaler.update()
    assert used.item() != 1.0
    assert (unused.item(), frozen.item()) == (1.0, 1.0)


def test_MP_07_an_optimizer_that_never_gets_gradients_is_mentioned_once_by_name(make_scaler):
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "forgotten": torch.nn.Linear(1, 1)})
    used, forgotten = (SGD(model[name].parameters(), 0.0) for name in ("used", "forgotten"))
    scaler = make_scaler(model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            scaler.scale(model["used"](torch.ones(1, 1)).sum()).backward()
            scaler.step(used)
            scaler.step(forgotten)
            scaler.update()
    texts = [str(w.message) for w in caught if issubclass(w.category, HalfstepWarning)]
    assert len(texts) == 1
    assert "forgotten.weight" in texts[0]
    assert "used.weight" not in texts[0]


def quadratic_closure(scaler, optimizer, p, *, bad_at=None, bad=math.inf, returns="scaled"):
    """Evaluates (p - 3)**2; the evaluation number ``bad_at`` is multiplied by ``bad``."""
    evaluations = [0]

    def closure():
        evaluations[0] += 1
        optimizer.zero_grad()
        loss = (p - 3).pow(2).sum() * (bad if evaluations[0] == bad_at else 1.0)
        scaled = scaler.scale(loss)
        scaled.backward()
        return scaled if returns == "scaled" else loss

    return closure


def call(scaler, optimizer, closure, style):
    return scaler.step(optimizer, closure) if style == "positional" else scaler.step(optimizer, closure=closure)


both_styles = pytest.mark.parametrize("style", ["positional", "keyword"])


@both_styles
def test_MP_10_the_reported_bad_evaluation_never_reaches_the_weights(make_scaler, param, style):
    p = param([0.0])
    optimizer, scaler = torch.optim.LBFGS([p], lr=1.0, max_iter=5), make_scaler(init_scale=1024.0)
    closure = quadratic_closure(scaler, optimizer, p, bad_at=2)
    closure()
    call(scaler, optimizer, closure, style)
    assert scaler.outcome(optimizer).kind == "skipped"
    scaler.update()
    assert (p.item(), scaler.get_scale(), scaler.skipped_steps) == (0.0, 512.0, 1)
    call(scaler, optimizer, closure, style)
    assert scaler.was_step_applied(optimizer)
    scaler.update()
    assert p.item() == pytest.approx(3.0, abs=1e-5)


@both_styles
@pytest.mark.parametrize("returns", ["scaled", "unscaled"])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_MP_10_finite_evaluations_give_what_they_give_without_a_scaler(make_scaler, param, style, returns, line_search):
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": line_search}
    p, plain = param([0.0, 7.0]), param([0.0, 7.0])
    optimizer, reference = torch.optim.LBFGS([p], **options), torch.optim.LBFGS([plain], **options)
    scaler = make_scaler(init_scale=1024.0)

    def plain_closure():
        reference.zero_grad()
        loss = (plain - 3).pow(2).sum()
        loss.backward()
        return loss

    closure = quadratic_closure(scaler, optimizer, p, returns=returns)
    for _ in range(2):
        call(scaler, optimizer, closure, style)
        scaler.update()
        reference.step(plain_closure)
        # 1024 is a power of two: scaling and unscaling change no bit of a gradient
        assert torch.equal(p, plain)
    assert scaler.get_scale() == 1024.0


@both_styles
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("bad_at", [1, 2, 3, 4])
def test_MP_10_a_bad_evaluation_at_any_place_undoes_the_whole_step(make_scaler, param, style, bad, bad_at):
    p = param([0.0, 7.0])
    optimizer, scaler = torch.optim.LBFGS([p], lr=0.1, max_iter=6, history_size=3), make_scaler(init_scale=1024.0)
    call(scaler, optimizer, quadratic_closure(scaler, optimizer, p), style)
    scaler.update()
    weights, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    call(scaler, optimizer, quadratic_closure(scaler, optimizer, p, bad_at=bad_at, bad=bad), style)
    assert scaler.outcome(optimizer).kind == "skipped"
    scaler.update()
    assert torch.equal(p, weights)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert (scaler.get_scale(), scaler.skipped_steps) == (512.0, 1)


@both_styles
@every_optimizer
def test_MP_10_any_optimizer_takes_a_closure(make_scaler, param, style, make_optimizer):
    p, plain = param([0.0, 7.0]), param([0.0, 7.0])
    optimizer, reference, scaler = make_optimizer([p]), make_optimizer([plain]), make_scaler(init_scale=1024.0)
    for step in range(4):
        is_bad = step == 2
        closure = quadratic_closure(scaler, optimizer, p, bad_at=1 if is_bad else None)
        call(scaler, optimizer, closure, style)
        assert scaler.was_step_applied(optimizer) is not is_bad
        scaler.update()
        if not is_bad:
            reference.zero_grad()
            (plain - 3).pow(2).sum().backward()
            reference.step()
        torch.testing.assert_close(p, plain, rtol=1e-6, atol=1e-6)
    assert scaler.get_scale() == 512.0
