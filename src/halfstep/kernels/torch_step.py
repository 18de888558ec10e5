"""The step as one can read it: every storage is unpacked to fp32, the rule runs on tensors, and all is packed.

This is what the compiled executors are tested against, and what runs where they cannot. Large tensors are stepped a
few rows at a time, for an element that is unpacked takes up to 90 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep._compat import rounded_sqrt
from halfstep.kernels import storage
from halfstep.kernels.rounding import rounded
from halfstep.kernels.rules import ADAM, LION
from halfstep.kernels.slots import GRADIENT_CAP, Counts, Kept, Slot, Turn
from halfstep.kernels.storage import GROUP, Master, Moment

AT_ONCE = 2**21  # elements, or one row if that is longer: some 200 MB unpacked, and enough work for a GPU
_LARGEST = torch.finfo(torch.float32).max
_EXTRA: dict[str, tuple[Callable[..., Tensor], ...]] = {
    ADAM.name: (rounded_sqrt, torch.div),
    LION.name: (torch.sign,),
}


def step(turn: Turn) -> Counts:
    """Step every slot's parameter, or none of them."""
    device = turn.keys.device
    counts = [torch.zeros((3,), dtype=torch.int64, device=device)]
    for slot, gradient, constants, key in zip(turn.slots, turn.gradients, turn.constants, turn.keys, strict=True):
        counts += [_step(turn, *part, constants, key) for part in _parts(slot, gradient)]
    count_step([slot.step for slot in turn.slots if slot.step is not None], turn.found_inf)
    saturated, updated, stalled = torch.stack(counts).sum(0)
    return Counts(saturated, updated, stalled) if turn.counts_stalled else Counts(saturated)


