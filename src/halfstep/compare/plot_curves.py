"""Does it learn? The error on unseen data over the steps, one line per regime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halfstep.compare.plot_style import MUTED, label_line_ends, new_figure, style_of
from halfstep.compare.run import Study
from halfstep.compare.tasks import Task
from halfstep.compare.words import Words


def draw_curves(study: Study, task: Task, words: Words) -> Any:
    """Error on the test data over steps, one line per regime."""
    figure, axes = new_figure()
    constant = task.constant_metric(task.build_data())
    ends = []
    for name, run in study.runs_of(task.name).items():
        style = style_of(name)
        points = [(point.step, point.metric) for point in run.curve if math.isfinite(point.metric)]
        steps, errors = zip(*points, strict=True)
        axes.plot(steps, errors, color=style.color, ls=style.dash, lw=style.width, zorder=3 if name == "fp32" else 4)
        ends.append((steps[-1], errors[-1], name, style.color))
    axes.axhline(constant, color=MUTED, lw=1.5, ls=(0, (1, 2)))
    axes.annotate(words("plot.constant"), (0.99, constant), xycoords=axes.get_yaxis_transform(), xytext=(0, -6),
                  textcoords="offset points", color=MUTED, fontsize=13, ha="right", va="top")  # fmt: skip
    axes.set_xlim(0, max(x for x, *_ in ends))
    _scale_errors(axes, task, [y for _, y, *_ in ends], constant)
    axes.set_xlabel(words("plot.step"))
    axes.set_ylabel(words(task.metric_name))
    axes.set_title(words.name_of("task", task.name))
    figure.canvas.draw()  # settles the axes, which the labels are placed by
    label_line_ends(axes, ends)
    return figure


def _scale_errors(axes: Any, task: Task, last: Sequence[float], constant: float) -> None:
    if task.has_log_curve:
        axes.set_yscale("log")
        axes.set_ylim(max(min(last), constant * 1e-8) / 3, 3 * constant)
    else:
        axes.set_ylim(max(min(last) - 0.25 * (constant - min(last)), 0), constant * 1.12)
