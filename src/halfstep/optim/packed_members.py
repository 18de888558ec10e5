"""The parameters that a packed optimizer steps: where each is, how it is kept, and whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._compat import is_dense
from halfstep.kernels.slots import Slot
from halfstep.optim import keeping
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.keeping import Keeping
from halfstep.optim.packed_options import DTYPES

Place = tuple[Any, ...]


@dataclass(eq=False)
class Member:
    """A parameter that is stepped.

    Args:
        parameter: the model's.
        number: of the parameter in the optimizer; its random bits depend on it.
        keeping: its storages.
        order: of its memory, see :func:`keeping.memory_order`.
        slot: the parameter as executors see it.
        places: where it and its state were when the slot was made.
    """

    parameter: Tensor
    number: int
    keeping: Keeping
    order: tuple[int, ...] | None
    slot: Slot
    places: tuple[Place, ...]

    def is_present(self, state: Mapping[str, Tensor]) -> bool:
        """Whether the slot is where the parameter and its state are now; others may have put something beside it."""
        if len(state) < len(self.places) - 1:
            return False
        return self.places == tuple(map(place_of, (self.parameter, *[*state.values()][: len(self.places) - 1])))


class Row(NamedTuple):
    """A parameter in one step.

    Args:
        group: its index.
        member: the parameter.
        gradient: in the order of its memory.
        state: its own.
    """

    group: int
    member: Member
    gradient: Tensor
    state: dict[str, Tensor]


def new_member(p: Tensor, state: Mapping[str, Tensor], number: int, kept: Keeping) -> Member:
    """A member whose slot is where its tensors are."""
    order = keeping.memory_order(p)
    slot = keeping.slot_of(p, state, kept, order)
    return Member(p, number, kept, order, slot, tuple(map(place_of, (p, *state.values()))))


def place_of(tensor: Any) -> Place:
    """Where a tensor's memory is, how much there is, and how it is laid out; of anything else, which object it is."""
    if not isinstance(tensor, Tensor):
        return (id(tensor),)
    storage = tensor.untyped_storage()
    where = int(storage._cdata), int(storage.nbytes()), int(tensor.storage_offset())
    return (*where, tensor.dtype, tensor.shape, tensor.stride())


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor is there: nobody has freed or cut its storage."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= end)


def checked_gradient(optimizer: object, group: Mapping[str, Any], member: Member, gradient: Tensor) -> Tensor:
    """The gradient in the order of its parameter's memory, if the rule can take it."""
    p, asked = member.parameter, (group["master"], group["moments"])
    if member.keeping.asked != asked:
        raise refusals.other_storages(member.keeping.asked, asked)
    if gradient.layout != torch.strided or gradient.dtype not in DTYPES:
        raise refusals.bad_gradient(optimizer, p, gradient)
    if gradient.shape != p.shape or gradient.device != p.device:
        raise refusals.gradient_of_another(p, gradient)
    if not has_memory(gradient) and is_dense(gradient):
        raise refusals.freed("the gradient", p)
    plain = gradient.detach().resolve_neg() if gradient.requires_grad or gradient.is_neg() else gradient
    return keeping.ordered(plain, member.order).contiguous()
