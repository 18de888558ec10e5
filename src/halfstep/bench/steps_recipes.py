"""One way to take an optimizer step: halfstep's, by rule, storage and executor, or torch's usual recipe.

Method: a recipe builds its own weights, gradients and state; `Ready.prepare` sets the gradients, outside the timing,
because torch's recipe overwrites them; `Ready.step` is what is timed. Both sides do the same work: look whether all
gradients are finite, clip their norm, step.

    halfstep        optimizer.step(), which inspects, clips and steps
    torch's recipe  scaler.unscale_, clip_grad_norm_, scaler.step (fused), scaler.update, on fp32 weights

Not here: timing; forward and backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.bench.steps_bytes import live_bytes
from halfstep.bench.steps_storages import Storage
from halfstep.bench.steps_tensors import Shape
from halfstep.errors import PrecisionWarning

SEED, CLIP_NORM, LEARNING_RATE = 0, 1.0, 1e-4
_WEIGHT_SIZE, _GRADIENT_SIZE = 2e-2, 1e-3  # about what a trained network has; the norm is beyond CLIP_NORM from 1 M on


@dataclass(frozen=True)
class BenchRule:
    """A rule and what it is compared with.

    Args:
        name: as it is asked for.
        halfstep_name: of the class in ``halfstep.optim``.
        torch_name: of the class in ``torch.optim`` whose recipe is the measure.
        options: of both constructors, beside LEARNING_RATE.
        note: to be said beside the numbers.
    """

    name: str
    halfstep_name: str
    torch_name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    note: str = ""


RULES = {
    rule.name: rule
    for rule in (
        BenchRule("adamw", "AdamW", "AdamW"),
        BenchRule("adam", "Adam", "Adam"),
        BenchRule("sgd", "SGD", "SGD", {"momentum": 0.9, "lr": 0.1}, "momentum 0.9"),
        BenchRule("lion", "Lion", "AdamW", note="torch has none: against AdamW's recipe"),
    )
}


@dataclass(eq=False)
class Ready:
    """A recipe with its tensors.

    Args:
        weights: the parameters; each has its gradient in ``.grad``.
        optimizer: holds the state.
        prepare: sets the gradients.
        step: what is timed.
    """

    weights: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    prepare: Callable[[], object]
    step: Callable[[], object]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return live_bytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Weights, gradients and what the optimizer keeps."""
        for weight in self.weights:
            yield weight
            if weight.grad is not None:
                yield weight.grad
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class Recipe(Protocol):
    """What is timed: whatever has a name and can be built."""

    @property
    def rule(self) -> BenchRule:
        """Its arithmetic."""

    @property
    def storage(self) -> str:
        """How weights and moments are kept."""

    @property
    def executor(self) -> str:
        """What runs the step."""

    def build(self, shapes: Sequence[Shape], device: torch.device) -> Ready:
        """Make weights, gradients and state."""


@dataclass(frozen=True)
class TorchRecipe:
    """torch's usual recipe: GradScaler, clip_grad_norm_ and the fused optimizer, on fp32 weights.

    Args:
        rule: whose ``torch_name`` is taken.
    """

    rule: BenchRule
    storage: str = "torch's recipe"
    executor: str = "fused"

    def build(self, shapes: Sequence[Shape], device: torch.device) -> Ready:
        """Make weights, gradients and state.

        Args:
            shapes: of the weights.
            device: where.
        """
        weights = new_weights(shapes, device, torch.float32)
        options = {"lr": LEARNING_RATE, **RULES[self.rule.torch_name.lower()].options}
        optimizer = getattr(torch.optim, self.rule.torch_name)(weights, fused=True, **options)
        scaler = torch.amp.GradScaler(device.type)
        scaler.scale(torch.ones((), device=device))  # makes the scale

        def step() -> None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()

        return Ready(weights, optimizer, set_gradients(weights, scaler.get_scale()), step)


@dataclass(frozen=True)
class HalfstepRecipe:
    """An optimizer of halfstep's, stepped bare: it inspects, clips and steps.

    Args:
        rule: whose ``halfstep_name`` is taken.
        kept: how weights and moments are kept.
        executor: ``"torch"``, ``"numba"`` or ``"triton"``.
        half_dtype: of the weights, unless they are fp32.
    """

    rule: BenchRule
    kept: Storage
    executor: str
    half_dtype: torch.dtype = torch.bfloat16

    @property
    def storage(self) -> str:
        """As it is asked for."""
        return str(self.kept)

    def build(self, shapes: Sequence[Shape], device: torch.device) -> Ready:
        """Make weights, gradients and state.

        Args:
            shapes: of the weights.
            device: where.
        """
        from halfstep import optim

        weights = new_weights(shapes, device, self.kept.weight_dtype(self.half_dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)  # "none" is no advice: nothing is trained here
            optimizer = getattr(optim, self.rule.halfstep_name)(
                weights,
                **{"lr": LEARNING_RATE, **self.rule.options},
                **self.kept.arguments,
                executor=self.executor,
                clip_norm=CLIP_NORM,
            )
        return Ready(weights, optimizer, set_gradients(weights), optimizer.step)


def new_weights(shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Random parameters, each with room for its gradient.

    Args:
        shapes: one for each.
        device: where.
        dtype: of weights and gradients.
    """
    numbers = _random(shapes, device, dtype, _WEIGHT_SIZE)
    weights = [torch.nn.Parameter(part.clone()) for part in _parts(numbers, shapes)]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    return weights


def set_gradients(weights: Sequence[torch.nn.Parameter], factor: float = 1.0) -> Callable[[], None]:
    """What writes random numbers, times a factor, into the gradients."""
    shapes = [(len(weight), weight.shape[1]) for weight in weights]
    numbers = _random(shapes, weights[0].device, weights[0].dtype, _GRADIENT_SIZE * factor)
    parts = _parts(numbers, shapes)
    gradients = [weight.grad for weight in weights if weight.grad is not None]

    def prepare() -> None:
        torch._foreach_copy_(gradients, parts)

    return prepare


def _random(shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype, size: float) -> Tensor:
    """Numbers for the largest tensor, which all of them share: what a step costs does not depend on them."""
    generator = torch.Generator(device).manual_seed(SEED)
    most = max(rows * columns for rows, columns in shapes)
    return (torch.randn(most, device=device, generator=generator) * size).to(dtype)


def _parts(numbers: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    return [numbers[: rows * columns].view(rows, columns) for rows, columns in shapes]
