"""The measurement as tables in a terminal.

Method: speeds by size and dtype; then, within each dtype, speeds of odd sizes and other layouts over that of n x n row
by row; then the verdicts. Not here: printing, which is the command line's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfstep.bench.machine import in_words
from halfstep.bench.measure import ALIGNMENT_STEPS, Measurement
from halfstep.bench.timing import Cell
from halfstep.bench.verdict import base_of, noise_of, ratio_of, verdicts
from halfstep.formats import FP32, FloatFormat

NOT_MEASURED = "-"


def tables(measurement: Measurement) -> Iterator[Any]:
    """Things that a rich console prints, each fit for 80 columns.

    Args:
        measurement: from `measure`.

    Yields:
        Two tables with their headings, what was not measured and why, a word about noise, and the verdicts.
    """
    where = in_words(measurement.settings.hardware, measurement.machine)
    yield f"[bold]GFLOP/s of n x n products[/]  [dim]{where}[/]"
    yield _speeds(measurement)
    yield "[bold]Speed over that of n x n, row by row[/]  [dim]of convolutions: over contiguous ones[/]"
    yield _ratios(measurement)
    for line in missing(measurement):
        yield f"[dim]not measured: {line}[/]"
    if note := noise_of(measurement):
        yield f"[yellow]{note}[/]"
    yield ""
    for verdict in verdicts(measurement):
        yield f"[bold]{verdict.format}[/]{verdict.text.removeprefix(str(verdict.format))}"


def missing(measurement: Measurement) -> list[str]:
    """What was not measured, and why: of each dtype's sizes and layouts the first."""
    lines = []
    for fmt in measurement.settings.formats:
        for cells in (measurement.by_size, measurement.alignment, measurement.layouts):
            first = next((cell for cell in measurement.of(cells, fmt) if cell.reason), None)
            if first is not None and cells is measurement.by_size:
                is_last = first.product.size == measurement.settings.sizes[-1]
                lines.append(f"{fmt} at {first.product.size}{'' if is_last else ' and above'}: {first.reason}")
            elif first is not None:
                lines.append(f"{first.product.name}: {first.reason}")
    return list(dict.fromkeys(lines))


def speed(gflops: float | None) -> str:
    """Three digits.

    Example:
        >>> speed(1.2345), speed(65.43), speed(712345.6), speed(None)
        ('1.23', '65.4', '712346', '-')
    """
    if gflops is None:
        return NOT_MEASURED
    return f"{gflops:.3g}" if gflops < 1000 else f"{gflops:.0f}"


def _table(first: str, formats: tuple[FloatFormat, ...]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for fmt in formats:
        table.add_column(str(fmt), justify="right", no_wrap=True)
    return table


def _speeds(measurement: Measurement) -> Any:
    formats = measurement.settings.formats
    table = _table("n", formats)
    for size in measurement.settings.sizes:
        row = {cell.product.format: cell for cell in measurement.by_size if cell.product.size == size}
        table.add_row(str(size), *(_with_ratio(row[fmt], row[FP32]) for fmt in formats))
    return table


def _with_ratio(cell: Cell, reference: Cell) -> str:
    ratio = ratio_of(cell, reference)
    if ratio is None or cell is reference:
        return speed(cell.gflops)
    return f"{speed(cell.gflops)} [dim]{ratio:.2g}x[/]"


def _ratios(measurement: Measurement) -> Any:
    formats = measurement.settings.formats
    table = _table("", formats)
    aligned = {fmt: measurement.of(measurement.alignment, fmt) for fmt in formats}
    table.add_row("n", *(str(aligned[fmt][0].product.size) for fmt in formats))
    for place, step in enumerate(ALIGNMENT_STEPS[1:], 1):
        cells = (ratio_of(aligned[fmt][place], aligned[fmt][0]) for fmt in formats)
        table.add_row(f"n {'-+'[step > 0]} {abs(step)}", *map(_ratio, cells))
    layouts = {fmt: measurement.of(measurement.layouts, fmt) for fmt in formats}
    for place, first in enumerate(layouts[FP32]):
        base = base_of(first, layouts[FP32])
        if base is not first:
            cells = (ratio_of(row[place], base_of(row[place], row)) for row in layouts.values())
            name = first.product.layout.value
            table.add_row(f"convolution, {name}" if first.product.layout.is_convolution else name, *map(_ratio, cells))
    return table


def _ratio(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"
