"""What is asked for is checked, and what comes back is in the promised form."""

import dataclasses
import json
import math

import pytest
import torch

from halfstep.compare import timing
from halfstep.compare.regimes import REGIMES
from halfstep.compare.run import SCHEMA, compare
from halfstep.compare.settings import choose
from halfstep.compare.tasks import HALF_WEIGHTS, STORAGES, TASKS, WRONG_REGIMES
from halfstep.compare.text import library_text
from halfstep.compare.verdict import Verdict
from halfstep.errors import ArgumentError

from .conftest import SMALL, small_settings

ROW_TYPES = {
    "task": str, "regime": str, "seeds": int, "final_loss": float, "difference_from_fp32": float, "verdict": str,
    "skipped_steps": int, "zero_gradient_share_start": float, "zero_gradient_share_end": float,
    "bytes_per_parameter": float, "peak_activation_bytes": int, "step_time_ratio": (float, type(None)),
    "final_scale": float,
}  # fmt: skip


def assert_is_schema_1(plain):
    """The form that other programs rely on: these keys with these types; more keys may come."""
    assert plain["schema"] == SCHEMA == 1
    assert isinstance(plain["machine"], dict)
    assert plain["rows"]
    for row in plain["rows"]:
        for key, kind in ROW_TYPES.items():
            assert isinstance(row[key], kind), (key, row[key])
        assert row["verdict"] in {verdict.value for verdict in Verdict}
        for key in ("zero_gradient_share_start", "zero_gradient_share_end"):
            assert 0 <= row[key] <= 1


def test_the_study_as_json(study):
    plain = json.loads(json.dumps(study.as_plain(), allow_nan=False))
    assert_is_schema_1(plain)
    assert [(row["task"], row["regime"]) for row in plain["rows"]] == [
        (task, regime) for task in ("linear-small-units", "autoencoder") for regime in SMALL
    ]
    thresholds = plain["settings"]["thresholds"]["autoencoder"]
    assert thresholds == {"same_relative": 0.1, "same_absolute": 0.0, "stall_share": 0.95, "diverge_factor": 4.0}
    assert plain["settings"]["regimes"]["fp16-static-1024"]["scale"]["scale"] == 1024.0


def test_the_schema_check_can_fail(study):
    plain = study.as_plain()
    plain["rows"][0] = {**plain["rows"][0], "verdict": "fine"}
    with pytest.raises(AssertionError):
        assert_is_schema_1(plain)


def test_verdicts_of_the_lecture_example(study):
    verdicts = {row.regime: row.verdict.value for row in study.rows_of("linear-small-units")}
    assert verdicts == {"fp32": "matches fp32", "fp16-unscaled": "stalls", "fp16-static-1024": "matches fp32",
                        "bf16": "matches fp32"}  # fmt: skip


def test_emulated_regimes_show_no_time_and_the_machine_says_so(study):
    emulated = study.machine["emulated_regimes"]
    for row in study.rows:
        assert row.is_emulated is (row.regime in emulated)
        if row.is_emulated:
            assert row.step_time_ratio is None
        elif row.regime == "fp32":
            assert row.step_time_ratio == 1.0


def test_fp32_is_always_there_to_compare_with():
    assert [regime.name for regime in choose(regimes=["bf16"], device="cpu").regimes] == ["fp32", "bf16"]


def test_order_is_the_tables_and_not_the_askers():
    settings = choose(["digits", "linear"], ["bf16", "fp32"], device="cpu")
    assert [task.name for task in settings.tasks] == ["linear", "digits"]
    assert [regime.name for regime in settings.regimes] == ["fp32", "bf16"]


