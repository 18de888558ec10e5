"""Which executor runs a pass over parameters, and why.

An executor changes the speed and no bit of a number, so the choice can be made for every pass anew. (The bits inside a
NaN may differ.)
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
    """A module that has ``widen``, ``add`` and ``round_into``, and why it is this one."""

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
    if (why_not := _missing_numba()) is not None:
        return _torch(why_not)
    return Executor("numba", "numba: one compiled pass over many tensors of the CPU")


def _torch(why: str) -> Executor:
    return Executor("torch", f"torch: {why}")


TORCH = _torch("it runs everywhere")


@functools.cache
def _missing_numba() -> str | None:
    """Why compiled loops cannot run here; None if they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'halfstep[cpu]')"
    try:
        importlib.import_module("halfstep.kernels.numba_.casts")
        if importlib.import_module("numba").config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set"
    except Exception as error:  # numba refuses some versions of NumPy and Python, in words of its own
        return f"numba does not run here: {type(error).__name__}: {error}"
    return None
