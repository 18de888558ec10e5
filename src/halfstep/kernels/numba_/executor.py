"""The step of ``kernels/torch_step.py`` in one compiled pass: slots become tables, a recipe a list of stages."""

from __future__ import annotations

import dataclasses
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels import torch_step
from halfstep.kernels.numba_.loops import Table, has_plain_memory, is_plain
from halfstep.kernels.numba_.memory import BF16, FP16, FP32, GRADIENT
from halfstep.kernels.numba_.stages import INDEX, KEY, NUM_CONSTANTS, ROW, Stages, address_of, stages_of
from halfstep.kernels.numba_.step import step as _compiled_step
from halfstep.kernels.slots import Counts, Kept, Slot, Turn
from halfstep.kernels.storage import Moment

_DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_NOTHING = torch.empty(0, device="cpu")
_ABSENT = Kept(Moment.NONE, _NOTHING)
_Recipe = tuple[int, ...]  # dtypes of weight and gradient, kinds of master, first and second moment
_address_of = methodcaller("data_ptr")


def step(turn: Turn) -> Counts:
    """As ``kernels/torch_step.py`` does it, for parameters on the CPU; what is no plain memory goes there."""
    if turn.found_inf is not None and turn.found_inf.item() != 0:
        return _counts(turn, [0, 0, 0])
    dtypes, are_plain = [gradient.dtype for gradient in turn.gradients], [*map(is_plain, turn.gradients)]
    key = turn.rule, dtypes, are_plain, turn.counts_stalled
    plan: _Plan | None = turn.prepared.get("numba")
    if plan is None or plan.key != key:
        plan = turn.prepared["numba"] = _Plan(turn, key)
    totals = {"saturated": 0, "count_updated": 0, "count_stalled": 0}
    for work in plan.works:
        for (name, _), total in zip(work.stages, work.run(turn), strict=True):
            totals[name if name in totals else "saturated"] += total
    counts = _counts(turn, [*totals.values()])
    if plan.others:
        rest = torch_step.step(_part(turn, plan.others))
        counts = Counts(*(None if a is None or b is None else a + b for a, b in zip(counts, rest, strict=True)))  # type: ignore[arg-type]
    return counts


def _counts(turn: Turn, totals: list[int]) -> Counts:
    counts = Counts(*(torch.tensor(total, device="cpu") for total in totals))
    return counts if turn.counts_stalled else Counts(counts.saturated)


def _part(turn: Turn, places: list[int]) -> Turn:
    slots, gradients = [turn.slots[place] for place in places], [turn.gradients[place] for place in places]
    return dataclasses.replace(
        turn, slots=slots, gradients=gradients, constants=turn.constants[places], keys=turn.keys[places], prepared={}
    )


class _Plan:
    """Which slots go together. All is compiled before the first weight is written: people interrupt what takes long.

    Args:
        turn: the first one of these slots.
        key: what else the plan depends on.
    """

    def __init__(self, turn: Turn, key: tuple[Any, ...]) -> None:
        self.key = key
        *_, are_plain, _ = key
        groups: dict[_Recipe, list[int]] = {}
        self.others: list[int] = []
        for place, (slot, gradient) in enumerate(zip(turn.slots, turn.gradients, strict=True)):
            if not (slot.weight.numel() and are_plain[place] and has_plain_memory(slot.weight)):
                self.others.append(place)
            else:
                groups.setdefault(_recipe(slot, gradient), []).append(place)
        self.works = [_Work(turn, places, recipe) for recipe, places in groups.items()]


def _recipe(slot: Slot, gradient: Tensor) -> _Recipe:
    first, second = (*slot.moments, _ABSENT, _ABSENT)[:2]
    dtypes = _DTYPES[slot.weight.dtype], _DTYPES[gradient.dtype]
    return (*dtypes, int(slot.master), int(first.kind), int(second.kind))


class _Work:
    """The slots of one recipe: where they are, and the machine code of their stages."""

    def __init__(self, turn: Turn, places: list[int], recipe: _Recipe) -> None:
        self.stages: Stages = stages_of(turn.rule, recipe, counts_stalled=turn.counts_stalled)
        self._code = np.array([address_of(name, *variant) for name, variant in self.stages], dtype=np.int64)
        slots = [turn.slots[place] for place in places]
        self._places = None if len(places) == len(turn.slots) else places
        self._weights = [slot.weight for slot in slots]
        firsts, seconds = zip(*[(*slot.moments, _ABSENT, _ABSENT)[:2] for slot in slots], strict=True)
        self._table = Table(
            self._weights,
            [_or_nothing(slot.rest) for slot in slots],
            [_NOTHING] * len(slots),  # the gradients
            [moment.values for moment in firsts],
            [moment.values for moment in seconds],
            [_or_nothing(moment.scales) for moment in firsts],
            [_or_nothing(moment.scales) for moment in seconds],
            [_or_nothing(slot.step) for slot in slots],
        )
        self._facts = np.zeros((len(slots), 8), dtype=np.int64)
        self._facts[:, ROW] = [slot.row for slot in slots]
        self._facts[:, INDEX] = [slot.index for slot in slots]
        self._numbers = np.zeros((len(slots), NUM_CONSTANTS), dtype=np.float32)

    def run(self, turn: Turn) -> list[int]:
        """Step the slots; what each stage returned, added up."""
        gradients, constants, keys = turn.gradients, turn.constants.numpy(), turn.keys.numpy()
        if self._places is not None:
            gradients = [gradients[place] for place in self._places]
            constants, keys = constants[self._places], keys[self._places]
        self._table.addresses[:, GRADIENT] = [*map(_address_of, gradients)]
        self._facts[:, KEY] = keys
        self._numbers[:, : constants.shape[1]] = constants
        totals = self._table.run(_compiled_step, self._code, self._facts, self._numbers)
        increment_version(self._weights)  # what else was written takes no part in autograd
        return [int(total) for total in sum(totals)]


def _or_nothing(tensor: Tensor | None) -> Tensor:
    return _NOTHING if tensor is None else tensor
