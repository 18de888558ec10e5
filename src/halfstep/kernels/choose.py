"""Which executor runs a pass over parameters, and why.

An executor changes the speed and not one bit of the result, so the choice can be made for every pass anew.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch

from halfstep._compat import is_host

FEWEST = 2**20  # elements: below, importing numba and loading its loops (about a second) outlasts what it would save


@dataclass(frozen=True)
class Executor:
    """A module that has ``widen`` and ``round_into``, and why it is this one."""

    name: str
    reason: str

    @property
    def module(self) -> ModuleType:
        """Imported when it is first used."""
        return importlib.import_module(f"halfstep.kernels.{_MODULES[self.name]}")


_MODULES = {"torch": "torch_", "numba": "numba_.casts"}


def choose(device: torch.device, num_elements: int) -> Executor:
    """The fastest executor that runs here.

    Args:
        device: where the parameters are.
        num_elements: how many there are in all.

    Example:
        >>> choose(torch.device("cpu"), 1000).reason
        'torch: 1000 elements are too few to load compiled loops for (fewer than 1048576)'
    """
    if not is_host(device):
        return _torch(f"compiled loops run on the CPU, and these parameters are on {device.type}")
    if num_elements < FEWEST:
        return _torch(f"{num_elements} elements are too few to load compiled loops for (fewer than {FEWEST})")
    if not _has_numba():
        return _torch("numba is not installed (pip install 'halfstep[cpu]')")
    return Executor("numba", "numba: one compiled pass over many tensors of the CPU")


def _torch(why: str) -> Executor:
    return Executor("torch", f"torch: {why}")


TORCH = _torch("it runs everywhere")


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None