def count_step(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """One step more on each counter, unless it was not taken."""
    if steps and found_inf is None:
        torch._foreach_add_(steps, 1.0)
    elif steps and found_inf is not None:
        torch._foreach_add_(steps, (found_inf == 0).to(torch.float32), alpha=1)  # without alpha a tensor is read


def _parts(slot: Slot, gradient: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    """Views of a few rows of dimension 0: no group crosses them, and random bits go by ``index``."""
    weight, rest = slot.weight, slot.rest
    if 0 < weight.numel() <= AT_ONCE:
        yield slot, gradient
    elif weight.numel():
        length = weight[0].numel()
        num_rows = max(1, AT_ONCE // length)
        for first in range(0, len(weight), num_rows):
            rows = slice(first, first + num_rows)
            moments = [Kept(m.kind, m.values[rows], None if m.scales is None else m.scales[rows]) for m in slot.moments]
            kept = slot.master, None if rest is None else rest[rows], tuple(moments)
            yield Slot(weight[rows], *kept, index=slot.index + first * length), gradient[rows]


def _step(turn: Turn, slot: Slot, gradient: Tensor, constants: Tensor, key: Tensor) -> Tensor:
    bits = None
    if slot.needs_chance:
        bits = storage.random_bits(key, slot.index, slot.weight.numel(), slot.weight.device).view(slot.weight.shape)
    multiplier, *numbers = constants.unbind()
    gradient = (gradient.float() * multiplier).clamp(-GRADIENT_CAP, GRADIENT_CAP)
    moments = [read_moment(moment, which) for which, moment in enumerate(slot.moments)]
    if not moments:
        moments = [torch.zeros_like(gradient)]  # SGD without momentum
    before = read_master(slot)
    master, *moments = turn.rule.function(before, gradient, *moments, tuple(numbers), *_EXTRA.get(turn.rule.name, ()))
    written = _written_master(slot, master, bits)
    for which, (moment, value) in enumerate(zip(slot.moments, moments, strict=False)):
        written += _written_moment(moment, which, value.clamp(-_LARGEST, _LARGEST), bits)
    is_taken = torch.ones((), dtype=torch.bool, device=master.device) if turn.found_inf is None else turn.found_inf == 0
    num_saturated = (_is_saturated(master, slot.weight.dtype) & is_taken).sum()
    if turn.counts_stalled:
        before, is_updated = before.clone(), (master != before) & is_taken  # of fp32 weights it is their memory
    for target, value in written:
        target.copy_(torch.where(is_taken, value, target))
    if not turn.counts_stalled:
        return num_saturated.expand(3)
    return torch.stack([num_saturated, is_updated.sum(), (is_updated & (read_master(slot) == before)).sum()])


def _is_saturated(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a value is beyond what its dtype can hold, or in bf16 would round to more."""
    if dtype == torch.float16:
        return master.abs() > torch.finfo(dtype).max
    if dtype == torch.bfloat16:
        return ((master.contiguous().view(torch.int32) & 0x7FFFFFFF) >= storage.BF16_BOUND) & ~master.isnan()
    return master.isinf()


def read_master(slot: Slot) -> Tensor:
    """The parameter's value in fp32, with all the bits that are kept of it.

    Whatever somebody else writes into a weight holds. Beside an fp32 master one sees it: the weight is not its
    master's rounding. A ``split`` rest stays: it lies below what the weight can show. (In fp16, at a tie or a
    power of two, the number next to it may come of that.)
    """
    if slot.rest is None:
        return slot.weight.float()
    if slot.master == Master.FP32:
        is_own = rounded(slot.rest, slot.weight.dtype).view(torch.int16) == slot.weight.view(torch.int16)
        return torch.where(is_own, slot.rest, slot.weight.float())
    return storage.join(slot.weight, slot.rest)


def _written_master(slot: Slot, master: Tensor, bits: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    dtype = slot.weight.dtype
    master = master.clamp(-_LARGEST, _LARGEST)
    if dtype == torch.float32:
        return [(slot.weight, master)]
    if slot.master in (Master.SPLIT, Master.SPLIT8) and slot.rest is not None:
        split = storage.split if slot.master == Master.SPLIT else storage.split8
        weight, rest = split(master, dtype)
        return [(slot.weight, weight), (slot.rest, rest)]
    if slot.master == Master.STOCHASTIC and bits is not None:
        return [(slot.weight, storage.round_by_chance(master, dtype, bits & 0xFFFF))]
    kept = [(slot.weight, rounded(master, dtype))]
    return kept if slot.rest is None else [*kept, (slot.rest, master)]


# ---- moments --------------------------------------------------------------------------------------------------------


def read_moment(moment: Kept, which: int) -> Tensor:
    """A moment's value in fp32; ``which`` is 0 for the first and 1 for the second."""
    if moment.scales is None:
        return moment.values.float()
    decode = (storage.decode_first, storage.decode_second)[which]
    groups, length = _grouped(moment.values)
    if which:
        groups = groups.view(torch.uint8)
    return decode(groups, moment.scales).flatten(1)[:, :length].reshape(moment.values.shape)


def encoded(value: Tensor, which: int, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes in int8 of a moment's value, and the scales of its groups; 32 random ``bits`` each, or None for nearest."""
    groups, length = _grouped(value)
    chance = None if bits is None else _grouped(_chance(bits, which))[0]
    codes, scales = (storage.encode_first, storage.encode_second)[which](groups, chance)
    return codes.view(torch.int8).flatten(1)[:, :length].reshape(value.shape), scales


def _chance(bits: Tensor, which: int) -> Tensor:
    """16 random bits for a moment: others for the first than for the second."""
    return (bits if which else bits * 0x9E3779B1 & 0xFFFFFFFF) >> 16


def _written_moment(moment: Kept, which: int, value: Tensor, bits: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    if moment.kind == Moment.BF16 and bits is not None:
        return [(moment.values, storage.round_by_chance(value, torch.bfloat16, _chance(bits, which)))]
    if moment.scales is None:
        return [(moment.values, value)]
    codes, scales = encoded(value, which, bits)
    return [(moment.values, codes), (moment.scales, scales)]


def _grouped(values: Tensor) -> tuple[Tensor, int]:
    """``[rows, groups, GROUP]``, filled up with zeros, and the length of a row."""
    rows = values.reshape(values.shape[0], -1)
    length = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -length % GROUP))
    return padded.view(rows.shape[0], -1, GROUP), length
