"""The picture of `halfstep bench --matmul`: speed by size, and what sizes and layouts change.

Method: left, GFLOP/s over n, both axes logarithmic, one line per dtype with its name at its end. Right, bars: speed
over that of n x n row by row, within each dtype, so that dtypes of very different speed fit one axis.
Not here: words for what the bars mean; those are computed in verdict.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfstep.bench.machine import in_words
from halfstep.bench.measure import ALIGNMENT_STEPS, Measurement
from halfstep.bench.style import BLUE, GREEN, INK, MUTED, ORANGE, SETTINGS, add_caption, new_figure
from halfstep.bench.table import speed
from halfstep.bench.timing import Cell
from halfstep.bench.verdict import base_of, noise_of, ratio_of
from halfstep.formats import FloatFormat

COLORS = {"fp32": INK, "tf32": ORANGE, "fp16": BLUE, "bf16": GREEN}
_MARKERS = {"fp32": "o", "tf32": "D", "fp16": "s", "bf16": "^"}


def draw(measurement: Measurement) -> Any:
    """Draw the picture.

    Args:
        measurement: from `measure`.

    Returns:
        A matplotlib figure.
    """
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS):
        figure = new_figure()
        axes = figure.subplot_mosaic([["speed", "sizes"], ["speed", "layouts"]], width_ratios=[1.15, 1])
        _draw_speeds(axes["speed"], measurement)
        formats = measurement.settings.formats
        aligned = {fmt: measurement.of(measurement.alignment, fmt) for fmt in formats}
        names = [f"n {'-+'[step > 0]} {abs(step)}" for step in ALIGNMENT_STEPS[1:]]
        _draw_bars(axes["sizes"], ("Sizes off a multiple of 8", "speed over n"), names, _ratios(aligned))
        layouts = {fmt: measurement.of(measurement.layouts, fmt) for fmt in formats}
        first = next(iter(layouts.values()))
        names = [_layout_name(cell) for cell in first if base_of(cell, first) is not cell]
        _draw_bars(axes["layouts"], ("Layouts", "speed over A B"), names, _ratios(layouts))
        add_caption(figure, _caption(measurement))
    return figure


def _layout_name(cell: Cell) -> str:
    layout = cell.product.layout
    return f"conv,\n{layout.value}" if layout.is_convolution else layout.value


def _ratios(cells: dict[FloatFormat, tuple[Cell, ...]]) -> dict[str, list[float | None]]:
    """Label of a dtype -> speeds over the base's, the bases left out."""
    found = {}
    for fmt, row in cells.items():
        bases = {cell: base_of(cell, row) for cell in row}
        # In the sizes' row every cell is row by row: the first, of size n, is the base of the others.
        found[f"{fmt}, n = {row[0].product.size}"] = [
            ratio_of(cell, base) for cell, base in bases.items() if base is not cell
        ]
    return found


def _draw_speeds(axes: Any, measurement: Measurement) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    sizes = measurement.settings.sizes
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for fmt in measurement.settings.formats:
        cells = [cell for cell in measurement.of(measurement.by_size, fmt) if cell.gflops]
        if not cells:
            continue
        xs, ys = [cell.product.size for cell in cells], [cell.gflops or 0 for cell in cells]
        low = [cell.product.flops / max(cell.seconds) / 1e9 for cell in cells]
        high = [cell.product.flops / min(cell.seconds) / 1e9 for cell in cells]
        color, marker = COLORS[str(fmt)], _MARKERS[str(fmt)]
        axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)
        label = f"{fmt}: {speed(ys[-1])} at {xs[-1]}"
        axes.plot(xs, ys, color=color, marker=marker, lw=3, ms=8, clip_on=False, zorder=3, label=label)
    if axes.lines:
        axes.legend(loc="best", labelcolor="linecolor", fontsize=13, framealpha=0.9, edgecolor="none")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("GFLOP/s of n x n products")
    axes.set_xlabel("n")


def _draw_bars(axes: Any, title: tuple[str, str], names: Sequence[str], rows: dict[str, list[float | None]]) -> None:
    width = 0.8 / len(rows)
    for place, (label, values) in enumerate(rows.items()):
        color = COLORS[label.split(",")[0]]
        xs = [index + (place - (len(rows) - 1) / 2) * width for index in range(len(names))]
        axes.bar(xs, [value or 0 for value in values], width * 0.9, color=color, label=label)
        for x, value in zip(xs, values, strict=True):
            text = "-" if value is None else f"{value:.2g}"
            axes.annotate(
                text, (x, value or 0), (0, 3), textcoords="offset points", ha="center", fontsize=10, color=color
            )
    axes.axhline(1, color=MUTED, lw=1.2, ls=(0, (2, 2)))
    axes.set_xticks(range(len(names)), names, color=INK)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    highest = max((value or 0 for values in rows.values() for value in values), default=0)
    axes.set_ylim(0, max(highest, 1) * 1.3)
    axes.set_title(title[0])
    axes.set_ylabel(title[1])
    axes.legend(loc="upper left", ncols=len(rows), fontsize=10, frameon=False, labelcolor="linecolor", handlelength=1)


def _caption(measurement: Measurement) -> str:
    return (
        f"{in_words(measurement.settings.hardware, measurement.machine)}. Medians; bands from the slowest to the "
        f"fastest round. Convolutions are compared with contiguous ones. {noise_of(measurement)}"
    )
