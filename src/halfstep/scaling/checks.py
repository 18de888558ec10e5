"""Numbers that a scale can be set to: each check returns the number or raises an error in four parts."""

from __future__ import annotations

import math

from halfstep.errors import ArgumentError, FactorError
from halfstep.formats import FP32

SMALLEST_SCALE = FP32.smallest_normal  # below it, 1/scale is inf in fp32


def checked_scale(value: float, name: str) -> float:
    """``value`` as a float, if it is finite, positive and has a finite reciprocal in fp32."""
    number = float(value)  # ValueError and TypeError say enough about what is no number
    if not (math.isfinite(number) and SMALLEST_SCALE <= number <= FP32.largest):
        raise ArgumentError(
            asked=f"{name}={value!r}",
            true=f"a loss scale is an fp32 number from {SMALLEST_SCALE:.3g} to {FP32.largest:.3g}",
            why="inf, NaN, zero and negative scales destroy gradients, and below that range 1/scale is inf",
            fix="pass a positive number such as 2.0**14",
        )
    return number


def checked_growth_factor(value: float) -> float:
    """``value`` if it is finite and above 1; the first words are torch's."""
    if not (math.isfinite(value) and value > 1.0):
        raise FactorError(
            asked=f"The growth factor must be > 1.0. Got growth_factor={value!r}",
            true="the scale is multiplied by it after a clean growth interval",
            why="at 1 or below, or not finite, the scale would never grow or would leave every format",
            fix="pass 2.0",
        )
    return float(value)


def checked_backoff_factor(value: float) -> float:
    """``value`` if it lies strictly between 0 and 1; the first words are torch's."""
    if not 0.0 < value < 1.0:
        raise FactorError(
            asked=f"The backoff factor must be < 1.0. Got backoff_factor={value!r}",
            true="the scale is multiplied by it after an overflow",
            why="at 1 or above the overflow would repeat for ever; at 0 or below no gradient would be left",
            fix="pass 0.5",
        )
    return float(value)


def checked_count(value: int, name: str) -> int:
    """``value`` as an int, if it is a whole number that fits an int32 counter and is at least 1."""
    is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    if not (is_whole and 1 <= value < 2**31):
        raise ArgumentError(
            asked=f"{name}={value!r}",
            true=f"{name} counts steps",
            why="a count is a whole number, at least 1, and fits 32 bits",
            fix="pass a whole number such as 2000",
        )
    return int(value)


def outside(name: str, value: float, low: float, high: float) -> ArgumentError:
    """The error for a scale beyond its bounds."""
    return ArgumentError(
        asked=f"{name}={value!r}",
        true=f"the bounds are min_scale={low!r} and max_scale={high!r}",
        why="a scale outside its bounds could never be reached or left again",
        fix=f"choose {name} within the bounds, or widen them",
    )
