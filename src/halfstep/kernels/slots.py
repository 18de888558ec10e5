"""What a step needs of one parameter: where everything is, how it is kept, and the numbers of this step."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

from halfstep.formats import FP32
from halfstep.kernels.storage import GROUP, Master, Moment

GRADIENT_CAP = 2.0**63  # beyond it gradients are cut: the square is finite, and so is a mean of such squares
_LARGEST = FP32.largest


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

    The gradient is finite, or the step is told by ``found_inf`` that it is not.

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

    def __post_init__(self) -> None:
        # Compiled loops pair elements by address: another order or size would be wrong in silence, or worse.
        for tensor in (self.weight, self.gradient, self.rest, *(moment.values for moment in self.moments)):
            assert tensor is None or (tensor.shape == self.weight.shape and tensor.is_contiguous())
            assert tensor is None or tensor.device == self.weight.device
        assert self.row == 0 or self.weight.dim() > 1, "groups lie in the rows of a matrix"
        for moment in self.moments:
            num_groups = len(self.weight) * -(-self.row // GROUP) if moment.scales is not None else 0
            assert moment.scales is None or (moment.scales.numel() == num_groups and moment.scales.is_contiguous())

    @property
    def constants(self) -> tuple[float, ...]:
        """Multiplier and numbers as fp32 has them: rounded once, and finite (``inf`` times 0 would be NaN)."""
        finite = [min(max(number, -_LARGEST), _LARGEST) for number in (self.multiplier, *self.numbers)]
        return struct.unpack(f"{len(finite)}f", struct.pack(f"{len(finite)}f", *finite))

    @property
    def row(self) -> int:
        """Elements in a row of dimension 0 if a moment is kept in groups, else 0."""
        if all(moment.kind != Moment.INT8 for moment in self.moments):
            return 0
        return self.weight.numel() // max(1, len(self.weight)) if self.weight.dim() else 0
