"""A step reads nothing of its own window on the host (DESIGN 6.10), proved on tensors that have no values to read."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.kernels import inspect as inspection
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.scale import DynamicScale, NoScale

HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that needs a device value on the host, and on copies from a device to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} reads the device"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            target = out if name == "_to_copy" else args[0]
            assert not (source.device.type != "cpu" and target.device.type == "cpu"), f"{name} copies to the host"
        return out


FUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3, fused=True),
}


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA tensors without values, on a machine without CUDA."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # These two have no rule for tensors without values; they write in place and return nothing.
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "_fused_adagrad_", lambda *args, **kwargs: None)
    with FakeTensorMode():
        yield torch.device("cuda")


def backward(scaler, weights):
    """What a scaled backward pass leaves behind; autograd itself cannot run on CUDA tensors without CUDA."""
    scaler.scale(torch.empty((), device=weights[0].device))
    for w in weights:
        w.grad = torch.empty_like(w)


def make(fake_cuda, name, **options):
    weights = [torch.nn.Parameter(torch.empty(n, 4, device=fake_cuda)) for n in (3, 5)]
    return weights, FUSED[name](weights), halfstep.GradScaler("cuda", **options)


SCALES = {
    "default": DynamicScale,
    "hysteresis and tolerance": lambda: DynamicScale(hysteresis=2, tolerance=0.1),
    "adaptive": AdaptiveScale,
    "none": NoScale,
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_step_and_update_read_nothing(fake_cuda, name, scale):
    weights, optimizer, scaler = make(fake_cuda, name, scale=scale())
    with NoHostRead():
        backward(scaler, weights)
        scaler.step(optimizer)
    # update() sends three numbers towards pinned memory and waits for nothing; that copy is the only one it makes.
    if not isinstance(scaler._rule, AdaptiveScale):  # torch.where has no rule for CUDA tensors without CUDA
        with NoHostRead():
            scaler._rule.update_(torch.zeros((), device=fake_cuda))


def test_the_adaptive_rule_reads_nothing():
    scale = AdaptiveScale()
    scale.value(torch.device("cpu"))
    with NoHostRead():
        scale.update_(torch.zeros(()), torch.ones(()))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_are_widened_without_a_read(monkeypatch, name, dtype):
    """On CPU tensors, with the inspection that accelerators run: CUDA tensors without CUDA cannot change dtype."""
    monkeypatch.setattr(inspection, "_norms", lambda device, values: inspection._norms_by_foreach(values))
    monkeypatch.setattr("halfstep.scaling.widen.is_host", lambda device: False)
    weights = [torch.nn.Parameter(torch.ones(n, 4, dtype=dtype)) for n in (3, 5)]
    optimizer, scaler = FUSED[name](weights), halfstep.GradScaler("cpu")
    with NoHostRead():
        backward(scaler, weights)
        scaler.step(optimizer)


@pytest.mark.parametrize("name", FUSED)
def test_unscale_reads_nothing_either(fake_cuda, name):
    weights, optimizer, scaler = make(fake_cuda, name)
    with NoHostRead():
        backward(scaler, weights)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)


def test_update_settles_the_window_before_and_not_its_own(fake_cuda, monkeypatch):
    weights, optimizer, scaler = make(fake_cuda, "adamw")
    sent, read = [], []

    class Numbers:
        def __init__(self, numbers):
            sent.append(self)
            self.count = len(numbers) - 2

        def read(self):
            read.append(self)
            return [8.0, 4.0, *[0.0] * self.count]

    monkeypatch.setattr("halfstep.scaling.window.HostCopy", Numbers)
    for step in range(3):
        with NoHostRead():
            backward(scaler, weights)
            scaler.step(optimizer)
            scaler.update()
        assert read == sent[:step], "each window is read one window late"
    assert scaler.skipped_steps == 0
    assert read == sent


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: t.to("cpu"), bool])
def test_the_guard_can_fail(fake_cuda, read):
    t = torch.empty((), device=fake_cuda)
    with pytest.raises((AssertionError, RuntimeError)), NoHostRead():
        read(t)


def test_an_unfused_optimizer_reads_once(fake_cuda):
    weights = [torch.nn.Parameter(torch.empty(3, device=fake_cuda))]
    scaler = halfstep.GradScaler("cuda")
    backward(scaler, weights)
    with pytest.raises((AssertionError, RuntimeError)), NoHostRead():
        scaler.step(torch.optim.SGD(weights, 0.1))
