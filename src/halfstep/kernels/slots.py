"""What a step needs of one parameter: where everything is, how it is kept, and the numbers of this step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import FP32
from halfstep.kernels.storage import Master, Moment


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
    """One parameter in one step; all its tensors are contiguous and on one device.

    Args:
        weight: fp32, bf16 or fp16; written.
        gradient: fp32, bf16 or fp16, of the same shape; read.
        master: what is kept beside the weight.
        rest: the fp32 master, or what :func:`halfstep.kernels.storage.split` leaves; None where nothing is kept.
        moments: in the order of the rule's arguments.
        numbers: the rule's constants.
        multiplier: what the gradient is multiplied by first: clipping, unscaling, the sign for ``maximize``.
        key: of the random bits of this step, see :func:`halfstep.kernels.storage.random_key`.
        index: of the first element in the whole tensor, if this is a shard of it.
    """

    weight: Tensor
    gradient: Tensor
    master: Master
    rest: Tensor | None
    moments: tuple[Kept, ...]
    numbers: tuple[float, ...]
    multiplier: float = 1.0
    key: int = 0
    index: int = 0

    @property
    def constants(self) -> tuple[float, ...]:
        """Multiplier and numbers as fp32 has them: rounded once, and finite (``inf`` times 0 would be NaN)."""
        finite = [min(max(number, -FP32.largest), FP32.largest) for number in (self.multiplier, *self.numbers)]
        return tuple(torch.tensor(finite, dtype=torch.float32).tolist())

    @property
    def row(self) -> int:
        """Elements in a row of dimension 0 if a moment is kept in groups, else 0."""
        if all(moment.kind != Moment.INT8 for moment in self.moments):
            return 0
        return self.weight.numel() // self.weight.shape[0]
