"""The step of ``kernels/torch_step.py`` in one compiled pass: slots become tables, a recipe a list of stages."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels.numba_.loops import Table
from halfstep.kernels.numba_.memory import BF16, FP16, FP32
from halfstep.kernels.numba_.stages import Stages, address_of, stages_of
from halfstep.kernels.numba_.step import step as _compiled_step
from halfstep.kernels.slots import Counts, Kept, Slot, Turn
from halfstep.kernels.storage import Moment

_DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_NOTHING = torch.empty(0)
_ABSENT = Kept(Moment.NONE, _NOTHING)
_Recipe = tuple[int, ...]  # dtypes of weight and gradient, kinds of master, first and second moment


def step(turn: Turn) -> Counts:
    """As ``kernels/torch_step.py`` does it, for parameters on the CPU."""
    totals = {"saturated": 0, "count_updated": 0, "count_stalled": 0}
    if turn.found_inf is None or turn.found_inf.item() == 0:
        groups: dict[_Recipe, list[int]] = {}
        for place, (slot, gradient) in enumerate(zip(turn.slots, turn.gradients, strict=True)):
            if slot.weight.numel():
                groups.setdefault(_recipe(slot, gradient), []).append(place)
        for recipe, places in groups.items():
            stages = stages_of(turn.rule, recipe, counts_stalled=turn.counts_stalled)
            for (name, _), total in zip(stages, _run(turn, places, stages), strict=True):
                totals[name if name in totals else "saturated"] += total
    counts = Counts(*map(torch.tensor, totals.values()))
    return counts if turn.counts_stalled else Counts(counts.saturated)


def _recipe(slot: Slot, gradient: Tensor) -> _Recipe:
    first, second = (*slot.moments, _ABSENT, _ABSENT)[:2]
    dtypes = _DTYPES[slot.weight.dtype], _DTYPES[gradient.dtype]
    return (*dtypes, int(slot.master), int(first.kind), int(second.kind))


def _run(turn: Turn, places: list[int], stages: Stages) -> list[int]:
    """Step the slots of one recipe; what each stage returned, added up."""
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
    addresses = np.array([address_of(name, *variant) for name, variant in stages], dtype=np.int64)
    facts = np.zeros((len(slots), 8), dtype=np.int64)
    facts[:, :2] = [(slot.row, slot.index) for slot in slots]
    facts[:, 2] = turn.keys.numpy()[places]
    numbers = np.zeros((len(slots), 9), dtype=np.float32)
    numbers[:, : turn.constants.shape[1]] = turn.constants.numpy()[places]
    totals = Table(*columns).run(_compiled_step, addresses, facts, numbers)
    increment_version([tensor for tensor in chain(*columns[:2], *columns[3:]) if tensor is not _NOTHING])
    return [int(total) for total in sum(totals)]


def _or_nothing(tensor: Tensor | None) -> Tensor:
    return _NOTHING if tensor is None else tensor
