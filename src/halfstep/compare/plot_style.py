"""How the study's pictures look: sizes, colours, fonts, and labels at the ends of lines.

Purpose: one place for what all pictures share. Method: colours of Okabe and Ito ("Color Universal Design", 2008),
which remain apart for the common kinds of colour blindness, and line styles beside them for print. Not here: any
picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from halfstep.compare._extras import need
from halfstep.compare.words import Words, words_in

SIZE = (12.8, 7.2)  # inches; 16:9, what a projector shows
DPI = 110
INK, MUTED, GRID = "#1a1a1a", "#6b6b6b", "#e3e3e3"

# Fonts that hold Chinese, in order of preference, on Linux, Windows and macOS.
CJK_FONTS = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei"),
    *("Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Arial Unicode MS"),
)


@dataclass(frozen=True)
class Style:
    """Colour, dash pattern and width of a regime's line."""

    color: str
    dash: str = "-"
    width: float = 2.6


_STYLES = {
    "fp32": Style(INK, "-", 4.5),
    "fp16-unscaled": Style("#D55E00", "-", 3.2),
    "fp16-static-8": Style("#E69F00", "--"),
    "fp16-static-1024": Style("#56B4E9", "--"),
    "fp16-dynamic": Style("#0072B2"),
    "fp16-dynamic-from-8": Style("#CC79A7", "-."),
    "fp16-dynamic-from-8-fast": Style("#882255", "-."),
    "fp16-adaptive": Style("#999933", ":", 3.2),
    "bf16": Style("#009E73"),
    "fp16-master": Style("#0072B2", "--", 3.2),
    "bf16-master": Style("#009E73", "-.", 3.2),
    "bf16-true": Style("#009E73", "--", 3.2),
    "fp16-split": Style("#0072B2", "-.", 3.2),
    "bf16-split": Style("#CC79A7", "--"),
    "bf16-split8": Style("#882255", "--"),
    "bf16-stochastic": Style("#E69F00", "-."),
    "bf16-split-bf16": Style("#56B4E9", "-."),
    "bf16-split8-int8": Style("#332288", "--"),
    "bf16-split8-int8-released": Style("#332288", ":", 3.2),
    "wrong-clip-before-unscale": Style("#B22222", ":", 3.2),
    "wrong-update-between": Style("#AA4499", ":", 3.2),
    "wrong-schedule-on-skip": Style("#8C6D1F", ":", 3.2),
    "wrong-sums-in-16-bits": Style("#D55E00", ":", 3.2),
}


def style_of(regime: str) -> Style:
    """A regime's style; grey for one that has none."""
    return _STYLES.get(regime, Style(MUTED))


def plot_words(words: Words) -> tuple[Words, str | None]:
    """The words for the pictures and the font that can draw them.

    Returns:
        The same words and a font's name (None: matplotlib's own), or English words where no font holds the language.
    """
    if words.code == "en":
        return words, None
    installed = {font.name for font in need("matplotlib.font_manager", "the study's plots").fontManager.ttflist}
    font = next((name for name in CJK_FONTS if name in installed), None)
    return (words, font) if font else (words_in("en"), None)


@contextmanager
def drawing_with(font: str | None) -> Iterator[None]:
    """Matplotlib's settings for one picture; they are put back afterwards."""
    settings = {
        "font.family": [font, "DejaVu Sans"] if font else ["DejaVu Sans"],
        "font.size": 15,
        "axes.titlesize": 17,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "axes.axisbelow": True,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "lines.solid_capstyle": "round",
    }
    with need("matplotlib", "the study's plots").rc_context(settings):
        yield


def new_figure(num_rows: int = 1, num_columns: int = 1, *, size: tuple[float, float] = SIZE, **options: Any) -> Any:
    """A figure and its axes, without pyplot.

    Args:
        num_rows: of axes.
        num_columns: of axes.
        size: in inches.
        options: for ``Figure.subplots``.

    Returns:
        (figure, axes as ``Figure.subplots`` gives them).
    """
    figure = need("matplotlib.figure", "the study's plots").Figure(figsize=size, dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure, figure.subplots(num_rows, num_columns, **options)


def label_line_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its end, apart from each other where the ends crowd.

    Args:
        axes: with its limits settled.
        ends: (x, y, name, colour) in data coordinates.
    """
    if not ends:
        return
    axes.figure.draw_without_rendering()  # settles the axes, which the labels are placed by
    to_axes = axes.transData + axes.transAxes.inverted()
    low, high = axes.get_ylim()
    inside = [(x, min(max(y, low), high), name, color) for x, y, name, color in ends]  # a line may leave the picture
    placed = sorted((float(to_axes.transform((x, y))[1]), x, y, name, color) for x, y, name, color in inside)
    heights = spread([height for height, *_ in placed], gap=0.062)
    for height, (_, x, y, name, color) in zip(heights, placed, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xycoords="data",
            xytext=(1.045, height),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=14,
            fontweight="bold",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 1, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)},
        )


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move sorted heights (0 to 1) apart to at least ``gap``, as little as possible and within the axes where they fit.

    Example:
        >>> [round(height, 2) for height in spread([0.5, 0.5, 0.9], gap=0.1)]
        [0.45, 0.55, 0.9]
    """
    groups: list[list[float]] = []  # each group: wanted heights that are laid out as one block around their mean
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _top(groups[-2], gap) + gap:
            upper = groups.pop()
            groups[-1] += upper
    placed: list[float] = []
    for group in groups:
        start = _bottom(group, gap)
        placed += [start + index * gap for index in range(len(group))]
    return placed


def _bottom(group: Sequence[float], gap: float) -> float:
    half = (len(group) - 1) * gap / 2
    # Kept inside the axes, from the bottom if the block is higher than they are.
    return max(min(sum(group) / len(group) - half, 1.0 - 2 * half), 0.0)


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + (len(group) - 1) * gap


def label_level(axes: Any, height: float, text: str, *, side: str) -> None:
    """Name a horizontal line, just below it, on a white ground so that it can be read across other lines.

    Args:
        axes: where the line is.
        height: of the line, in data coordinates.
        text: its name.
        side: ``"left"`` or ``"right"`` end of the axes.
    """
    axes.annotate(
        text,
        (0.01 if side == "left" else 0.99, height),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, -7),
        textcoords="offset points",
        color=MUTED,
        fontsize=13,
        ha=side,
        va="top",
        zorder=6,
        bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1.5},
    )


def power_of_two(exponent: int) -> str:
    """A power of two in matplotlib's mathematical text."""
    return f"$2^{{{exponent}}}$"
