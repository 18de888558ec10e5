"""Time products in turn, on a budget, and leave the process as it was.

Method: every product of a group runs once to warm up. Then come rounds; in each round every product runs in turn, the
order reversed from round to round, so that a machine that slows down slows all of them down. A round repeats a short
product until it fills `ROUND_SECONDS`, between two waits for the device. Products that would take more than their
share of the budget are not run, and the reason is kept: before the first run the time is predicted from the smallest
product of the kind, doubled until a product takes `PILOT_SECONDS`.

Not here: which products; medians are taken where they are read.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from halfstep.bench.clock import spread_of, wait_for
from halfstep.bench.products import Product
from halfstep.formats import TF32
from halfstep.tf32 import tf32_switched

ROUND_SECONDS = 0.005  # a clock that ticks in microseconds is exact to a thousandth
PILOT_SECONDS = 0.002
SHORTEST_SECONDS = 1e-6  # no call from Python takes less, whatever a clock says
MOST_ROUNDS, FEWEST_ROUNDS = 7, 3
_PILOT_SIZE = {False: 64, True: 7}  # of a matrix product, of a convolution


@dataclass(frozen=True)
class Cell:
    """One product and its times.

    Args:
        product: what was timed.
        seconds: per product, one value per round; empty if it was not measured.
        reason: why it was not measured; empty if it was.

    Example:
        >>> from halfstep.formats import FP32
        >>> Cell(Product(FP32, 1000), seconds=(0.2, 0.1, 0.1)).gflops
        20.0
    """

    product: Product
    seconds: tuple[float, ...] = ()
    reason: str = ""

    @property
    def gflops(self) -> float | None:
        """10^9 operations per second, from the median of the rounds; None if it was not measured."""
        return self.product.flops / statistics.median(self.seconds) / 1e9 if self.seconds else None

    @property
    def spread(self) -> float | None:
        """Interquartile range of the rounds as a share of their median; None if it was not measured."""
        return spread_of(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "dtype": self.product.format.name,
            "operation": "conv2d" if self.product.layout.is_convolution else "matmul",
            "size": self.product.size,
            "layout": self.product.layout.value,
            "flops": self.product.flops,
            "gflops_per_s": self.gflops,
            "spread": self.spread,
            "seconds": list(self.seconds),
            "not_measured": self.reason or None,
        }


@dataclass
class Timer:
    """Times groups of products within a budget of seconds.

    Args:
        device: where the products run.
        seconds: that all groups may take together; the clock starts with the timer.
        now: a clock in seconds, monotonic.
    """

    device: torch.device
    seconds: float
    now: Callable[[], float] = time.perf_counter
    _started: float = field(init=False)
    _flops_per_second: dict[tuple[str, bool], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._started = self.now()

    @property
    def seconds_left(self) -> float:
        """Of the budget; negative when it is overspent."""
        return self.seconds - (self.now() - self._started)

    def fits(self, products: Sequence[Product], seconds: float) -> bool:
        """Whether the fewest rounds of all these products are predicted to take at most so many seconds."""
        return sum(self._predict(product) for product in products) * (1 + FEWEST_ROUNDS) <= seconds

    def time(self, products: Sequence[Product], seconds: float) -> tuple[Cell, ...]:
        """Time a group of products in turn.

        Args:
            products: to be compared with each other.
            seconds: that the group may take; where that is too little for all, the quickest are timed.

        Returns:
            One cell per product, in order.
        """
        found = {product: self._set_up(product, share) for product, share in self._shares(products, seconds).items()}
        runs = [run for run in found.values() if isinstance(run, _Run)]
        for number in range(MOST_ROUNDS):
            for run in runs if number % 2 == 0 else reversed(runs):
                if number < run.num_rounds:
                    run.seconds.append(self._time_batch(run))
        for run in runs:
            self._learn(run.product, statistics.median(run.seconds))
        cells = {p: Cell(p, tuple(run.seconds)) if isinstance(run, _Run) else run for p, run in found.items()}
        return tuple(cells[product] for product in products)

    def _shares(self, products: Sequence[Product], seconds: float) -> dict[Product, float | Cell]:
        """Seconds for each product that can be timed; for the others the cell that says why not."""
        found = {product: self._predict_or_fail(product) for product in products}
        predicted = {product: value for product, value in found.items() if not isinstance(value, Cell)}
        shares: dict[Product, float | Cell] = {p: cell for p, cell in found.items() if isinstance(cell, Cell)}
        left, needed = seconds, {}
        for product, once in sorted(predicted.items(), key=lambda item: item[1]):
            if once * (1 + FEWEST_ROUNDS) <= left:
                needed[product] = once * (1 + FEWEST_ROUNDS)
                left -= needed[product]
            else:
                shares[product] = Cell(product, reason=_too_long(once, seconds))
        extra = left / max(len(needed), 1)
        return shares | {product: need + extra for product, need in needed.items()}

    def _predict_or_fail(self, product: Product) -> float | Cell:
        try:
            return self._predict(product)
        except RuntimeError as error:
            return _failed(product, error)

    def _set_up(self, product: Product, share: float | Cell) -> Cell | _Run:
        if isinstance(share, Cell):
            return share
        run = _Run(product)
        try:
            run.multiply = product.build(self.device)
            once = self._time_batch(run)  # the first run loads kernels and fills caches
            if once < ROUND_SECONDS:
                once = self._time_batch(run)
        except RuntimeError as error:
            return _failed(product, error)
        run.repeats = max(math.ceil(ROUND_SECONDS / max(once, SHORTEST_SECONDS)), 1)
        affordable = int(share / max(run.repeats * once, SHORTEST_SECONDS)) - 1
        run.num_rounds = min(max(affordable, FEWEST_ROUNDS), MOST_ROUNDS)
        return run

    def _time_batch(self, run: _Run) -> float:
        is_tf32 = run.product.format == TF32
        with fp32_products(self.device.type, as_tf32=is_tf32), torch.no_grad():
            wait_for(self.device)
            started = self.now()
            for _ in range(run.repeats):
                run.multiply()
            wait_for(self.device)
            return (self.now() - started) / run.repeats

    def _predict(self, product: Product) -> float:
        """Seconds that one product will take, at the speed of the last of its kind."""
        kind = (product.format.name, product.layout.is_convolution)
        if kind not in self._flops_per_second:
            self._pilot(product)
        return product.flops / self._flops_per_second[kind]

    def _pilot(self, product: Product) -> None:
        size = _PILOT_SIZE[product.layout.is_convolution]
        while True:
            small = replace(product, size=min(size, product.size))
            run = _Run(small, small.build(self.device))
            self._time_batch(run)
            seconds = self._time_batch(run)
            self._learn(small, seconds)
            if seconds >= PILOT_SECONDS or small.size == product.size:
                return
            size *= 2

    def _learn(self, product: Product, seconds: float) -> None:
        kind = (product.format.name, product.layout.is_convolution)
        self._flops_per_second[kind] = product.flops / max(seconds, SHORTEST_SECONDS)


def _nothing() -> None:
    """What a run multiplies before its operands are made."""


@dataclass
class _Run:
    product: Product
    multiply: Callable[[], Any] = _nothing
    repeats: int = 1
    num_rounds: int = FEWEST_ROUNDS
    seconds: list[float] = field(default_factory=list)


def _failed(product: Product, error: RuntimeError) -> Cell:
    """torch has no kernel for it on this device, or no memory."""
    return Cell(product, reason=f"torch: {str(error).splitlines()[0]}")


def _too_long(predicted: float, seconds: float) -> str:
    return f"one product would take about {predicted:.2g} s" if seconds > 0 else "the time was spent"


@contextlib.contextmanager
def fp32_products(device_type: str, *, as_tf32: bool) -> Iterator[None]:
    """fp32 products and convolutions read as tf32, or as they are, and torch's switches as they were afterwards.

    Both ways: by default cuDNN's convolutions read fp32 as tf32, and a process may have switched products too. Of
    oneDNN's only a switch that says otherwise is touched; one that says what its parent says follows it afterwards.
    """
    if device_type == "cuda":
        with tf32_switched(is_on=as_tf32):
            yield
        return
    backends: Any = torch.backends  # its submodules' switches are not in torch's type hints
    switches = backends.mkldnn.matmul, backends.mkldnn.conv
    wanted = ("tf32",) if as_tf32 else ("ieee", "none")
    before = [(switch, switch.fp32_precision) for switch in switches if switch.fp32_precision not in wanted]
    try:
        for switch, _ in before:
            switch.fp32_precision = wanted[0]
        yield
    finally:
        for switch, value in before:
            switch.fp32_precision = "none"
            if switch.fp32_precision != value:
                switch.fp32_precision = value
