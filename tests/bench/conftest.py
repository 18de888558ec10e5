"""A machine for the tests: products that take the time they are told to take, on a clock that only they move."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from halfstep.bench import steps_measure, steps_settings
from halfstep.bench.measure import measure
from halfstep.bench.products import Product
from halfstep.bench.settings import FORMATS, choose
from halfstep.bench.steps_bytes import PROBE_BYTES
from halfstep.bench.steps_recipes import HalfstepRecipe, TorchRecipe
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


class StepMachine:
    """Recipes that take the time they are told to take; remembers what stepped, in order."""

    def __init__(self, seconds_of, compile_seconds=0.0, error_of=lambda recipe: "", bytes_per_param=16):
        self.seconds_of, self.compile_seconds, self.error_of = seconds_of, compile_seconds, error_of
        self.bytes_per_param = bytes_per_param
        self.time, self.stepped, self.compiled = 0.0, [], set()

    def now(self):
        return self.time

    def build(self, recipe, shapes, device):
        if self.error_of(recipe):
            raise RuntimeError(f"{self.error_of(recipe)}\nand more lines")
        num_params = sum(rows * columns for rows, columns in shapes)

        def step():
            self.stepped.append((recipe, num_params))
            self.time += self.seconds_of(recipe) * num_params / 1e6
            if recipe not in self.compiled:
                self.compiled.add(recipe)
                self.time += self.compile_seconds

        return SimpleNamespace(prepare=lambda: None, step=step, num_bytes=self.bytes_per_param * num_params)

    def probe(self, num_params, device):
        def multiply():
            self.time += num_params * PROBE_BYTES / 1e9  # 1 GB/s

        return multiply


@pytest.fixture
def step_machine(monkeypatch):
    """Make a machine that steps a million parameters in given seconds; from then on every recipe runs on it."""

    def make(seconds_of, **options):
        made = StepMachine(seconds_of, **options)
        for kind in (TorchRecipe, HalfstepRecipe):
            monkeypatch.setattr(kind, "build", lambda recipe, shapes, device: made.build(recipe, shapes, device))
        monkeypatch.setattr(steps_measure, "new_probe", made.probe)
        return made

    return make


@pytest.fixture
def measured_steps(step_machine):
    """Measure a machine on which torch's recipe takes 16 ns a parameter, and each of ours a part of that."""

    def run(times_as_fast, *, hardware=MADE_UP, rules=("adamw",), executors=("numba", "torch"), **options):
        made = step_machine(lambda recipe: 0.016 / (1 if isinstance(recipe, TorchRecipe) else times_as_fast(recipe)))
        options = {"device": "cpu", "num_threads": 1, "num_params": 1e6, **options}
        settings = steps_settings.choose(rules, **options)
        settings = dataclasses.replace(settings, hardware=hardware, executors=executors, missing=())
        return steps_measure.measure(settings, now=made.now)

    return run
