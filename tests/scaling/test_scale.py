"""The four scales: what the next scale is, bounds, state, and the peers' rules as references."""

import copy
import math
import pickle
import random
import re

import pytest
import torch

from halfstep.errors import ArgumentError, FactorError, StateError
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale, Scale, StaticScale

CPU = torch.device("cpu")
FOUR_PARTS = r"(.|\n)*true:(.|\n)*why:(.|\n)*fix:"
NON_DEFAULT = [
    NoScale(),
    StaticScale(1000.0),
    DynamicScale(
        2.0**10, 4.0, 0.25, 7, min_scale=2.0**-3, max_scale=2.0**12, hysteresis=3, consecutive_hysteresis=True,
        tolerance=0.125,
    ),
    AdaptiveScale(2.0**9, min_scale=2.0**-2, max_scale=2.0**20, margin_log2=3.0, narrow_interval=17),
]  # fmt: skip
KINDS = [type(scale).__name__ for scale in NON_DEFAULT]


def run(scale: Scale, overflows, largest=1.0):
    """The scale after each step; ``overflows`` are 0 or 1."""
    scale.value(CPU)
    seen = []
    for found in overflows:
        amount = torch.tensor(math.inf if found else largest * scale.get())
        scale.update_(torch.tensor(float(found)), amount)
        seen.append(scale.get())
    return seen


def test_dynamic_equals_torch():
    overflows = [random.Random(0).random() < 0.1 for _ in range(300)]
    ours = run(DynamicScale(2.0**16, growth_interval=5, min_scale=2.0**-100, max_scale=2.0**100), overflows)
    scale, tracker, theirs = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32), []
    for found in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(found)), 2.0, 0.5, 5)
        theirs.append(scale.item())
    assert ours == theirs
    assert len(set(ours)) > 5


def megatron(overflows, *, init, interval, hysteresis):
    """Megatron-LM's DynamicGradScaler, written from its published rule (core/optimizer/grad_scaler.py)."""
    scale, growth, left, seen = init, 0, hysteresis, []
    for found in overflows:
        if found:
            growth, left = 0, left - 1
            if left <= 0:
                scale *= 0.5
        else:
            growth += 1
            if growth == interval:
                growth, left, scale = 0, hysteresis, scale * 2
        seen.append(scale)
    return seen


def deepspeed(overflows, *, init, interval, hysteresis):
    """DeepSpeed's DynamicLossScaler with consecutive_hysteresis (runtime/fp16/loss_scaler.py)."""
    scale, last, left, seen = init, -1, hysteresis, []
    for iteration, found in enumerate(overflows):
        if found:
            if left == 1:
                scale *= 0.5
            else:
                left -= 1
            last = iteration
        else:
            left = hysteresis
            if (iteration - last) % interval == 0:
                scale *= 2
        seen.append(scale)
    return seen


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hysteresis", [2, 3])
def test_hysteresis_equals_its_peers(seed, hysteresis):
    overflows = [random.Random(seed).random() < 0.25 for _ in range(120)]
    settings = {"init": 2.0**10, "interval": 4, "hysteresis": hysteresis}
    wide = {"min_scale": 2.0**-120, "max_scale": 2.0**120, "hysteresis": hysteresis}
    assert run(DynamicScale(2.0**10, growth_interval=4, **wide), overflows) == megatron(overflows, **settings)
    consecutive = DynamicScale(2.0**10, growth_interval=4, consecutive_hysteresis=True, **wide)
    assert run(consecutive, overflows) == deepspeed(overflows, **settings)


def fairseq(overflows, *, init, interval, tolerance):
    """fairseq's rule: back off only when overflows reach the tolerated share of the steps since the last change."""
    scale, clean, steps, count, seen = init, 0, 0, 0, []
    for found in overflows:
        steps += 1
        if found:
            clean, count = 0, count + 1
            if count / steps >= tolerance:
                scale, steps, count = scale / 2, 0, 0
        else:
            clean += 1
            if clean == interval:
                scale, clean, steps, count = scale * 2, 0, 0, 0
        seen.append(scale)
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_tolerance_is_a_rate(seed):
    overflows = [random.Random(seed).random() < 0.15 for _ in range(120)]
    ours = DynamicScale(2.0**10, growth_interval=9, tolerance=0.25, min_scale=2.0**-120, max_scale=2.0**120)
    assert run(ours, overflows) == fairseq(overflows, init=2.0**10, interval=9, tolerance=0.25)


