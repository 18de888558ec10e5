"""Order, budget and ratios on a clock that only the steps move; and one small run for real."""

import json

import pytest
import torch

from halfstep.bench.steps_measure import FEWEST_ROUNDS, MOST_ROUNDS, measure
from halfstep.bench.steps_recipes import RULES, HalfstepRecipe, TorchRecipe
from halfstep.bench.steps_settings import choose


def settings_of(**options):
    return choose(**{"rules": ["adamw"], "device": "cpu", "num_params": 1e6, "num_threads": 1, **options})


def seconds_of(recipe):
    return 0.02 if isinstance(recipe, TorchRecipe) else {"numba": 0.01, "torch": 0.1}[recipe.executor]


def test_ratio_and_floor_are_those_of_the_clock(step_machine):
    made = step_machine(seconds_of, bytes_per_param=10)
    settings = settings_of(storages=["split"])
    [one] = measure(settings, now=made.now).rules
    ours, by_torch = one.cells
    assert one.reference.ratio == pytest.approx(1)
    assert ours.ratio == pytest.approx(2)
    assert by_torch.ratio == pytest.approx(0.2)
    assert ours.bytes_per_param == 10
    # 20 bytes a parameter have to move at 1 GB/s: 20 ns; ours took 10
    assert ours.floors == pytest.approx(0.5)
    assert by_torch.floors == pytest.approx(5)
    assert ours.seconds == pytest.approx((0.01 * settings.num_params / 1e6,) * MOST_ROUNDS)
    assert one.bytes_per_second == pytest.approx((1e9,) * MOST_ROUNDS)


def test_every_round_begins_with_another_recipe(step_machine):
    made = step_machine(lambda recipe: 0.01)
    settings = settings_of(storages=["fp32", "split"], executors=["torch"])
    measure(settings, now=made.now)
    timed = [recipe for recipe, num_params in made.stepped if num_params == settings.num_params]
    assert isinstance(timed[-3 * MOST_ROUNDS - 3], TorchRecipe), "warmed up first"
    rounds = [timed[-3 * MOST_ROUNDS :][3 * number : 3 * number + 3] for number in range(MOST_ROUNDS)]
    assert all(len(set(recipes)) == 3 for recipes in rounds)
    assert [len({recipes[place] for recipes in rounds}) for place in range(3)] == [3, 3, 3]
    assert rounds[1] == rounds[0][1:] + rounds[0][:1]


def test_drift_hits_both_sides_of_a_ratio(step_machine):
    made = step_machine(lambda recipe: seconds_of(recipe) * (1 + made.time))
    [one] = measure(settings_of(storages=["split"], executors=["numba"]), now=made.now).rules
    assert max(one.cells[0].seconds) > 1.5 * min(one.cells[0].seconds)
    assert one.cells[0].ratio == pytest.approx(2, rel=0.05)


def test_slow_recipes_get_fewer_rounds_or_none_and_say_why(step_machine):
    slow = {"split": 0.5, "split8": 4.0}
    made = step_machine(lambda r: slow.get(r.storage, 0.01) if isinstance(r, HalfstepRecipe) else 0.01)
    settings = settings_of(storages=["fp32", "split", "split8"], executors=["torch"], seconds=8)
    [one] = measure(settings, now=made.now).rules
    quick, slower, slowest = one.cells
    assert len(one.reference.seconds) == len(quick.seconds) == MOST_ROUNDS
    assert FEWEST_ROUNDS <= len(slower.seconds) < MOST_ROUNDS
    assert len(slower.over_torch) == len(slower.seconds)
    assert slowest.seconds == ()
    assert slowest.ratio is slowest.floors is slowest.spread is slowest.bytes_per_param is None
    assert slowest.predicted_seconds == pytest.approx(4, rel=0.06)
    assert slowest.reason == "one step would take about 4 s"


@pytest.mark.parametrize("seconds", [5, 40])
@pytest.mark.parametrize("rules", [["adamw"], ["adamw", "adam", "sgd", "lion"]])
def test_the_budget_is_kept_and_compiling_is_not_of_it(step_machine, seconds, rules):
    made = step_machine(lambda r: 0.02 if r.executor != "torch" else 0.4, compile_seconds=3.0)
    settings = settings_of(rules=rules, seconds=seconds)
    measurement = measure(settings, now=made.now)
    compiled = 3.0 * len(made.compiled)
    pilots = 3 * 0.3 * sum(r.executor == "torch" for r in made.compiled)  # before anything is known
    assert made.time - compiled <= 1.1 * seconds + pilots
    assert any(cell.ratio for one in measurement.rules for cell in one.cells)
    if seconds == 40 and len(rules) == 1:
        assert all(cell.ratio for cell in measurement.cells)


def test_what_does_not_run_says_torchs_first_line(step_machine):
    made = step_machine(seconds_of, error_of=lambda r: "no kernel" if r.storage == "split8+int8" else "")
    [one] = measure(settings_of(executors=["torch"]), now=made.now).rules
    assert {cell.storage: cell.reason for cell in one.cells if cell.reason} == {"split8+int8": "no kernel"}
    assert one.cells[0].ratio == pytest.approx(0.2)


def test_progress_is_told_and_others_can_be_compared(step_machine):
    calls = []
    made = step_machine(seconds_of)

    class Other:
        rule, storage, executor = RULES["adamw"], "another library", "its own"

        def build(self, shapes, device):
            return made.build(TorchRecipe(RULES["adamw"]), shapes, device)

    [one] = measure(
        settings_of(storages=["split"]), lambda *call: calls.append(call), others=lambda _: [Other()], now=made.now
    ).rules
    assert one.cells[-1].storage == "another library"
    assert one.cells[-1].ratio == pytest.approx(1)
    assert calls[0] == (0, 3, "adamw: split (numba), a few tensors")
    assert calls[-1] == (MOST_ROUNDS, MOST_ROUNDS, "adamw: rounds")


def test_a_real_run_measures_every_rule_storage_and_executor():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    settings = choose(["adamw", "lion"], device="cpu", num_threads=1, num_params=4000, tensors="4", seconds=20)
    measurement = measure(settings)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for one in measurement.rules:
        assert len(one.cells) == 14
        assert [cell.reason for cell in one.cells] == [""] * 14
        assert all(cell.ratio > 0 and cell.floors > 0 and cell.spread >= 0 for cell in one.cells)
        numba, by_torch = (
            [cell.bytes_per_param for cell in one.cells if cell.executor == name] for name in ("numba", "torch")
        )
        assert numba == by_torch == sorted(numba, reverse=True)
    plain = json.loads(json.dumps(measurement.as_dict(), allow_nan=False))
    assert plain["machine"]["threads"] == 1
    assert plain["params"] == settings.num_params
    assert [one["compared_with"] for one in plain["rules"]] == ["torch.optim.AdamW", "torch.optim.AdamW"]
    assert plain["rules"][0]["recipes"][0]["storage"] == "torch's recipe"
