"""From scaled gradients to what the optimizer may use: one divisor, found once, applied where it is cheapest.

The divisor is the scale, for every gradient that a run can use. Where an unscaled element would exceed 2**52 it is
larger, so that the largest becomes 2**52: the squares that Adam keeps would be inf in fp32. So a finite gradient never
skips a step and never writes inf into a moment. fp64 gradients, whose moments are fp64, are shrunk only together with
others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep._compat import has_float64, local_part, moved
from halfstep.kernels.inspect import Inspection

LARGEST_GRADIENT = 2.0**52  # Adagrad adds up squares for ever: 2**24 of 2**104 fit below fp32's largest value


def safe_divisor(found: Inspection, scale: Tensor) -> Tensor:
    """The scale, or more where the gradients need it: 0-dim fp32 on the scale's device."""
    return torch.maximum(scale, _largest(found, scale.device) / LARGEST_GRADIENT)


def safe_factor(found: Inspection, inv_scale: Tensor) -> Tensor:
    """The reciprocal of the scale, or less where the gradients need it: 0-dim fp32, for multiplying in place."""
    return torch.minimum(inv_scale, LARGEST_GRADIENT / _largest(found, inv_scale.device))


def _largest(found: Inspection, device: torch.device) -> Tensor:
    # inf or NaN: that step is skipped, so its gradients may be unscaled like any other.
    return found.total_largest(device, below_fp64=True).nan_to_num(nan=0.0, posinf=0.0)


def reciprocal(divisor: Tensor) -> Tensor:
    """``1 / divisor``, rounded once to fp32, as torch computes it."""
    wide = divisor.double() if has_float64(divisor.device) else divisor
    return wide.reciprocal().float()


def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim fp32 tensor; sparse ones by their values, DTensors by their local part."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = local_part(gradient)
        if values.layout == torch.sparse_coo:
            values = values._values()  # a factor spreads over duplicates: no need to add them first
        elif values.layout != torch.strided:
            values = values.values()
        groups.setdefault((values.device, values.dtype), []).append(values)
    with torch.no_grad():
        for (device, _), values_list in groups.items():
            torch._foreach_mul_(values_list, moved(factor, device))
