"""Does it learn? The error on unseen data over the steps, one line per regime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halfstep.compare.plot_style import MUTED, label_level, label_line_ends, new_figure, style_of
from halfstep.compare.run import Study
from halfstep.compare.settings import REFERENCE
from halfstep.compare.task import Task
from halfstep.compare.train import Run
from halfstep.compare.words import Words


def draw_curves(study: Study, task: Task, words: Words) -> Any:
    """Error on the test data over steps, one line per regime."""
    figure, axes = new_figure()
    constant = task.constant_metric(task.build_data())
    runs = list(study.runs_of(task.name).values())
    ends = [_draw_line(axes, run) for run in runs]
    errors = [point.metric for run in runs for point in run.curve]
    axes.set_xlim(0, max(step for step, *_ in ends))
    if task.has_log_curve:
        _scale_in_powers(axes, errors, constant)
    else:
        _scale_errors(axes, errors, [error for _, error, *_ in ends], constant)
    if constant < axes.get_ylim()[1]:
        axes.axhline(constant, color=MUTED, lw=1.5, ls=(0, (1, 2)))
        label_level(axes, constant, words.constant(task.metric_name), side="right")
    axes.set_xlabel(words("plot.step"))
    axes.set_ylabel(words(task.metric_name))
    axes.set_title(words.name_of("task", task.name))
    label_line_ends(axes, ends)
    return figure


def _draw_line(axes: Any, run: Run) -> tuple[float, float, str, str]:
    """Draw one run; returns where its line ends, its name and colour.

    NaN leaves a gap, and a line may be all gap: then the name says so.
    """
    style = style_of(run.regime)
    steps, errors = [point.step for point in run.curve], [point.metric for point in run.curve]
    over = 3 if run.regime == REFERENCE.name else 4  # the reference is the broad line below the others
    axes.plot(steps, errors, color=style.color, ls=style.dash, lw=style.width, zorder=over)
    finite = [(step, error) for step, error in zip(steps, errors, strict=True) if math.isfinite(error)]
    name = run.regime if math.isfinite(errors[-1]) else f"{run.regime} ({'NaN' if math.isnan(errors[-1]) else 'inf'})"
    return (*(finite[-1] if finite else (steps[-1], math.inf)), name, style.color)


def _scale_errors(axes: Any, errors: Sequence[float], last: Sequence[float], constant: float) -> None:
    """From a little below the best end up to the constant predictor, or to the start of a model that knew more."""
    highest = min(max((error for error in errors if math.isfinite(error)), default=constant), constant)
    lowest = min(*last, highest)
    axes.set_ylim(max(lowest - 0.25 * (highest - lowest), 0), highest * 1.12)


def _scale_in_powers(axes: Any, errors: Sequence[float], constant: float) -> None:
    lowest = min((error for error in errors if math.isfinite(error)), default=constant)
    axes.set_yscale("log")
    axes.set_ylim(max(lowest, constant * 1e-9) / 3, 3 * constant)