def test_an_overflow_that_is_put_up_with_is_no_clean_step():
    scale = DynamicScale(growth_interval=2, hysteresis=5)
    assert run(scale, [0, 1, 0, 1, 0, 1]) == [2.0**14] * 6


def test_dynamic_stays_within_its_bounds():
    scale = DynamicScale(8.0, growth_interval=1, min_scale=2.0, max_scale=32.0)
    assert run(scale, [0, 0, 0, 0]) == [16, 32, 32, 32]
    assert run(scale, [1] * 6) == [16, 8, 4, 2, 2, 2]


@pytest.mark.parametrize("make", [DynamicScale, AdaptiveScale])
def test_ten_thousand_random_faults_keep_the_scale_sound(make):
    rng = random.Random(1)
    scale = make()
    scale.value(CPU)
    for _ in range(10_000):
        found = rng.random() < 0.3
        largest = rng.choice([0.0, 1e-30, 1e-8, 1.0, 6e4, 3e38])
        scale.update_(torch.tensor(float(found)), torch.tensor(rng.choice([math.inf, math.nan]) if found else largest))
        value = scale.get()
        low, high = scale.bounds()
        assert low <= value <= high
        assert math.frexp(value)[0] == 0.5, "a scale that halfstep chooses is a power of two"
        assert all(math.isfinite(number) for number in scale.state_dict().values() if not isinstance(number, str))


@pytest.mark.parametrize("scale", [NoScale(), StaticScale(8)], ids=["none", "static"])
def test_what_does_not_move(scale):
    start = scale.get()
    assert run(scale, [0, 1, 1, 0]) == [start] * 4


@pytest.mark.parametrize("log2_level", [-30, -10, 0, 6])
def test_adaptive_finds_the_level_and_keeps_its_margin(log2_level):
    scale = AdaptiveScale(min_scale=2.0**-20, max_scale=2.0**60)
    run(scale, [0] * 60, largest=2.0**log2_level)
    scaled = 2.0**log2_level * scale.get()
    assert 65504 / 2**3.01 < scaled <= 65504 / 2**2


def test_adaptive_learns_nothing_from_an_overflow_but_widens():
    scale = AdaptiveScale()
    run(scale, [0] * 50, largest=1e-3)
    before = scale.state_dict()
    run(scale, [1])
    after = scale.state_dict()
    assert (after["mean"], after["variance"], after["num_seen"]) == (
        before["mean"],
        before["variance"],
        before["num_seen"],
    )
    assert after["extra_margin"] == before["extra_margin"] + 1
    assert scale.get() <= before["scale"] / 2
    run(scale, [0] * 500, largest=1e-3)
    assert scale.state_dict()["extra_margin"] == pytest.approx(0.5, abs=0.01)


def test_adaptive_variance_counts():
    quiet, noisy = AdaptiveScale(), AdaptiveScale()
    run(quiet, [0] * 200, largest=0.1)
    noisy.value(CPU)
    rng = random.Random(0)
    for _ in range(200):
        noisy.update_(torch.tensor(0.0), torch.tensor(0.1 * 2 ** rng.gauss(0, 2) * noisy.get()))
    assert noisy.get() < quiet.get() / 8
    assert math.sqrt(noisy.state_dict()["variance"]) == pytest.approx(2, rel=0.2)


def test_adaptive_doubles_until_there_is_something_to_see():
    scale = AdaptiveScale(max_scale=2.0**18)
    assert run(scale, [0] * 6, largest=0.0) == [2.0**15, 2.0**16, 2.0**17, 2.0**18, 2.0**18, 2.0**18]
    run(scale, [0] * 3, largest=1.0)
    settled = scale.get()
    assert run(scale, [0] * 4, largest=0.0) == [settled] * 4, "later zeros say nothing"


