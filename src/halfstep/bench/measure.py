"""All products of one run, and what a reader needs to know to believe them.

Method: three questions, one group of products each, timed in turn (see timing.py): dtypes against each other, size by
size; for each dtype, sizes that miss a multiple of 8 and transposed operands against n x n row by row; for each dtype,
convolutions with channels last against contiguous ones. Each group gets an equal part of the time that is left.

Not here: what the numbers mean (verdict.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from halfstep.bench.clock import threads
from halfstep.bench.machine import facts_of
from halfstep.bench.products import Layout, Product
from halfstep.bench.settings import Settings, alignment_sizes
from halfstep.bench.timing import Cell, Timer
from halfstep.formats import FloatFormat

Progress: TypeAlias = "Callable[[int, int, str], object]"

# Steps from a multiple of 8: none, just below, just above, and a multiple of 4 only.
ALIGNMENT_STEPS = (0, -1, 1, 4)
TRANSPOSED = (Layout.RIGHT_TRANSPOSED, Layout.LEFT_TRANSPOSED)
# Sides of the images, the largest that is affordable first.
_IMAGE_SIZES = (56, 28, 14, 7)


@dataclass(frozen=True)
class Measurement:
    """What `measure` found.

    Args:
        settings: what was to be measured.
        by_size: n x n products, dtypes within sizes.
        alignment: for each dtype n, n - 1, n + 1 and n + 4, where n is a multiple of 8.
        layouts: for each dtype n x n products with a transposed operand, and convolutions.
        machine: plain facts about hardware and versions.
    """

    settings: Settings
    by_size: tuple[Cell, ...]
    alignment: tuple[Cell, ...]
    layouts: tuple[Cell, ...]
    machine: dict[str, Any]

    def of(self, cells: Sequence[Cell], fmt: FloatFormat) -> tuple[Cell, ...]:
        """Those of the cells that are in a format."""
        return tuple(cell for cell in cells if cell.product.format == fmt)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "machine": self.machine,
            "seconds": self.settings.seconds,
            "by_size": [cell.as_dict() for cell in self.by_size],
            "alignment": [cell.as_dict() for cell in self.alignment],
            "layouts": [cell.as_dict() for cell in self.layouts],
        }


def measure(
    settings: Settings, progress: Progress = lambda *_: None, *, now: Callable[[], float] = time.perf_counter
) -> Measurement:
    """Measure what the settings ask for, in about the time that they allow.

    Args:
        settings: from `choose`.
        progress: called before and after each group of products with (groups done, groups in all, its name).
        now: a clock in seconds, monotonic.

    Returns:
        The measurement. Threads and TF32 switches are as they were.
    """
    with threads(settings.num_threads):
        groups = _Groups(settings, progress, Timer(settings.device, settings.seconds, now))
        by_size = [groups.time([Product(fmt, n) for fmt in settings.formats], f"{n} x {n}") for n in settings.sizes]
        alignment, layouts = [], []
        for fmt in settings.formats:
            base, steps, transposed = groups.time_around(fmt)
            alignment.append((base, *steps))
            layouts.append((base, *transposed))
        layouts += [groups.time_convolutions(fmt) for fmt in settings.formats]
        return Measurement(
            settings,
            _flat(by_size),
            _flat(alignment),
            _flat(layouts),
            facts_of(settings.hardware, settings.num_threads),
        )


class _Groups:
    """Gives each group an equal part of the time that is left."""

    def __init__(self, settings: Settings, progress: Progress, timer: Timer) -> None:
        self.settings, self.progress, self.timer = settings, progress, timer
        self.done, self.total = 0, len(settings.sizes) + 2 * len(settings.formats)

    def share(self) -> float:
        return self.timer.seconds_left / max(self.total - self.done, 1)

    def time(self, products: Sequence[Product], name: str) -> tuple[Cell, ...]:
        self.progress(self.done, self.total, name)
        cells = self.timer.time(products, self.share())
        self.done += 1
        self.progress(self.done, self.total, name)
        return cells

    def time_around(self, fmt: FloatFormat) -> tuple[Cell, tuple[Cell, ...], tuple[Cell, ...]]:
        """n x n row by row, the sizes around it, and the transposed layouts, at the best n that is affordable."""
        for n in alignment_sizes(self.settings):
            products = [Product(fmt, n + step) for step in ALIGNMENT_STEPS]
            products += [Product(fmt, n, layout) for layout in TRANSPOSED]
            if self._fits(products):
                break
        base, *others = self.time(products, f"{fmt}, sizes around {n}")
        num_steps = len(ALIGNMENT_STEPS) - 1
        return base, tuple(others[:num_steps]), tuple(others[num_steps:])

    def time_convolutions(self, fmt: FloatFormat) -> tuple[Cell, ...]:
        for size in _IMAGE_SIZES:
            products = [Product(fmt, size, layout) for layout in (Layout.CONTIGUOUS, Layout.CHANNELS_LAST)]
            if self._fits(products):
                break
        return self.time(products, f"{fmt}, convolutions")

    def _fits(self, products: Sequence[Product]) -> bool:
        try:
            return self.timer.fits(products, self.share())
        except RuntimeError:  # no kernel for it here: timing it will give the reason
            return True


def _flat(groups: Sequence[Sequence[Cell]]) -> tuple[Cell, ...]:
    return tuple(cell for group in groups for cell in group)
