"""The loss on its way to backward: is it one number with a graph, and did backward start from it?

A missing ``backward()`` and an optimizer that has nothing to do look the same from outside: no gradient. A hook on the
scaled loss tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.errors import ArgumentError, CallOrderError


def check_loss(loss: Tensor, call: str = "backward") -> None:
    """Raise ArgumentError unless ``loss`` is a real tensor of one element that backward can start from."""
    if not isinstance(loss, Tensor):
        raise ArgumentError(
            asked=f"{call}() of a {type(loss).__name__}",
            true="backward starts from a tensor",
            why="a number has no graph",
            fix="pass the loss tensor, without .item()",
        )
    if loss.numel() != 1:
        raise ArgumentError(
            asked=f"{call}() of a loss of shape {tuple(loss.shape)}",
            true="a loss is one number",
            why="backward does not know how to weigh several",
            fix="reduce it first: loss.mean() or loss.sum()",
        )
    if loss.is_complex():
        raise ArgumentError(
            asked=f"{call}() of a complex loss",
            true=f"the loss is {loss.dtype}",
            why="a complex number has no descent: smaller is not defined",
            fix="take a real number of it: loss.abs(), or loss.real",
        )
    if not loss.requires_grad:
        raise ArgumentError(
            asked=f"{call}() of a loss without a graph",
            true="no parameter that requires a gradient took part in it, or it was detached",
            why="no gradient would reach any parameter",
            fix="check requires_grad of the parameters, and look for no_grad(), detach() or .item() on the way",
        )


class LossSeen:
    """What happened to the losses scaled in this window."""

    def __init__(self) -> None:
        self._has_graph = False
        self._was_backward_run = False
        self._collected: list[Tensor] | None = None

    def loss(self, scaled: Tensor) -> None:
        """A scaled loss was handed out."""
        if self._collected is not None:
            self._collected.append(scaled)
        if scaled.requires_grad:
            self._has_graph = True
            scaled.register_hook(self._on_backward)  # type: ignore[no-untyped-call]

    def _on_backward(self, _: Tensor) -> None:
        self._was_backward_run = True

    def clear(self) -> None:
        """A new window begins."""
        self._has_graph = self._was_backward_run = False

    @contextmanager
    def collect(self) -> Iterator[list[Tensor]]:
        """The scaled losses that are handed out inside, to recognise one that a closure returns."""
        collected: list[Tensor] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer without gradients is stepped: raise CallOrderError if backward was forgotten."""
        if self._was_backward_run:
            return
        name = type(optimizer).__name__
        if self._has_graph:
            raise CallOrderError(
                asked=f"step() of {name} before backward()",
                true="the scaled loss of this window has a graph, backward was not run from it, and no gradient exists",
                why="there is nothing to step with",
                fix="call scaler.scale(loss).backward() before scaler.step(optimizer)",
            )
        raise CallOrderError(
            asked=f"step() of {name} without any gradient",
            true="no loss with a graph was scaled in this window: all its parameters are frozen, or it was detached",
            why="backward cannot reach a parameter",
            fix="check requires_grad of the parameters, and look for no_grad(), detach() or .item() on the loss",
        )
