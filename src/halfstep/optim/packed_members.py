"""The parameters that a packed optimizer steps: where each is, how it is kept, and whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.slots import Slot
from halfstep.optim import keeping
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.keeping import Keeping
from halfstep.optim.packed_options import DTYPES

_PLAIN = (Tensor, torch.nn.Parameter)

# Of a tensor: its address, the bytes of its storage, its shape, strides and dtype.
Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class Member:
    """A parameter that is stepped.

    Args:
        parameter: the model's.
        number: of the parameter in the optimizer; its random bits depend on it.
        keeping: its storages.
        order: of its memory, see :func:`keeping.memory_order`.
        slot: the parameter as executors see it.
        names: of the tensors of its state, in order.
        kept: these, when the slot was made; the first counts its steps.
        places: where the parameter and ``kept`` were then.
        marks: what shows that ``kept`` is untouched since it was last found in its places; None if it cannot be known.
    """

    parameter: Tensor
    number: int
    keeping: Keeping
    order: tuple[int, ...] | None
    slot: Slot
    names: list[str]
    kept: list[Tensor]
    places: list[Place]
    marks: list[int] | None = None

    def is_present(self, state: Mapping[str, Tensor]) -> bool:
        """Whether the slot is where the parameter and its state are now; others may have put something beside it."""
        names, kept = self.names, self.kept
        if [*state][: len(names)] != names or not all(map(is_, state.values(), kept)):
            return False
        if place_of(self.parameter) != self.places[0]:
            return False
        if self.marks is not None and self.marks == _marks_of(kept):
            return True
        is_in_place = [*map(place_of, kept)] == self.places[1:]
        self.marks = _marks_of(kept) if is_in_place and all(map(_has_marks, kept)) else None
        return is_in_place


def _has_marks(t: Tensor) -> bool:
    return type(t) in _PLAIN and not t.is_inference()


def _marks_of(kept: list[Tensor]) -> list[int]:
    """Address, memory and version of each, in half the time of ``place_of``.

    Whoever gives a tensor another shape or other strides in place counts its version up.
    """
    marks = [t.data_ptr() for t in kept]
    marks += [t.untyped_storage().nbytes() for t in kept]
    marks += [t._version for t in kept]
    return marks


class Row(NamedTuple):
    """A parameter in one step.

    Args:
        group: its index.
        member: the parameter.
        gradient: in the order of its memory.
    """

    group: int
    member: Member
    gradient: Tensor


def new_member(p: Tensor, state: Mapping[str, Tensor], number: int, kept: Keeping) -> Member:
    """A member whose slot is where its tensors are."""
    order = keeping.memory_order(p)
    slot = keeping.slot_of(p, state, kept, order)
    names = keeping.names_of(kept)
    own = [state[name] for name in names]
    return Member(p, number, kept, order, slot, names, own, [*map(place_of, (p, *own))])


def place_of(t: Tensor) -> Place:
    """Asked of every tensor in every step. (A storage that is freed and filled again may come back to its address.)"""
    # A subclass may have no memory of its own, as FakeTensor has none: then which storage it has.
    storage = t.untyped_storage()
    address = t.data_ptr() if type(t) in _PLAIN else storage._cdata
    return address, storage.nbytes(), t.shape, t.stride(), t.dtype


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is there: nobody has freed or cut its storage."""
    extent = tensor.numel()
    if extent and not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + extent) * tensor.element_size())


def checked_gradient(optimizer: object, member: Member, gradient: Tensor) -> Tensor:
    """The gradient in the order of its parameter's memory, if the rule can take it."""
    if gradient.layout is not torch.strided or gradient.dtype not in DTYPES:
        raise refusals.bad_gradient(optimizer, member.parameter, gradient)
    if gradient.shape != member.parameter.shape or gradient.device != member.slot.weight.device:
        raise refusals.gradient_of_another(optimizer, member.parameter, gradient)
    if not has_memory(gradient):
        raise refusals.freed(optimizer, "the gradient", member.parameter)
    if gradient.requires_grad or gradient.is_neg():
        gradient = gradient.detach().resolve_neg()
    if member.order is not None:
        gradient = gradient.permute(member.order)
    return gradient if gradient.is_contiguous() else gradient.contiguous()
