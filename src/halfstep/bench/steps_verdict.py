"""What the numbers of `halfstep bench --steps` say, in sentences that are computed from them.

Method: for each rule the quickest recipe and the one with the fewest bytes, each against torch's. A difference counts
where it is above `NOTICEABLE` and above the spread of the rounds; where the spread is above `NOTICEABLE` itself and the
difference is not above it, nothing is decided.

Not here: what a recipe would do on other machines, or to a model's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.bench.clock import NOTICEABLE, UNDECIDED, noise_note, spread_of
from halfstep.bench.steps_cells import RuleCells, StepCell, StepMeasurement

_STALLED = 10.0  # times as fast as torch's recipe: with fewer bytes and less overhead it may be four or five


@dataclass(frozen=True)
class StepVerdict:
    """One sentence and the number that it stands on.

    Args:
        rule: what it is about.
        ratio: how many times as fast as torch's recipe; None where nothing could be compared.
        text: for a person to read.
    """

    rule: str
    ratio: float | None
    text: str


def verdicts(measurement: StepMeasurement) -> tuple[StepVerdict, ...]:
    """What a measurement says: one or two sentences for each rule.

    Args:
        measurement: from `measure`.
    """
    return tuple(verdict for one in measurement.rules for verdict in _of_rule(one))


def noise_of(measurement: StepMeasurement) -> str:
    """A sentence if the rounds of the same recipe differ much, or torch's threads stood still; else nothing.

    Args:
        measurement: from `measure`.
    """
    if measurement.settings.num_threads > 1 and any((cell.ratio or 0) > _STALLED for cell in measurement.cells):
        # OpenMP's threads wait for each other in every operation: alike in all rounds, so that no spread shows it.
        return (
            "torch's threads waited for each other, for others use the cores: these ratios mean nothing. Measure on a"
            " quiet machine, or with --threads 1."
        )
    return noise_note(cell.spread for cell in measurement.cells)


def _of_rule(one: RuleCells) -> list[StepVerdict]:
    measured = [cell for cell in one.cells if cell.ratio is not None]
    if not measured:
        reason = next((cell.reason for cell in one.cells), "nothing was asked for")
        text = f"{one.rule.name}: nothing was compared with torch's recipe: {reason}"
        return [StepVerdict(one.rule.name, None, text)]
    quickest = max(measured, key=lambda cell: cell.ratio or 0)
    fewest = min(measured, key=lambda cell: (cell.bytes_per_param or 0, -(cell.ratio or 0)))
    named = {"quickest": quickest} if quickest is fewest else {"quickest": quickest, "fewest bytes": fewest}
    return [StepVerdict(one.rule.name, cell.ratio, _sentence(one, what, cell)) for what, cell in named.items()]


def _sentence(one: RuleCells, what: str, cell: StepCell) -> str:
    ours, theirs = f"{cell.bytes_per_param:.3g}", f"{one.reference.bytes_per_param:.3g}"
    size = f"{ours} bytes per parameter" + (f" instead of {theirs}" if ours != theirs else ", as torch's recipe")
    return f"{one.rule.name}, {what}: {cell.storage} ({cell.executor}), {size}: {_speed(cell)}"


def _speed(cell: StepCell) -> str:
    ratio, noise = cell.ratio or 0.0, max(NOTICEABLE, spread_of(cell.over_torch) or 0.0)
    if abs(ratio - 1) > noise:
        return f"{ratio:.2g} times as fast"
    return UNDECIDED if noise > NOTICEABLE else "as fast"
