"""What a step needs to know: of each parameter where everything is and how it is kept, and the numbers of this turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.formats import FP32
from halfstep.kernels.rules import Rule
from halfstep.kernels.storage import GROUP, Master, Moment

GRADIENT_CAP = 2.0**63  # beyond it gradients are cut: the square is finite, and so is a mean of such squares


@dataclass(eq=False)
class Kept:
    """One moment.

    Args:
        kind: how it is kept.
        values: fp32, bf16 or int8 (the second moment's codes as uint8 patterns), shape of the weight.
        scales: int16, one for each group; None unless ``kind`` is ``INT8``. Groups of up to 32 neighbours lie inside
            one row of dimension 0, of ``numel / shape[0]`` elements, ``[rows, groups of a row]``.
    """

    kind: Moment
    values: Tensor
    scales: Tensor | None = None


@dataclass(eq=False)
class Slot:
    """One parameter, from step to step; all its tensors are contiguous and on one device.

    They stay where they are: executors remember their addresses. Whoever moves one, or exchanges its memory, makes a
    new slot.

    Args:
        weight: fp32, bf16 or fp16; written.
        master: what is kept beside the weight.
        rest: the fp32 master, or what :func:`halfstep.kernels.storage.split` leaves; None where nothing is kept.
        moments: in the order of the rule's arguments.
        index: of the first element in the whole tensor, if this is a shard of it.
        step: 0-dim fp32, how often it was stepped: counted by the executor, for on a device nobody else knows whether
            the step is taken. None if nobody asks.
        prepared: what executors have found out about this slot alone, by their names.
    """

    weight: Tensor
    master: Master
    rest: Tensor | None
    moments: tuple[Kept, ...]
    index: int = 0
    step: Tensor | None = None
    prepared: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # not copied with a slot

    def __post_init__(self) -> None:
        # Compiled loops pair elements by address: another order or size would be wrong in silence, or worse.
        for tensor in (self.weight, self.rest, *(moment.values for moment in self.moments)):
            assert tensor is None or (tensor.shape == self.weight.shape and tensor.is_contiguous())
            assert tensor is None or tensor.device == self.weight.device
        if self.step is not None:
            assert (self.step.dtype, self.step.dim()) == (torch.float32, 0)
            assert self.step.device == self.weight.device
        assert self.row == 0 or self.weight.dim() > 1, "groups lie in the rows of a matrix"
        for moment in self.moments:
            num_groups = len(self.weight) * -(-self.row // GROUP) if moment.scales is not None else 0
            assert moment.scales is None or (moment.scales.numel() == num_groups and moment.scales.is_contiguous())
            assert moment.scales is None or moment.scales.device == self.weight.device

    @cached_property
    def row(self) -> int:
        """Elements in a row of dimension 0 if a moment is kept in groups, else 0."""
        if all(moment.kind != Moment.INT8 for moment in self.moments):
            return 0
        return self.weight.numel() // max(1, len(self.weight)) if self.weight.dim() else 0

    @cached_property
    def needs_chance(self) -> bool:
        """Whether something of it is rounded by chance."""
        return self.master == Master.STOCHASTIC or any(m.kind in (Moment.BF16, Moment.INT8) for m in self.moments)


@dataclass(eq=False)
class Turn:
    """One step of some parameters, all on one device.

    Args:
        rule: the arithmetic.
        slots: one for each parameter.
        gradients: fp32, bf16 or fp16, each contiguous, of its slot's shape, and with all of its memory; read. They are
            finite, or ``found_inf`` says that they are not.
        constants: fp32 ``[slots, 1 + numbers of the rule]``, finite: what the gradient is multiplied by first
            (clipping, unscaling, the sign for ``maximize``), then the rule's numbers; on the slots' device.
        keys: int64 ``[slots]``, of the random bits, see :func:`halfstep.kernels.storage.random_key`; the same device.
        found_inf: 0-dim, on the same device: where it is not 0, every bit stays. On a device it is not read by the
            host. None if the step is to be taken.
        counts_stalled: whether updates that round to nothing are counted: one more read of what is kept.
        prepared: what executors have found out about these very slots, by their names; an empty dict for new ones.
    """

    rule: Rule
    slots: Sequence[Slot]
    gradients: Sequence[Tensor]
    constants: Tensor
    keys: Tensor
    found_inf: Tensor | None = None
    counts_stalled: bool = False
    prepared: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.constants.dtype == torch.float32
        assert len(self.slots) == len(self.gradients) == len(self.constants) == len(self.keys)


class Counts(NamedTuple):
    """What happened to the weights of a turn: 0-dim int64 tensors on its device.

    Args:
        saturated: how many were made the largest number of their dtype.
        updated: of how many the rule changed the fp32 value; None unless it was asked for.
        stalled: how many of these are kept as they were before, so that their update is lost; None likewise.
    """

    saturated: Tensor
    updated: Tensor | None = None
    stalled: Tensor | None = None


def finite(constants: Tensor) -> Tensor:
    """Constants as the rules take them: rounded once to fp32, and finite (``inf`` times 0 would be NaN)."""
    return constants.clamp(-FP32.largest, FP32.largest).float()
