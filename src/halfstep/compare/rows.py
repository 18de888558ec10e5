"""Rows of the study: the runs of one task and one regime over all seeds, summed up and judged.

Purpose: the numbers that table, report and JSON share, computed once. Method: each run is paired with the fp32 run of
the same seed; differences are means over pairs. Not here: how rows look (table.py, report.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from halfstep.compare.task import Task
from halfstep.compare.train import Run
from halfstep.compare.verdict import Thresholds, Verdict, judge, worst


@dataclass(frozen=True)
class Row:
    """One line of the table. Means are over seeds; differences are paired with fp32's run of the same seed.

    Args:
        task: its name.
        regime: its name.
        seeds: number of seeds.
        final_loss: test loss after the last step, mean.
        difference_from_fp32: of ``final_loss``, mean of the pairs.
        metric: the task's test error that the verdict judges, mean; lower is better.
        metric_difference_from_fp32: of ``metric``, mean of the pairs.
        verdict: the worst of the seeds' verdicts.
        skipped_steps: over all seeds.
        num_steps: over all seeds.
        zero_gradient_share_start: share of gradient elements that are exactly zero at the first step, mean.
        zero_gradient_share_end: the same at the last step.
        extra_zero_share_start: how much of ``zero_gradient_share_start`` fp32 does not have.
        extra_zero_share_end: the same at the last step.
        first_layer_zero_share_start: share of exact zeros in the first parameter's gradient at the first step, mean.
        moved_share: share of weight elements that changed at all, mean.
        bytes_per_parameter: weights, gradients and optimizer state.
        parameter_bytes: weights.
        gradient_bytes: gradients.
        optimizer_state_bytes: tensors of the optimizer.
        peak_activation_bytes: kept by the forward pass for the backward pass.
        weight_copy_bytes: 16-bit copies of weights kept for the backward pass.
        step_time_ratio: time per step relative to fp32; None where emulated or not measured.
        is_emulated: whether the arithmetic was emulated.
        final_scale: after the last update, median of the seeds.
        per_seed: each run's seed, loss, metric, verdict, skips and final scale.
    """

    task: str
    regime: str
    seeds: int
    final_loss: float
    difference_from_fp32: float
    metric: float
    metric_difference_from_fp32: float
    verdict: Verdict
    skipped_steps: int
    num_steps: int
    zero_gradient_share_start: float
    zero_gradient_share_end: float
    extra_zero_share_start: float
    extra_zero_share_end: float
    first_layer_zero_share_start: float
    moved_share: float
    bytes_per_parameter: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    peak_activation_bytes: int
    weight_copy_bytes: int
    step_time_ratio: float | None
    is_emulated: bool
    final_scale: float
    per_seed: tuple[dict[str, Any], ...]

    def as_plain(self) -> dict[str, Any]:
        """The row as JSON can hold it: a number that is not finite becomes null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def limits_of(task: Task) -> Thresholds:
    """The thresholds that judge a task's rows."""
    return Thresholds(same_relative=task.same_relative, same_absolute=task.same_absolute)


def make_row(task: Task, runs: Sequence[Run], references: Sequence[Run], *, step_time_ratio: float | None) -> Row:
    """Sum up the runs of one task and regime.

    Args:
        task: what was learned.
        runs: one per seed.
        references: fp32's runs of the same seeds, in the same order.
        step_time_ratio: from timing.py.

    Returns:
        The row.
    """
    pairs = list(zip(runs, references, strict=True))
    verdicts = [_judge(task, run, reference) for run, reference in pairs]
    held = runs[0].footprint  # bytes depend on shapes, not on the seed
    return Row(
        task=task.name,
        regime=runs[0].regime,
        seeds=len(runs),
        final_loss=mean(run.final_loss for run in runs),
        difference_from_fp32=mean(run.final_loss - reference.final_loss for run, reference in pairs),
        metric=mean(run.metric for run in runs),
        metric_difference_from_fp32=mean(run.metric - reference.metric for run, reference in pairs),
        verdict=worst(verdicts),
        skipped_steps=sum(len(run.skipped) for run in runs),
        num_steps=sum(len(run.scales) for run in runs),
        zero_gradient_share_start=mean(run.start.zero_share for run in runs),
        zero_gradient_share_end=mean(run.end.zero_share for run in runs),
        extra_zero_share_start=mean(run.start.zero_share - ref.start.zero_share for run, ref in pairs),
        extra_zero_share_end=mean(run.end.zero_share - ref.end.zero_share for run, ref in pairs),
        first_layer_zero_share_start=mean(run.start_first_layer.zero_share for run in runs),
        moved_share=mean(run.moved_share for run in runs),
        bytes_per_parameter=held.bytes_per_parameter,
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_state_bytes=held.state_bytes,
        peak_activation_bytes=held.activation_bytes,
        weight_copy_bytes=held.weight_copy_bytes,
        step_time_ratio=step_time_ratio,
        is_emulated=runs[0].is_emulated,
        final_scale=median(run.final_scale for run in runs),
        per_seed=tuple(_one_seed(run, verdict) for run, verdict in zip(runs, verdicts, strict=True)),
    )


def mean(values: Iterable[float]) -> float:
    """The mean, which may be inf or NaN (the statistics module raises for some of those).

    Example:
        >>> mean([1.0, 2.0]), mean([float("inf"), float("-inf")])
        (1.5, nan)
    """
    numbers = list(values)
    return sum(numbers) / len(numbers)


def deviation(values: Iterable[float]) -> float:
    """The standard deviation of a sample of two or more, which may be NaN.

    Example:
        >>> deviation([1.0, 3.0]), deviation([1.0, float("inf")])
        (1.4142135623730951, nan)
    """
    numbers = list(values)
    centre = mean(numbers)
    return math.sqrt(sum((number - centre) ** 2 for number in numbers) / (len(numbers) - 1))


def _judge(task: Task, run: Run, reference: Run) -> Verdict:
    return judge(
        run.metric,
        reference=reference.metric,
        constant=task.constant_metric(task.build_data()),
        moved_share=run.moved_share,
        is_finite=run.is_finite and math.isfinite(run.final_loss),
        limits=limits_of(task),
    )


def _one_seed(run: Run, verdict: Verdict) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "final_loss": run.final_loss,
        "metric": run.metric,
        "verdict": verdict,
        "skipped_steps": len(run.skipped),
        "final_scale": run.final_scale,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
