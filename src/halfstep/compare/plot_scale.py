"""Where did the scale go? The loss scale at every step, skipped steps marked."""

from __future__ import annotations

from typing import Any

from halfstep.compare.measure import GradientStats
from halfstep.compare.plot_style import MUTED, label_level, label_line_ends, new_figure, style_of
from halfstep.compare.run import Study
from halfstep.compare.settings import REFERENCE
from halfstep.compare.tasks import Task
from halfstep.compare.words import Words
from halfstep.formats import FP16


def draw_scale(study: Study, task: Task, words: Words) -> Any:
    """The scale at every step of the scaled regimes, skipped steps marked."""
    figure, axes = new_figure()
    runs = study.runs_of(task.name)
    ends = []
    for name, run in runs.items():
        if any(scale != 1.0 for scale in run.scales):
            style = style_of(name)
            axes.step(
                range(len(run.scales)), run.scales, where="post", color=style.color, ls=style.dash, lw=style.width
            )
            ends.append((len(run.scales) - 1, run.scales[-1], name, style.color))
            heights = [run.scales[step] for step in run.skipped]
            axes.plot(run.skipped, heights, "x", color=style.color, ms=13, mew=3.2, zorder=5)
    axes.set_yscale("log", base=2)
    _mark_need(axes, scale_needed(runs[REFERENCE.name].start_first_layer), words)
    axes.set_xlim(0, max(x for x, *_ in ends))
    axes.set_ylim(bottom=2.0)
    axes.set_xlabel(words("plot.step"))
    axes.set_ylabel(words("plot.scale"))
    axes.set_title(words("plot.scale_title"), fontsize=20)
    has_skips = any(run.skipped for run in runs.values())
    axes.set_title(
        words("plot.skip" if has_skips else "plot.no_skip"), loc="right", color=MUTED, fontsize=15, fontweight="normal"
    )
    label_line_ends(axes, ends)
    return figure


def _mark_need(axes: Any, needed: float | None, words: Words) -> None:
    if needed is not None:
        axes.axhline(needed, color=MUTED, lw=1.5, ls=(0, (4, 3)))
        label_level(axes, needed, words("plot.needed"), side="left")


def scale_needed(stats: GradientStats) -> float | None:
    """The power of two that lifts half of the non-zero gradients to fp16's smallest subnormal; None without any.

    Example:
        >>> scale_needed(GradientStats(num_elements=4, num_zeros=1, exponents=((-30, 1), (-29, 2)))) == 2.0**5
        True
    """
    total = sum(count for _, count in stats.exponents)
    seen = 0
    for exponent, count in stats.exponents:
        seen += count
        if 2 * seen > total:
            return max(FP16.smallest_subnormal / 2.0**exponent, 1.0)
    return None
