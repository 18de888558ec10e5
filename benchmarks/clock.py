"""How the benchmarks here read the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read means something."""
    if device != "cpu":
        torch.accelerator.synchronize()


def timed(device: str, function: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start
