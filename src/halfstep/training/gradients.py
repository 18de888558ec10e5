"""Small things that a stepper does to losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep._compat import moved
from halfstep.scaling.unscale import Number
from halfstep.scaling.widen import HALF_DTYPES
from halfstep.training import refusals


def scaled(loss: Tensor, factor: Number) -> Tensor:
    """The loss times a factor, in fp32 or wider; the loss itself where there is nothing to multiply."""
    if isinstance(factor, float) and factor == 1.0:
        return loss
    return widened(loss) * (moved(factor, loss.device) if isinstance(factor, Tensor) else factor)


def widened(tensor: Tensor) -> Tensor:
    """fp32 where it was 16-bit."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def drop(parameters: Iterable[Tensor]) -> None:
    """Free the gradients."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def shifted(parameters: Iterable[Tensor], shifts: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Add shifts to some of the parameters; put their bits back when the block is left.

    Raises:
        ArgumentError: a key is no parameter of them, or a shift has another shape; nothing is changed.
    """
    known = {id(p) for p in parameters}
    for parameter, shift in shifts.items():
        if id(parameter) not in known or shift.shape != parameter.shape:
            raise refusals.foreign_shift(shift.shape, parameter.shape if id(parameter) in known else None)
    before = {p: p.detach().clone() for p in shifts}
    torch.clear_autocast_cache()  # inside an open autocast, torch would go on using 16-bit copies of the old weights
    try:
        with torch.no_grad():
            for parameter, shift in shifts.items():
                parameter.add_(shift)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)
        torch.clear_autocast_cache()
