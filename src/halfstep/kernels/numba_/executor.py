"""The step of ``kernels/torch_step.py`` in one compiled pass: slots become tables, a recipe a list of stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels.numba_.loops import Table
from halfstep.kernels.numba_.memory import BF16, FP16, FP32
from halfstep.kernels.numba_.stages import address_of
from halfstep.kernels.numba_.step import step as _compiled_step
from halfstep.kernels.rules import Rule
from halfstep.kernels.slots import Kept, Slot
from halfstep.kernels.storage import Moment

_DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_NOTHING = torch.empty(0)
_ABSENT = Kept(Moment.NONE, _NOTHING)
_Recipe = tuple[int, ...]  # dtypes of weight and gradient, kinds of master, first and second moment


def step(rule: Rule, slots: Sequence[Slot], found_inf: Tensor | None = None) -> Tensor | None:
    """As ``kernels/torch_step.py`` does it, for parameters on the CPU."""
    if not any(slot.weight.numel() for slot in slots):
        return None
    if found_inf is not None and found_inf.item() != 0:
        return torch.zeros((), dtype=torch.int64)
    groups: dict[_Recipe, list[Slot]] = {}
    slots = [slot for slot in slots if slot.weight.numel()]
    for slot in slots:
        groups.setdefault(_recipe(slot), []).append(slot)
    num_saturated = sum(_step(rule, recipe, group) for recipe, group in groups.items())
    return torch.tensor(num_saturated)


def _recipe(slot: Slot) -> _Recipe:
    first, second = (*slot.moments, _ABSENT, _ABSENT)[:2]
    dtypes = _DTYPES[slot.weight.dtype], _DTYPES[slot.gradient.dtype]
    return (*dtypes, int(slot.master), int(first.kind), int(second.kind))


def stages_of(rule: Rule, recipe: _Recipe) -> list[tuple[str, tuple[int, ...]]]:
    """The stages of a step, in order: their names and variants."""
    weight, gradient, master, first, second = recipe
    moments = [(first, 0), (second, 1)][: max(1, len(rule.moments))]
    return [
        ("gradient", (gradient,)),
        ("read_master", (weight, master)),
        *(("read_moment", moment) for moment in moments),
        (rule.name, ()),
        *(("write_moment", moment) for moment in moments if moment[0] != Moment.NONE),
        ("write_master", (weight, master)),
    ]


def _step(rule: Rule, recipe: _Recipe, slots: list[Slot]) -> int:
    firsts, seconds = zip(*[(*slot.moments, _ABSENT, _ABSENT)[:2] for slot in slots], strict=True)
    columns = (
        [slot.weight for slot in slots],
        [_or_nothing(slot.rest) for slot in slots],
        [slot.gradient for slot in slots],
        [moment.values for moment in firsts],
        [moment.values for moment in seconds],
        [_or_nothing(moment.scales) for moment in firsts],
        [_or_nothing(moment.scales) for moment in seconds],
        [_NOTHING] * len(slots),
    )
    stages = np.array([address_of(name, *variant) for name, variant in stages_of(rule, recipe)], dtype=np.int64)
    facts = np.array([(slot.row, slot.index, slot.key, 0, 0, 0, 0, 0) for slot in slots], dtype=np.int64)
    numbers = np.zeros((len(slots), 9), dtype=np.float32)
    for row, slot in zip(numbers, slots, strict=True):
        row[: len(slot.numbers) + 1] = slot.constants
    counts = Table(*columns).run(_compiled_step, stages, facts, numbers)
    increment_version([tensor for tensor in chain(*columns[:2], *columns[3:]) if tensor is not _NOTHING])
    return int(sum(counts))


def _or_nothing(tensor: Tensor | None) -> Tensor:
    return _NOTHING if tensor is None else tensor
