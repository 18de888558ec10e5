"""Checks that both kinds of measurement share: where, on how many threads, for how long.

Not here: what is measured (settings.py, steps_settings.py).
"""

from __future__ import annotations

import math
import os

import torch

from halfstep.errors import ArgumentError
from halfstep.hardware import Hardware, as_device, probe

MEMORY_SHARE = 0.5  # of the machine's: the rest is for everything else that runs on it
_MEASURABLE = ("cpu", "cuda", "mps", "xpu")


def checked_device(device: str | None) -> tuple[torch.device, Hardware]:
    """The device that is meant, and the facts about it.

    Args:
        device: ``"cpu"``, ``"cuda:1"``, ...; None is the current accelerator, or the CPU if there is none.

    Raises:
        ArgumentError: nothing can be timed there.
        UnsupportedError: it is not there.
    """
    hardware = probe(None if device is None else device)
    place = as_device(hardware.device_type if device is None else device)
    if place.type not in _MEASURABLE:
        raise ArgumentError(
            asked=f"to measure on {str(place)!r}",
            true=f"bench measures on {', '.join(_MEASURABLE)}",
            why="nothing is computed there, or nothing that a clock would show",
            fix="pass --device cpu, or leave --device out",
        )
    return place, hardware


def checked_seconds(seconds: float, default: float) -> float:
    """Time that all of it may take.

    Raises:
        ArgumentError: it is not above 0, or not finite.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ArgumentError(
            asked=f"seconds={seconds}",
            true="it is the time that all measurements may take, above 0",
            why="nothing could be measured in it",
            fix=f"pass --seconds {default:.0f}",
        )
    return float(seconds)


def checked_threads(wanted: int | None, device: torch.device) -> int:
    """Threads of the CPU; None is what torch uses now.

    Raises:
        ArgumentError: there are not so many cores, or the device has no use for them.
    """
    if wanted is None:
        return torch.get_num_threads()
    num_cores = os.cpu_count() or 1
    if device.type != "cpu":
        raise ArgumentError(
            asked=f"threads={wanted} on {device}",
            true="threads are the CPU's",
            why="the option would change nothing",
            fix="leave --threads out, or pass --device cpu",
        )
    if not 1 <= wanted <= num_cores:
        raise ArgumentError(
            asked=f"threads={wanted}",
            true=f"this machine has {num_cores} cores",
            why="no thread computes nothing, and more threads than cores wait for each other",
            fix=f"pass --threads 1 to {num_cores}",
        )
    return wanted
