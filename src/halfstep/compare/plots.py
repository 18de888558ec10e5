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

from halfstep.compare.measure import GradientStats
from halfstep.compare.plot_style import (
    INK,
    MUTED,
    drawing_with,
    label_line_ends,
    new_figure,
    plot_words,
    power_of_two,
    style_of,
)
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
    axes.text(0.99, constant, words("plot.constant"), transform=axes.get_yaxis_transform(), color=MUTED, fontsize=13,
              ha="right", va="bottom")  # fmt: skip
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
        # fp32 may go on to 1e-7; the picture ends where the tolerance has long been met.
        axes.set_ylim(max(min(last), task.same_absolute * 1e-3) / 2, 3 * constant)
    else:
        axes.set_ylim(max(min(last) - 0.25 * (constant - min(last)), 0), constant * 1.12)


# ---- what happened to the gradients? --------------------------------------------------------------------------------


def draw_gradients(study: Study, task: Task, words: Words) -> Any:
    """Exponents of the first step's gradients: as fp32 has them, and as they arrive in fp16, unscaled and scaled."""
    runs = study.runs_of(task.name)
    scaled = cure(runs)
    assert scaled is not None
    figure, grid = new_figure(2, 2, sharex=True, sharey="col")
    figure.suptitle(words("plot.gradients_title"), x=0.01, ha="left", fontsize=20, fontweight="bold", color=INK)
    for axes_row, run in zip(grid, (runs[DAMAGED], scaled), strict=True):
        log2_scale = round(math.log2(run.scales[0]))
        for axes, (true, kept) in zip(axes_row, _layers(runs[REFERENCE.name], run), strict=True):
            _draw_histogram(axes, true, kept, log2_scale, style_of(run.regime).color, words)
        label = words("plot.scaled", log2=f"{{{log2_scale}}}") if log2_scale else words("plot.unscaled")
        axes_row[0].set_ylabel(label.replace("2^", "$2^") + "$" if log2_scale else label, fontsize=16, fontweight="bold")
    grid[0][0].set_title(words("plot.first_layer"))
    grid[0][1].set_title(words("plot.all_layers"))
    figure.supxlabel(words("plot.magnitude"), fontsize=15, color=INK)
    return figure


def _layers(reference: Run, run: Run) -> tuple[tuple[GradientStats, GradientStats], tuple[GradientStats, GradientStats]]:
    return (reference.start_first_layer, run.start_first_layer), (reference.start, run.start)


LOWEST_EXPONENT, HIGHEST_EXPONENT = -52, 18


