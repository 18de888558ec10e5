"""What is known about the optimizers of one window, and when the host learns it.

A record is made when an optimizer's gradients are inspected and holds device tensors only. Asking it for the outcome
reads the host; closing the window sends three kinds of numbers towards the host (scale before, scale after, found_inf
of each optimizer) and settles the window before.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep._compat import HostCopy
from halfstep.errors import ArgumentError
from halfstep.kernels.inspect import Inspection
from halfstep.scaling.culprit import ParameterOrder
from halfstep.scaling.skips import SkipLog, StepOutcome


@dataclass(eq=False)
class StepRecord:
    """One optimizer in one window: what was found in its gradients, and whether it was stepped.

    ``found_inf`` is a 0-dim fp32 tensor, or None if the optimizer had no gradient.
    """

    parameters: list[Tensor]
    group_ends: list[int]
    found: Inspection | None = None
    found_inf: Tensor | None = None
    is_stepped: bool = False
    _outcome: StepOutcome | None = field(default=None, repr=False)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepRecord:
        """An empty record of the optimizer's parameters, in order."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
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

    def note(self, found: Inspection, device: torch.device) -> None:
        """Take what inspection found; the last call of a window counts."""
        self.found, self.found_inf, self._outcome = found, found.any_found_inf(device), None

    def outcome(self, order: ParameterOrder) -> StepOutcome:
        """What the step did. Reads the host unless it is known already."""
        if self._outcome is None:
            is_bad = self.found_inf is not None and self.found_inf.item() != 0
            self._outcome = self._settled(is_bad, order)
        return self._outcome

    def _settled(self, is_bad: bool, order: ParameterOrder) -> StepOutcome:
        if self.found_inf is None:
            return StepOutcome("no_gradients")
        if not is_bad:
            return StepOutcome("applied")
        faults = self.found.faults() if self.found is not None else {}
        return StepOutcome("skipped", order.culprit(self.parameters, faults, self.group_ends) if faults else None)


def refuse_shared(
    record: StepRecord, optimizer: torch.optim.Optimizer, others: weakref.WeakKeyDictionary[object, StepRecord]
) -> None:
    """Two optimizers that step one parameter would unscale its gradient twice."""
    for other, other_record in others.items():
        if other is optimizer:
            continue
        mine = {id(p) for p in record.parameters if p.grad is not None}
        shared = [p for p in other_record.parameters if id(p) in mine]
        if shared:
            raise ArgumentError(
                asked=f"step() of {type(optimizer).__name__} after {type(other).__name__} in one window",
                true=f"{len(shared)} parameters with gradients belong to both optimizers",
                why="their gradients would be unscaled twice, and stepped twice with one backward pass",
                fix="give each parameter to one optimizer, or call update() and backward() between the two steps",
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
        outcomes = []
        for record, flag in zip(self._records, flags, strict=True):
            if record._outcome is None:
                record._outcome = record._settled(flag != 0, order)
            outcomes.append(record._outcome)
        if outcomes:
            log.record(outcomes, old_scale, new_scale)
