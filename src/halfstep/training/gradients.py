"""Small things that a stepper does to losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import moved
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.gradients import drop_gradient
from halfstep.scaling.unscale import Number
from halfstep.training import refusals


def scaled(loss: Tensor, factor: Number) -> Tensor:
    """The loss times a factor, in fp32 or wider; the loss itself where there is nothing to multiply."""
    if isinstance(factor, float) and factor == 1.0:
        return loss
    return widened(loss) * (moved(factor, loss.device) if isinstance(factor, Tensor) else factor)


def divided(gradient: Tensor, divisor: Number) -> Tensor:
    """The gradient over a divisor, fp32 or wider."""
    wide = widened(gradient)
    return wide / (moved(divisor, wide.device).to(wide.real.dtype) if isinstance(divisor, Tensor) else divisor)


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Backward and step run outside autocast, even in a loop that is inside one."""
    is_inside = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_inside else nullcontext()


def widened(tensor: Tensor) -> Tensor:
    """fp32 where it was 16-bit."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def drop(parameters: Iterable[Tensor]) -> None:
    """Free the gradients."""
    for parameter in parameters:
        drop_gradient(parameter)


def checked_inputs(inputs: Any, call: str) -> list[Tensor]:
    """One tensor or several that can receive a gradient, as a list."""
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs) if isinstance(inputs, Iterable) else []
    if not wanted or not all(isinstance(one, Tensor) and one.requires_grad for one in wanted):
        raise refusals.bad_inputs(call, inputs)
    return wanted


@contextmanager
def shifted(parameters: Iterable[Tensor], shifts: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Add shifts to some of the parameters; put their bits back when the block is left.

    Raises:
        ArgumentError: a key is no parameter of them, or a shift has another shape; nothing is changed.
    """
    if not isinstance(shifts, Mapping):
        raise refusals.foreign_shift(shifts, None, is_known=False)
    known = {id(p) for p in parameters}
    for parameter, shift in shifts.items():
        is_known = id(parameter) in known
        if not (is_known and isinstance(shift, Tensor) and shift.shape == parameter.shape):
            raise refusals.foreign_shift(shift, parameter, is_known=is_known)
        if shift.is_complex() and not parameter.is_complex():
            raise refusals.foreign_shift(shift, parameter, is_known=True)
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
