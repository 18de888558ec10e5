"""Where did the scale go? The loss scale at every step, skipped steps marked."""

from __future__ import annotations

from typing import Any

from halfstep.compare.plot_style import MUTED, label_line_ends, new_figure, style_of
from halfstep.compare.run import Study
from halfstep.compare.task import Task
from halfstep.compare.words import Words


def draw_scale(study: Study, task: Task, words: Words) -> Any:
    """The scale at every step of the scaled regimes, skipped steps marked."""
    figure, axes = new_figure()
    runs = study.runs_of(task.name)
    ends = []
    for name, run in runs.items():
        if any(scale != 1.0 for scale in run.scales):
            style = style_of(name)
            scales = (*run.scales, run.final_scale)  # the last update counts too, as in the table
            axes.step(range(len(scales)), scales, where="post", color=style.color, ls=style.dash, lw=style.width)
            ends.append((len(run.scales), run.final_scale, name, style.color))
            heights = [run.scales[step] for step in run.skipped]
            axes.plot(run.skipped, heights, "x", color=style.color, ms=13, mew=3.2, zorder=5)
    axes.set_yscale("log", base=2)
    axes.set_xlim(0, max(x for x, *_ in ends))
    drawn = [scale for run in runs.values() for scale in (*run.scales, run.final_scale) if set(run.scales) != {1.0}]
    axes.set_ylim(min(drawn) / 4, max(drawn) * 4)
    axes.set_xlabel(words("plot.step"))
    axes.set_ylabel(words("plot.scale"))
    axes.set_title(words("plot.scale_title"), fontsize=20)
    has_skips = any(run.skipped for run in runs.values())
    axes.set_title(
        words("plot.skip" if has_skips else "plot.no_skip"), loc="right", color=MUTED, fontsize=15, fontweight="normal"
    )
    label_line_ends(axes, ends)
    return figure
