"""The pictures of the study, one per question.

Purpose: readable from the last row of a lecture hall. Method: matplotlib's ``Figure`` without pyplot, so that nothing global is
kept and no display is needed. Each function takes the study and gives a figure; `pictures` says which there are.

Not here: captions (report.py), words (words_*.py), looks (plot_style.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from halfstep.compare._extras import need
from halfstep.compare.cells import percent
from halfstep.compare.measure import GradientStats
from halfstep.compare.plot_style import (
    INK,
    MUTED,
    SIZE,
    drawing_with,
    label_line_ends,
    new_figure,
    plot_words,
    power_of_two,
    style_of,
)
from halfstep.compare.rows import Row
from halfstep.compare.run import REFERENCE, Study
from halfstep.compare.tasks import Task
from halfstep.compare.train import Run
from halfstep.compare.words import Words
from halfstep.formats import FP16

# What the histogram is about: the regime that shows the damage, and the ones that may show the cure, best first.
DAMAGED = "fp16-unscaled"
CURES = ("fp16-dynamic", "fp16-static-1024", "fp16-adaptive", "fp16-static-8")

SMALLEST_BAR_BYTES = 16 * 1024  # tasks that hold less than this have nothing to show about memory


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        name: file name without ending.
        kind: ``"curves"``, ``"gradients"``, ``"scale"`` or ``"bytes"``; chooses the caption.
        task: what it is about; None for all tasks.
        draw: makes the figure.
    """

    name: str
    kind: str
    task: Task | None
    draw: Callable[[Words], Any]

    def render(self, words: Words) -> Any:
        """The figure, in the words' language where a font can write it."""
        drawable, font = plot_words(words)
        with drawing_with(font):
            figure = self.draw(drawable)
            figure.canvas.draw()  # while the settings hold: fonts are looked up when text is laid out
        return figure


def pictures(study: Study) -> Iterator[Picture]:
    """The pictures that this study can show: one per question, and those only whose runs exist."""
    for task in study.settings.tasks:
        yield Picture(f"curves-{task.name}", "curves", task, partial(draw_curves, study, task))
    shown = lesson(study)
    if shown is not None:
        yield Picture("gradients", "gradients", shown, partial(draw_gradients, study, shown))
        yield Picture("scale", "scale", shown, partial(draw_scale, study, shown))
    yield Picture("bytes", "bytes", None, partial(draw_bytes, study))


def lesson(study: Study) -> Task | None:
    """The task that teaches most: the one whose first layer loses most gradients; among equals the largest model.

    None without an unscaled and a scaled fp16 run.
    """
    ranked = [
        (runs[DAMAGED].start_first_layer.zero_share - runs[REFERENCE.name].start_first_layer.zero_share > 0.5,
         runs[DAMAGED].footprint.num_parameters, task)
        for task in study.settings.tasks
        if DAMAGED in (runs := study.runs_of(task.name)) and cure(runs) is not None
    ]  # fmt: skip
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def cure(runs: dict[str, Run]) -> Run | None:
    """The scaled run that the histogram shows beside the damage."""
    return next((runs[name] for name in CURES if name in runs), None)


# ---- does it learn? -------------------------------------------------------------------------------------------------


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


# ---- what happened to the gradients? --------------------------------------------------------------------------------

LOWEST_EXPONENT, HIGHEST_EXPONENT = -48, 21
_EXPONENT_TICKS = (-40, -32, -24, -14, 0, 15)
LOST, PARTLY, KEPT, GREY = "#f7d9c8", "#fdf0d5", "#e2f1e7", "#a9a9a9"


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
    """fp16's limits: at half the smallest subnormal zero, below the smallest normal fewer digits, above the largest inf."""
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


# ---- where did the scale go? ----------------------------------------------------------------------------------------


def draw_scale(study: Study, task: Task, words: Words) -> Any:
    """The scale at every step of the scaled regimes, skipped steps marked."""
    figure, axes = new_figure()
    runs = study.runs_of(task.name)
    ends = []
    for name, run in runs.items():
        if any(scale != 1.0 for scale in run.scales):
            style = style_of(name)
            axes.step(range(len(run.scales)), run.scales, where="post", color=style.color, ls=style.dash, lw=style.width)
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
    axes.set_title("×  " + words("plot.skip"), loc="right", color=MUTED, fontsize=15, fontweight="normal")
    figure.canvas.draw()
    label_line_ends(axes, ends)
    return figure


