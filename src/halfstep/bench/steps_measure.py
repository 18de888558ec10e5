"""Steps in turn: every recipe of a rule against torch's, in one process, on a time budget.

Method, rule by rule: each recipe first steps a few of the tensors, which compiles what is compiled and tells about how
long all of them will take; those that do not fit into the rule's part of the time are left out, with the reason. The
others are built, step once to warm up, and then step in rounds: in each round every recipe once, from another one on
each time, and then the probe of the memory's speed. Quick recipes get up to `MOST_ROUNDS`, slow ones at least
`FEWEST_ROUNDS`.

Not here: what is timed (steps_recipes.py); what the numbers mean (steps_verdict.py).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from halfstep.bench.clock import threads, wait_for
from halfstep.bench.machine import facts_of
from halfstep.bench.steps_bytes import PROBE_BYTES, floor_seconds, new_probe
from halfstep.bench.steps_cells import RuleCells, StepCell, StepMeasurement
from halfstep.bench.steps_recipes import BenchRule, Ready, Recipe, TorchRecipe
from halfstep.bench.steps_settings import StepSettings
from halfstep.bench.steps_tensors import Shape

Progress: TypeAlias = "Callable[[int, int, str], object]"

MOST_ROUNDS, FEWEST_ROUNDS = 15, 3
_PILOT_SECONDS = 0.1
_PILOT_SHARE, _PILOT_PARAMS = 64, 2**18  # a pilot steps this part of the parameters, but not fewer than so many


def measure(
    settings: StepSettings,
    progress: Progress = lambda *_: None,
    *,
    others: Callable[[BenchRule], Sequence[Recipe]] = lambda _: (),
    now: Callable[[], float] = time.perf_counter,
) -> StepMeasurement:
    """Measure what the settings ask for, in about the time that they allow.

    Args:
        settings: from `choose`.
        progress: called with (recipes or rounds done, in all, what is next).
        others: further recipes for a rule, such as another library's.
        now: a clock in seconds, monotonic.

    Returns:
        The measurement. Threads are as they were.
    """
    budget = _Budget(settings.seconds, now)
    done = []
    with threads(settings.num_threads):
        for place, rule in enumerate(settings.rules):
            budget.begin(1 / (len(settings.rules) - place))
            runs = _Runs(settings, _named(progress, rule.name), budget)
            done.append(runs.measure(TorchRecipe(rule), (*settings.recipes(rule), *others(rule))))
            gc.collect()  # the next rule needs the memory
    return StepMeasurement(settings, tuple(done), facts_of(settings.hardware, settings.num_threads))


def _named(progress: Progress, rule: str) -> Progress:
    return lambda done, total, name: progress(done, total, f"{rule}: {name}")


class _Budget:
    """Seconds that are left, of all and of what is under way. Compiling costs none: it happens once per machine."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self.now = now
        self._ends_at = self._part_ends_at = now() + seconds

    def begin(self, part: float) -> None:
        """Something new that may take a part of what is left."""
        self._part_ends_at = self.now() + (self._ends_at - self.now()) * part

    @property
    def left(self) -> float:
        """Of what is under way; negative when it is overspent."""
        return self._part_ends_at - self.now()

    def give_back(self, seconds: float) -> None:
        """Time that does not count."""
        self._ends_at += seconds
        self._part_ends_at += seconds


@dataclass
class _Run:
    recipe: Recipe
    ready: Ready
    once: float  # seconds of a step and what prepares it
    num_rounds: int
    seconds: list[float]


