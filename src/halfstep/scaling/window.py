"""What is known about the optimizers of one window, and when the host learns it.

A record is made when an optimizer's gradients are inspected and holds device tensors only. Asking it for the outcome
reads the host; closing a window sends its numbers towards the host (scale before, scale after, found_inf of each
optimizer) and settles the window before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep._compat import HostCopy, is_host
from halfstep.errors import ArgumentError, HalfstepWarning, warn
from halfstep.kernels.found_inf import any_found_inf
from halfstep.kernels.inspect import Inspection
from halfstep.scaling import refusals
from halfstep.scaling.culprit import Culprit, ParameterOrder
from halfstep.scaling.skips import SkipLog, StepOutcome

NO_GRADIENT_STEPS = 100  # steps without any gradient after which an optimizer is mentioned, once


@dataclass(eq=False)
class StepRecord:
    """One optimizer in one window: what was found in its gradients, whether they were unscaled, whether it stepped.

    ``found_inf`` is a 0-dim fp32 tensor, or None if the optimizer had no gradient.
    """

    parameters: list[Tensor]
    group_ends: list[int]
    found: Inspection | None = None
    found_inf: Tensor | None = None
    is_unscaled: bool = False
    is_stepped: bool = False
    _outcome: StepOutcome | None = field(default=None, repr=False)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepRecord:
        """An empty record of the optimizer's parameters, in order."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        parameters = parameters_of(optimizer)
        if not parameters:
            raise ArgumentError(
                asked=f"step() of {type(optimizer).__name__} (id {id(optimizer):#x})",
                true="the optimizer holds no parameters",
                why="there is nothing to unscale, check or step",
                fix="give it parameters (add_param_group), or leave it out of the loop",
            )
        return cls(parameters, list(itertools.accumulate(sizes)))

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient now."""
        return any(p.grad is not None for p in self.parameters)

    def note(self, found: Inspection) -> None:
        """Take what inspection found; the last look in a window counts."""
        self.found, self._outcome = found, None

    def decide(self, found_inf_per_device: Mapping[torch.device, Tensor], device: torch.device) -> Tensor | None:
        """Take what the step is decided by: inspection's flags, or what others made of them, such as ranks agreeing."""
        self.found_inf, self._outcome = any_found_inf(found_inf_per_device.values(), device), None
        return self.found_inf

    def outcome(self, order: ParameterOrder) -> StepOutcome:
        """What the step did. Reads the host unless it is known already."""
        return self._outcome or self.settle(self.found_inf is not None and self.found_inf.item() != 0, order)

    def settle(self, is_bad: bool, order: ParameterOrder) -> StepOutcome:
        """What the step did, now that the host knows its found_inf."""
        if self._outcome is None:
            self._outcome = self._outcome_of(is_bad, order)
        return self._outcome

    def _outcome_of(self, is_bad: bool, order: ParameterOrder) -> StepOutcome:
        if self.found_inf is None:
            return StepOutcome("no_gradients")
        if not is_bad:
            return StepOutcome("applied")
        faults = self.found.faults() if self.found is not None else {}
        return StepOutcome("skipped", order.culprit(self.parameters, faults, self.group_ends) if faults else None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters, group after group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class IdleSteps:
    """Counts an optimizer's steps without any gradient, and mentions it once."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer, order: ParameterOrder, *, has_gradients: bool) -> None:
        """The optimizer was stepped."""
        if has_gradients:
            self._counts.pop(optimizer, None)
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if count == NO_GRADIENT_STEPS:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            names = order.names_of(parameters_of(optimizer)[:3], list(itertools.accumulate(sizes)))
            warn(
                f"{type(optimizer).__name__} had no gradient for {count} steps in a row; its first parameters are"
                f" {', '.join(names)}. Frozen, unused in forward, or zero_grad() between backward() and step()?",
                HalfstepWarning,
            )


class PendingWindow:
    """A closed window whose numbers are on their way to the host."""

    def __init__(self, records: list[StepRecord], old_scale: Tensor, new_scale: Tensor) -> None:
        self._records = [record for record in records if record.is_stepped]
        flags = [old_scale.new_zeros(()) if r.found_inf is None else r.found_inf for r in self._records]
        self._numbers = HostCopy(torch.stack([old_scale, new_scale, *flags]))

    def settle(self, log: SkipLog, order: ParameterOrder) -> None:
        """Tell the log what happened."""
        old_scale, new_scale, *flags = self._numbers.read()
        outcomes = [record.settle(flag != 0, order) for record, flag in zip(self._records, flags, strict=True)]
        if outcomes:
            log.record(outcomes, old_scale, new_scale)


class Books:
    """The records of the present window, the window that is on its way, and the last outcome of every optimizer.

    Keeps no optimizer alive.
    """

    def __init__(self, log: SkipLog, order: ParameterOrder) -> None:
        self.log, self.order = log, order
        self._window: list[StepRecord] = []
        self._records: weakref.WeakKeyDictionary[object, StepRecord] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[object, StepRecord] = weakref.WeakKeyDictionary()
        self._idle = IdleSteps()
        self._pending: PendingWindow | None = None

    def record(self, optimizer: torch.optim.Optimizer) -> StepRecord:
        """The optimizer's record in this window; made when first asked for.

        Raises:
            ArgumentError: the optimizer holds no parameters.
            CallOrderError: parameters were added or removed after its gradients were unscaled.
        """
        known = self._records.get(optimizer)
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is not None and len(known.parameters) == size:
            return known
        if known is not None and known.is_unscaled:
            raise refusals.parameters_changed(optimizer, len(known.parameters))
        record = self._records[optimizer] = StepRecord.of(optimizer)
        self._window = [other for other in self._window if other is not known] + [record]
        return record

    def records(self) -> list[StepRecord]:
        """The records of this window, also of optimizers that are gone."""
        return self._window

    def take_over_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are about to be unscaled in place.

        Raises:
            ArgumentError: another optimizer of this window has unscaled one of them already.
        """
        record = self.record(optimizer)
        for other, other_record in self._records.items():
            if other is optimizer or not other_record.is_unscaled:
                continue
            mine = {id(p) for p in record.parameters if p.grad is not None}
            shared = sum(id(p) in mine for p in other_record.parameters)
            if shared:
                raise refusals.shared_parameters(optimizer, other, shared)
        record.is_unscaled = True

    def stepped(self, optimizer: torch.optim.Optimizer, record: StepRecord) -> None:
        """The optimizer's step has returned."""
        record.is_stepped = True
        self._last[optimizer] = record
        self._idle.stepped(optimizer, self.order, has_gradients=record.found_inf is not None)

    def close(self, old_scale: Tensor, new_scale: Tensor) -> None:
        """End the window; settle the one before, and this one as well where there is nothing to wait for."""
        earlier, self._pending = self._pending, PendingWindow(self.records(), old_scale, new_scale)
        self._records, self._window = weakref.WeakKeyDictionary(), []
        self.order.finish()
        if earlier is not None:
            earlier.settle(self.log, self.order)
        if is_host(old_scale.device):
            self.settle()

    def settle(self) -> None:
        """Wait for the window that is on its way, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle(self.log, self.order)

    def forget_pending(self) -> None:
        """Drop the window that is on its way: the counts are about to be replaced by saved ones."""
        self._pending = None

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """What the optimizer's last step did. Reads the host."""
        if optimizer not in self._last:
            raise refusals.never_stepped(optimizer)
        return self._last[optimizer].outcome(self.order)

    def culprit(self) -> Culprit | None:
        """Who was at fault in the last skipped step. Reads the host."""
        self.settle()
        return self.log.culprit
