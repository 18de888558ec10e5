"""The step of ``kernels/torch_step.py`` in one launch for each recipe: slots become a table of addresses.

Nothing is read on the host. What goes the other way, addresses and sizes, the host knows: one copy from pinned memory
for each launch. Which program takes which part of which tensor depends on the sizes alone, and is kept on the device.
Addresses are asked for in every step: whoever moves a tensor's memory need not tell us.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep._compat import is_host
from halfstep.errors import UnsupportedError
from halfstep.kernels import torch_step
from halfstep.kernels.slots import Counts, Kept, Slot, Turn
from halfstep.kernels.storage import GROUP, Master, Moment
from halfstep.kernels.triton_ import kernel

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_RESTS = {Master.FP32: tl.float32, Master.SPLIT: tl.int16, Master.SPLIT8: tl.int8}
_ABSENT = Kept(Moment.NONE, torch.empty(0, device="cpu"))
_NUM_ADDRESSES = 7
_Table = Any  # int64 [tensors, kernel.COLUMNS]
_Recipe = dict[str, Any]  # compile-time arguments of kernel.step


@dataclass(frozen=True, eq=False)  # there is one for each kind, so that what it is can be seen by its identity
class _Kind:
    recipe: _Recipe
    widest: int


@dataclass(frozen=True)
class _Facts:
    """What does not change about a slot: its tensors in the order of the table, and how many elements it has."""

    kind: _Kind
    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, int]


def step(turn: Turn) -> Counts:
    """As ``kernels/torch_step.py`` does it, for parameters on a CUDA device."""
    counts = torch.zeros(3, dtype=torch.int64, device=turn.keys.device)
    with nullcontext() if is_host(counts.device) else torch.cuda.device(counts.device):
        _refuse_capture(counts.device)
        for recipe, table in _launches(turn):
            _launch(turn, recipe, table, counts)
        empty = [slot.step for slot in turn.slots if slot.step is not None and not slot.weight.numel()]
        torch_step.count_step(empty, turn.found_inf)
    increment_version([slot.weight for slot in turn.slots])  # what else was written takes no part in autograd
    saturated, updated, stalled = counts.unbind()
    return Counts(saturated, updated, stalled) if turn.counts_stalled else Counts(saturated)


def _refuse_capture(device: torch.device) -> None:
    if not is_host(device) and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            asked="a step inside a CUDA graph, on the triton executor",
            true="its table of addresses is copied from memory that is free again after the step",
            why="a replay would copy whatever is there by then, and write to those addresses",
            fix='step outside the graph, or pass executor="torch"',
        )


# ---- what is launched -----------------------------------------------------------------------------------------------


def _launches(turn: Turn) -> Iterator[tuple[_Recipe, _Table]]:
    """For each launch its recipe, and the rows of the table that belong to it."""
    rows, groups = array("q"), dict[tuple[_Kind, torch.dtype], list[int]]()
    for place, (slot, gradient) in enumerate(zip(turn.slots, turn.gradients, strict=True)):
        facts = _facts(slot)
        weight, rest, first, second, first_scales, second_scales = [
            0 if tensor is None else tensor.data_ptr() for tensor in facts.tensors
        ]
        addresses = weight, rest, gradient.data_ptr(), first, second, first_scales, second_scales
        step = 0 if slot.step is None else slot.step.data_ptr()
        rows.extend((*addresses, *facts.sizes, slot.index, place, step))
        if facts.sizes[0]:
            groups.setdefault((facts.kind, gradient.dtype), []).append(place)
    table = np.array(rows, dtype=np.int64).reshape(-1, kernel.COLUMNS)
    for (kind, dtype), places in groups.items():
        width = 16 // max(kind.widest, dtype.itemsize)
        for chosen, at_once in _by_width(table[places], width):
            yield {**kind.recipe, "GRADIENT": _DTYPES[dtype], "WIDTH": at_once}, chosen


def _by_width(table: _Table, width: int) -> Iterator[tuple[_Table, int]]:
    """Tensors that can be read in pieces of 16 bytes, which is ``width`` elements of the widest; and the others."""
    bits = np.bitwise_or.reduce(table[:, :_NUM_ADDRESSES], axis=1)
    is_wide = (bits % 16 == 0) & (table[:, _NUM_ADDRESSES + 1] % width == 0)
    for chosen, at_once in ((table[is_wide], width), (table[~is_wide], 1)):
        if len(chosen):
            yield chosen, at_once


def _facts(slot: Slot) -> _Facts:
    facts: _Facts | None = slot.prepared.get("triton")
    if facts is None:
        facts = slot.prepared["triton"] = _found(slot)
    return facts


def _found(slot: Slot) -> _Facts:
    first, second = (*slot.moments, _ABSENT, _ABSENT)[:2]
    states = slot.rest, first.values, second.values, first.scales, second.scales
    tensors = (slot.weight, *(None if t is _ABSENT.values else t for t in states))
    size, is_ragged = slot.weight.numel(), slot.row % GROUP != 0
    master = slot.master if slot.rest is not None or slot.master == Master.STOCHASTIC else Master.NONE
    widest = max(tensor.element_size() for tensor in tensors if tensor is not None)
    kind = _kind(slot.weight.dtype, master, first.kind, second.kind, is_ragged, widest)
    return _Facts(kind, tensors, (size, slot.row if is_ragged else size))


@functools.cache
def _kind(dtype: torch.dtype, master: Master, first: Moment, second: Moment, is_ragged: bool, widest: int) -> _Kind:
    recipe = {
        "WEIGHT": _DTYPES[dtype],
        "MASTER": int(master),
        "REST": _RESTS.get(master),
        "FIRST": int(first),
        "SECOND": int(second),
        "IS_RAGGED": is_ragged,
    }
    return _Kind(recipe, widest)


# ---- launching ------------------------------------------------------------------------------------------------------


def _launch(turn: Turn, recipe: _Recipe, table: _Table, counts: Tensor) -> None:
    device = counts.device
    stream = 0 if is_host(device) else torch.cuda.current_stream(device).cuda_stream
    sizes = table[:, _NUM_ADDRESSES : _NUM_ADDRESSES + 2]
    programs = _programs(sizes.tobytes(), device, stream)
    kernel.step[(len(programs),)](
        _sent(table, device), programs, turn.constants.contiguous(), turn.keys.contiguous(), turn.found_inf, counts,
        **recipe, RULE=turn.rule.name, NUM_CONSTANTS=turn.constants.shape[1], COUNTS_STALLED=turn.counts_stalled,
        num_warps=kernel.NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _sent(numbers: Any, device: torch.device) -> Tensor:
    """On the device, without waiting: pinned memory is not used again before a copy from it is done."""
    tensor = torch.from_numpy(numbers)
    return tensor if is_host(device) else tensor.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=32)
def _programs(sizes: bytes, device: torch.device, stream: int) -> Tensor:  # noqa: ARG001 - a key
    """For each program the row of its tensor, and its first group: int32 ``[programs, 2]``.

    Args:
        sizes: of each tensor how many elements it has, and how many are in a row: int64.
        device: that will read it.
        stream: whose turn it is; another one would have to wait for the copy.
    """
    size, length = np.frombuffer(sizes, dtype=np.int64).reshape(-1, 2).T
    num_programs = -(-(size // length * -(-length // GROUP)) // kernel.GROUPS)
    tensors = np.repeat(np.arange(len(size)), num_programs)
    before = np.repeat(np.cumsum(num_programs) - num_programs, num_programs)
    firsts = (np.arange(len(tensors)) - before) * kernel.GROUPS
    return _sent(np.stack([tensors, firsts], axis=1).astype(np.int32), device)