def _draw_histogram(
    axes: Any, true: GradientStats, kept: GradientStats, log2_scale: int, color: str, words: Words
) -> None:
    """Grey: the true gradient, moved by the scale. Coloured: what the format kept."""
    _draw_zones(axes, words)
    shifted = {exponent + log2_scale: count for exponent, count in true.exponents}
    axes.bar(*_bars(shifted), width=1.0, align="edge", color="#b9b9b9", label=words("plot.true_gradient"))
    axes.bar(*_bars(dict(kept.exponents)), width=0.72, align="edge", color=color, label=words("plot.arrived"))
    axes.set_xlim(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    axes.text(0.02, 0.8, words("plot.lost", share=f"{kept.zero_share:.0%}"), transform=axes.transAxes, va="top",
              color=color, fontsize=15, fontweight="bold")  # fmt: skip
    ticks = [-48, -40, -32, -24, -14, 0, 15]
    axes.set_xticks(ticks, [power_of_two(tick) for tick in ticks])


def _bars(counts: dict[int, int]) -> tuple[list[int], list[int]]:
    return list(counts), list(counts.values())


def _draw_zones(axes: Any, words: Words) -> None:
    """fp16's limits: below half the smallest subnormal zero, below the smallest normal fewer digits, above largest inf."""
    zero = math.log2(FP16.smallest_subnormal) - 1
    normal, top = math.log2(FP16.smallest_normal), math.log2(FP16.largest)
    zones = (
        (LOWEST_EXPONENT, zero, "#f7d9c8", words("plot.rounds_to_zero")),
        (zero, normal, "#fdf0d5", words("plot.subnormal")),
        (normal, top, "#e2f1e7", words("plot.normal")),
        (top, HIGHEST_EXPONENT, "#f7d9c8", words("plot.too_large")),
    )
    for low, high, color, text in zones:
        axes.axvspan(low, high, color=color, lw=0, zorder=0)
        axes.text((low + high) / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                  fontsize=12, color=INK)  # fmt: skip


# ---- where did the scale go? ----------------------------------------------------------------------------------------


def draw_scale(study: Study, task: Task, words: Words) -> Any:
    """The scale at every step of the scaled regimes, skipped steps marked."""
    figure, axes = new_figure()
    ends = []
    runs = study.runs_of(task.name)
    for name, run in runs.items():
        if all(scale == 1.0 for scale in run.scales):
            continue
        style = style_of(name)
        axes.step(range(len(run.scales)), run.scales, where="post", color=style.color, ls=style.dash, lw=style.width)
        axes.plot(run.skipped, [run.scales[step] for step in run.skipped], "x", color=style.color, ms=12, mew=3, zorder=5)
        ends.append((len(run.scales) - 1, run.scales[-1], name, style.color))
    axes.set_yscale("log", base=2)
    needed = scale_needed(runs[REFERENCE.name].start_first_layer)
    if needed is not None:
        axes.axhline(needed, color=MUTED, lw=1.5, ls=(0, (4, 3)))
        axes.text(0.01, needed * 1.15, words("plot.needed"), transform=axes.get_yaxis_transform(), color=MUTED, fontsize=13,
                  va="bottom")  # fmt: skip
    axes.plot([], [], "x", color=MUTED, ms=12, mew=3, ls="", label=words("plot.skip"))
    axes.legend(loc="upper left", frameon=False)
    axes.set_xlim(0, max(x for x, *_ in ends))
    axes.set_xlabel(words("plot.step"))
    axes.set_ylabel(words("plot.scale"))
    axes.set_title(words.name_of("task", task.name))
    figure.canvas.draw()
    label_line_ends(axes, ends)
    return figure


def scale_needed(stats: GradientStats) -> float | None:
    """The power of two that lifts half of the non-zero gradients to fp16's smallest subnormal or above; None without any."""
    total = sum(count for _, count in stats.exponents)
    seen = 0
    for exponent, count in stats.exponents:
        seen += count
        if 2 * seen >= total:
            return max(FP16.smallest_subnormal / 2.0**exponent, 1.0)
    return None


# ---- where are the bytes? -------------------------------------------------------------------------------------------

_PARTS = (
    ("plot.weights", "parameter_bytes", "#0072B2"),
    ("plot.gradients", "gradient_bytes", "#56B4E9"),
    ("plot.state", "optimizer_state_bytes", "#b9b9b9"),
    ("plot.copies", "weight_copy_bytes", "#E69F00"),
    ("plot.activations", "peak_activation_bytes", "#009E73"),
)


def draw_bytes(study: Study, words: Words) -> Any:
    """Bytes held in one training step, by kind; one bar per format, for fp16's regimes differ in the scale alone."""
    groups = _byte_groups(study)
    figure, grid = new_figure(len(groups), 1, squeeze=False)
    figure.suptitle(words("plot.bytes_title"), x=0.01, ha="left", fontsize=20, fontweight="bold", color=INK)
    for axes, (task, rows) in zip(grid[:, 0], groups, strict=True):
        _draw_bars(axes, rows, words)
        axes.set_title(words.name_of("task", task.name))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=14)
    return figure


def _byte_groups(study: Study) -> list[tuple[Task, list[Any]]]:
    """Tasks worth a panel, each with one row per format; tasks whose bytes equal an earlier one's are left out."""
    formats = {regime.name: regime.format.name for regime in study.settings.regimes}
    groups: list[tuple[Task, list[Any]]] = []
    seen: set[tuple[Any, ...]] = set()
    for task in study.settings.tasks:
        rows = list({formats[row.regime]: row for row in reversed(study.rows_of(task.name))}.values())[::-1]
        shape = tuple(getattr(row, part) for row in rows for _, part, _ in _PARTS)
        if shape not in seen and max(shape) >= SMALLEST_BAR_BYTES:
            groups.append((task, rows))
        seen.add(shape)
    return groups or [(study.settings.tasks[0], study.rows_of(study.settings.tasks[0].name)[:1])]


def _draw_bars(axes: Any, rows: Sequence[Any], words: Words) -> None:
    names = [words("plot.fp16_any") if row.regime.startswith("fp16") else row.regime for row in rows]
    left = [0.0] * len(rows)
    for key, part, color in _PARTS:
        kib = [getattr(row, part) / 1024 for row in rows]
        axes.barh(names, kib, left=left, color=color, height=0.68, label=words(key), edgecolor="white", lw=1.2)
        for y, (start, width) in enumerate(zip(left, kib, strict=True)):
            if width > 0.06 * max(sum(getattr(row, p) for _, p, _ in _PARTS) / 1024 for row in rows):
                axes.text(start + width / 2, y, f"{width:,.0f}", ha="center", va="center", fontsize=14,
                          color="white" if color in ("#0072B2", "#009E73") else INK)  # fmt: skip
        left = [start + width for start, width in zip(left, kib, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f"  {total:,.0f} KiB", va="center", fontsize=14, color=INK, fontweight="bold")
    axes.set_xlim(0, max(left) * 1.14)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", labelcolor=INK, length=0)
