"""Why a scale? Histograms of the gradients' exponents, with fp16's limits, before and after scaling.

Purpose: the picture that explains loss scaling. Method: grey, the true gradients of the first step as the fp32 run has
them, moved by the scale; before them, in colour, what the fp16 run of the same seed received. Both have the same
weights and batch.

Not here: an estimate of what would be lost; what is drawn was lost.
"""

from __future__ import annotations

import math
from typing import Any

from halfstep.compare._extras import need
from halfstep.compare.cells import percent
from halfstep.compare.measure import GradientStats
from halfstep.compare.plot_style import INK, new_figure, power_of_two, style_of
from halfstep.compare.run import Study
from halfstep.compare.settings import REFERENCE
from halfstep.compare.task import Task
from halfstep.compare.train import Run
from halfstep.compare.words import Words
from halfstep.formats import FP16

# What the histogram is about: the regime that shows the damage, and the ones that may show the cure, best first.
DAMAGED = "fp16-unscaled"
CURES = ("fp16-dynamic", "fp16-static-1024", "fp16-adaptive", "fp16-static-8")

LOWEST_EXPONENT, HIGHEST_EXPONENT = -48, 21
_EXPONENT_TICKS = (-40, -32, -24, -14, 0, 15)
LOST, PARTLY, KEPT, GREY = "#f7d9c8", "#fdf0d5", "#e2f1e7", "#a9a9a9"


def lesson(study: Study) -> Task | None:
    """The task that teaches most: the one whose first layer loses most gradients; among equals the largest model.

    None without an unscaled and a scaled fp16 run.
    """
    ranked = [
        (loses_first_layer(runs), runs[DAMAGED].footprint.num_parameters, task)
        for task in study.settings.tasks
        if DAMAGED in (runs := study.runs_of(task.name)) and cure(runs) is not None
    ]  # fmt: skip
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def loses_first_layer(runs: dict[str, Run]) -> bool:
    """Whether unscaled fp16 loses more than half of the first layer's gradient that fp32 has, at the first step."""
    return runs[DAMAGED].start_first_layer.zero_share - runs[REFERENCE.name].start_first_layer.zero_share > 0.5


def cure(runs: dict[str, Run]) -> Run | None:
    """The scaled run that the histogram shows beside the damage."""
    return next((runs[name] for name in CURES if name in runs), None)


def draw_gradients(study: Study, task: Task, words: Words) -> Any:
    """Exponents of the first step's gradients: as fp32 has them, and as they arrive in fp16, unscaled and scaled."""
    runs = study.runs_of(task.name)
    true, scaled = runs[REFERENCE.name], cure(runs)
    assert scaled is not None
    figure, grid = new_figure(2, 2, sharex=True, sharey="col")
    figure.suptitle(words("plot.gradients_title"), x=0.012, ha="left", fontsize=20, fontweight="bold", color=INK)
    for (left, right), run in zip(grid, (runs[DAMAGED], scaled), strict=True):
        left.set_ylabel(_scale_label(run.scales[0], words), fontsize=17, fontweight="bold", labelpad=12)
        color, log2_scale = style_of(run.regime).color, math.log2(run.scales[0])
        _draw_histogram(left, (true.start_first_layer, run.start_first_layer), log2_scale, color, words)
        _draw_histogram(right, (true.start, run.start), log2_scale, color, words)
    grid[0][0].set_title(words("plot.first_layer"))
    grid[0][1].set_title(words("plot.all_layers"))
    for axes in grid[1]:
        axes.set_xlabel(words("plot.magnitude"))
    _histogram_legend(figure, words)
    return figure


def _scale_label(scale: float, words: Words) -> str:
    if scale == 1.0:
        return words("plot.unscaled")
    return words("plot.scaled", scale=f"$\\mathbf{{2^{{{round(math.log2(scale))}}}}}$")


def _draw_histogram(
    axes: Any, stats: tuple[GradientStats, GradientStats], log2_scale: float, color: str, words: Words
) -> None:
    """Grey: the true gradient, moved by the scale. Coloured, before it: what the format kept."""
    true, kept = stats
    _draw_zones(axes, words)
    axes.bar([exponent + log2_scale for exponent, _ in true.exponents], [count for _, count in true.exponents],
             width=1.0, align="edge", color=GREY)  # fmt: skip
    axes.bar([exponent for exponent, _ in kept.exponents], [count for _, count in kept.exponents],
             width=1.0, align="edge", color=color, edgecolor="white", lw=0.6)  # fmt: skip
    share = words("plot.zeros", fp16=percent(kept.zero_share), fp32=percent(true.zero_share))
    axes.set_title(share, loc="right", color=color, fontsize=15)
    axes.set_xlim(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    axes.set_xticks(_EXPONENT_TICKS, [power_of_two(exponent) for exponent in _EXPONENT_TICKS])
    axes.set_yticks([])
    axes.margins(y=0.22)
    axes.spines["left"].set_visible(False)
    axes.grid(False)


def _draw_zones(axes: Any, words: Words) -> None:
    """fp16's limits: zero up to half the smallest subnormal, fewer digits below the smallest normal, then inf."""
    zero = math.log2(FP16.smallest_subnormal) - 1
    normal, top = math.log2(FP16.smallest_normal), math.log2(FP16.largest)
    zones = (
        (LOWEST_EXPONENT, zero, LOST, words("plot.rounds_to_zero")),
        (zero, normal, PARTLY, words("plot.subnormal")),
        (normal, top, KEPT, words("plot.normal")),
        (top, HIGHEST_EXPONENT, LOST, words("plot.too_large")),
    )
    for low, high, color, text in zones:
        axes.axvspan(low, high, color=color, lw=0, zorder=0)
        axes.text((low + high) / 2, 0.97, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                  fontsize=13, color=INK)  # fmt: skip


def _histogram_legend(figure: Any, words: Words) -> None:
    patches = need("matplotlib.patches", "the study's plots")
    colors = (GREY, style_of(DAMAGED).color, style_of(CURES[0]).color)
    handles = [patches.Patch(color=color) for color in colors]
    texts = [words("plot.true_gradient"), words("plot.arrived_unscaled"), words("plot.arrived_scaled")]
    figure.legend(handles, texts, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=14)
