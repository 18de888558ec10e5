"""The stall meter: of every so many windows it counts the updates that round to nothing.

An update counts if the rule changed the fp32 value of a weight, and as stalled if what is kept of it (the 16-bit
weight, and its rest) is what it was before. Where weights are rounded by chance that is no loss: the others make up for
it. The counts stay on the device until the step settles.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep._compat import moved
from halfstep.errors import PrecisionWarning, warn
from halfstep.optim.packed import PackedOptimizer

THRESHOLD = 0.25  # share of stalled updates above which a warning is due
Pair = tuple[float, float] | tuple[Tensor, Tensor]  # updated weights, and those whose update stalled


class StallMeter:
    """Says which windows are counted, and gathers the counts."""

    def __init__(self) -> None:
        self.every: int | None = None
        self._num_windows = 0
        self._counts: list[Tensor] | None = None

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor] | None:
        """A step begins: where counts of 16-bit weights are put, if they are wanted."""
        self._num_windows += 1
        self._counts = [] if self.every is not None and self._num_windows % self.every == 0 else None
        if self.every is not None:
            for optimizer in optimizers:
                if isinstance(optimizer, PackedOptimizer):
                    optimizer.count_stalled = self._counts is not None
        return self._counts

    def counts(self, optimizers: Iterable[torch.optim.Optimizer], home: torch.device) -> Pair:
        """Updated and stalled weights of the step that was taken; 0 of 0 where nothing was counted."""
        if self._counts is None:
            return 0.0, 0.0
        found, self._counts = self._counts, None
        for optimizer in optimizers:
            if isinstance(optimizer, PackedOptimizer):
                found = [*found, *optimizer.stall_counts]
        if not found:
            return 0.0, 0.0
        updated, stalled = torch.stack([moved(pair, home) for pair in found]).sum(0)
        return updated, stalled


def storages_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[str]:
    """How the weights are kept: names of storages, ``"none"`` for another's optimizer."""
    kept = set[str]()
    for one in optimizers:
        packed = isinstance(one, PackedOptimizer)
        kept |= {group["master"] for group in one.param_groups} if packed else {"none"}
    return kept


def warn_of_stall(step: int, share: float, storages: set[str]) -> None:
    """Say that much of a step was lost, and what keeps it. By chance nothing is: others make up for it."""
    if storages <= {"stochastic"}:
        return
    remedy = "Keep one byte more: master='split'."
    if "none" in storages:
        remedy = (
            "Keep what 16 bits cannot hold: an optimizer of halfstep.optim with master='split8' (1 byte per weight), or"
            " 'stochastic' (none); or halfstep.MasterWeights."
        )
    warn(
        f"Step {step}: {share:.0%} of the updates rounded to nothing: they are below half a unit in the last place of"
        f" what is kept of their weights. {remedy} This is said once.",
        PrecisionWarning,
    )
