"""What an optimizer keeps of a parameter beside its weight, and in which storage: made at once, seen as a slot.

    state of a parameter    step (0-dim fp32)
                            master (fp32), or rest (int16 for split, int8 for split8)
                            each moment: <name> (fp32 or bf16), or <name>_codes (int8) and <name>_scales

Codes are no numbers that an optimizer of torch could step with. It checks no names when it loads a state, so they must
not have its names: without them Adam and AdamW fail at their first step, and SGD begins its momentum anew.

All tensors have the weight's shape and strides, except for scales, ``[rows, groups of a row]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import HALF_DTYPES
from halfstep.kernels import storage, torch_step
from halfstep.kernels.rounding import round_into, rounded
from halfstep.kernels.rules import Rule
from halfstep.kernels.slots import Kept, Slot
from halfstep.kernels.storage import GROUP, Master, Moment

STEP, MASTER, REST, CODES, SCALES = "step", "master", "rest", "_codes", "_scales"
DTYPES = {Moment.FP32: torch.float32, Moment.BF16: torch.bfloat16, Moment.INT8: torch.int8}
REST_DTYPES = {Master.FP32: torch.float32, Master.SPLIT: torch.int16, Master.SPLIT8: torch.int8}
_CHUNK = 2**22  # elements that are split at a time: the conversions need some 50 bytes for each meanwhile

MASTERS = {kind.name.lower(): kind for kind in Master}
MOMENTS = {kind.name.lower(): kind for kind in Moment if kind != Moment.NONE}


@dataclass(frozen=True)
class Keeping:
    """Which storages a parameter has.

    Args:
        master: of the weight.
        moment: of every moment.
        names: of the moments, in the order of the rule's arguments.
        asked: the group's words for both storages.
    """

    master: Master
    moment: Moment
    names: tuple[str, ...]
    asked: tuple[str, str]

    @property
    def rest_name(self) -> str | None:
        """Under which name the rest is in the state."""
        if self.master not in REST_DTYPES:
            return None
        return MASTER if self.master == Master.FP32 else REST


def keeping_of(p: Tensor, group: Mapping[str, Any], rule: Rule) -> Keeping:
    """The storages that a group asks for, as far as this parameter can have them.

    fp32 weights are their own masters. int8 moments need rows that groups can lie in: a matrix, row after row in memory
    (not ``channels_last``), with rows long enough that scales cost less than bf16 would; other parameters keep bf16.
    """
    master = MASTERS[group["master"]] if p.dtype in HALF_DTYPES else Master.NONE
    names = () if rule.name == "sgd" and group["momentum"] == 0 else rule.moments
    moment = MOMENTS[group["moments"]]
    if moment == Moment.INT8 and not _has_rows(p):
        moment = Moment.BF16
    return Keeping(master, moment if names else Moment.NONE, names, (group["master"], group["moments"]))


def _has_rows(p: Tensor) -> bool:
    if p.dim() < 2 or not p.numel() or not p.is_contiguous():
        return False
    row = p.numel() // len(p)
    return 2 * -(-row // GROUP) < row  # bytes of scales, against the second byte of bf16


def new_state(p: Tensor, keeping: Keeping, value: Tensor | None = None) -> dict[str, Tensor]:
    """The state of a parameter before its first step.

    Args:
        p: the weight as it will be.
        keeping: the storages.
        value: fp32, what the weight was rounded from; None if it is all there is.
    """
    state = {STEP: torch.zeros((), dtype=torch.float32, device=p.device)}
    if keeping.rest_name is not None:
        rest = torch.zeros_like(p, dtype=REST_DTYPES[keeping.master], requires_grad=False)
        state[keeping.rest_name] = rest
        if keeping.master == Master.FP32:
            rest.copy_(p.detach() if value is None else value)
    for name in keeping.names:
        values = torch.zeros_like(p, dtype=DTYPES[keeping.moment], requires_grad=False)
        state[values_name(name, keeping.moment)] = values
        if keeping.moment == Moment.INT8:
            num_groups = -(-p.numel() // len(p) // GROUP)
            state[name + SCALES] = torch.zeros(len(p), num_groups, dtype=torch.int16, device=p.device)
    return state


def names_of(keeping: Keeping) -> list[str]:
    """The names in :func:`new_state`, in order."""
    rest = [] if keeping.rest_name is None else [keeping.rest_name]
    return [STEP, *rest, *(part for name in keeping.names for part in names_of_moment(name, keeping.moment))]


def names_of_moment(name: str, kind: Moment) -> tuple[str, ...]:
    """Under which names a moment is in the state: its values, and the scales of int8 ones."""
    values = values_name(name, kind)
    return (values, name + SCALES) if kind == Moment.INT8 else (values,)


def values_name(name: str, kind: Moment) -> str:
    """Under which name a moment's values are in the state: torch's own, unless they are codes."""
    return name + CODES if kind == Moment.INT8 else name


# ---- slots ----------------------------------------------------------------------------------------------------------


def memory_order(p: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None if they are in order already."""
    if p.is_contiguous():
        return None
    strides = p.stride()
    return tuple(sorted(range(p.dim()), key=lambda dim: (-strides[dim], dim)))


