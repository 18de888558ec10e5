"""What each step did, how often steps were skipped, and when to say so.

A skipped step must never be silent, and must never flood a log: one warning the first time, then one at each power of
ten, each with the culprit. After ``repeat_after`` skips in a row the cause is not the scale: the loss or the forward
pass itself is inf or NaN, which no scale can mend, and ``on_repeat`` says so, once for each such run of skips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from halfstep.errors import ArgumentError, NonFiniteError, SkippedStepWarning, warn
from halfstep.scaling.culprit import Culprit

StepKind = Literal["applied", "skipped", "no_gradients"]
OnRepeat = Literal["warn", "raise", "ignore"] | Callable[[Culprit | None, int], object]

REPEAT_AFTER = 20  # from 2**24, twenty halvings reach 2**4, below any scale that helps fp16


@dataclass(frozen=True)
class StepOutcome:
    """What one ``step(optimizer)`` did.

    Args:
        kind: ``"applied"``; ``"skipped"``: a gradient was inf or NaN and nothing was written; ``"no_gradients"``: no
            parameter of the optimizer had a gradient.
        culprit: who was at fault, for a skipped step.
    """

    kind: StepKind
    culprit: Culprit | None = None


class SkipLog:
    """Counts of windows and skips, and the warnings that follow from them.

    Args:
        on_repeat: ``"warn"``, ``"raise"``, ``"ignore"``, or a callable ``(culprit, step)``.
        repeat_after: number of skipped windows in a row that makes a repeat.
        warns: whether the first skip, and one at each power of ten, is worth a warning.
    """

    def __init__(self, on_repeat: OnRepeat = "warn", repeat_after: int = REPEAT_AFTER, *, warns: bool = True) -> None:
        if not callable(on_repeat) and on_repeat not in ("warn", "raise", "ignore"):
            raise ArgumentError(
                asked=f"on_repeat={on_repeat!r}",
                true='on_repeat is "warn", "raise", "ignore" or a callable (culprit, step)',
                why="there is no such reaction to skip after skip",
                fix='pass on_repeat="warn"',
            )
        self.on_repeat = on_repeat
        self.repeat_after = repeat_after
        self.warns = warns
        self.steps = 0
        self.skipped_steps = 0
        self.skips_in_a_row = 0
        self.culprit: Culprit | None = None
        self._scale_before_run = 0.0

    def record(self, outcomes: list[StepOutcome], old_scale: float, new_scale: float) -> None:
        """Count one window of one or more optimizers, and warn where that is due. Counts first, so that an error or a
        warning turned into one leaves the books right."""
        skipped = [outcome for outcome in outcomes if outcome.kind == "skipped"]
        self.steps += 1
        if not skipped:
            if any(outcome.kind == "applied" for outcome in outcomes):
                self.skips_in_a_row = 0
            return
        if self.skips_in_a_row == 0:
            self._scale_before_run = old_scale
        before = self.skipped_steps
        self.skipped_steps += len(skipped)
        self.skips_in_a_row += 1
        self.culprit = next((outcome.culprit for outcome in skipped if outcome.culprit is not None), self.culprit)
        repeats = self.skips_in_a_row == self.repeat_after
        if repeats and self.on_repeat != "ignore":
            self._repeat(skipped[0].culprit, old_scale)
        elif self.warns and _passed_power_of_ten(before, self.skipped_steps):
            warn(self._text(skipped[0].culprit, old_scale, new_scale), SkippedStepWarning)

    def _text(self, culprit: Culprit | None, old_scale: float, new_scale: float) -> str:
        if new_scale != old_scale:
            moved = f"the scale went from {old_scale:g} to {new_scale:g}"
            meaning = "With a dynamic scale a few skips are normal while the scale finds its level."
        else:
            moved = f"the scale stays at {old_scale:g}"
            meaning = "No scale will move away from it: look at the loss, and at the layer that is named."
        return (
            f"Step {self.steps} was skipped: {_bad_gradient(culprit)}; {moved}. {meaning} Skips so far:"
            f" {self.skipped_steps}; the next warning comes at ten times as many."
        )

    def _repeat(self, culprit: Culprit | None, scale: float) -> None:
        error = NonFiniteError(
            asked=f"step {self.steps}: skipped; skips in a row: {self.skips_in_a_row}",
            true=f"{_bad_gradient(culprit)}, even at scale {scale:g}",
            why=self._why(scale),
            fix="print the loss; run the named layer in fp32 or bf16; look there for log(0), 0/0, values above 65504",
        )
        if callable(self.on_repeat):
            self.on_repeat(culprit, self.steps)
        elif self.on_repeat == "raise":
            raise error
        else:
            warn(str(error), SkippedStepWarning)

    def _why(self, scale: float) -> str:
        if scale < self._scale_before_run:
            return (
                f"the scale fell from {self._scale_before_run:g} and that made no difference: the loss or the forward"
                " pass itself is inf or NaN, and lowering the scale cannot help"
            )
        if scale <= 1.0:
            return "nothing is scaled up: the loss or the forward pass itself is inf or NaN"
        return "the scale does not move: it is too large for this model, or the loss or the forward pass is inf or NaN"

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return {name: getattr(self, name) for name in ("steps", "skipped_steps", "skips_in_a_row")}

    def load_counts(self, state: dict[str, Any]) -> None:
        """Take over counts that :func:`valid_counts` has passed."""
        for name, count in state.items():
            setattr(self, name, count)


def valid_counts(state: dict[str, Any]) -> dict[str, int]:
    """The counts in ``state`` (0 where it has none), or ValueError."""
    counts = {name: state.get(name, 0) for name in ("steps", "skipped_steps", "skips_in_a_row")}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} is {count!r}, not a count")
    return counts


def _bad_gradient(culprit: Culprit | None) -> str:
    return "a gradient is inf or NaN" if culprit is None else f"the gradient of {culprit}"


def _passed_power_of_ten(before: int, after: int) -> bool:
    """Whether counting from ``before`` to ``after`` reached 1, 10, 100, ..."""
    return len(str(after)) > len(str(before)) or before == 0
