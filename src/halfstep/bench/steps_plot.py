"""The picture of `halfstep bench --steps`: how many times as fast as torch's recipe, and how fast memory would allow.

Method: for each rule horizontal bars, one group for each storage with a bar for each executor; the line at 1 is torch's
recipe; the black mark is the floor, where a bar would end if the step took as long as moving its bytes takes.

Not here: words for what the bars mean; those are computed in steps_verdict.py.
"""

from __future__ import annotations

from typing import Any

from halfstep.bench.machine import in_words
from halfstep.bench.steps_cells import RuleCells, StepCell, StepMeasurement
from halfstep.bench.steps_tensors import in_words as tensors_in_words
from halfstep.bench.steps_verdict import noise_of
from halfstep.bench.style import BLUE, GREEN, INK, MUTED, ORANGE, SETTINGS, add_caption, new_figure

COLORS = {"numba": BLUE, "triton": GREEN, "torch": ORANGE}
_ROW_HEIGHT, _AROUND = 0.36, 1.3  # inches: of a storage, of a title and an axis
_BAR = 0.8  # of a storage's height
_ROOM_FOR_NUMBER = 0.12  # of the axis: in a shorter bar the number stands beside it


def draw(measurement: StepMeasurement) -> Any:
    """Draw the picture.

    Args:
        measurement: from `measure`.

    Returns:
        A matplotlib figure.
    """
    import matplotlib as mpl

    rules = measurement.rules
    num_columns = min(2, len(rules))
    num_rows = -(-len(rules) // num_columns)
    most = max(len(_by_storage(one)) for one in rules)
    with mpl.rc_context(SETTINGS):
        figure = new_figure(num_rows * (most * _ROW_HEIGHT + _AROUND) + 0.9)
        grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
        for axes, one in zip(grid, rules, strict=False):
            _draw_rule(axes, one)
        for axes in grid[len(rules) :]:
            axes.set_visible(False)
        _draw_legend(figure, measurement)
        add_caption(figure, _caption(measurement))
    return figure


def _by_storage(one: RuleCells) -> dict[str, list[StepCell]]:
    found: dict[str, list[StepCell]] = {}
    for cell in one.cells:
        found.setdefault(cell.storage, []).append(cell)
    return found


def _draw_rule(axes: Any, one: RuleCells) -> None:
    storages = _by_storage(one)
    floors = {name: _floor_of(cells) for name, cells in storages.items()}
    most = max(1.2, *(floor or 0 for floor in floors.values()), *(cell.ratio or 0 for cell in one.cells)) * 1.08
    for place, (name, cells) in enumerate(storages.items()):
        height = _BAR / len(cells)
        for number, cell in enumerate(cells):
            y = place + (number - (len(cells) - 1) / 2) * height
            _draw_bar(axes, cell, y, height * 0.92, most)
        if (floor := floors[name]) is not None:
            ends = [place - _BAR / 2, place + _BAR / 2]
            axes.plot([floor, floor], ends, color=INK, lw=2.5, solid_capstyle="butt", zorder=3)
    axes.axvline(1, color=INK, lw=1.2, ls=(0, (2, 2)))
    axes.set_yticks(range(len(storages)), [_row_label(name, cells) for name, cells in storages.items()], color=INK)
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.set_ylim(len(storages) - 0.5, -0.5)  # the first on top
    axes.set_xlim(0, most)
    axes.grid(axis="y", visible=False)
    axes.set_title(", ".join(filter(None, (one.rule.name, one.rule.note))), fontsize=12)
    axes.set_xlabel("times as fast as torch's recipe", fontsize=11)


def _floor_of(cells: list[StepCell]) -> float | None:
    """Where a bar would end at the floor, by the recipe with the most rounds: the floor is the storage's."""
    cell = max(cells, key=lambda cell: len(cell.seconds))
    return None if cell.ratio is None or cell.floors is None else cell.ratio * cell.floors


def _draw_bar(axes: Any, cell: StepCell, y: float, height: float, most: float) -> None:
    color = COLORS.get(cell.executor, MUTED)
    if cell.ratio is None:
        _write(axes, "not measured", 0, y, color)
        return
    axes.barh(y, cell.ratio, height, color=color)
    if cell.ratio > _ROOM_FOR_NUMBER * most:
        _write(axes, f"{cell.ratio:.2g}", cell.ratio, y, "white", on=color)
    else:
        _write(axes, f"{cell.ratio:.2g}", cell.ratio, y, color)


def _write(axes: Any, text: str, x: float, y: float, color: str, *, on: str = "white") -> None:
    """Beside a bar, or at its inner end on its colour; the line at 1 may run there."""
    side: Any = {"ha": "left", "xytext": (4, 0)} if on == "white" else {"ha": "right", "xytext": (-4, 0)}
    side["bbox"] = {"facecolor": on, "edgecolor": "none", "pad": 0.6}
    axes.annotate(text, (x, y), textcoords="offset points", va="center_baseline", fontsize=8.5, color=color, **side)


def _row_label(name: str, cells: list[StepCell]) -> str:
    size = next((f"  {cell.bytes_per_param:.3g} B" for cell in cells if cell.bytes_per_param is not None), "")
    return f"{name}{size}"


def _draw_legend(figure: Any, measurement: StepMeasurement) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    executors = dict.fromkeys(cell.executor for one in measurement.rules for cell in one.cells)
    handles: list[Any] = [Patch(color=COLORS.get(name, MUTED), label=f"executor {name}") for name in executors]
    handles.append(Line2D([], [], color=INK, lw=2.5, label="the floor: as fast as memory"))
    handles.append(Line2D([], [], color=INK, lw=1.2, ls=(0, (2, 2)), label="torch's recipe"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=11, frameon=False)


def _caption(measurement: StepMeasurement) -> str:
    return (
        f"{in_words(measurement.settings.hardware, measurement.machine)}; "
        f"{tensors_in_words(measurement.settings.shapes)}. Medians of paired rounds. torch's recipe: unscale_, "
        "clip_grad_norm_, fused step, on fp32 weights. Floor: the bytes that must move, at the speed of an in-place "
        f"multiplication. B: bytes per parameter. {noise_of(measurement)}"
    )