def ordered(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """A view whose elements are in the order of memory, if the tensor's are in ``order``."""
    return tensor if order is None else tensor.permute(order)


def slot_of(p: Tensor, state: Mapping[str, Tensor], keeping: Keeping, order: tuple[int, ...] | None) -> Slot:
    """A parameter and its state as executors see them."""
    kind, rest = keeping.moment, None if keeping.rest_name is None else ordered(state[keeping.rest_name], order)
    moments = tuple(
        Kept(kind, ordered(state[values_name(name, kind)], order), state.get(name + SCALES)) for name in keeping.names
    )
    return Slot(ordered(p.detach(), order), keeping.master, rest, moments, step=state[STEP])


# ---- values in fp32, and back ---------------------------------------------------------------------------------------


def split_into(p: Tensor, rest: Tensor | None, value: Tensor, master: Master) -> None:
    """Write a 16-bit weight and its rest from an fp32 value, a part at a time.

    Args:
        p: bf16 or fp16; written.
        rest: of the same shape, int16, int8 or fp32; written.
        value: fp32, of the same shape.
        master: the storage.
    """
    if master not in (Master.SPLIT, Master.SPLIT8) or rest is None:
        round_into(p, value.clone() if rest is None else value)
        if rest is not None:
            rest.copy_(value)
        return
    split = storage.split if master == Master.SPLIT else storage.split8
    for part, low, source in _parts(p, rest, value):
        high, rest_of_it = split(source, p.dtype)
        part.copy_(high.view(part.shape))
        low.copy_(rest_of_it.view(part.shape))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same elements of each, a few rows at a time."""
    first = tensors[0]
    if first.numel() <= _CHUNK or first.dim() == 0:
        yield tensors
        return
    num_rows = max(1, _CHUNK // max(1, first.numel() // len(first)))
    yield from zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def master_value(p: Tensor, rest: Tensor | None, master: Master) -> Tensor:
    """The fp32 value of a parameter, as a new tensor."""
    value = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
    weight = p.detach()
    parts = _parts(value, weight) if rest is None else _parts(value, weight, rest)
    for target, *part in parts:
        slot = Slot(part[0].contiguous(), master, part[1].contiguous() if rest is not None else None, ())
        target.copy_(torch_step.read_master(slot))
    return value


def moment_value(values: Tensor, scales: Tensor | None, which: int) -> Tensor:
    """A moment in fp32, as a new tensor."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == values.dtype)
    return torch_step.read_moment(Kept(kind, values, scales), which).clone()


def packed_moment(value: Tensor, kind: Moment, which: int) -> dict[str, Tensor]:
    """An fp32 moment in a storage, rounded to nearest: by the endings of their names, values and scales."""
    if kind != Moment.INT8:
        return {"": value if kind == Moment.FP32 else rounded(value, torch.bfloat16)}
    codes, scales = torch_step.encoded(value, which, None)
    return {CODES: codes, SCALES: scales}
