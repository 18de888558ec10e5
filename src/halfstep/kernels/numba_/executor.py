"""The step of ``kernels/torch_step.py`` in one compiled pass: slots become tables, a recipe a list of stages."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels import torch_step
from halfstep.kernels.numba_.loops import Table, has_plain_memory
from halfstep.kernels.numba_.memory import BF16, FP16, FP32
from halfstep.kernels.numba_.stages import Stages, address_of, stages_of
from halfstep.kernels.numba_.step import step as _compiled_step
from halfstep.kernels.slots import Counts, Kept, Slot, Turn
from halfstep.kernels.storage import Moment

_DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_NOTHING = torch.empty(0, device="cpu")
_ABSENT = Kept(Moment.NONE, _NOTHING)
_Recipe = tuple[int, ...]  # dtypes of weight and gradient, kinds of master, first and second moment


def step(turn: Turn) -> Counts:
    """As ``kernels/torch_step.py`` does it, for parameters on the CPU; what is no plain memory goes there."""
    if turn.found_inf is not None and turn.found_inf.item() != 0:
        return _counts(turn, [0, 0, 0])
    groups: dict[_Recipe, list[int]] = {}
    others: list[int] = []
    for place, (slot, gradient) in enumerate(zip(turn.slots, turn.gradients, strict=True)):
        if not (has_plain_memory(slot.weight) and has_plain_memory(gradient)):
            others.append(place)
        elif slot.weight.numel():
            groups.setdefault(_recipe(slot, gradient), []).append(place)
    # All is compiled before the first weight is written: people interrupt what takes long.
    work = [_Work(turn, places, recipe) for recipe, places in groups.items()]
    totals = {"saturated": 0, "count_updated": 0, "count_stalled": 0}
    for one in work:
        for (name, _), total in zip(one.stages, one.run(), strict=True):
            totals[name if name in totals else "saturated"] += total
    counts = _counts(turn, [*totals.values()])
    if others:
        rest = torch_step.step(_part(turn, others))
        counts = Counts(*(None if a is None or b is None else a + b for a, b in zip(counts, rest, strict=True)))  # type: ignore[arg-type]
    return counts


def _counts(turn: Turn, totals: list[int]) -> Counts:
    counts = Counts(*(torch.tensor(total, device="cpu") for total in totals))
    return counts if turn.counts_stalled else Counts(counts.saturated)


def _part(turn: Turn, places: list[int]) -> Turn:
    slots, gradients = [turn.slots[place] for place in places], [turn.gradients[place] for place in places]
    return dataclasses.replace(
        turn, slots=slots, gradients=gradients, constants=turn.constants[places], keys=turn.keys[places]
    )


def _recipe(slot: Slot, gradient: Tensor) -> _Recipe:
    first, second = (*slot.moments, _ABSENT, _ABSENT)[:2]
    dtypes = _DTYPES[slot.weight.dtype], _DTYPES[gradient.dtype]
    return (*dtypes, int(slot.master), int(first.kind), int(second.kind))


class _Work:
    """The slots of one recipe, and the machine code of its stages."""

    def __init__(self, turn: Turn, places: list[int], recipe: _Recipe) -> None:
        self.turn, self.places = turn, places
        self.stages: Stages = stages_of(turn.rule, recipe, counts_stalled=turn.counts_stalled)
        self.code = np.array([address_of(name, *variant) for name, variant in self.stages], dtype=np.int64)

    def run(self) -> list[int]:
        """Step the slots; what each stage returned, added up."""
        turn, places = self.turn, self.places
        slots = [turn.slots[place] for place in places]
        firsts, seconds = zip(*[(*slot.moments, _ABSENT, _ABSENT)[:2] for slot in slots], strict=True)
        columns = (
            [slot.weight for slot in slots],
            [_or_nothing(slot.rest) for slot in slots],
            [turn.gradients[place] for place in places],
            [moment.values for moment in firsts],
            [moment.values for moment in seconds],
            [_or_nothing(moment.scales) for moment in firsts],
            [_or_nothing(moment.scales) for moment in seconds],
            [_NOTHING] * len(slots),
        )
        facts = np.zeros((len(slots), 8), dtype=np.int64)
        facts[:, :2] = [(slot.row, slot.index) for slot in slots]
        facts[:, 2] = turn.keys.numpy()[places]
        numbers = np.zeros((len(slots), 9), dtype=np.float32)
        numbers[:, : turn.constants.shape[1]] = turn.constants.numpy()[places]
        totals = Table(*columns).run(_compiled_step, self.code, facts, numbers)
        increment_version([tensor for tensor in chain(*columns[:2], *columns[3:]) if tensor is not _NOTHING])
        return [int(total) for total in sum(totals)]


def _or_nothing(tensor: Tensor | None) -> Tensor:
    return _NOTHING if tensor is None else tensor
