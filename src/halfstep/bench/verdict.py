"""What the numbers of `halfstep bench --matmul` say, in sentences that are computed from them.

Method: a dtype is judged by its speed over fp32's at the largest size at which both were measured, where products are
limited by multiplication. Sizes and layouts are judged within a dtype, by their speed over that of n x n, row by row.
A difference counts where it is above `NOTICEABLE` and above the spread of the rounds it comes from. Where the spread is
above `NOTICEABLE` itself and no difference is above it, nothing is decided, and the sentence says so.

Not here: what a dtype would do on other machines; thresholds are for words only, the numbers stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.bench.clock import NOTICEABLE, UNDECIDED, noise_note
from halfstep.bench.measure import Measurement
from halfstep.bench.products import Layout
from halfstep.bench.timing import Cell
from halfstep.formats import FP32, FloatFormat

# Hardware that has a format multiplies it at fp32's speed or half of it at the least; software takes it apart first.
EMULATED = 0.2


@dataclass(frozen=True)
class Verdict:
    """One sentence and the number that it stands on.

    Args:
        text: for a person to read.
        ratio: speed over that of what it is compared with; None where nothing could be compared.
        format: what it is about.
    """

    text: str
    ratio: float | None
    format: FloatFormat


def verdicts(measurement: Measurement) -> tuple[Verdict, ...]:
    """What a measurement says: about each dtype, then sizes off a multiple of 8, then layouts.

    Args:
        measurement: from `measure`.

    Returns:
        One verdict per dtype beside fp32, one per dtype for sizes, and one per dtype for layouts; none for what was not
        measured.
    """
    formats = measurement.settings.formats
    return (
        *(_speed(measurement, fmt) for fmt in formats if fmt != FP32),
        *(verdict for fmt in formats for verdict in _sizes(measurement.of(measurement.alignment, fmt))),
        *(verdict for fmt in formats for verdict in _layouts(measurement.of(measurement.layouts, fmt))),
    )


def noise_of(measurement: Measurement) -> str:
    """A sentence if the rounds of the same product differ much; else nothing.

    Args:
        measurement: from `measure`.
    """
    cells = (*measurement.by_size, *measurement.alignment, *measurement.layouts)
    return noise_note(cell.spread for cell in cells)


def speed_over_fp32(measurement: Measurement, fmt: FloatFormat) -> tuple[int, float] | None:
    """Largest size at which a dtype and fp32 were measured, and the dtype's speed over fp32's there.

    Args:
        measurement: from `measure`.
        fmt: the dtype.

    Returns:
        (size, ratio), or None if there is no such size.
    """
    found = _largest_pair(measurement, fmt)
    return found and (found[0].product.size, found[2])


def _largest_pair(measurement: Measurement, fmt: FloatFormat) -> tuple[Cell, Cell, float] | None:
    """The dtype's cell, fp32's, and the ratio, at the largest size at which both were measured."""
    reference = {cell.product.size: cell for cell in measurement.of(measurement.by_size, FP32)}
    found = None
    for cell in measurement.of(measurement.by_size, fmt):
        base = reference.get(cell.product.size)
        if base is not None and (ratio := ratio_of(cell, base)) is not None:
            found = cell, base, ratio
    return found


def _speed(measurement: Measurement, fmt: FloatFormat) -> Verdict:
    found = _largest_pair(measurement, fmt)
    if found is None:
        cells = (*measurement.of(measurement.by_size, fmt), *measurement.of(measurement.by_size, FP32))
        reason = next(cell.reason for cell in cells if cell.reason)
        return Verdict(f"{fmt} products were not compared with fp32's: {reason}", None, fmt)
    cell, base, ratio = found
    size = cell.product.size
    if abs(ratio - 1) <= _noise(cell, base) and _is_noisy(cell, base):
        return Verdict(f"{fmt} products against fp32's at {size} x {size}: {UNDECIDED}", ratio, fmt)
    number = f"{ratio:.2g} of fp32's speed at {size} x {size}"
    if ratio > 1 + NOTICEABLE:
        text = f"{fmt} products pay here: {ratio:.2g} times fp32's speed at {size} x {size}"
    elif ratio >= 1 - NOTICEABLE:
        text = f"{fmt} products are as fast as fp32's here: {number}"
    else:
        text = f"{fmt} products are {'emulated' if ratio < EMULATED else 'slower than fp32'} here: {number}"
    claims = str(fmt) in measurement.settings.hardware.native_formats
    if claims and ratio < 1 - NOTICEABLE:
        text += ", although the hardware lists it as native"
    return Verdict(text, ratio, fmt)


def _sizes(cells: Sequence[Cell]) -> list[Verdict]:
    base, *others = cells
    compared = [(cell, ratio) for cell in others if (ratio := ratio_of(cell, base)) is not None]
    if not compared:
        return []
    slower = [(cell, ratio) for cell, ratio in compared if ratio < 1 - _noise(base, cell)]
    worst, ratio = min(slower or compared, key=lambda pair: pair[1])
    fmt, n = base.product.format, base.product.size
    if slower:
        text = f"{fmt}: sizes off a multiple of 8 cost; {worst.product.size} runs at {ratio:.2g} of the speed of {n}"
    elif all(ratio > 1 + _noise(base, cell) for cell, ratio in compared):
        text = f"{fmt}: sizes off a multiple of 8 are faster; {worst.product.size} by {ratio:.2g} times over {n}"
    elif any(_is_noisy(base, cell) for cell, _ in compared):
        text = f"{fmt}: sizes off a multiple of 8, at {n}: {UNDECIDED}"
    else:
        text = f"{fmt}: sizes off a multiple of 8 cost less than {NOTICEABLE:.0%} at {n}"
    return [Verdict(text, ratio, fmt)]


def _layouts(cells: Sequence[Cell]) -> list[Verdict]:
    pairs = [(cell, base) for cell in cells if (base := base_of(cell, cells)) is not cell]
    compared = [(cell, base, ratio) for cell, base in pairs if (ratio := ratio_of(cell, base)) is not None]
    if not compared:
        return []
    fmt = compared[0][0].product.format
    found = [
        f"{cell.product.layout.value} {ratio:.2g} times {base.product.layout.value}"
        for cell, base, ratio in compared
        if abs(ratio - 1) > _noise(cell, base)
    ]
    is_open = any(abs(ratio - 1) <= _noise(cell, base) and _is_noisy(cell, base) for cell, base, ratio in compared)
    if found:
        text = f"layouts change the speed: {', '.join(found)}{'; others ' + UNDECIDED if is_open else ''}"
    else:
        text = f"layouts: {UNDECIDED}" if is_open else f"layouts change the speed by less than {NOTICEABLE:.0%}"
    return [
        Verdict(f"{fmt}: {text}", max((ratio for *_, ratio in compared), key=lambda ratio: abs(math.log(ratio))), fmt)
    ]


def base_of(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """What a cell of one dtype's layouts is compared with: A B for products, contiguous for convolutions."""
    layout = Layout.CONTIGUOUS if cell.product.layout.is_convolution else Layout.ROWS
    return next(one for one in cells if one.product.layout is layout)


def ratio_of(cell: Cell, base: Cell) -> float | None:
    """Speed over the base's; None where one of the two was not measured."""
    return cell.gflops / base.gflops if cell.gflops and base.gflops else None


def _is_noisy(*cells: Cell) -> bool:
    """Whether the rounds spread by more than what would count as a difference."""
    return _noise(*cells) > NOTICEABLE


def _noise(*cells: Cell) -> float:
    return max(NOTICEABLE, *(cell.spread or 0 for cell in cells))
