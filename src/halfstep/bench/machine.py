"""The machine that was measured: plain facts for files, and one line for headings.

Not here: what a device multiplies natively (``halfstep.hardware``).
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from halfstep import __version__
from halfstep.hardware import Hardware


def facts_of(hardware: Hardware, num_threads: int) -> dict[str, Any]:
    """What a reader needs to know to believe a number.

    Args:
        hardware: of the device that was measured.
        num_threads: of the CPU.
    """
    return {
        "hardware": hardware.as_dict(),
        "cores": os.cpu_count(),
        "threads": num_threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "halfstep": __version__,
    }


def in_words(hardware: Hardware, facts: dict[str, Any]) -> str:
    """Device, threads if they are its own, and torch's version.

    Example:
        >>> in_words(Hardware("cpu", "AMD EPYC"), {"threads": 1, "cores": 2, "torch": "2.13.0"})
        'AMD EPYC, 1 of 2 cores, torch 2.13.0'
    """
    threads = f", {facts['threads']} of {facts['cores']} cores" if hardware.device_type == "cpu" else ""
    return f"{hardware.name or hardware.label}{threads}, torch {facts['torch']}"
