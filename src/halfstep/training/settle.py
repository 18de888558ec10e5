"""A step whose numbers are on their way to the host, and what happens there once they have arrived.

Everything that lives on the host acts then: counts, warnings, callbacks, schedulers. So they act exactly once, in the
order of the steps, and never on a guess; on the CPU within ``step()``, elsewhere one step late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from halfstep._compat import HostCopy
from halfstep.errors import SkippedStepWarning, warn
from halfstep.kernels.inspect import Inspection
from halfstep.scaling.culprit import Culprit, ParameterOrder
from halfstep.scaling.skips import SkipLog, StepOutcome
from halfstep.training.outcome import Facts, Outcome


class Numbers(NamedTuple):
    """What the host learns about a step; the order in which a device sends it.

    Args:
        found_inf: 1.0 if a gradient was inf or NaN, else 0.0.
        scale: of the window's losses.
        plain: what makes the true gradient of the scaled one, scale times sum of weights.
        divisor: the same, clipped.
        norm: L2 norm of the scaled gradient.
        next_scale: of the next window.
    """

    found_inf: float
    scale: float
    plain: float
    divisor: float
    norm: float
    next_scale: float


@dataclass(eq=False)
class StepRecord:
    """What is known on the host about a step when it is enqueued."""

    num_micro_batches: int
    parameters: list[Tensor]
    group_ends: list[int]
    found: Inspection | None
    missed_buffers: list[str] = field(default_factory=list)

    def culprit(self, order: ParameterOrder) -> Culprit | None:
        """Who was at fault. Reads the device."""
        faults = self.found.faults() if self.found is not None else {}
        return order.culprit(self.parameters, faults, self.group_ends) if faults else None


@dataclass(eq=False)
class Settler:
    """The host's side of a stepper: counts, and who is told of what.

    Args:
        log: counts and warnings.
        order: names of parameters.
        schedulers: stepped after each step that was applied.
        on_skip: told the outcome of each skipped step.
    """

    log: SkipLog
    order: ParameterOrder
    schedulers: tuple[Any, ...]
    on_skip: Callable[[Outcome], object] | None
    _pending: _Sent | None = None

    def settle(self) -> None:
        """Wait for the step that is on its way, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.arrive()

    @property
    def next_step(self) -> int:
        """Number of the window that is open or will open next, from 1."""
        is_waiting = self._pending is not None and self._pending.is_waiting
        return self.log.steps + 1 + is_waiting

    def known(self, record: StepRecord, numbers: Numbers) -> Outcome:
        """A step whose numbers the host has."""
        return Outcome(self._arrived(record, numbers))

    def sent(self, record: StepRecord, numbers: HostCopy) -> Outcome:
        """A step whose numbers will arrive."""
        self._pending = _Sent(record, numbers, self._arrived)
        return Outcome(settle=self._pending.arrive)

    def no_gradients(self, num_micro_batches: int) -> Outcome:
        """A window in which no parameter had a gradient."""
        facts = Facts("no_gradients", self.log.steps + 1, num_micro_batches)
        self.log.record([StepOutcome("no_gradients")], 1.0, 1.0)
        return Outcome(facts)

    def _arrived(self, record: StepRecord, numbers: Numbers) -> Facts:
        facts = self._facts(record, numbers)
        outcome = StepOutcome("skipped", facts.culprit) if facts.kind == "skipped" else StepOutcome("applied")
        try:
            self.log.record([outcome], numbers.scale, numbers.next_scale)
        finally:  # also where the log's warning is an error
            self._tell(facts, record.missed_buffers)
        return facts

    def _facts(self, record: StepRecord, numbers: Numbers) -> Facts:
        is_skipped = numbers.found_inf != 0
        return Facts(
            kind="skipped" if is_skipped else "applied",
            step=self.log.steps + 1,
            num_micro_batches=record.num_micro_batches,
            scale=numbers.scale,
            grad_norm=numbers.norm / numbers.plain,
            clip_coefficient=1.0 if is_skipped else numbers.plain / numbers.divisor,
            culprit=record.culprit(self.order) if is_skipped else None,
        )

    def _tell(self, facts: Facts, missed_buffers: list[str]) -> None:
        if facts.kind == "applied":
            for scheduler in self.schedulers:
                scheduler.step()
            return
        if missed_buffers:
            warn(
                f"Step {facts.step} was skipped, and {', '.join(missed_buffers)} keeps what its forward pass wrote: it"
                " had never changed before, so no copy was made. From now on it is copied.",
                SkippedStepWarning,
            )
        if self.on_skip is not None:
            self.on_skip(Outcome(facts))


class _Sent:
    """A step that the host has not heard of yet."""

    def __init__(self, record: StepRecord, numbers: HostCopy, act: Callable[[StepRecord, Numbers], Facts]) -> None:
        self._waiting: tuple[StepRecord, HostCopy, Callable[[StepRecord, Numbers], Facts]] | None
        self._waiting = (record, numbers, act)
        self._facts: Facts | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether nobody has asked yet."""
        return self._waiting is not None

    def arrive(self) -> Facts:
        """Wait, act, and let go of everything but the facts; acts once, even if acting raises."""
        if self._waiting is not None:
            (record, numbers, act), self._waiting = self._waiting, None
            self._facts = act(record, Numbers(*numbers.read()))
        assert self._facts is not None, "settling this step has raised"
        return self._facts
