"""Numbers that a scale can be set to: each check returns the number or raises an error in four parts."""

from __future__ import annotations

import math
import struct

from halfstep.errors import ArgumentError, FactorError
from halfstep.formats import FP32

SMALLEST_SCALE = FP32.smallest_normal  # below it, 1/scale is inf in fp32


def checked_scale(value: object, name: str) -> float:
    """``value`` as the nearest fp32 number, if it is finite, positive and has a finite reciprocal in fp32.

    Rounded to fp32 because the scale is an fp32 tensor: a bound between two fp32 numbers could be passed by rounding.
    """
    number = _number(value)
    if not (math.isfinite(number) and SMALLEST_SCALE <= number <= FP32.largest):
        raise ArgumentError(
            asked=f"{name}={value!r}",
            true=f"a loss scale is an fp32 number from {SMALLEST_SCALE:.3g} to {FP32.largest:.3g}",
            why="inf, NaN, zero and negative scales destroy gradients, and below that range 1/scale is inf",
            fix="pass a positive number such as 2.0**14",
        )
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _number(value: object) -> float:
    """``value`` as a float; NaN for what is no number or too large for one, so that the caller's range check fails."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def checked_growth_factor(value: object) -> float:
    """``value`` if it is finite and above 1; the first words are torch's."""
    number = _number(value)
    if not (math.isfinite(number) and number > 1.0):
        raise FactorError(
            asked=f"The growth factor must be > 1.0. Got growth_factor={value!r}",
            true="the scale is multiplied by it after a clean growth interval",
            why="at 1 or below, or not finite, the scale would never grow or would leave every format",
            fix="pass 2.0",
        )
    return number


def checked_backoff_factor(value: object) -> float:
    """``value`` if it lies strictly between 0 and 1; the first words are torch's."""
    number = _number(value)
    if not 0.0 < number < 1.0:
        raise FactorError(
            asked=f"The backoff factor must be < 1.0. Got backoff_factor={value!r}",
            true="the scale is multiplied by it after an overflow",
            why="at 1 or above the overflow would repeat for ever; at 0 or below no gradient would be left",
            fix="pass 0.5",
        )
    return number


def checked_tolerance(value: object) -> float:
    """``value`` if it is a share that can be reached."""
    number = _number(value)
    if not 0.0 <= number < 1.0:
        raise ArgumentError(
            asked=f"tolerance={value!r}",
            true="tolerance is the share of overflowing steps that is accepted, from 0 to below 1",
            why="at 1 or more no overflow would ever lower the scale",
            fix="pass a share such as 0.05, or 0.0 to back off at every overflow",
        )
    return number


def checked_count(value: object, name: str) -> int:
    """``value`` as an int, if it is a whole number that fits an int32 counter and is at least 1."""
    number = math.nan if isinstance(value, bool) else _number(value)
    if not (number.is_integer() and 1 <= number < 2**31):
        raise ArgumentError(
            asked=f"{name}={value!r}",
            true=f"{name} counts {'micro-batches' if name == 'accumulate' else 'steps'}",
            why="a count is a whole number, at least 1, and fits 32 bits",
            fix=f"pass a whole number such as {4 if name == 'accumulate' else 2000}",
        )
    return int(number)


def outside(name: str, value: float, low: float, high: float) -> ArgumentError:
    """The error for a scale beyond its bounds."""
    return ArgumentError(
        asked=f"{name}={value!r}",
        true=f"the bounds are min_scale={low!r} and max_scale={high!r}",
        why="a scale outside its bounds could never be reached or left again",
        fix=f"choose {name} within the bounds, or widen them",
    )
