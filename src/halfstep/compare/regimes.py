"""The regimes of the study: in which format forward and backward run, and how the loss is scaled.

Purpose: one row of the table each. Method: a regime is data; a new one is a new entry in ``REGIMES``. All keep fp32
weights (torch.autocast casts copies of them) and all step through halfstep's scaler, the unscaled ones with
``NoScale``, so that rows differ in precision and scale and in nothing else.

Growth intervals: 2000 clean steps is every library's default and suits runs of 10**5 steps. The autoencoder's run has
2200, so the ordinary dynamic regime here doubles every 200; the start from 8 is shown with both.

Source: P. Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from halfstep.formats import BF16, FP16, FP32, FloatFormat
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale, Scale, StaticScale


@dataclass(frozen=True)
class Regime:
    """One way to train.

    Args:
        name: what the command line calls it.
        format: format of autocast's matrix products; fp32 means no autocast.
        build_scale: makes the loss scale of one run.
        in_quick: whether the lecture demonstration shows it.
    """

    name: str
    format: FloatFormat
    build_scale: Callable[[], Scale]
    in_quick: bool = True

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast runs in, or None where the regime is plain fp32."""
        return None if self.format == FP32 else self.format.dtype  # not `is`: a regime that was pickled has a copy


def _fp16(name: str, build_scale: Callable[[], Scale], *, in_quick: bool = True) -> Regime:
    return Regime(name, FP16, build_scale, in_quick)


REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("fp32", FP32, NoScale),
        _fp16("fp16-unscaled", NoScale),
        _fp16("fp16-static-8", partial(StaticScale, 8.0), in_quick=False),
        _fp16("fp16-static-1024", partial(StaticScale, 1024.0), in_quick=False),
        _fp16("fp16-dynamic", partial(DynamicScale, growth_interval=200)),
        _fp16("fp16-dynamic-from-8", partial(DynamicScale, 8.0, growth_interval=2000), in_quick=False),
        _fp16("fp16-dynamic-from-8-fast", partial(DynamicScale, 8.0, growth_interval=200), in_quick=False),
        _fp16("fp16-adaptive", AdaptiveScale, in_quick=False),
        Regime("bf16", BF16, NoScale),
    )
}
