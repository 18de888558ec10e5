"""From scaled gradients to what the optimizer may use: one multiplier, found once, applied where it is cheapest.

The multiplier is ``1 / (scale * restraint)``. The restraint is exactly 1 for every gradient that a run can use; where
an element exceeds 2**52 it shrinks the gradients so that the largest is 2**52, because their squares, which Adam keeps,
would be inf in fp32. So a finite gradient never skips a step and never writes inf into a moment. fp64 gradients, whose
moments are fp64, are shrunk only together with others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep._compat import has_float64, local_part
from halfstep.formats import FP32
from halfstep.kernels.inspect import Inspection

LARGEST_GRADIENT = 2.0**52  # Adagrad adds up squares for ever: 2**24 of 2**104 fit below fp32's largest value


def restraint(found: Inspection, scale: Tensor) -> Tensor:
    """How much the unscaled gradients exceed the largest usable value: 0-dim fp32 on the scale's device, at least 1.

    1 as well where a gradient is inf or NaN: that step is skipped, so its gradients may keep their values.
    """
    largest = found.total_largest(scale.device, below_fp64=True).nan_to_num(nan=0.0, posinf=0.0)
    return (largest / (scale * LARGEST_GRADIENT)).clamp(1.0, FP32.largest)


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
            torch._foreach_mul_(values_list, factor.to(device, non_blocking=True))