class _Runs:
    """One rule's recipes."""

    def __init__(self, settings: StepSettings, progress: Progress, budget: _Budget) -> None:
        self.settings, self.progress, self.budget, self.now = settings, progress, budget, budget.now

    def measure(self, reference: TorchRecipe, recipes: Sequence[Recipe]) -> RuleCells:
        unmeasured = self._pilot(recipes)
        fitting = [recipe for recipe in recipes if recipe not in unmeasured]
        runs = [self._warmed_up(reference)]
        for place, recipe in enumerate(fitting):
            self.progress(place, len(fitting), f"{_label(recipe)}, building")
            try:
                runs.append(self._warmed_up(recipe))
            except RuntimeError as error:  # torch has no kernel for it there, or no memory
                unmeasured[recipe] = _failed(recipe, error)
        self._plan(runs)
        probe_seconds = self._rounds(runs)
        found = {run.recipe: self._cell(run, runs[0], probe_seconds) for run in runs} | unmeasured
        speeds = tuple(PROBE_BYTES * self.settings.num_params / one for one in probe_seconds)
        return RuleCells(reference.rule, found[reference], tuple(found[recipe] for recipe in recipes), speeds)

    def _pilot(self, recipes: Sequence[Recipe]) -> dict[Recipe, StepCell]:
        """Those that would not fit into the time, or not run at all, and why."""
        shapes = _part(self.settings.shapes, max(self.settings.num_params / _PILOT_SHARE, _PILOT_PARAMS))
        share = sum(rows * columns for rows, columns in shapes) / self.settings.num_params
        predicted, unmeasured = {}, {}
        for place, recipe in enumerate(recipes):
            self.progress(place, len(recipes), f"{_label(recipe)}, a few tensors")
            try:
                ready = recipe.build(shapes, self.settings.device)
                self.budget.give_back(self._step(ready))  # compiles
                once = self._step(ready)
                if once < _PILOT_SECONDS:  # what else the machine does may have hit it
                    once = min(once, self._step(ready))
                predicted[recipe] = once / share
            except RuntimeError as error:
                unmeasured[recipe] = _failed(recipe, error)
        left = self.budget.left
        for recipe, once in sorted(predicted.items(), key=lambda item: item[1]):
            needed = once * (1 + FEWEST_ROUNDS)
            if needed > left:
                unmeasured[recipe] = _too_long(recipe, once)
            else:
                left -= needed
        return unmeasured

    def _warmed_up(self, recipe: Recipe) -> _Run:
        ready = recipe.build(self.settings.shapes, self.settings.device)
        started = self.now()
        self._step(ready)
        return _Run(recipe, ready, self.now() - started, MOST_ROUNDS, [])

    def _plan(self, runs: Sequence[_Run]) -> None:
        """How many rounds each may take: of the quick ones what they like, of the others what is left."""
        left = self.budget.left
        for place, run in enumerate(sorted(runs, key=lambda run: run.once)):
            part = left / (len(runs) - place)
            run.num_rounds = min(max(int(part / max(run.once, 1e-9)), FEWEST_ROUNDS), MOST_ROUNDS)
            left -= run.num_rounds * run.once

    def _rounds(self, runs: Sequence[_Run]) -> list[float]:
        """Step everything in turn; seconds of the probe, one for each round."""
        probe = new_probe(self.settings.num_params, self.settings.device)
        probe()
        probe_seconds: list[float] = []
        for number in range(max(run.num_rounds for run in runs)):
            self.progress(number, MOST_ROUNDS, "rounds")
            turn = [run for run in runs if number < run.num_rounds]
            for place in range(len(turn)):
                run = turn[(place + number) % len(turn)]
                run.seconds.append(self._step(run.ready))
            probe_seconds.append(self._timed(probe))
        self.progress(MOST_ROUNDS, MOST_ROUNDS, "rounds")
        return probe_seconds

    def _step(self, ready: Ready) -> float:
        ready.prepare()
        return self._timed(ready.step)

    def _timed(self, function: Callable[[], object]) -> float:
        wait_for(self.settings.device)
        started = self.now()
        function()
        wait_for(self.settings.device)
        return self.now() - started

    def _cell(self, run: _Run, base: _Run, probe_seconds: Sequence[float]) -> StepCell:
        num_params, num_bytes = self.settings.num_params, run.ready.num_bytes
        floor = floor_seconds(num_bytes, num_params, statistics.median(probe_seconds))
        return StepCell(
            run.recipe.rule.name,
            run.recipe.storage,
            run.recipe.executor,
            bytes_per_param=num_bytes / num_params,
            seconds=tuple(run.seconds),
            over_torch=tuple(theirs / ours for theirs, ours in zip(base.seconds, run.seconds, strict=False)),
            over_floor=tuple(ours / floor for ours in run.seconds),
        )


def _label(recipe: Recipe) -> str:
    return f"{recipe.storage} ({recipe.executor})"


def _failed(recipe: Recipe, error: RuntimeError) -> StepCell:
    reason = "the device's memory is full" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]
    return StepCell(recipe.rule.name, recipe.storage, recipe.executor, reason=reason)


def _too_long(recipe: Recipe, predicted: float) -> StepCell:
    reason = f"one step would take about {predicted:.2g} s"
    return StepCell(recipe.rule.name, recipe.storage, recipe.executor, predicted_seconds=predicted, reason=reason)


def _part(shapes: Sequence[Shape], num_params: float) -> tuple[Shape, ...]:
    """The first tensors, so many that they have as many parameters."""
    part, found = [], 0
    for rows, columns in shapes:
        part.append((rows, columns))
        found += rows * columns
        if found >= num_params:
            break
    return tuple(part)
