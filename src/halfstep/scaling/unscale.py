"""From scaled gradients to what the optimizer may use: one divisor, found once, applied where it is cheapest.

The divisor is the scale, for every gradient that a run can use. Where an unscaled element would exceed 2**52 it is
larger, so that the largest becomes 2**52: the squares that Adam keeps would be inf in fp32. So a finite gradient never
skips a step and never writes inf into a moment. fp64 gradients, whose moments are fp64, are shrunk only together with
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from halfstep._compat import has_float64, local_part, moved
from halfstep.kernels.inspect import Inspection

LARGEST_GRADIENT = 2.0**52  # Adagrad adds up squares for ever: 2**24 of 2**104 fit below fp32's largest value
LARGEST_FP64_GRADIENT = 2.0**500  # its square, added up 2**23 times, fits below fp64's largest value
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_: with it a run that moves here keeps its numbers

Number = float | Tensor  # a Python number where the host knows it, a 0-dim tensor where only the device does


def safe_divisor(found: Inspection, scale: Tensor) -> Tensor:
    """The scale, or more where the gradients need it: 0-dim fp32 on the scale's device."""
    return torch.maximum(scale, _largest(found, scale.device) / LARGEST_GRADIENT)


def safe_factor(found: Inspection, inv_scale: Tensor) -> Tensor:
    """The reciprocal of the scale, or less where the gradients need it: 0-dim fp32, for multiplying in place."""
    return torch.minimum(inv_scale, LARGEST_GRADIENT / _largest(found, inv_scale.device))


def clipping_divisor(plain: Number, norm: Number, norm_below_fp64: Number, clip_norm: float | None) -> Number:
    """What scaled gradients are divided by, clipped and safe: the largest of three.

    ``g / plain`` is the true gradient. Its norm is ``norm / plain``, so that clipping it to ``clip_norm`` divides it by
    ``(norm / plain + 1e-6) / clip_norm`` more; and no element exceeds the norm, which bounds what must be shrunk.

    Args:
        plain: scale times sum of weights.
        norm: L2 norm of all scaled gradients, not finite only where the step is skipped anyway.
        norm_below_fp64: the same without fp64 ones.
        clip_norm: largest norm that the true gradient may have; None clips nothing.

    Returns:
        The divisor, fp64 where ``norm`` is.
    """
    divisor = _larger(_larger(plain, norm_below_fp64 / LARGEST_GRADIENT), norm / LARGEST_FP64_GRADIENT)
    if clip_norm is not None:
        divisor = _larger(divisor, (norm + _CLIP_EPS * plain) / clip_norm)
    return divisor


def _larger(a: Number, b: Number) -> Number:
    return torch.maximum(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else max(a, b)


def _largest(found: Inspection, device: torch.device) -> Tensor:
    # inf or NaN: that step is skipped, so its gradients may be unscaled like any other.
    return found.total_largest(device, below_fp64=True).nan_to_num(nan=0.0, posinf=0.0)


def reciprocal(divisor: Tensor) -> Tensor:
    """``1 / divisor``, rounded once to fp32, as torch computes it."""
    wide = divisor.double() if has_float64(divisor.device) else divisor
    return wide.reciprocal().float()


def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim fp32 tensor; sparse ones by their values, DTensors by their local part."""
    with torch.no_grad():
        for device, values in _values_by_kind(gradients):
            torch._foreach_mul_(values, moved(factor, device))


def divide_(gradients: Iterable[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place by a 0-dim fp32 tensor: one rounding, the one that torch's fused kernels make."""
    with torch.no_grad():
        for device, values in _values_by_kind(gradients):
            torch._foreach_div_(values, moved(divisor, device))


def _values_by_kind(gradients: Iterable[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    """The memory behind the gradients, one list for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in {id(gradient): gradient for gradient in gradients}.values():  # a parameter may be listed twice
        values = local_part(gradient)
        if values.layout == torch.sparse_coo:
            values = values._values()  # a factor spreads over duplicates: no need to add them first
        elif values.layout != torch.strided:
            values = values.values()
        groups.setdefault((values.device, values.dtype), []).append(values)
    for (device, _), values_list in groups.items():
        yield device, values_list
