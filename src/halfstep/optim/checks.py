"""What MasterWeights looks at before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.formats import BF16, FP16, HALF_DTYPES, format_of
from halfstep.kernels.overlap import overlap
from halfstep.optim import refusals

_WIDE_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_optimizer(optimizer: Any, *, is_wrapped: bool) -> None:
    """Refuse what cannot be wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refusals.no_optimizer(optimizer)
    if is_wrapped:
        raise refusals.wrapped_twice(optimizer)
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise refusals.scheduler_made_before(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise refusals.differentiable(optimizer)


def checked_dtype(dtype: Any, parameters: Iterable[Tensor]) -> torch.dtype | None:
    """The 16-bit dtype to cast to; None casts nothing."""
    if dtype is None:
        return None
    try:
        fmt = format_of(dtype)
    except (ArgumentError, TypeError, ValueError) as error:
        raise refusals.not_16_bit(dtype) from error
    if fmt not in (FP16, BF16) or fmt.dtype is None:
        raise refusals.not_16_bit(dtype)
    for p in parameters:
        if p.requires_grad and p.dtype in HALF_DTYPES and p.dtype != fmt.dtype:
            raise refusals.another_16_bit_dtype(fmt.dtype, p.dtype, p.shape)
        if p.requires_grad and p.dtype == torch.float32 and p.grad is not None:
            raise refusals.gradients_present(fmt.dtype)
    return fmt.dtype


def check_parameters(parameters: Iterable[Tensor], cast_dtype: torch.dtype | None) -> None:
    """Refuse trainable parameters that no master can stand for."""
    with_master = []
    for p in parameters:
        if not p.requires_grad:
            continue
        # DTensors, and every tensor that is made of other tensors (quantised ones).
        if hasattr(p, "device_mesh") or hasattr(p.data, "__tensor_flatten__"):
            raise refusals.dtensor(p)
        if p.dtype not in (*HALF_DTYPES, *_WIDE_DTYPES):
            raise refusals.no_master_for(p)
        if p.dtype in HALF_DTYPES or (cast_dtype is not None and p.dtype == torch.float32):
            with_master.append(p)
    if overlap(dict.fromkeys(with_master)):
        raise refusals.overlap()


def check_unchanged(p: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a parameter that was cast or moved after it was taken in."""
    if p.dtype != dtype or p.device != device:
        raise refusals.changed_after_wrapping(p, f"{dtype} on {device}", f"{p.dtype} on {p.device}")


def check_shape(p: Tensor, master: Tensor) -> None:
    """Refuse a parameter that has grown or shrunk: its master and moments have not."""
    if p.shape != master.shape:
        raise refusals.changed_after_wrapping(p, f"of shape {list(master.shape)}", f"of shape {list(p.shape)}")


def narrowed_text(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> str:
    """Moments that were 16-bit before they came here."""
    return (
        f"The state {', '.join(sorted(names))} of {type(optimizer).__name__} was kept in 16 bits until now. It is fp32"
        " from here on, but what it has lost (in fp16 second moments below 3e-8 are 0) does not come back: the next"
        " steps may be too large. Warm the learning rate up again."
    )
