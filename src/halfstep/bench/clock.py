"""What every measurement here needs of the machine: waiting for the device, threads, how much rounds differ.

Not here: what is measured, in which order, and for how long.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence

import torch

NOTICEABLE = 0.1  # a difference that a sentence speaks of
UNDECIDED = "not decided: differences are within the rounds' spread"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for what the CPU computes, and the old number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was told, so that a clock read means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def spread_of(seconds: Sequence[float]) -> float | None:
    """Interquartile range of the rounds as a share of their median; None if there are none.

    Example:
        >>> spread_of((1.0, 1.0, 1.0, 9.0, 0.5))
        0.0
    """
    if not seconds:
        return None
    if len(seconds) == 1:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / statistics.median(seconds)


def noise_note(spreads: Iterable[float | None]) -> str:
    """A sentence if the rounds of the same thing differ much, for then something else ran too; else nothing.

    Args:
        spreads: from `spread_of`, one for everything that was timed.

    Returns:
        The sentence, or an empty string.
    """
    spread = statistics.median([one for one in spreads if one is not None] or [0.0])
    if spread <= NOTICEABLE:
        return ""
    return f"The rounds spread by {spread:.0%}: the machine was busy, and its own speed is higher."
