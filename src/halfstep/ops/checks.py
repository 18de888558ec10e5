"""What the stable functions ask of their arguments, and what they may ask of the machine.

Not here: what one function alone needs to know.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import ArgumentError

NARROW = (torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")


def check_floating(x: Tensor, function: str, name: str = "x") -> None:
    """Refuse integers, booleans and complex numbers.

    Args:
        x: any tensor.
        function: for the message, such as ``"softmax"``.
        name: of the argument, for the message.

    Raises:
        ArgumentError: ``x`` does not hold real floating-point numbers.
    """
    if not x.is_floating_point():
        raise ArgumentError(
            asked=f"{function} of {name} with dtype {x.dtype}",
            true="it computes with real floating-point numbers",
            why="integers have no fractions to return and no gradient",
            fix=f"pass {name}.float()",
        )


def check_reduction(reduction: str, function: str) -> None:
    """Refuse a reduction that does not exist.

    Args:
        reduction: what the caller asked for.
        function: for the message.

    Raises:
        ArgumentError: it is none of ``"mean"``, ``"sum"``, ``"none"``.
    """
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            asked=f"{function}(reduction={reduction!r})",
            true='a loss is reduced by "mean" or "sum", or left as it is by "none"',
            why="there is no other way to reduce it",
            fix='pass reduction="mean", "sum" or "none"',
        )


def check_same_shape(x: Tensor, target: Tensor, function: str) -> None:
    """Refuse a target that would have to be broadcast.

    Args:
        x: predictions.
        target: what they are compared with.
        function: for the message.

    Raises:
        ArgumentError: the shapes differ, or the target is complex.
    """
    if target.is_complex():
        raise ArgumentError(
            asked=f"{function} of targets of dtype {target.dtype}",
            true="a target is a real number, such as 0 or 1",
            why="its imaginary part would be dropped without a word",
            fix="pass target.real, if that is what is meant",
        )
    if x.shape != target.shape:
        raise ArgumentError(
            asked=f"{function} of predictions {tuple(x.shape)} and targets {tuple(target.shape)}",
            true="every prediction is compared with one target",
            why="broadcasting [N] against [N, 1] would compare all with all without a word",
            fix=f"bring the target to the shape {tuple(x.shape)}",
        )


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast on the tensor's device; free where none is on."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def is_narrow(x: Tensor) -> bool:
    """Whether the dtype is a 16-bit float."""
    return x.dtype in NARROW


def widened(x: Tensor) -> Tensor:
    """16-bit floats as fp32; everything else as it is."""
    return x.float() if is_narrow(x) else x


def seen_on_host(flag: Tensor) -> bool | None:
    """The value of a one-element tensor where reading it costs nothing.

    Args:
        flag: a boolean tensor of one element.

    Returns:
        Its value; None where the host would have to wait for a device, or where there is no value to read (tracing,
        torch.vmap, fake and meta tensors). The caller then does what is right for both values.
    """
    if not is_host(flag.device) or torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError:  # what vmap and fake tensors answer
        return None