def test_the_full_study_and_its_quick_form():
    full, quick = choose(device="cpu"), choose(is_quick=True, device="cpu")
    by_name_only = {"autoencoder-short", "digits-sgd", "accumulation", "text", "text-small-lr"}
    assert {task.name for task in full.tasks} == TASKS.keys() - by_name_only
    assert [regime.name for regime in full.regimes] == [
        "fp32", "fp16-unscaled", "fp16-static-8", "fp16-static-1024", "fp16-dynamic", "fp16-dynamic-from-8",
        "fp16-dynamic-from-8-fast", "fp16-adaptive", "bf16", *HALF_WEIGHTS, "fp16-split", *STORAGES,
    ]  # fmt: skip
    assert all(quick.regimes_of(task) == quick.regimes for task in quick.tasks)
    for task in full.tasks:
        usual = tuple(regime for regime in full.regimes if regime.in_full)
        usual_and_half = (*usual, *(REGIMES[name] for name in HALF_WEIGHTS))
        masters = [full.regimes[0], *(REGIMES[name] for name in ("fp16-master", "bf16-master"))]
        expected = {
            "attention": tuple(masters), "attention-naive": tuple(masters), "linear": usual_and_half,
            "linear-small-units": usual_and_half, "digits": usual_and_half,
            "digits-finetune": tuple(REGIMES[name] for name in TASKS["digits-finetune"].regimes),
        }.get(task.name, usual)  # fmt: skip
        assert full.regimes_of(task) == expected, task.name
    assert [task.name for task in quick.tasks] == ["linear", "linear-small-units", "autoencoder-short"]
    assert {"fp32", "fp16-unscaled", "fp16-dynamic"} <= {regime.name for regime in quick.regimes} < set(REGIMES)


def names(regimes):
    return [regime.name for regime in regimes]


def test_a_task_with_regimes_of_its_own_shows_these_beside_a_task_without():
    settings = choose(["linear", "digits-sgd"], device="cpu")
    linear, digits = settings.tasks
    assert names(settings.regimes_of(digits)) == ["fp32", "fp16-dynamic", *WRONG_REGIMES]
    assert names(settings.regimes_of(linear)) == names(choose(["linear"], device="cpu").regimes)
    assert names(settings.regimes) == [*names(settings.regimes_of(linear)), *WRONG_REGIMES]
    assert names(settings.regimes_of(linear))[-3:] == list(HALF_WEIGHTS)


def test_in_quick_form_a_task_shows_those_of_its_regimes_that_are_meant_for_it():
    settings = choose(["text"], is_quick=True, device="cpu")
    assert names(settings.regimes_of(settings.tasks[0])) == ["fp32", "fp16-unscaled", "fp16-dynamic", "bf16"]


def test_regimes_that_are_named_are_run_on_every_task():
    settings = choose(["linear", "text"], ["bf16-true"], device="cpu")
    assert [names(settings.regimes_of(task)) for task in settings.tasks] == [["fp32", "bf16-true"]] * 2


def test_every_regime_of_a_task_exists_and_fp32_is_among_them():
    for task in TASKS.values():
        assert set(task.regimes) <= REGIMES.keys()
        assert set(task.more_regimes) <= REGIMES.keys()
        assert not task.regimes or "fp32" in task.regimes
    wrong = (*WRONG_REGIMES, "wrong-sums-in-16-bits")
    assert tuple(name for name in REGIMES if name.startswith("wrong-")) == wrong


