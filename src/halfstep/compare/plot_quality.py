"""What does it cost to keep fewer bytes? Error beyond fp32's against bytes per parameter, one point per regime.

Method: only regimes that differ in how weights and moments are kept are drawn, fp32 among them. The scale is linear up
to a tenth of the task's tolerance and logarithmic beyond, so that a run within the tolerance and one that is lost are
both seen. Small dots are single seeds. A run that ends in NaN stands at the upper edge, and its name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from halfstep.compare.plot_style import label_level, new_figure, style_of
from halfstep.compare.rows import Row, limits_of
from halfstep.compare.run import Study
from halfstep.compare.settings import REFERENCE
from halfstep.compare.task import Task
from halfstep.compare.words import Words

MATCH = "#dff2ea"  # the ground of the verdict's chip on the page
Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels


def compares_storages(study: Study, task: Task) -> bool:
    """Whether a task shows masters or moments in fewer bytes than fp32."""
    return any(regime.is_packed for regime in study.settings.regimes_of(task))


def draw_quality(study: Study, task: Task, words: Words) -> Any:
    """Difference from fp32 over bytes per parameter."""
    figure, axes = new_figure()
    rows = _rows(study, task)
    reference = next(row for row in rows if row.regime == REFERENCE.name)
    limit = limits_of(task).same_limit(reference.metric) - reference.metric
    seeds = {row.regime: list(_seed_differences(row, reference)) for row in rows}  # one under the point, if it is one
    _scale_axes(axes, rows, [change for changes in seeds.values() for change in changes], limit)
    axes.axhspan(axes.get_ylim()[0], limit, color=MATCH, lw=0, zorder=0)
    label_level(axes, limit, words("plot.within_tolerance", limit=f"{limit:.2g}"), side="left")
    top = axes.get_ylim()[1]
    points = [(row.bytes_per_parameter, _height(row, top)) for row in rows]
    for row, (x, y) in zip(rows, points, strict=True):
        color = style_of(row.regime).color
        known = seeds[row.regime]
        axes.plot([x] * len(known), known, "o", color=color, ms=4, alpha=0.6, zorder=3)  # NaN draws nothing
        axes.plot(x, y, "o", color=color, ms=11, mec="white", mew=1.2, zorder=4, clip_on=False)
    axes.set_xlabel(words("plot.bytes_per_parameter"))
    axes.set_ylabel(words("plot.beyond_fp32", metric=words(task.metric_name)))
    axes.set_title(words("plot.quality_title", task=words.name_of("task", task.name)))
    dots = [(row.bytes_per_parameter, change) for row in rows for change in seeds[row.regime] if math.isfinite(change)]
    _label_points(axes, points, dots, [(_name(row), style_of(row.regime).color) for row in rows])
    return figure


def _rows(study: Study, task: Task) -> list[Row]:
    """fp32's row and those of 16-bit weights: the others' bytes are fp32's, and their differences the scale's."""
    shown = {REFERENCE.name} | {r.name for r in study.settings.regimes if r.has_half_weights and r.mistake is None}
    return [row for row in study.rows_of(task.name) if row.regime in shown]


def _seed_differences(row: Row, reference: Row) -> Iterator[float]:
    for own, theirs in zip(row.per_seed, reference.per_seed, strict=True):
        yield own["metric"] - theirs["metric"]


def _name(row: Row) -> str:
    return row.regime if math.isfinite(row.metric_difference_from_fp32) else f"{row.regime} (NaN)"


def _height(row: Row, top: float) -> float:
    change = row.metric_difference_from_fp32
    return min(change, top) if math.isfinite(change) else top


def _scale_axes(axes: Any, rows: list[Row], changes: list[float], limit: float) -> None:
    finite = [change for change in changes if math.isfinite(change)]
    axes.set_yscale("symlog", linthresh=limit / 10, linscale=1.0, subs=[2, 5])
    # Room for names on both sides of the points that are close to zero.
    axes.set_ylim(min(-0.4 * limit, 3 * min(finite)), max(20 * limit, 5 * max(finite)))
    axes.yaxis.set_major_formatter(partial(_tick, smallest=limit / 10))
    held = [row.bytes_per_parameter for row in rows]
    axes.set_xlim(min(held) - 1.2, max(held) + 1.2)


def _tick(value: float, _: int, smallest: float) -> str:
    """Nothing between 0 and where the scale becomes logarithmic: there is no room."""
    if 0 < abs(value) < 0.99 * smallest:
        return ""
    return f"{value:+.4g}".replace("-", "−") if value else "0"


# ---- names ----------------------------------------------------------------------------------------------------------

_SHARES = (0.5, 0.3, 0.7, 0.1, 0.9)  # of a name's width that is left of its point
_ROWS = tuple(sign * (1.2 + 1.1 * row) for row in range(12) for sign in (1, -1))  # in heights of a name from its point
_GAP = 14.0  # pixels between a point and a name beside it
_RADIUS, _DOT_RADIUS = 8.0, 4.0  # pixels around a point, and around that of a single seed, that names keep off


def _label_points(
    axes: Any, points: list[tuple[float, float]], dots: list[tuple[float, float]], labels: list[tuple[str, str]]
) -> None:
    """Write each point's name (with its colour) near it, where it covers no other name, line, point or dot."""
    axes.figure.draw_without_rendering()  # settles the axes, which the names are placed by
    texts = [axes.text(0, 0, name, fontsize=14, fontweight="bold") for name, _ in labels]
    boxes = [text.get_window_extent() for text in texts]
    for text in texts:
        text.remove()
    pixels, small = axes.transData.transform(points), axes.transData.transform(dots).reshape(-1, 2)
    kept_free = [_around(x, y, _DOT_RADIUS) for x, y in small.tolist()]
    sizes = [(box.width + 8, box.height + 2) for box in boxes]
    places = place_names(pixels.tolist(), sizes, axes.get_window_extent().extents, kept_free)
    for (x, y), (left, bottom, right, top), (name, color) in zip(pixels, places, labels, strict=True):
        near_x, near_y = min(max(x, left), right), min(max(y, bottom), top)  # of the name, to the point
        axes.annotate(
            name,
            xy=(x, y),
            xytext=((left + right) / 2, (bottom + top) / 2),
            xycoords="figure pixels",
            textcoords="figure pixels",
            color=color,
            ha="center",
            va="center",
            fontsize=14,
            fontweight="bold",
            zorder=5,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 1,
                "shrinkA": 0,
                "shrinkB": 5,
                "relpos": ((near_x - left) / (right - left), (near_y - bottom) / (top - bottom)),
            },
        ).set_in_layout(False)


