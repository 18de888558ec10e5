"""Who was at fault: the bad parameter nearest the loss, by name, and whether it held inf or NaN.

A NaN born in the middle of a network poisons the gradient of everything upstream of it, so the list of bad parameters
is long and mostly innocent. Backward runs from the loss to the input; the first parameter that received a bad gradient
is the one nearest the place where it was born. The order of arrival is read from the autograd graphs of the first
window's losses: a node created later in forward runs earlier in backward. Where the graph hides it (compiled regions,
reentrant checkpointing), the order of definition stands in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.errors import ArgumentError
from halfstep.kernels.inspect import FaultKind


@dataclass(frozen=True)
class Culprit:
    """The parameter whose gradient went bad nearest the loss.

    Args:
        name: dotted name in the model, or "parameter 3 of group 0" where no model was given.
        kind: ``"inf"`` or ``"nan"`` (NaN if both occur).
        shape: shape of the parameter.
        num_bad: how many parameters of this optimizer had a gradient that was not finite, this one included.
    """

    name: str
    kind: FaultKind
    shape: tuple[int, ...]
    num_bad: int

    def __str__(self) -> str:
        others = f", and {self.num_bad - 1} more behind it" if self.num_bad > 1 else ""
        return f"{self.name} (shape {list(self.shape)}) holds {'NaN' if self.kind == 'nan' else 'inf'}{others}"


class ParameterOrder:
    """Names of parameters, and the order in which backward reaches them. Holds no parameter alive."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._steps: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._is_learned = False
        if model is not None:
            self.name(model)

    def name(self, model: torch.nn.Module) -> None:
        """Take the names of a model's parameters.

        Raises:
            ArgumentError: ``model`` is not a module.
        """
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                asked=f"model={type(model).__name__}",
                true="model is a torch.nn.Module; it is used for the names of its parameters only",
                why="there are no named parameters to report",
                fix="pass the model that is trained, or leave model out",
            )
        for name, parameter in model.named_parameters():
            self._names[parameter] = name

    def learn(self, loss: Tensor) -> None:
        """Read the order from the graph behind a loss of the first window that has one."""
        if self._is_learned:
            return
        for leaf, step in _leaf_steps(loss):
            self._steps[leaf] = min(step, self._steps.get(leaf, step))

    def finish(self) -> None:
        """The window is over: what it taught is kept."""
        self._is_learned = len(self._steps) > 0

    def culprit(self, parameters: Sequence[Tensor], faults: Mapping[int, FaultKind], groups: list[int]) -> Culprit:
        """The one of ``faults`` (position in ``parameters`` -> kind) that is nearest the loss."""
        position = max(faults, key=lambda i: (self._steps.get(parameters[i], -1), i))
        parameter = parameters[position]
        return Culprit(
            name=self._names.get(parameter) or _position_name(position, groups),
            kind=faults[position],
            shape=tuple(parameter.shape),
            num_bad=len(faults),
        )

    def names_of(self, parameters: Sequence[Tensor], groups: list[int]) -> list[str]:
        """Names, or positions where no name is known."""
        return [self._names.get(p) or _position_name(i, groups) for i, p in enumerate(parameters)]


def _position_name(position: int, groups: list[int]) -> str:
    """``groups[g]`` is the number of parameters in the groups before and including g."""
    start = 0
    for group, end in enumerate(groups):
        if position < end:
            return f"parameter {position - start} of group {group}"
        start = end
    return f"parameter {position}"


def _leaf_steps(loss: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Each leaf behind ``loss`` with the sequence number after which backward reaches it.

    A leaf receives its gradient once, after the earliest of the forward operations that used it has run backward: the
    smallest sequence number counts.
    """
    root = loss.grad_fn
    if root is None:
        return
    steps: dict[Any, int] = {}
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if type(child).__name__ == "AccumulateGrad":
                number = node._sequence_nr()
                steps[child] = min(number, steps.get(child, number))
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    for leaf, step in steps.items():
        yield leaf.variable, step
