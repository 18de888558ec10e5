"""A step whose numbers are on their way to the host, and what happens there once they have arrived.

Everything that lives on the host acts then: counts, warnings, callbacks, schedulers. So they act exactly once, in the
order of the steps, and never on a guess; on the CPU within ``step()``, elsewhere one step late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from halfstep._compat import HostCopy
from halfstep.errors import SkippedStepWarning, warn
from halfstep.kernels.inspect import Inspection
from halfstep.scaling.culprit import Culprit, ParameterOrder
from halfstep.scaling.skips import SkipLog, StepOutcome
from halfstep.scaling.unscale import Number
from halfstep.training.outcome import Facts, Outcome
from halfstep.training.stalls import THRESHOLD, warn_of_stall


class Numbers(NamedTuple):
    """What the host learns about a step; the order in which a device sends it.

    Args:
        found_inf: 1.0 if a gradient was inf or NaN, else 0.0.
        scale: of the window's losses.
        plain: what makes the true gradient of the scaled one, scale times sum of weights.
        divisor: the same, clipped.
        norm: L2 norm of the scaled gradient.
        next_scale: of the next window.
        loss: mean of the window's losses.
        updated: how many weights the step changed in fp32, if it was counted.
        stalled: of how many of these nothing was kept.
    """

    found_inf: float
    scale: float
    plain: float
    divisor: float
    norm: float
    next_scale: float
    loss: float
    updated: float = 0.0
    stalled: float = 0.0


@dataclass(eq=False)
class WindowRecord:
    """What is known on the host about a step when it is enqueued."""

    num_micro_batches: int
    parameters: list[Tensor]
    group_ends: list[int]
    found: Inspection | None
    missed_buffers: list[str] = field(default_factory=list)
    storages: set[str] = field(default_factory=set)

    def culprit(self, order: ParameterOrder, norms: list[float] | None) -> Culprit | None:
        """Who was at fault; the norms of the gradients, if they have arrived, tell without another read."""
        faults = self.found.faults(norms) if self.found is not None else {}
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
    has_warned_of_stall: bool = False
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

    def known(self, record: WindowRecord, numbers: Numbers) -> Outcome:
        """A step whose numbers the host has."""
        facts = self.facts(record, numbers, None)
        self.act(facts, record, numbers)
        return Outcome(facts)

    def sent(self, record: WindowRecord, numbers: HostCopy) -> Outcome:
        """A step whose numbers will arrive, and behind them the norms of its gradients."""
        self._pending = _Sent(record, numbers, self)
        return Outcome(settle=self._pending.arrive)

    def no_gradients(self, num_micro_batches: int, loss: Number) -> Outcome:
        """A window in which no parameter had a gradient."""
        facts = Facts("no_gradients", self.log.steps + 1, num_micro_batches, loss=float(loss))
        self.log.record([StepOutcome("no_gradients")], 1.0, 1.0)
        return Outcome(facts)

    def facts(self, record: WindowRecord, numbers: Numbers, norms: list[float] | None) -> Facts:
        """What the numbers say."""
        is_skipped = numbers.found_inf != 0
        return Facts(
            kind="skipped" if is_skipped else "applied",
            step=self.log.steps + 1,
            num_micro_batches=record.num_micro_batches,
            scale=numbers.scale,
            grad_norm=numbers.norm / numbers.plain,
            clip_coefficient=1.0 if is_skipped else numbers.plain / numbers.divisor,
            culprit=record.culprit(self.order, norms) if is_skipped else None,
            loss=numbers.loss,
            stalled=numbers.stalled / numbers.updated if numbers.updated else math.nan,
        )

    def act(self, facts: Facts, record: WindowRecord, numbers: Numbers) -> None:
        """Count, warn, step schedulers, call back. May raise what on_repeat or a callback raises."""
        outcome = StepOutcome("skipped", facts.culprit) if facts.kind == "skipped" else StepOutcome("applied")
        try:
            self.log.record([outcome], numbers.scale, numbers.next_scale)
        finally:  # also where the log's warning is an error
            self._tell(facts, record)

    def _tell(self, facts: Facts, record: WindowRecord) -> None:
        if facts.kind == "applied":
            if facts.stalled > THRESHOLD and not self.has_warned_of_stall:
                self.has_warned_of_stall = True
                warn_of_stall(facts.step, facts.stalled, record.storages)
            for scheduler in self.schedulers:
                scheduler.step()
            return
        if record.missed_buffers:
            warn(
                f"Step {facts.step} was skipped, and {', '.join(record.missed_buffers)} keeps what its forward pass"
                " wrote: it had never changed before, so no copy was made. From now on it is copied.",
                SkippedStepWarning,
            )
        if self.on_skip is not None:
            self.on_skip(Outcome(facts))


class _Sent:
    """A step that the host has not heard of yet."""

    def __init__(self, record: WindowRecord, numbers: HostCopy, settler: Settler) -> None:
        self._waiting: tuple[WindowRecord, HostCopy, Settler] | None = (record, numbers, settler)
        self._facts: Facts | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether nobody has asked yet."""
        return self._waiting is not None

    def arrive(self) -> Facts:
        """Wait, act, and let go of everything but the facts. Acts once, even if acting raises."""
        if self._waiting is not None:
            (record, sent, settler), self._waiting = self._waiting, None
            arrived = sent.read()
            count = len(Numbers._fields)
            numbers = Numbers(*arrived[:count])
            self._facts = settler.facts(record, numbers, arrived[count:])
            settler.act(self._facts, record, numbers)
        assert self._facts is not None
        return self._facts
