"""The numbers of one turn: the rule's constants for each parameter, and the keys of its random bits.

On the host they are Python numbers, found once for all parameters of a group that have taken the same number of steps.
On a device only the device knows which steps were taken, so the same formulas run there, in fp64, and nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import has_float64, is_host, moved
from halfstep.formats import FP32
from halfstep.kernels import storage
from halfstep.kernels.rules import Rule
from halfstep.kernels.slots import finite
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.packed_members import Row

_Groups = Sequence[Mapping[str, Any]]


def numbers_of(rule: Rule, groups: _Groups, rows: list[Row], factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Constants and keys of a turn, as :class:`~halfstep.kernels.slots.Turn` wants them.

    Args:
        rule: the arithmetic.
        groups: the optimizer's, with their hyperparameters.
        rows: the parameters, all on one device, in the order of the groups.
        factor: what gradients are multiplied by; a number where the host is the device.

    Raises:
        ArgumentError: on the host: a constant is not a number.
        StateError: on the host: a step counter does not count.
    """
    device = rows[0].member.parameter.device
    return (_on_host if is_host(device) else _on_device)(rule, groups, rows, factor)


def _on_host(rule: Rule, groups: _Groups, rows: list[Row], factor: Any) -> tuple[Tensor, Tensor]:
    steps = [row.member.kept[0].item() + 1.0 for row in rows]
    if not all(1.0 <= step < math.inf for step in steps):
        raise refusals.bad_step_counter(steps)
    kinds = [*zip([row.group for row in rows], steps, strict=True)]
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    known = [_numbers(rule, groups[index], step, factor) for index, step in places]
    constants = torch.tensor(known, dtype=torch.float64, device="cpu")
    if bool(constants.isnan().any()):
        raise refusals.not_a_number(rule)
    of_kind = torch.tensor([places[kind] for kind in kinds], device="cpu")
    constants = finite(constants)[of_kind]
    if not any(row.member.slot.needs_chance for row in rows):
        return constants, torch.zeros(len(rows), dtype=torch.int64, device="cpu")
    keys = torch.tensor([storage.step_key(groups[index]["seed"], int(step)) for index, step in places], device="cpu")
    tensors = torch.tensor([row.member.number for row in rows], device="cpu")
    return constants, storage.with_tensor(keys[of_kind], tensors)


def _on_device(rule: Rule, groups: _Groups, rows: list[Row], factor: Any) -> tuple[Tensor, Tensor]:
    device = rows[0].member.parameter.device
    wide = torch.float64 if has_float64(device) else torch.float32
    steps = torch.stack([row.member.kept[0] for row in rows]).to(wide) + 1.0
    parts, runs = [], _runs(rows)
    for (index, size), of_run in zip(runs, torch.split(steps, [size for _, size in runs]), strict=True):
        numbers = _numbers(rule, groups[index], of_run, factor)
        parts.append(torch.stack([_column(number, size, wide, device) for number in numbers], dim=1))
    constants = finite(torch.cat(parts))
    if not any(row.member.slot.needs_chance for row in rows):
        return constants, torch.zeros(len(rows), dtype=torch.int64, device=device)
    facts = torch.tensor([(groups[row.group]["seed"], row.member.number) for row in rows], device="cpu")
    seeds, places = _sent(facts, device).unbind(1)
    return constants, storage.random_key(seeds, steps.long(), places)


def _numbers(rule: Rule, group: Mapping[str, Any], step: Any, factor: Any) -> tuple[Any, ...]:
    lr = group["lr"]
    if isinstance(lr, Tensor) and not isinstance(step, Tensor):
        lr = float(lr)
    elif isinstance(lr, Tensor):
        lr = moved(lr.detach().reshape(()), step.device).to(step.dtype)
    sign = -1.0 if group["maximize"] else 1.0
    return (sign * factor, *rule.numbers({**group, "lr": lr}, step))


def _column(number: Any, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(dtype).expand(size)
    return torch.full((size,), max(-FP32.largest, min(number, FP32.largest)), dtype=dtype, device=device)


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _runs(rows: list[Row]) -> list[tuple[int, int]]:
    """Groups in order, and how many rows each has."""
    runs: list[tuple[int, int]] = []
    for index in (row.group for row in rows):
        if runs and runs[-1][0] == index:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