def place_names(
    points: list[Any], sizes: list[tuple[float, float]], area: Any, kept_free: Sequence[Box] = ()
) -> list[Box]:
    """Boxes for names, each as close to its point as no earlier name or line, and no point, is in the way.

    Args:
        points: (x, y) in pixels.
        sizes: (width, height) of the names.
        area: left, bottom, right and top of where all of them are to be.
        kept_free: what else they are not to cover.

    Returns:
        Left, bottom, right and top of each. Where there is no room at all, the one that covers least.

    Example:
        >>> place_names([(50, 50), (50, 50)], [(40, 10), (40, 10)], (0, 0, 100, 100))
        [(30.0, 57.0, 70.0, 67.0), (30.0, 33.0, 70.0, 43.0)]
    """
    around = [_around(x, y, _RADIUS) for x, y in points]
    names: list[Box] = []
    lines: list[Box] = []
    for index, ((x, y), size) in enumerate(zip(points, sizes, strict=True)):
        others = [box for box in around if box != around[index]]  # a point at the same place is no other
        best, least = None, math.inf
        for name, line in _candidates(x, y, size, area):
            covered = sum(_overlap(name, box) for box in (*names, *lines, *others, *kept_free))
            covered += sum(_overlap(line, box) for box in (*names, *others))
            if covered < least:
                best, least = (name, line), covered
        assert best is not None
        names.append(best[0])
        lines.append(best[1])
    return names


def _candidates(x: float, y: float, size: tuple[float, float], area: Any) -> Iterator[tuple[Box, Box]]:
    """Places of a name and of the line to it, the nearest first; all inside the area."""
    (width, height), (low_x, low_y, high_x, high_y) = size, area
    for index, row in enumerate(_ROWS):
        bottom = y + row * height - height / 2
        for share in _SHARES if low_y <= bottom <= high_y - height else ():
            left = min(max(x - share * width, low_x), high_x - width)
            name = (left, bottom, left + width, bottom + height)
            yield name, (x - 1, min(y, bottom), x + 1, max(y, bottom + height))
        if index == 1:  # before it goes farther up or down
            for left in (x - _GAP - width, x + _GAP):
                if low_x <= left <= high_x - width:
                    name = (left, y - height / 2, left + width, y + height / 2)
                    yield name, (min(x, left + width), y - 1, max(x, left), y + 1)
    # However narrow the area: on the point.
    left, bottom = min(max(x - width / 2, low_x), high_x - width), min(max(y - height / 2, low_y), high_y - height)
    yield (left, bottom, left + width, bottom + height), (x, y, x, y)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(wide, 0.0) * max(high, 0.0)
