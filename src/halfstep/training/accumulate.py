"""A window: the micro-batches between two optimizer steps, and the mean that their gradients amount to.

Each micro-batch brings the gradient of its own mean loss, ``g_i``, and a weight ``w_i`` (1, or a number of tokens). The
step is taken with ``sum(w_i * g_i) / sum(w_i)``, whatever the number of micro-batches turns out to be: a short last
window needs no special treatment. Losses are multiplied by ``w_i / unit`` on the way in, so that the scale keeps its
meaning when weights are counts of thousands, and the sum is divided by ``sum(w_i) / unit`` together with the scale. The
unit is the power of two next below the window's first weight: it changes no digit of a weight. A window keeps the scale
it began with: who else moves that scale meanwhile does not matter.

Not here: in which dtype autograd's gradients are summed (kernels/gradients.py).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.kernels.gradients import gradient_of
from halfstep.scaling.unscale import Number
from halfstep.training import refusals


@dataclass(eq=False)
class Window:
    """The micro-batches since the last step.

    Args:
        size: number of micro-batches that make it full; None: it ends when it is flushed.
    """

    size: int | None
    num_micro_batches: int = 0
    has_forward: bool = False  # a forward pass has run since the last backward
    awaits_step: bool = False  # a backward pass has run since the last step
    replay: list[Any] = field(default_factory=list)  # micro-batches that can be run again
    retries: int = 0  # how often
    scale_changes: int = 0  # how often the scale had changed when the window opened
    scale: Number = 1.0  # of the losses of this window; known once the first one is scaled
    is_unscaled: bool = False
    first_pass_found_inf: Number | None = None  # of an earlier pass over the same window (SAM)
    _unit: Number = 1.0
    _weight: Number = 0.0  # sum of w_i / unit
    _losses: Number = 0.0  # sum of loss_i * w_i / unit
    _seen: list[tuple[int, int] | None] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether some gradient of this window would be lost if the run ended here."""
        return self.num_micro_batches > 0 or self.first_pass_found_inf is not None

    @property
    def is_full(self) -> bool:
        """Whether it is time to step."""
        return self.size is not None and self.num_micro_batches >= self.size

    @property
    def divisor(self) -> Number:
        """What the summed gradients are divided by to become the weighted mean: scale times sum of weights."""
        return self.scale * self._weight

    @property
    def loss(self) -> Number:
        """Mean of the losses by their weights; NaN before the first."""
        return self._losses / self._weight if self.num_micro_batches else math.nan

    def add(self, weight: Number, loss: Tensor) -> None:
        """A micro-batch of this weight (:meth:`in_units`) has gone through backward."""
        value = loss.detach().reshape(())
        self._losses = self._losses + weight * (value.item() if is_host(value.device) else value.float())
        self.num_micro_batches += 1
        self.has_forward, self.awaits_step = False, True
        self._weight = self._weight + weight

    def in_units(self, weight: Number) -> Number:
        """``weight`` in the window's unit, which the first one sets. One that only the device knows to be bad is NaN,
        so that its gradient is, on every rank."""
        if self.num_micro_batches == 0:
            self._unit = _unit_of(weight)
        share = weight / self._unit
        if isinstance(share, Tensor):
            return torch.where((share > 0) & torch.isfinite(share), share, math.nan)
        return share

    def flags(self) -> list[Number]:
        """Reasons not to step beside the gradients: what an earlier pass over the window found."""
        return [] if self.first_pass_found_inf is None else [self.first_pass_found_inf]

    # -- whether anybody else touched the gradients ---------------------------------------------------------------

    def saw(self, parameters: Sequence[Tensor]) -> None:
        """Remember the gradients as backward left them."""
        self._seen = [_mark(gradient_of(p)) for p in parameters]

    def changed(self, parameters: Sequence[Tensor]) -> list[int]:
        """Positions of the parameters whose gradients are not as backward left them."""
        return [
            i for i, (p, seen) in enumerate(zip(parameters, self._seen, strict=True)) if _mark(gradient_of(p)) != seen
        ]


def _unit_of(weight: Number) -> Number:
    """The power of two next below a weight."""
    if isinstance(weight, Tensor):
        return weight / (torch.frexp(weight).mantissa * 2.0)  # a mantissa is at least 1/2
    return 2.0 ** (math.frexp(weight)[1] - 1)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def checked_weight(weight: Any) -> Number:
    """The weight of a micro-batch, as a number wherever that needs no waiting; None is 1."""
    if weight is None:
        return 1.0
    is_tensor = isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex()
    if isinstance(weight, bool) or not (is_tensor or isinstance(weight, numbers.Real)):
        raise refusals.bad_weight(weight)
    if isinstance(weight, Tensor) and not is_host(weight.device):
        return weight.detach().reshape(()).float()
    try:
        number = float(weight)
    except OverflowError:  # a whole number beyond fp64
        number = math.inf
    if not 0.0 < number < math.inf:
        raise refusals.bad_weight(weight)
    return number
