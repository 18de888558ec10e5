"""Custom autograd Functions whose backward runs in the dtype of their forward.

Autocast is a state of the thread. A forward under ``torch.autocast`` sees it; the backward, which autograd runs later
and perhaps on a thread of its own, does not: products that were bf16 in forward are fp32 in backward, or meet tensors
of two dtypes and raise. ``autograd_function`` notes the state in which forward ran and sets it again around backward.
Or it fixes one dtype for both, wherever they run.

torch.amp.custom_fwd and custom_bwd do the first of these for one named device, as two decorators on two methods; the
second only where autocast is already on. They remain right for such cases.

Not here: casting inside the Function; what its author writes there is not changed.

Sources: pytorch/pytorch#87979, #125186, #38487.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.formats import FloatFormat, dtype_of

F = TypeVar("F", bound=type[torch.autograd.Function])

# (device type, is autocast on, its dtype) for each device type
_State = tuple[tuple[str, bool, torch.dtype], ...]
_NOTE = "_halfstep_autocast"


def autograd_function(
    dtype: str | torch.dtype | FloatFormat | None = None,
) -> Callable[[F], F]:
    """Make a class derived from ``torch.autograd.Function`` compute in one dtype, forward and backward.

    Args:
        dtype: None: whatever autocast says where ``apply`` is called, in backward too. A dtype or its name: floating
            tensors are cast to it before forward and backward, and autocast runs with it (fp32: is off), on every
            thread and under any outer autocast, a checkpoint's recompute included.

    Returns:
        A decorator. The class it gives back is called like the original; the gradients reach the inputs in the inputs'
        own dtypes, as always in autograd.

    Raises:
        ArgumentError: the class is no Function, or the dtype is neither 16-bit nor fp32.

    Example:
        >>> @autograd_function()
        ... class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x @ x
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         x, = ctx.saved_tensors
        ...         return (g @ x.T + x.T @ g)          # bf16 products, as in forward
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = Square.apply(x)
        >>> y.sum().backward()
        >>> y.dtype, x.grad.dtype
        (torch.bfloat16, torch.float32)
    """
    wanted = None if dtype is None else dtype_of(dtype)
    if wanted not in (None, torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(
            asked=f"autograd_function(dtype={wanted})",
            true="a Function computes in fp32, or in fp16 or bf16 under autocast",
            why="autocast has no other dtype",
            fix="pass torch.float32, torch.float16, torch.bfloat16, or nothing",
        )
    return lambda cls: _wrapped(cls, wanted)


def _wrapped(cls: F, dtype: torch.dtype | None) -> F:
    if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
        raise ArgumentError(
            asked=f"autograd_function on {cls!r}",
            true="it decorates classes derived from torch.autograd.Function",
            why="only those have a forward and a backward",
            fix="write it above the class, as @autograd_function()",
        )
    members: dict[str, Any] = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    # torch asks whether setup_context is overridden to know which of its two calling styles a Function has.
    has_setup = cls.setup_context is not torch.autograd.Function.setup_context
    members["forward"] = staticmethod(_forward(cls.forward, dtype, has_ctx=not has_setup))
    if has_setup:
        members["setup_context"] = staticmethod(_noting(cls.setup_context, dtype))
    members["backward"] = staticmethod(_backward(cls.backward, dtype))
    return type(cls.__name__, (cls,), members)  # type: ignore[return-value]


def _forward(forward: Callable[..., Any], dtype: torch.dtype | None, *, has_ctx: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        ctx, inputs = (args[:1], args[1:]) if has_ctx else ((), args)
        state = _state(inputs, dtype)
        if has_ctx:
            setattr(ctx[0], _NOTE, state)
        return _run(state, forward, *ctx, *_cast(inputs, dtype))

    return run


def _noting(setup_context: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    @functools.wraps(setup_context)
    def run(ctx: Any, inputs: Any, output: Any) -> Any:
        setattr(ctx, _NOTE, _state(inputs, dtype))
        return setup_context(ctx, _cast(inputs, dtype), output)

    return run


def _backward(backward: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return _run(getattr(ctx, _NOTE), backward, ctx, *_cast(gradients, dtype))

    return run


def _state(inputs: tuple[Any, ...], dtype: torch.dtype | None) -> _State:
    """What autocast is (or shall be) on the devices of the inputs."""
    kinds = sorted({x.device.type for x in inputs if isinstance(x, Tensor)})
    kinds = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
    if dtype is None:
        return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    is_on = dtype != torch.float32
    # Where autocast is off its dtype does not matter, but it must be one that the device's autocast accepts.
    return tuple((kind, is_on, dtype if is_on else torch.get_autocast_dtype(kind)) for kind in kinds)


def _run(state: _State, function: Callable[..., Any], *args: Any) -> Any:
    """Call with autocast so on every device; recursive, for torch.compile follows no ExitStack of autocasts."""
    if not state:
        return function(*args)
    (kind, is_on, dtype), rest = state[0], state[1:]
    with torch.autocast(kind, dtype=dtype, enabled=is_on):
        return _run(rest, function, *args)


def _cast(values: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Floating tensors in the dtype; fp64 stays, as under autocast: it was chosen on purpose."""
    if dtype is None:
        return values

    def is_cast(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64

    return tuple(value.to(dtype) if is_cast(value) else value for value in values)
