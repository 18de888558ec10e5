"""Ranks that hold shards of one parameter decide together: a fault in one shard is a fault in all.

torch's own scaler agrees where gradients are DTensors, inside DTensor's dispatch. Here the local parts are inspected,
so the two answers that decide a step, found_inf and the largest magnitude, are reduced over the mesh: 8 bytes. Plain
tensors need nothing; under DistributedDataParallel their gradients agree already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import moved
from halfstep.kernels.inspect import Inspection


def agreed(found: Inspection, gradients: Sequence[Tensor | None]) -> Inspection:
    """What all ranks found together, if any gradient is sharded over several; else ``found`` itself."""
    groups = _groups_of(gradients)
    if not groups:
        return found
    device = next(_local_device(g) for g in gradients if hasattr(g, "device_mesh"))
    flags = [moved(flag, device) for flag in found.found_inf.values()]
    bad = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
    # NaN has no order that every backend respects: the flag speaks for it.
    largest = found.total_largest(device).nan_to_num(nan=0.0, posinf=0.0)
    both = torch.stack([bad, largest])
    for group in groups:
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
    if not found.largest:  # not one element of any gradient lies on this rank
        return Inspection({device: (0,)}, {device: (False,)}, {device: both[0]}, {device: both[1:]}, None)
    return dataclasses.replace(
        found,
        found_inf={home: moved(both[0], home) for home in found.found_inf},
        largest={h: torch.maximum(size, moved(both[1], h).to(size.dtype)) for h, size in found.largest.items()},
    )


def _groups_of(gradients: Sequence[Tensor | None]) -> list[Any]:
    """The process groups along every dimension, larger than 1, of every mesh that a gradient is sharded over."""
    groups: dict[int, Any] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        if mesh is None or mesh.size() == 1:
            continue
        for dimension in range(mesh.ndim):
            if mesh.size(dimension) > 1:
                group = mesh.get_group(dimension)
                groups[id(group)] = group
    return list(groups.values())


def _local_device(gradient: Tensor | None) -> torch.device:
    assert gradient is not None
    return gradient.device