@pytest.mark.parametrize("scale", NON_DEFAULT, ids=KINDS)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_round_trip_of_non_default_values(scale, how):
    scale = copy.deepcopy(scale)
    run(scale, [0, 1, 0, 0, 1, 0, 0, 0], largest=0.01)
    if how == "state_dict":
        other = StaticScale(2.0) if isinstance(scale, StaticScale) else type(scale)()
        other.load_state_dict(pickle.loads(pickle.dumps(scale.state_dict())))
    else:
        other = copy.deepcopy(scale) if how == "deepcopy" else pickle.loads(pickle.dumps(scale))
        assert not other.is_placed
    assert other.state_dict() == scale.state_dict()
    future = [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert run(other, future, largest=0.02) == run(scale, future, largest=0.02)


@pytest.mark.parametrize("scale", NON_DEFAULT, ids=KINDS)
def test_every_field_and_counter_is_in_the_state(scale):
    state = scale.state_dict()
    assert {"kind", "scale"} <= state.keys()
    assert all(isinstance(value, (int, float, str)) for value in state.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("scale", value) for value in (math.inf, -math.inf, math.nan, 0.0, -1.0, 2.0**40, "x", None)],
        *[("growth_tracker", value) for value in (-1, 0.5, math.nan, 2**31)],
        ("growth_factor", 1.0), ("growth_factor", math.inf), ("backoff_factor", 1.0), ("backoff_factor", 0.0),
        ("growth_interval", 0), ("hysteresis_tracker", -1), ("tolerance", 1.0), ("kind", "adaptive"),
    ],
)  # fmt: skip
def test_invalid_state_is_refused_whole(name, value):
    scale = DynamicScale(2.0**10, hysteresis=2)
    run(scale, [0, 1, 0])
    before = scale.state_dict()
    with pytest.raises(StateError, match=FOUR_PARTS):
        scale.load_state_dict({**before, "init_scale": 4.0, "growth_interval": 3, name: value})
    assert scale.state_dict() == before


def test_incomplete_state_is_refused():
    scale = DynamicScale()
    state = scale.state_dict()
    del state["hysteresis_tracker"]
    with pytest.raises(StateError, match="all of it"):
        scale.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: StaticScale(0.0), "destroy gradients"),
        (lambda: StaticScale(-2.0), "init_scale=-2.0"),
        (lambda: StaticScale(math.nan), "init_scale=nan"),
        (lambda: StaticScale(1e-39), "1/scale is inf"),
        (lambda: StaticScale(1e39), "init_scale=1e\\+39"),
        (lambda: DynamicScale(2.0**30), "max_scale=16777216.0"),
        (lambda: DynamicScale(min_scale=8.0, max_scale=4.0), "outside its bounds"),
        (lambda: DynamicScale(growth_factor=1.0), "growth_factor=1.0"),
        (lambda: DynamicScale(backoff_factor=1.5), "backoff_factor=1.5"),
        (lambda: DynamicScale(growth_interval=0), "growth_interval=0"),
        (lambda: DynamicScale(growth_interval=2.5), "growth_interval=2.5"),
        (lambda: DynamicScale(hysteresis=0), "hysteresis=0"),
        (lambda: DynamicScale(tolerance=1.0), "tolerance=1.0"),
        (lambda: DynamicScale(consecutive_hysteresis=True), "cannot take effect"),
        (lambda: AdaptiveScale(1000.0), "1024.0"),
        (lambda: AdaptiveScale(margin_log2=-1), "margin_log2=-1"),
        (lambda: DynamicScale().set_(2.0**30), "new_scale=1073741824.0"),
        (lambda: NoScale().set_(2.0), "max_scale=1.0"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        make()
    assert re.search(FOUR_PARTS, str(caught.value))


def test_bad_factors_are_also_assertion_errors_as_in_torch():
    with pytest.raises(AssertionError, match=r"The growth factor must be > 1\.0\."):
        DynamicScale(growth_factor=0.5)
    with pytest.raises(FactorError, match=r"The backoff factor must be < 1\.0\."):
        DynamicScale(backoff_factor=1.0)