@pytest.mark.parametrize(
    ("task", "regime", "lack"),
    [
        ("digits", "wrong-clip-before-unscale", "digits clips no gradients"),
        ("digits", "wrong-schedule-on-skip", "digits keeps its learning rate"),
        ("linear", "wrong-update-between", "linear has one parameter, which two optimizers cannot share"),
    ],
)
def test_a_mistake_that_cannot_be_made_on_a_task_is_refused(task, regime, lack):
    before = torch.get_rng_state()
    with pytest.raises(ArgumentError) as caught:
        choose([task], [regime], device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert caught.value.asked == f"the regime {regime!r} on the task {task!r}"
    assert caught.value.true == lack
    assert "a right loop under a wrong name" in caught.value.why
    assert caught.value.fix == "choose a task that shows it: --task digits-sgd or --task text or --task text-small-lr"


@pytest.mark.parametrize("task", ["linear", "digits-sgd", "text"])
def test_sums_cannot_be_wrong_where_nothing_is_summed(task):
    with pytest.raises(ArgumentError) as caught:
        choose([task], ["wrong-sums-in-16-bits"], device="cpu")
    assert caught.value.true == f"{task} has one micro-batch in each window, so nothing is summed"
    assert caught.value.fix == "choose a task that shows it: --task accumulation"


def test_a_mistake_that_can_be_made_is_not_refused():
    for task, regime in (("digits", "wrong-update-between"), *(("digits-sgd", name) for name in WRONG_REGIMES)):
        assert names(choose([task], [regime], device="cpu").regimes) == ["fp32", regime]


def test_json_says_what_each_task_read_and_showed(study):
    plain = dataclasses.replace(study, settings=choose(["linear", "digits-sgd", "text"], device="cpu")).as_plain()
    tasks, regimes = plain["settings"]["tasks"], plain["settings"]["regimes"]
    assert tasks["linear"]["data"] == ""
    assert tasks["text"]["data"] == library_text().source
    assert tasks["digits-sgd"]["regimes"] == ["fp32", "fp16-dynamic", *WRONG_REGIMES]
    assert {regime for task in tasks.values() for regime in task["regimes"]} == regimes.keys()
    assert (regimes["bf16-true"]["policy"], regimes["bf16-true"]["mistake"]) == ("bf16-true", None)
    assert regimes["wrong-update-between"] == {
        "format": "fp16", "policy": "fp16-mixed", "mistake": "update-between",
        "scale": {"kind": "torch", "scale": 2.0**16, "growth_interval": 200},
    }  # fmt: skip


def test_a_task_asked_for_by_name_is_run_whatever_the_form():
    for is_quick, name in ((False, "autoencoder-short"), (True, "digits"), (True, "text"), (False, "digits-sgd")):
        (task,) = choose([name], is_quick=is_quick, device="cpu").tasks
        assert task.num_epochs(is_quick=is_quick) > 0


@pytest.mark.parametrize(
    ("arguments", "asked", "true"),
    [
        ({"tasks": ["autoencodr"]}, "the task 'autoencodr'", "linear, linear-small-units, autoencoder"),
        ({"tasks": ["linear", ""]}, "the task ''", "linear"),
        ({"regimes": ["fp8", "int4"]}, "the regime 'fp8', 'int4'", "fp16-unscaled"),
        ({"num_seeds": 0}, "seeds=0", "seeds is a count, 1 or more"),
        ({"num_seeds": -3}, "seeds=-3", "seeds is a count, 1 or more"),
        ({"num_jobs": 0}, "jobs=0", "jobs is a count, 1 or more"),
        ({"device": "tpu"}, "device='tpu'", "cpu and cuda"),
    ],
)
def test_what_cannot_be_run_is_refused_in_four_parts(arguments, asked, true):
    with pytest.raises(ArgumentError) as caught:
        choose(**arguments)
    assert caught.value.asked == asked
    assert true in caught.value.true
    assert caught.value.why
    assert caught.value.fix.startswith(("choose", "pass"))


def test_progress_counts_every_run():
    seen = []
    settings = choose(["linear"], ["fp32"], num_seeds=2, num_jobs=1, device="cpu")
    compare(settings, lambda *call: seen.append(call))
    assert seen == [(1, 2, "linear / fp32"), (2, 2, "linear / fp32")]


def test_the_number_of_threads_is_given_back(study):
    assert torch.get_num_threads() == 1
    before = torch.get_num_threads()
    compare(choose(["linear"], ["fp32"], num_jobs=1, device="cpu"))
    assert torch.get_num_threads() == before


def test_two_processes_find_what_one_finds():
    one, two = (compare(choose(["linear"], ["fp16-static-8"], num_jobs=jobs, device="cpu")) for jobs in (1, 2))
    found = [[{**row.as_plain(), "step_time_ratio": None} for row in study.rows] for study in (one, two)]
    assert found[0] == found[1]


def test_native_regimes_take_turns_and_emulated_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(timing, "NUM_TURNS", 2)
    monkeypatch.setattr(timing, "STEPS_PER_TURN", 1)
    monkeypatch.setattr("halfstep.compare.trainer._is_native_on_cpu", lambda fmt: fmt.name != "fp16")
    regimes = small_settings().regimes
    seconds = timing.time_steps(TASKS["linear"], regimes, device=torch.device("cpu"))
    assert seconds.keys() == {"fp32", "bf16"}
    assert all(math.isfinite(value) and value > 0 for value in seconds.values())


def test_fp32_alone_is_not_timed(monkeypatch):
    monkeypatch.setattr("halfstep.compare.trainer._is_native_on_cpu", lambda fmt: fmt.name == "fp32")
    assert timing.time_steps(TASKS["linear"], small_settings().regimes, device=torch.device("cpu")) == {}
