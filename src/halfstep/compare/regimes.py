"""The regimes of the study: in which format forward and backward run, how the loss is scaled, in which order.

Purpose: one row of the table each. Method: a regime is data; a new one is a new entry in ``REGIMES``. Most keep fp32
weights (torch.autocast casts copies of them). The others have 16-bit ones: ``bf16-true`` alone, ``fp16-master`` and
``bf16-master`` with fp32 masters around torch's optimizer, and those called ``<format>-<master>[-<moments>]`` on
halfstep's own optimizers, which keep both in fewer bytes.

All but two kinds run on halfstep's Stepper, the unscaled ones with ``NoScale``, so that rows differ in precision and
scale and in nothing else. The ``wrong-`` ones are loops written by hand with one common mistake each (mistakes.py), and
a ``-released`` one steps inside the backward pass (released.py).

Growth intervals: 2000 clean steps is every library's default and suits runs of 10**5 steps. The autoencoder's run has
2200, so the ordinary dynamic regime here doubles every 200; the start from 8 is shown with both.

Source: P. Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 to 3.3.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfstep.compare.mistakes import GROWTH_INTERVAL, INIT_SCALE, Mistake
from halfstep.formats import BF16, FP16, FP32, FloatFormat
from halfstep.policy import Master, Moments
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale, Scale, StaticScale


class Weights(enum.Enum):
    """In which format a regime keeps the weights, and who keeps the rest; the second half of its policy's name."""

    FULL = "mixed"  # fp32, with autocast
    MASTER = "master"  # 16-bit, and masters in the optimizer
    HALF = "true"  # 16-bit, and nothing else


@dataclass(frozen=True)
class Regime:
    """One way to train.

    Args:
        name: what the command line calls it.
        format: format of matrix products; fp32 means no autocast.
        build_scale: makes the loss scale of one run. A mistaken loop has torch's own, which starts from the same.
        in_quick: whether the lecture demonstration shows it.
        in_full: whether a task shows it without asking for it by name.
        weights: in which format they are kept.
        mistake: what its loop does wrong; None: it has none.
        master: how the optimizer keeps what 16-bit weights lack; it counts beside ``Weights.MASTER`` alone.
        moments: how the optimizer keeps its moments; likewise.
        is_released: whether each gradient is used and freed inside the backward pass.
    """

    name: str
    format: FloatFormat
    build_scale: Callable[[], Scale]
    in_quick: bool = True
    in_full: bool = True
    weights: Weights = Weights.FULL
    mistake: Mistake | None = None
    master: Master = Master.FP32
    moments: Moments = Moments.FP32
    is_released: bool = False

    @property
    def policy(self) -> str:
        """The policy that the Stepper runs under, as text."""
        if self.format == FP32:  # not `is`: a regime that was pickled has a copy
            return "fp32"
        master = f",master={self.master.value}" if self.master is not Master.FP32 else ""
        moments = f",moments={self.moments.value}" if self.moments is not Moments.FP32 else ""
        return f"{self.format.name}-{self.weights.value}{master}{moments}"

    @property
    def is_packed(self) -> bool:
        """Whether it steps with halfstep's own optimizers, for masters or moments in less than fp32."""
        return (self.master, self.moments) != (Master.FP32, Moments.FP32)

    @property
    def has_half_weights(self) -> bool:
        """Whether the model's weights are in ``format`` as well."""
        return self.weights is not Weights.FULL

    def scale_settings(self) -> dict[str, object]:
        """The scale's kind and numbers as JSON can hold them; torch's GradScaler's in a mistaken loop of fp16."""
        if self.mistake is None or self.format != FP16:
            return self.build_scale().state_dict()
        return {"kind": "torch", "scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast runs in, or None where there is nothing to cast."""
        return None if self.format == FP32 or self.has_half_weights else self.format.dtype


def _fp16(name: str, build_scale: Callable[[], Scale], *, in_quick: bool = True) -> Regime:
    return Regime(name, FP16, build_scale, in_quick)


def _half_weights(name: str, fmt: FloatFormat, weights: Weights, build_scale: Callable[[], Scale] = NoScale) -> Regime:
    return Regime(name, fmt, build_scale, in_quick=False, in_full=False, weights=weights)


def _packed(fmt: FloatFormat, master: Master, moments: Moments = Moments.FP32, *, is_released: bool = False) -> Regime:
    parts = [fmt.name, master.value]
    parts += [moments.value] * (moments is not Moments.FP32) + ["released"] * is_released
    build_scale = NoScale if fmt == BF16 else partial(DynamicScale, growth_interval=GROWTH_INTERVAL)
    plain = _half_weights("-".join(parts), fmt, Weights.MASTER, build_scale)
    return replace(plain, master=master, moments=moments, is_released=is_released)


def _wrong(mistake: Mistake) -> Regime:
    if mistake is Mistake.HALF_SUMS:
        return replace(_half_weights(f"wrong-{mistake.value}", BF16, Weights.MASTER), mistake=mistake)
    build_scale = partial(DynamicScale, INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    return Regime(f"wrong-{mistake.value}", FP16, build_scale, in_quick=False, in_full=False, mistake=mistake)


REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("fp32", FP32, NoScale),
        _fp16("fp16-unscaled", NoScale),
        _fp16("fp16-static-8", partial(StaticScale, 8.0), in_quick=False),
        _fp16("fp16-static-1024", partial(StaticScale, 1024.0), in_quick=False),
        _fp16("fp16-dynamic", partial(DynamicScale, growth_interval=GROWTH_INTERVAL)),
        _fp16("fp16-dynamic-from-8", partial(DynamicScale, 8.0, growth_interval=2000), in_quick=False),
        _fp16("fp16-dynamic-from-8-fast", partial(DynamicScale, 8.0, growth_interval=200), in_quick=False),
        _fp16("fp16-adaptive", AdaptiveScale, in_quick=False),
        Regime("bf16", BF16, NoScale),
        _half_weights("fp16-master", FP16, Weights.MASTER, partial(DynamicScale, growth_interval=GROWTH_INTERVAL)),
        _half_weights("bf16-master", BF16, Weights.MASTER),
        _half_weights("bf16-true", BF16, Weights.HALF),
        _packed(FP16, Master.SPLIT),
        _packed(BF16, Master.SPLIT),
        _packed(BF16, Master.SPLIT8),
        _packed(BF16, Master.STOCHASTIC),
        _packed(BF16, Master.SPLIT, Moments.BF16),
        _packed(BF16, Master.SPLIT8, Moments.INT8),
        _packed(BF16, Master.SPLIT8, Moments.INT8, is_released=True),
        *map(_wrong, Mistake),
    )
}
