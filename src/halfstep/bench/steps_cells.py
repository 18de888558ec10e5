"""What was measured of each recipe: its times, beside those of torch's recipe and of the memory in the same rounds.

Method: a ratio is taken round by round and its median kept, so that a machine that slows down slows both sides.

Not here: measuring (steps_measure.py); what the numbers mean (steps_verdict.py).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from halfstep.bench.clock import spread_of
from halfstep.bench.steps_recipes import BenchRule
from halfstep.bench.steps_settings import StepSettings


@dataclass(frozen=True)
class StepCell:
    """One recipe and its times.

    Args:
        rule: its name.
        storage: how weights and moments are kept.
        executor: what ran it.
        bytes_per_param: of weights, gradients and state, from the live tensors; None if it was not built.
        seconds: of one step, one value per round; empty if it was not measured.
        over_torch: how many times as fast as torch's recipe, one value per round; likewise.
        over_floor: how many times as long as memory needs to move the bytes, one value per round; likewise.
        predicted_seconds: of one step, from some of the tensors, if that is too long; else None.
        reason: why it was not measured; empty if it was.
    """

    rule: str
    storage: str
    executor: str
    bytes_per_param: float | None = None
    seconds: tuple[float, ...] = ()
    over_torch: tuple[float, ...] = ()
    over_floor: tuple[float, ...] = ()
    predicted_seconds: float | None = None
    reason: str = ""

    @property
    def median_seconds(self) -> float | None:
        """Of the rounds; None if it was not measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as torch's recipe; None if it was not measured."""
        return statistics.median(self.over_torch) if self.over_torch else None

    @property
    def floors(self) -> float | None:
        """Its time as a multiple of the floor; None if it was not measured."""
        return statistics.median(self.over_floor) if self.over_floor else None

    @property
    def spread(self) -> float | None:
        """Interquartile range of the rounds as a share of their median; None if it was not measured."""
        return spread_of(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "storage": self.storage,
            "executor": self.executor,
            "bytes_per_param": self.bytes_per_param,
            "times_as_fast_as_torch": self.ratio,
            "multiple_of_floor": self.floors,
            "spread": self.spread,
            "seconds": list(self.seconds),
            "predicted_seconds": self.predicted_seconds,
            "not_measured": self.reason or None,
        }


@dataclass(frozen=True)
class RuleCells:
    """All recipes of a rule.

    Args:
        rule: the rule.
        reference: torch's recipe.
        cells: what is compared with it.
        bytes_per_second: of the probe, one value per round.
    """

    rule: BenchRule
    reference: StepCell
    cells: tuple[StepCell, ...]
    bytes_per_second: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "rule": self.rule.name,
            "compared_with": f"torch.optim.{self.rule.torch_name}",
            "probe_bytes_per_s": statistics.median(self.bytes_per_second),
            "recipes": [cell.as_dict() for cell in (self.reference, *self.cells)],
        }


@dataclass(frozen=True)
class StepMeasurement:
    """What `measure` found.

    Args:
        settings: what was to be measured.
        rules: one for each rule.
        machine: plain facts about hardware and versions.
    """

    settings: StepSettings
    rules: tuple[RuleCells, ...]
    machine: dict[str, Any]

    @property
    def cells(self) -> tuple[StepCell, ...]:
        """All of them, torch's recipes included."""
        return tuple(cell for one in self.rules for cell in (one.reference, *one.cells))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rules = [one.as_dict() for one in self.rules]
        return {"machine": self.machine, **self.settings.as_dict(), "rules": rules}
