"""MasterWeights under GradScaler and Stepper: the division in fp32, skipped steps, and the invariants under faults."""

import copy
import functools
import math
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import DynamicScale, NoScale, StaticScale
from halfstep.kernels.rounding import rounded
from halfstep.optim.masters import MasterWeights

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")
optim = torch.optim
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd-dampening": lambda p: optim.SGD(p, 0.05, momentum=0.9, dampening=0.5),
    "sgd-fused": lambda p: optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "sgd-fused-dampening": lambda p: optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, fused=True),
    "adamw": lambda p: optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "adagrad-fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "rprop": lambda p: optim.Rprop(p),
}


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Both paths on CPU tensors: the host decides about skipping, or the inner optimizer's kernel does."""
    if request.param == "device":
        for module in ("optim.masters", "kernels.rounding", "optim.step_parts"):
            monkeypatch.setattr(f"halfstep.{module}.is_host", lambda device: False)
    return request.param


def everything(model, optimizer):
    found = {f"weight.{name}": p for name, p in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        found |= {f"{names[p]}.{k}": v for k, v in state.items()}
    return {k: v.detach().clone().reshape(-1).view(torch.uint8).tolist() for k, v in found.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scaler_of", [halfstep.GradScaler, torch.amp.GradScaler], ids=["halfstep", "torch"])
def test_small_fp16_gradients_survive_the_division(name, scaler_of, where):
    """1e-3 is divided by 2**16 after it was widened: in fp16 it would be 1.5e-8, which is 0."""
    weight, reference = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, plain = MasterWeights(OPTIMIZERS[name]([weight]), "fp16"), OPTIMIZERS[name]([reference])
    scaler = scaler_of("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    for _ in range(3):
        weight.grad = torch.full((3,), 1e-3, dtype=torch.float16)
        reference.grad = weight.grad.float() / 2.0**16
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        assert torch.equal(optimizer.state[weight]["master"], reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit(name, where):
    """Also the very first one: torch's fused SGD leaves its momentum uninitialised then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = MasterWeights(OPTIMIZERS[name](model.parameters()), "fp16")
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False, True):
        before, versions = everything(model, optimizer), [p._version for p in model.parameters()]
        loss = model(torch.ones(2, 3).half()).float().sum() * (math.inf if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (everything(model, optimizer) == before) == bad
        if bad and where == "host":
            assert [p._version for p in model.parameters()] == versions
    assert all(torch.isfinite(v).all() for state in optimizer.state.values() for v in state.values())


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_grad_scale_is_a_divisor_for_every_parameter(name, where):
    half, single = nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(2))
    references = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, plain = MasterWeights(OPTIMIZERS[name]([half, single])), OPTIMIZERS[name](references)
    for p in (half, single):
        p.grad = torch.full_like(p, 3.0)
    for r in references:
        r.grad = torch.full_like(r, 1.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(0.0)
    optimizer.step()
    plain.step()
    assert torch.equal(optimizer.state[half]["master"], references[0])
    assert torch.equal(single, references[1])
    assert torch.equal(half.grad, torch.full_like(half, 3.0))  # 16-bit gradients stay as they are
    optimizer.found_inf = torch.tensor(2.0)  # torch adds the flags of several devices up
    before = optimizer.state[half]["master"].clone()
    optimizer.step()
    assert torch.equal(optimizer.state[half]["master"], before)
    assert not hasattr(optimizer.inner, "found_inf")


def test_a_loaded_state_that_switches_fused_off(where):
    weight, other = (nn.Parameter(torch.ones(2).half()) for _ in range(2))
    optimizer = MasterWeights(OPTIMIZERS["adamw-fused"]([weight]))
    optimizer.load_state_dict(MasterWeights(OPTIMIZERS["adamw"]([other])).state_dict())
    weight.grad = torch.ones_like(weight)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.025, 0.025])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd"])
def test_stepper_clips_by_the_true_norm(name, dtype, where):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    reference = nn.Parameter(model.weight.detach().clone())
    optimizer, plain = MasterWeights(OPTIMIZERS[name](model.parameters()), dtype), OPTIMIZERS[name]([reference])
    scale = StaticScale(256.0) if dtype == "fp16" else NoScale()
    stepper = halfstep.Stepper(model, optimizer, policy=f"{dtype}-true", clip_norm=0.5, scale=scale)
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(model.weight.dtype)
        with stepper.forward():
            loss = model(x).float().square().sum()
        stepper.backward(loss)
        scaled = model.weight.grad.float()
        outcome = stepper.step()
        factor = 256.0 if dtype == "fp16" else 1.0
        reference.grad = scaled / factor
        norm = reference.grad.double().norm().item()
        reference.grad /= max(1.0, (norm + 1e-6) / 0.5)
        plain.step()
        assert outcome.is_applied
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-4)
        assert torch.allclose(optimizer.state[model.weight]["master"], reference, rtol=1e-5, atol=1e-7)
    assert stepper.skipped_steps == 0


def test_stepper_refuses_to_step_an_optimizer_that_needs_a_closure():
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(optim.LBFGS(model.parameters()), "bf16")
    with pytest.raises(halfstep.errors.UnsupportedError, match="16-bit weights are widened"):
        halfstep.Stepper(model, optimizer, policy="bf16-true")


# -- the invariants of the design under faults ------------------------------------------------------------------------

VALUES = [math.inf, -math.inf, math.nan, 3e38, -1e30, 65504.0, 1e-45, 1e-7, 0.0]
FAULTS = [*VALUES, "absent"]


class Fragile(nn.Module):
    """fp16, bf16 and fp32 weights; ``faults`` says what happens to whose gradient."""

    def __init__(self):
        super().__init__()
        self.fp16 = nn.Parameter(torch.randn(4, 3).half())
        self.bf16 = nn.Parameter(torch.randn(4).bfloat16())
        self.fp32 = nn.Parameter(torch.randn(4))
        self.spectator = nn.Parameter(torch.ones(()))  # in no optimizer, so that a loss always has a graph
        self.faults = {}
        for name in ("fp16", "bf16", "fp32"):
            getattr(self, name).register_hook(functools.partial(self._break, name))

    def _break(self, name, gradient):
        fault = self.faults.get(name)
        if fault is None:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[-1] = fault
        return gradient

    def _used(self, name):
        p = getattr(self, name)
        return (p.detach() if self.faults.get(name) == "absent" else p).float()

    def forward(self, x):
        x = torch.tanh(x @ self._used("fp16").T + self._used("bf16")) * self._used("fp32")
        return (x - 1).square().mean() * self.spectator

    def trained(self):
        return [self.fp16, self.bf16, self.fp32]


def check_finite(model, optimizer):
    for p in model.trained():
        assert torch.isfinite(p).all()
        for name, value in optimizer.state[p].items():
            assert torch.isfinite(value).all(), name
        if "master" in optimizer.state[p]:
            assert torch.equal(
                rounded(optimizer.state[p]["master"], p.dtype).view(torch.int16), p.detach().view(torch.int16)
            )


@pytest.mark.parametrize("by", ["scaler", "stepper"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_invariants_1_2_and_5_under_random_faults(name, by, where):
    """2 048 windows in all. 1: a skip changes nothing. 2: nothing non-finite. 5: a state comes back bit for bit."""
    rng = random.Random(f"{name} {by} {where}")
    torch.manual_seed(rng.randrange(10**6))
    model = Fragile()
    optimizer = MasterWeights(OPTIMIZERS[name](model.trained()))
    scale = DynamicScale(growth_interval=3)
    scaler = halfstep.GradScaler("cpu", scale=scale) if by == "scaler" else None
    stepper = None
    if by == "stepper":
        stepper = halfstep.Stepper(model, optimizer, policy="fp32", clip_norm=0.5, scale=scale, on_overflow="ignore")
    skips = 0
    for window in range(64):
        model.faults = {n: rng.choice(FAULTS) for n in ("fp16", "bf16", "fp32") if rng.random() < 0.2}
        before = everything(model, optimizer)
        x = torch.randn(5, 3)
        if by == "scaler":
            optimizer.zero_grad()
            scaler.scale(model(x)).backward()
            model.spectator.grad = None
            is_bad = any(p.grad is not None and not torch.isfinite(p.grad).all() for p in model.trained())
            scaler.step(optimizer)
            scaler.update()
        else:
            with stepper.forward():
                loss = model(x)
            stepper.backward(loss)
            is_bad = any(p.grad is not None and not torch.isfinite(p.grad).all() for p in model.trained())
            model.spectator.grad = None
            assert stepper.step().is_skipped == is_bad
        skips += is_bad
        if is_bad:
            assert everything(model, optimizer) == before, window
        check_finite(model, optimizer)
        if rng.random() < 0.1:
            saved = copy.deepcopy(optimizer.state_dict())
            now = everything(model, optimizer)
            other = copy.deepcopy((model, optimizer))
            other[1].load_state_dict(saved)
            assert everything(*other) == now
    assert 0 < skips < 64
    assert optimizer.adopted_weights == 0


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that needs a device value on the host, and on copies from a device to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "equal"), f"{name} reads the device"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            assert not (source.device.type != "cpu" and target.device.type == "cpu"), f"{name} copies to the host"
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_read_on_the_host(dtype):
    """Invariant 10: the step runs on fake CUDA tensors, which have no values that could be read."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(4, n, device="cuda", dtype=dtype)) for n in (3, 5)]
        optimizer = MasterWeights(optim.AdamW(weights, fused=True))
        optimizer.grad_scale, optimizer.found_inf = (torch.empty((), device="cuda") for _ in range(2))
        with NoHostRead():
            for _ in range(2):
                for w in weights:
                    w.grad = torch.empty_like(w)
                optimizer.step()
        assert weights[0].dtype == dtype
        assert optimizer.state[weights[0]]["exp_avg"].dtype == torch.float32
        with NoHostRead(), pytest.raises(AssertionError, match="reads the device"):
            optimizer.saturated_weights  # noqa: B018
