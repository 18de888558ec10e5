"""A machine for the tests: products that take the time they are told to take, on a clock that only they move."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from halfstep.bench.measure import measure
from halfstep.bench.products import Product
from halfstep.bench.settings import FORMATS, choose
from halfstep.hardware import Hardware

MADE_UP = Hardware("cpu", "made up")


@dataclass
class Machine:
    """Seconds of a product by a function of it, and torch's error, if any; remembers what ran, in order."""

    seconds_of: Callable
    error_of: Callable = lambda product: ""
    time: float = 0.0
    ran: list = field(default_factory=list)

    def now(self):
        return self.time

    def build(self, product):
        if self.error_of(product):
            raise RuntimeError(f"{self.error_of(product)}\nand more lines")

        def multiply():
            self.ran.append(product)
            self.time += self.seconds_of(product)

        return multiply


@pytest.fixture
def machine(monkeypatch):
    """Make a machine; from then on every product runs on it."""

    def make(seconds_of, error_of=lambda product: ""):
        made = Machine(seconds_of, error_of)
        monkeypatch.setattr(Product, "build", lambda product, device: made.build(product))
        return made

    return make


@pytest.fixture
def measured(machine):
    """Measure a machine of given speeds in GFLOP/s by dtype, with a factor by size and layout."""

    def run(speeds, factor=lambda product: 1.0, *, hardware=MADE_UP, **options):
        settings = choose(["fp32"], options.pop("sizes", (128, 256, 512, 1024)), device="cpu", num_threads=1, **options)
        formats = tuple(fmt for fmt in FORMATS if str(fmt) in speeds)
        settings = dataclasses.replace(settings, formats=formats, hardware=hardware)
        made = machine(lambda product: product.flops / (speeds[str(product.format)] * 1e9 * factor(product)))
        return measure(settings, now=made.now)

    return run