def _mark_need(axes: Any, needed: float | None, words: Words) -> None:
    if needed is not None:
        axes.axhline(needed, color=MUTED, lw=1.5, ls=(0, (4, 3)))
        axes.annotate(words("plot.needed"), (0.01, needed), xycoords=axes.get_yaxis_transform(), xytext=(0, -6),
                      textcoords="offset points", color=MUTED, fontsize=13, va="top")  # fmt: skip


def scale_needed(stats: GradientStats) -> float | None:
    """The power of two that lifts half of the non-zero gradients to fp16's smallest subnormal or above; None without any.

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


# ---- where are the bytes? -------------------------------------------------------------------------------------------

_PARTS = (
    ("plot.weights", "parameter_bytes", "#0072B2", "white"),
    ("plot.gradients", "gradient_bytes", "#56B4E9", INK),
    ("plot.state", "optimizer_state_bytes", "#b9b9b9", INK),
    ("plot.copies", "weight_copy_bytes", "#E69F00", INK),
    ("plot.activations", "peak_activation_bytes", "#009E73", "white"),
)


def draw_bytes(study: Study, words: Words) -> Any:
    """Bytes held in one training step, by kind; one bar per format, for fp16's regimes differ in the scale alone."""
    groups = _byte_groups(study)
    height = 1.6 + sum(0.9 + 0.62 * len(rows) for _, rows in groups)
    figure, grid = new_figure(len(groups), 1, size=(SIZE[0], height), squeeze=False)
    figure.suptitle(words("plot.bytes_title"), x=0.012, ha="left", fontsize=20, fontweight="bold", color=INK)
    for axes, (task, rows) in zip(grid[:, 0], groups, strict=True):
        _draw_bars(axes, rows, words)
        title = words("plot.batch", task=words.name_of("task", task.name), size=task.batch_size)
        axes.set_title(title, fontsize=15)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=14)
    return figure


def _byte_groups(study: Study) -> list[tuple[Task, list[Row]]]:
    """Tasks worth a panel, each with one row per format; tasks whose bytes equal an earlier one's are left out."""
    formats = {regime.name: regime.format.name for regime in study.settings.regimes}
    groups: list[tuple[Task, list[Row]]] = []
    seen: set[tuple[int, ...]] = set()
    for task in study.settings.tasks:
        rows = list({formats[row.regime]: row for row in reversed(study.rows_of(task.name))}.values())[::-1]
        shape = tuple(getattr(row, part) for row in rows for _, part, *_ in _PARTS)
        if shape not in seen and max(shape) >= SMALLEST_BAR_BYTES:
            groups.append((task, rows))
        seen.add(shape)
    return groups or [(study.settings.tasks[0], study.rows_of(study.settings.tasks[0].name)[:1])]


def _draw_bars(axes: Any, rows: Sequence[Row], words: Words) -> None:
    names = [words("plot.fp16_any") if row.regime.startswith("fp16") else row.regime for row in rows]
    widest = max(sum(_kib(row, part) for _, part, *_ in _PARTS) for row in rows)
    left = [0.0] * len(rows)
    for key, part, color, ink in _PARTS:
        widths = [_kib(row, part) for row in rows]
        axes.barh(names, widths, left=left, color=color, height=0.72, label=words(key), edgecolor="white", lw=1.2)
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.05 * widest:  # a narrower piece has no room for its number
                axes.text(start + width / 2, y, f"{width:,.0f}", ha="center", va="center", fontsize=14, color=ink)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f"  {total:,.0f} KiB", va="center", fontsize=14, color=INK, fontweight="bold")
    axes.set_xlim(0, widest * 1.14)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xticks([])
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(axis="y", labelcolor=INK, length=0)


def _kib(row: Row, part: str) -> float:
    return float(getattr(row, part)) / 1024
