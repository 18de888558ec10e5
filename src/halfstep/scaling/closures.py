"""Optimizers that evaluate the loss themselves (LBFGS): every evaluation is unscaled and checked.

The closure that the optimizer receives runs the user's closure, unscales the gradients it left, and looks at them. If
one is inf or NaN the step is abandoned: parameters and optimizer state return to what they were before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Closure = Callable[[], Any]


class BadEvaluation(BaseException):
    """A closure left a gradient that is inf or NaN. No Exception, so that no optimizer catches it by accident."""


def split_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Closure | None, tuple[Any, ...]]:
    """The closure, passed by name or first by position, and the remaining positional arguments; mends ``kwargs``."""
    if "closure" in kwargs:
        return kwargs.pop("closure"), args
    if args and (args[0] is None or callable(args[0])):
        return args[0], args[1:]
    return None, args


def step_or_restore(
    optimizer: torch.optim.Optimizer,
    evaluate: Closure,
    is_bad: Callable[[], bool],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """``optimizer.step(evaluate)``, undone whole if an evaluation was bad or raised.

    Args:
        optimizer: its parameters and state are copied first.
        evaluate: leaves true gradients and returns the loss; raises :class:`BadEvaluation` if one is inf or NaN.
        is_bad: whether the last evaluation was bad, for an optimizer that swallows every exception.
        args: passed to ``optimizer.step`` behind the closure.
        kwargs: passed to ``optimizer.step``.

    Returns:
        What ``optimizer.step`` returned; None if it was undone.
    """
    before = Snapshot(optimizer)
    try:
        result = optimizer.step(evaluate, *args, **(kwargs or {}))
    except BadEvaluation:
        result = None
    except BaseException:  # an exception of the user's own: no half of a step either
        before.restore()
        raise
    if is_bad():
        before.restore()
        return None
    return result


class Snapshot:
    """Copies of an optimizer's parameters and state, to go back to. Costs their bytes once more while it lives."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._values: list[tuple[Tensor, Tensor]] = [
                (p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]
            ]
        self._state = {p: _copy(state) for p, state in optimizer.state.items()}

    def restore(self) -> None:
        """Put everything back, bit for bit, into the same parameters."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _copy(state: Any) -> Any:
    # deepcopy refuses tensors that carry a graph; an optimizer's state may hold them when it is differentiable.
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_copy(value) for value in state)
    return copy.deepcopy(state)
