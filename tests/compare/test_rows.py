"""Rows from runs made by hand: every mean and difference has a closed form."""

import dataclasses
import json
import math

import pytest

from halfstep.compare import cells
from halfstep.compare.measure import Footprint, GradientStats
from halfstep.compare.rows import make_row
from halfstep.compare.tasks import TASKS
from halfstep.compare.train import CurvePoint, Run
from halfstep.compare.verdict import Verdict

TASK = TASKS["autoencoder"]  # constant predictor: 0.0738


def made_run(error, *, seed=0, regime="fp16-dynamic", zeros=10, scale=8.0, skipped=(), moved=1.0, finite=True):
    stats = GradientStats(num_elements=100, num_zeros=zeros, exponents=((-3, 100 - zeros),))
    return Run(
        task=TASK.name,
        regime=regime,
        seed=seed,
        curve=(CurvePoint(0, 0.5, 0.5), CurvePoint(2, error, error)),
        scales=(scale, scale),
        skipped=skipped,
        start=stats,
        start_first_layer=stats,
        end=stats,
        footprint=Footprint(100, 400, 400, 808, 5000, 200),
        moved_share=moved,
        is_finite=finite,
        final_scale=scale,
        is_emulated=True,
        duration_s=1.0,
    )


def references(*errors):
    return [made_run(error, seed=seed, regime="fp32", zeros=5, scale=1.0) for seed, error in enumerate(errors)]


def test_means_and_paired_differences():
    runs = [made_run(0.042, seed=0), made_run(0.047, seed=1, scale=32.0, skipped=(0, 1))]
    row = make_row(TASK, runs, references(0.040, 0.046), step_time_ratio=0.5)
    assert row.metric == row.final_loss == pytest.approx(0.0445)
    assert row.difference_from_fp32 == row.metric_difference_from_fp32 == pytest.approx((0.002 + 0.001) / 2)
    assert (row.seeds, row.skipped_steps, row.num_steps, row.final_scale) == (2, 2, 4, 20.0)
    assert row.zero_gradient_share_start == 0.10
    assert row.extra_zero_share_end == pytest.approx(0.05)
    assert row.bytes_per_parameter == 16.08
    assert row.verdict is Verdict.MATCHES
    assert [entry["seed"] for entry in row.per_seed] == [0, 1]


def test_several_seeds_show_their_spread():
    runs = [made_run(error, seed=seed) for seed, error in enumerate((0.04, 0.05, 0.07))]
    assert cells.error(make_row(TASK, runs, references(0.04, 0.04, 0.04), step_time_ratio=None)) == "0.0533 ± 0.0153"
    assert cells.error(make_row(TASK, runs[:1], references(0.04), step_time_ratio=None)) == "0.0400"


def test_one_lost_seed_of_three_loses_the_row():
    runs = [made_run(0.041), made_run(0.0739, seed=1), made_run(0.041, seed=2)]
    row = make_row(TASK, runs, references(0.04, 0.04, 0.04), step_time_ratio=None)
    assert row.verdict is Verdict.STALLS
    assert [entry["verdict"] for entry in row.per_seed] == [Verdict.MATCHES, Verdict.STALLS, Verdict.MATCHES]


@pytest.mark.parametrize("run", [made_run(math.nan), made_run(math.inf), made_run(0.04, finite=False)])
def test_what_is_not_finite_diverges_and_is_null_in_json(run):
    row = make_row(TASK, [run], references(0.04), step_time_ratio=None)
    assert row.verdict is Verdict.DIVERGES
    plain = json.loads(json.dumps(row.as_plain(), allow_nan=False))
    assert plain["verdict"] == "diverges"
    assert plain["final_loss"] is None or plain["final_loss"] == 0.04
    assert plain["step_time_ratio"] is None


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_seeds_that_are_not_finite_spoil_the_mean_and_not_the_report(lost):
    row = make_row(TASK, [made_run(math.inf), made_run(0.04, seed=1)], references(0.04, lost), step_time_ratio=None)
    assert row.verdict is Verdict.DIVERGES
    json.dumps(row.as_plain(), allow_nan=False)
    assert cells.error(row) == "inf"
    assert cells.difference(row) in ("nan", "+inf")


def test_a_finite_metric_beside_a_loss_of_nan_diverges():
    run = dataclasses.replace(made_run(0.04), curve=(CurvePoint(2, math.nan, 0.04),))
    assert make_row(TASK, [run], references(0.04), step_time_ratio=None).verdict is Verdict.DIVERGES


def test_runs_and_references_must_pair():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        make_row(TASK, [made_run(0.04), made_run(0.04, seed=1)], references(0.04), step_time_ratio=None)
