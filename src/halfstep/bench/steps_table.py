"""The steps as tables in a terminal.

Method: one table for each rule, torch's recipe first; then what was not measured and why, a word about noise, and the
verdicts. Not here: printing, which is the command line's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfstep.bench.machine import in_words
from halfstep.bench.steps_cells import RuleCells, StepCell, StepMeasurement
from halfstep.bench.steps_tensors import in_words as tensors_in_words
from halfstep.bench.steps_verdict import noise_of, verdicts
from halfstep.bench.table import NOT_MEASURED

_KEY = (
    "[dim]x torch: how many times as fast as torch's recipe (unscale_, clip_grad_norm_, fused step, on fp32 weights),\n"
    "        the median of rounds in which both were timed; ms: the median by itself;\n"
    "x floor: the time over that of moving the bytes that must move; bytes: of weights, gradients and state[/]"
)


def tables(measurement: StepMeasurement) -> Iterator[Any]:
    """Things that a rich console prints, each fit for 80 columns.

    Args:
        measurement: from `measure`.

    Yields:
        A heading and a table for each rule, what was not measured and why, a word about noise, and the verdicts.
    """
    settings = measurement.settings
    where = in_words(settings.hardware, measurement.machine)
    yield f"[bold]Optimizer steps over {tensors_in_words(settings.shapes)}[/]\n[dim]{where}[/]\n"
    for one in measurement.rules:
        note = f"  [dim]{one.rule.note}[/]" if one.rule.note else ""
        yield f"[bold]{one.rule.name}[/]{note}"
        yield _table(one)
    yield _KEY
    for line in missing(measurement):
        escaped = line.replace("[", r"\[")  # rich would take an extra's brackets for its own
        yield f"[dim]not measured: {escaped}[/]"
    if note := noise_of(measurement):
        yield f"[yellow]{note}[/]"
    yield ""
    for verdict in verdicts(measurement):
        yield f"[bold]{verdict.rule}[/]{verdict.text.removeprefix(verdict.rule)}"


def missing(measurement: StepMeasurement) -> list[str]:
    """What was not measured, and why; recipes of one executor that share a reason on one line."""
    lines = [f"the executor {name}: {reason}" for name, reason in measurement.settings.missing]
    for one in measurement.rules:
        reasons: dict[str, list[str]] = {}
        for cell in one.cells:
            if cell.predicted_seconds is not None:
                known = f"{cell.storage} {cell.predicted_seconds:.2g} s"
                reasons.setdefault(f"{one.rule.name} ({cell.executor}), one step would take about", []).append(known)
            elif cell.reason:
                reasons.setdefault(f"{one.rule.name} ({cell.executor}), {cell.reason}:", []).append(cell.storage)
        lines += [f"{reason} {', '.join(storages)}" for reason, storages in reasons.items()]
    return lines


def _table(one: RuleCells) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for name in ("storage", "executor"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "x torch", "x floor", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in (one.reference, *one.cells):
        if not cell.reason:
            table.add_row(cell.storage, cell.executor, *numbers_of(cell))
    return table


def numbers_of(cell: StepCell) -> tuple[str, str, str, str]:
    """Milliseconds, times as fast as torch's recipe, multiple of the floor, and bytes per parameter.

    Example:
        >>> numbers_of(StepCell("adamw", "split", "numba", 14.0, (0.25,), (2.5,), (1.125,)))
        ('250', '2.50', '1.12', '14.00')
    """
    if cell.median_seconds is None:
        return (NOT_MEASURED,) * 4
    ms = cell.median_seconds * 1e3
    time = f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"
    return time, f"{cell.ratio:.2f}", f"{cell.floors:.2f}", f"{cell.bytes_per_param:.2f}"
