"""The verdict on a run, from thresholds that the report prints.

Purpose: one word per row that a reader can check by hand. Method: four questions in this order, against fp32 with the
same seed and against the best predictor that ignores its input. Not here: any knowledge of a task's or a regime's
name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """What became of a run, best first."""

    MATCHES = "matches fp32"
    WORSE = "worse"
    STALLS = "stalls"
    DIVERGES = "diverges"


@dataclass(frozen=True)
class Thresholds:
    """Where one verdict ends and the next begins. Errors are the task's metric; lower is better.

    Args:
        same_relative: up to this share above fp32's error still matches it.
        same_absolute: and so does up to this much above it.
        stall_share: at or above this share of the constant predictor's error nothing was learned.
        diverge_factor: above this multiple of the constant predictor's error the run got lost.
    """

    same_relative: float
    same_absolute: float
    stall_share: float = 0.95  # a run that learned anything at all passes: the worst that does scores 0.78
    diverge_factor: float = 4.0

    def same_limit(self, reference: float) -> float:
        """The largest error that still matches fp32's."""
        return reference * (1 + self.same_relative) + self.same_absolute


def judge(
    metric: float, *, reference: float, constant: float, moved_share: float, is_finite: bool, limits: Thresholds
) -> Verdict:
    """The verdict on one run.

    Args:
        metric: error of the run.
        reference: error of the fp32 run with the same seed.
        constant: error of the best predictor that ignores its input.
        moved_share: share of the weight elements that changed at all.
        is_finite: whether loss and weights are finite at the end.
        limits: the thresholds.

    Returns:
        ``DIVERGES`` if something is inf or NaN or the error is beyond ``diverge_factor`` times the constant
        predictor's; else ``STALLS`` if no weight moved or the error is about the constant predictor's; else ``MATCHES``
        if the error is within the tolerances above fp32's; else ``WORSE``.

    Example:
        >>> limits = Thresholds(same_relative=0.1, same_absolute=0.0)
        >>> judge(0.0739, reference=0.0437, constant=0.0738, moved_share=0.3, is_finite=True, limits=limits).value
        'stalls'
    """
    if not is_finite or not math.isfinite(metric) or metric > limits.diverge_factor * constant:
        return Verdict.DIVERGES
    if moved_share == 0.0 or metric >= limits.stall_share * constant:
        return Verdict.STALLS
    return Verdict.MATCHES if metric <= limits.same_limit(reference) else Verdict.WORSE


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of several seeds' verdicts: one lost run in three is a regime that loses runs.

    Example:
        >>> worst([Verdict.MATCHES, Verdict.STALLS, Verdict.WORSE]).value
        'stalls'
    """
    return max(verdicts, key=list(Verdict).index)
