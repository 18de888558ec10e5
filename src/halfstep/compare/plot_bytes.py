"""Where are the bytes? What one training step holds, by kind, one bar per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfstep.compare.plot_style import INK, SIZE, new_figure
from halfstep.compare.rows import Row
from halfstep.compare.run import Study
from halfstep.compare.task import Task
from halfstep.compare.words import Words

SMALLEST_BAR_BYTES = 16 * 1024  # tasks that hold less than this have nothing to show about memory

_PARTS = (
    ("plot.weights", "parameter_bytes", "#0072B2", "white"),
    ("plot.gradients", "gradient_bytes", "#56B4E9", INK),
    ("plot.state", "optimizer_state_bytes", "#b9b9b9", INK),
    ("plot.copies", "weight_copy_bytes", "#E69F00", INK),
    ("plot.activations", "peak_activation_bytes", "#009E73", "white"),
)


def draw_bytes(study: Study, words: Words) -> Any:
    """Bytes held in one training step, by kind; one bar per policy, for fp16's regimes differ in the scale alone."""
    groups = _byte_groups(study)
    named = _bars(study)
    height = 1.6 + sum(0.9 + 0.62 * len(rows) for _, rows in groups)
    figure, grid = new_figure(len(groups), 1, size=(SIZE[0], height), squeeze=False)
    figure.suptitle(words("plot.bytes_title"), x=0.012, ha="left", fontsize=20, fontweight="bold", color=INK)
    for axes, (task, rows) in zip(grid[:, 0], groups, strict=True):
        _draw_bars(axes, rows, [_bar_name(named[row.regime], words) for row in rows])
        size = task.batch_size // task.num_micro_batches
        title = words("plot.batch", task=words.name_of("task", task.name), size=size)
        axes.set_title(title, fontsize=15)
    handles, keys = grid[0, 0].get_legend_handles_labels()
    labels = [words(key) for key in keys]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=14)
    return figure


def _byte_groups(study: Study) -> list[tuple[Task, list[Row]]]:
    """Tasks worth a panel, each with one row per bar; tasks whose bytes equal an earlier one's are left out."""
    named = _bars(study)
    groups: list[tuple[Task, list[Row]]] = []
    seen: set[tuple[int, ...]] = set()
    for task in study.settings.tasks:
        first: dict[str, Row] = {}
        for row in study.rows_of(task.name):
            first.setdefault(named[row.regime], row)
        rows = list(first.values())
        shape = tuple(getattr(row, part) for row in rows for _, part, *_ in _PARTS)
        if shape not in seen and max(shape) >= SMALLEST_BAR_BYTES:
            groups.append((task, rows))
        seen.add(shape)
    return groups or [(study.settings.tasks[0], study.rows_of(study.settings.tasks[0].name)[:1])]


def _bars(study: Study) -> dict[str, str]:
    """Regime's name -> its bar: the policy, or the regime where policies have long names or the loop makes a change."""
    return {r.name: r.name if r.is_packed else r.policy for r in study.settings.regimes}


def _bar_name(bar: str, words: Words) -> str:
    return words("plot.fp16_any") if bar == "fp16-mixed" else bar.removesuffix("-mixed")


def _draw_bars(axes: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    widest = max(sum(_kib(row, part) for _, part, *_ in _PARTS) for row in rows)
    left = [0.0] * len(rows)
    for key, part, color, ink in _PARTS:
        widths = [_kib(row, part) for row in rows]
        axes.barh(names, widths, left=left, color=color, height=0.72, label=key, edgecolor="white", lw=1.2)
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
