"""How the pictures of a measurement look.

Colours of Okabe and Ito ("Color Universal Design", 2008), which remain apart for the common kinds of colour blindness.
"""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH, HEIGHT, DPI = 12.8, 7.2, 110  # inches; 16:9, what a projector shows
CAPTION_COLUMNS = 140  # of size 10 across the picture
INK, MUTED, GRID = "#1a1a1a", "#6b6b6b", "#e3e3e3"
ORANGE, BLUE, GREEN = "#E69F00", "#0072B2", "#009E73"

SETTINGS: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def new_figure(height: float = HEIGHT) -> Any:
    """A figure of the usual width (made without pyplot: no window, no global state).

    Args:
        height: in inches.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))


def add_caption(figure: Any, text: str) -> None:
    """Small words below everything."""
    figure.supxlabel(textwrap.fill(text, CAPTION_COLUMNS), fontsize=10, color=MUTED, x=0.01, ha="left")
