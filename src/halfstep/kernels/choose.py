"""Which executor runs a pass over parameters, and why.

An executor changes the speed and no bit of a number, so the choice can be made for every pass anew. (The bits inside a
NaN may differ.)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from halfstep._compat import is_host
from halfstep.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from halfstep.kernels.slots import Counts, Turn

FEWEST = 2**20  # elements: below, importing numba and loading its loops (about a second) outlasts what it would save


@dataclass(frozen=True)
class Executor:
    """What runs over the memory of parameters, and why it is this one.

    Args:
        name: ``"torch"``, ``"numba"`` or ``"triton"``.
        reason: in words.
        lacks_package: whether it only stands in for a quicker one that is not installed.
    """

    name: str
    reason: str
    lacks_package: bool = False

    @property
    def module(self) -> ModuleType:
        """Has ``widen``, ``add`` and ``round_into``; imported when it is first used."""
        return importlib.import_module(f"halfstep.kernels.{_CASTS[self.name]}")

    @property
    def step(self) -> Callable[[Turn], Counts]:
        """Takes one turn of an optimizer; imported when it is first used."""
        step: Callable[[Turn], Counts] = importlib.import_module(f"halfstep.kernels.{_STEPS[self.name]}").step
        return step


_CASTS = {"torch": "torch_", "numba": "numba_.casts", "triton": "torch_"}
_STEPS = {"torch": "torch_step", "numba": "numba_.executor", "triton": "triton_.executor"}
NAMES = ("auto", *_STEPS)


def choose(device: torch.device, num_elements: int, wanted: str = "auto") -> Executor:
    """The fastest executor that runs here, or the one that is asked for.

    Args:
        device: where the parameters are.
        num_elements: how many there are in all.
        wanted: ``"auto"``, or an executor's name.

    Raises:
        ArgumentError: there is no such executor.
        UnsupportedError: it cannot run here.

    Example:
        >>> choose(torch.device("cpu"), 1000).reason
        'torch: 1000 elements are too few to load compiled loops for (fewer than 1048576)'
    """
    if wanted not in NAMES:
        raise ArgumentError(
            asked=f"executor={wanted!r}",
            true=f"the executors are {', '.join(NAMES)}",
            why="an executor is chosen by its name",
            fix='leave executor out: "auto" takes the fastest that runs here',
        )
    if wanted == "auto":
        return _fastest(device, num_elements)
    why_not = None
    if wanted != "torch":
        why_not = _missing(wanted, device.type) if wanted == _best(device) else _elsewhere(wanted, device)
    if why_not is not None:
        raise UnsupportedError(
            asked=f"executor={wanted!r}",
            true=why_not,
            why="what was asked for by name is not replaced in silence",
            fix='leave executor out, or pass executor="torch", which runs everywhere',
        )
    return Executor(wanted, f"{wanted}: it was asked for")


def _best(device: torch.device) -> str:
    return "numba" if is_host(device) else "triton"


def _elsewhere(wanted: str, device: torch.device) -> str:
    return f"{wanted} runs on {'the CPU' if wanted == 'numba' else 'CUDA'}, and these parameters are on {device.type}"


def _fastest(device: torch.device, num_elements: int) -> Executor:
    best = _best(device)
    if is_host(device) and num_elements < FEWEST:
        too_few = f"{num_elements} elements are too few to load compiled loops for (fewer than {FEWEST})"
        return Executor("torch", f"torch: {too_few}")
    why_not = _missing(best, device.type)
    if why_not is None:
        return Executor(best, _WHY[best])
    lacks_package = device.type in ("cpu", "cuda") and importlib.util.find_spec(best) is None
    return Executor("torch", f"torch: {why_not}", lacks_package)


_WHY = {
    "numba": "numba: one compiled pass over many tensors of the CPU",
    "triton": "triton: one launch over many tensors of the device",
}
TORCH = Executor("torch", "torch: it runs everywhere")


def _missing(name: str, device_type: str) -> str | None:
    """Why an executor cannot run on such a device; None if it can."""
    return _missing_numba() if name == "numba" else _missing_triton(device_type)


@functools.cache
def _missing_numba() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'halfstep[cpu]')"
    try:
        importlib.import_module("halfstep.kernels.numba_.casts")
        if importlib.import_module("numba").config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set"
    except Exception as error:  # numba refuses some versions of NumPy and Python, in words of its own
        return f"numba does not run here: {type(error).__name__}: {error}"
    return None


@functools.cache
def _missing_triton(device_type: str) -> str | None:
    if device_type != "cuda" or torch.version.hip is not None:
        return f"compiled loops run on the CPU and on CUDA, and these parameters are on {device_type}"
    if not torch.cuda.is_available():
        return "triton needs a CUDA device, and torch sees none here"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with torch for CUDA on Linux)"
    if torch.cuda.get_device_capability() < (8, 0):
        return "triton's bf16 needs a device of capability 8.0 or more"
    try:
        importlib.import_module("halfstep.kernels.triton_.executor")
    except Exception as error:
        return f"triton does not run here: {type(error).__name__}: {error}"
    return None
