"""Bytes of a step: what lives between two steps, what must move in one, and how fast memory moves it.

Method: all that a step needs lives in tensors, so their storages are added up. A step reads the gradients twice (all
must be finite, and their norm known, before the first weight is written), and reads and writes everything else once:
twice the bytes that live, whatever the storages.

    AdamW                           weight  kept   gradient  moments        lives     moves
    fp32                              4      -        4       4 + 4         16        32
    bf16, split, bf16 moments         2      2        2       2 + 2         10        20
    bf16, split8, int8 moments        2      1        2      1.06 + 1.06     7.125    14.25

The floor is the time in which the bytes that must move could be moved, at the bandwidth of `probe`: an in-place
multiplication, which reads and writes each number once.

Not here: memory that exists during a step only; cached allocations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.bench.steps_storages import Storage

if TYPE_CHECKING:
    from halfstep.bench.steps_recipes import BenchRule
    from halfstep.bench.steps_tensors import Shape

PROBE_BYTES = 8  # a number of fp32 is read and written


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors; a storage that several of them share counts once.

    Example:
        >>> whole = torch.zeros(100)
        >>> live_bytes([whole, whole[:10], torch.zeros(100, dtype=torch.int8)])
        500
    """
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def moved_bytes(num_bytes: int) -> int:
    """Bytes that a step must move at least, from those that live: gradients are read twice, all else is rewritten."""
    return 2 * num_bytes


def predicted_bytes(rule: BenchRule, storage: Storage, shapes: Sequence[Shape], half_dtype: torch.dtype) -> int:
    """Bytes of weights, gradients and state, before anything is allocated: from tensors without memory.

    Args:
        rule: decides how many moments there are.
        storage: of weights and moments.
        shapes: of the weights.
        half_dtype: of the weights, unless they are fp32.
    """
    from halfstep import optim
    from halfstep.optim.keeping import keeping_of, new_state

    group = {"master": "split", "moments": "fp32", **rule.options, **storage.arguments}
    kept_by = getattr(optim, rule.halfstep_name).rule
    found: dict[Shape, int] = {}
    for shape in set(shapes):
        weight = torch.empty(shape, dtype=storage.weight_dtype(half_dtype), device="meta")
        state = new_state(weight, keeping_of(weight, group, kept_by))
        found[shape] = sum(tensor.numel() * tensor.element_size() for tensor in (weight, weight, *state.values()))
    return sum(found[shape] for shape in shapes)


def new_probe(num_params: int, device: torch.device) -> Callable[[], object]:
    """What reads and writes as many fp32 numbers as there are parameters: `PROBE_BYTES` for each.

    Args:
        num_params: how many.
        device: where.
    """
    numbers = torch.ones(num_params, device=device)
    return lambda: numbers.mul_(1.0000001)


def floor_seconds(num_bytes: int, num_params: int, probe_seconds: float) -> float:
    """Time in which the bytes that must move could be moved, at the speed of the probe.

    Args:
        num_bytes: that live.
        num_params: that the probe multiplied.
        probe_seconds: that it took.

    Example:
        >>> floor_seconds(num_bytes=16_000, num_params=1000, probe_seconds=0.5)
        2.0
    """
    if not num_params:
        return math.nan
    return moved_bytes(num_bytes) / (PROBE_BYTES * num_params) * probe_seconds
