"""A scale that is aimed instead of searched for: from statistics of the largest gradient. Experimental.

Source: the LogMax scaler of OpenSeq2Seq (NVIDIA, 2018, open_seq2seq/optimizers/automatic_loss_scaler.py), mended: a
step that overflowed never enters the statistics, the target respects the format, and a margin is kept and learned for
what the weights' gradients do not show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.formats import FP16
from halfstep.scaling.checks import checked_count
from halfstep.scaling.scale import BoundedScale


@dataclass(eq=False)
class AdaptiveScale(BoundedScale):
    """Aim the largest gradient just below fp16's largest value, by what the last gradients were. Experimental.

    The running mean and deviation of ``log2`` of the largest unscaled gradient give a level that one step in a thousand
    passes; the scale is the largest power of two that keeps that level ``margin`` octaves below 65504. Every overflow
    widens the margin by one octave, every clean step narrows it by ``1 / narrow_interval``. A step that overflowed says
    nothing about the gradients' size, so it never enters the statistics. Until the first gradient that is not entirely
    zero, the scale doubles at each step.

    Args:
        init_scale: first scale.
        min_scale: the scale never goes below this.
        max_scale: the scale never goes above this.
        margin_log2: octaves kept free at least, for activation gradients larger than any weight gradient.
        narrow_interval: clean steps that undo one octave of margin won by an overflow.

    Example:
        >>> scale = AdaptiveScale()
        >>> _ = scale.value(torch.device("cpu"))
        >>> scale.update_(found_inf=torch.tensor(1.0), largest=torch.tensor(float("inf"))); scale.get() == 2**13
        True
    """

    kind: ClassVar[str] = "adaptive"
    needs_largest: ClassVar[bool] = True
    margin_log2: float = field(default=2.0, kw_only=True)
    narrow_interval: int = field(default=1000, kw_only=True)

    _MEAN_DECAY: ClassVar[float] = 0.99
    _VARIANCE_DECAY: ClassVar[float] = 0.999
    _DEVIATIONS: ClassVar[float] = 3.09  # a normal variable exceeds mean + 3.09 deviations once in a thousand

    def _check(self) -> None:
        super()._check()
        self.narrow_interval = checked_count(self.narrow_interval, "narrow_interval")
        for name, value in (("init_scale", self.init_scale), ("min_scale", self.min_scale)):
            if math.frexp(value)[0] != 0.5:
                raise ArgumentError(
                    asked=f"AdaptiveScale({name}={value!r})",
                    true="an adaptive scale moves between powers of two",
                    why="a factor that is not a power of two rounds every gradient",
                    fix=f"pass {2.0 ** round(math.log2(value))!r}",
                )
        if not (math.isfinite(self.margin_log2) and self.margin_log2 >= 0):
            raise ArgumentError(
                asked=f"margin_log2={self.margin_log2!r}",
                true="the margin is the number of octaves kept free below the largest fp16 value, 0 or more",
                why="a negative margin aims above the largest value: every step would overflow",
                fix="pass a number from 0 to 8",
            )

    def _fresh(self) -> dict[str, float | int]:
        return {"scale": self.init_scale, "mean": 0.0, "variance": 0.0, "extra_margin": 0.0, "num_seen": 0}

    def update_(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Learn from a clean step, widen the margin on overflow; see :meth:`Scale.update_`."""
        assert largest is not None, "needs_largest"
        state = self._state()
        clean = found_inf == 0
        informative = clean & (largest > 0) & torch.isfinite(largest)
        self._learn_(state, informative, torch.log2(largest) - torch.log2(state["scale"]))
        extra = state["extra_margin"]
        extra.copy_(torch.where(clean, (extra - 1 / self.narrow_interval).clamp(min=0), extra + 1))
        state["scale"].copy_(self._next(state, clean, informative))

    def _learn_(self, state: dict[str, Tensor], informative: Tensor, level: Tensor) -> None:
        """Exponential mean and variance of ``level``; the first steps weigh equally, so that no start value lingers."""
        mean, variance, seen = state["mean"], state["variance"], state["num_seen"]
        seen.add_(informative.to(torch.int32))
        new_weight = 1 / seen.clamp(min=1).float()
        away = torch.where(informative, level - mean, 0.0)
        mean.add_(away * new_weight.clamp(min=1 - self._MEAN_DECAY))
        weight = new_weight.clamp(min=1 - self._VARIANCE_DECAY)
        spread = (away * torch.where(informative, level - mean, 0.0)).clamp(min=0)  # Welford's product
        variance.add_(torch.where(informative, (spread - variance) * weight, 0.0))

    def _next(self, state: dict[str, Tensor], clean: Tensor, informative: Tensor) -> Tensor:
        scale = state["scale"]
        high_level = state["mean"] + self._DEVIATIONS * state["variance"].sqrt()
        room = math.log2(FP16.largest) - self.margin_log2 - state["extra_margin"] - high_level
        aimed = torch.exp2(room.clamp(-126, 127).floor())
        unknown = state["num_seen"] == 0
        octave = torch.exp2(torch.log2(scale).floor())  # a scale that the user set may be no power of two
        aimed = torch.where(unknown, octave * 2, torch.minimum(aimed, octave * 2))  # grow one octave a step at most
        aimed = torch.where(clean, torch.where(informative | unknown, aimed, scale), torch.minimum(aimed, octave / 2))
        return aimed.clamp(self.min_scale, self.max_scale)
