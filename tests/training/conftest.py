"""A device's delay, played on CPU tensors: numbers travel, and the host hears of a step when somebody asks."""

import functools
import math
import sys

import pytest
import torch

import halfstep.training.stepper  # noqa: F401  (loads every module that asks where a tensor lives)
from halfstep.kernels import inspect as inspection

_tolist = torch.Tensor.tolist  # tests forbid it to everybody else


class Delay:
    """What was sent towards the host and what was read there, in order: ``("sent", 0), ("read", 0), ...``."""

    def __init__(self):
        self.events = []

    @property
    def sent(self):
        return [number for event, number in self.events if event == "sent"]

    @property
    def read(self):
        return [number for event, number in self.events if event == "read"]


def patch_everywhere(monkeypatch, name, value):
    """Replace a name that modules of halfstep.training, and the kernels below them, have imported."""
    places = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("halfstep.training.") or path in ("halfstep.kernels.inspect", "halfstep.scaling.widen")
        if hasattr(module, name)
    ]
    assert places, f"nobody uses {name} any more"
    for module in places:
        monkeypatch.setattr(module, name, value)


def play_device(monkeypatch):
    """Let the training code believe that CPU tensors live on an accelerator."""
    delay = Delay()

    class Travelling:
        def __init__(self, numbers):
            self.numbers = numbers.clone()
            self.number = len(delay.sent)
            delay.events.append(("sent", self.number))

        def read(self):
            delay.events.append(("read", self.number))
            return _tolist(self.numbers)

    patch_everywhere(monkeypatch, "is_host", lambda device: False)
    patch_everywhere(monkeypatch, "HostCopy", Travelling)
    # The look at the gradients that accelerators take.
    monkeypatch.setattr(inspection, "_norms", lambda device, values: inspection._norms_by_foreach(values))
    largest = lambda device, values: inspection._by_dtype(values, lambda g: torch._foreach_norm(g, math.inf))  # noqa: E731
    monkeypatch.setattr(inspection, "_largest", largest)
    return delay


@pytest.fixture
def patched(monkeypatch):
    """``patched(name, value)`` replaces an imported name in all of the training code."""
    return functools.partial(patch_everywhere, monkeypatch)


@pytest.fixture
def delayed(monkeypatch):
    """The device's path on CPU tensors."""
    return play_device(monkeypatch)


@pytest.fixture(params=["host", "delayed"])
def delay(request, monkeypatch):
    """Both paths, one after the other: None where the host knows everything at once."""
    return play_device(monkeypatch) if request.param == "delayed" else None
