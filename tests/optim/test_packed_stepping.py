"""Packed optimizers under everything that steps them: bare, GradScalers, a Stepper, two ranks, and a device's path."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.errors import HalfstepWarning, SkippedStepWarning
from halfstep.kernels import choose
from halfstep.optim import SGD, Adam, AdamW, Lion

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")
RULES = {
    "AdamW": lambda ps, **o: AdamW(ps, lr=1e-2, **o),
    "Adam": lambda ps, **o: Adam(ps, lr=1e-2, weight_decay=0.1, **o),
    "SGD": lambda ps, **o: SGD(ps, lr=1e-2, momentum=0.9, dampening=0.5, **o),
    "SGD, no momentum": lambda ps, **o: SGD(ps, lr=1e-2, **o),
    "Lion": lambda ps, **o: Lion(ps, lr=1e-2, **o),
}
MASTERS = ("fp32", "split", "split8", "stochastic", "none")
KINDS = [(FP32, None), *itertools.product((BF16, FP16), MASTERS)]
MOMENTS = ("fp32", "bf16", "int8")
STORAGES = list(itertools.product(KINDS, MOMENTS))
SOME = STORAGES[::4]  # every kind of weight and master, every kind of moment
pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")


def executors():
    pytest.importorskip("numba")
    return ("torch", "numba")


def make_model(dtype=FP32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def loss_of(model, step, factor=1.0):
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    return model(x).float().square().mean() * factor


def snapshot(model, optimizer):
    """Copies of weights and states, by name; ``is_as`` compares bit for bit."""
    states = {f"{i}.{name}": v for i, s in enumerate(optimizer.state.values()) for name, v in s.items()}
    return {name: v.detach().clone() for name, v in {**dict(model.named_parameters()), **states}.items()}


def is_as(one, other):
    assert one.keys() == other.keys()
    flat = ((one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)) for name in one)
    return all(torch.equal(a, b) for a, b in flat)


# -- invariant 1: a skipped step leaves every bit ---------------------------------------------------------------------


def step_bare(model, optimizer, step, factor):
    optimizer.zero_grad()
    (loss_of(model, step) if factor == 1.0 else loss_of(model, step, factor)).backward()
    optimizer.step()


def step_by_scaler(make_scaler):
    def stepped(model, optimizer, step, factor):
        scaler = optimizer.__dict__.setdefault("the_scaler", make_scaler())
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, factor)).backward()
        scaler.step(optimizer)
        scaler.update()

    return stepped


def step_by_stepper(model, optimizer, step, factor):
    if "the_stepper" not in optimizer.__dict__:
        dtype = model[0].weight.dtype
        policy = {FP32: "fp32", BF16: "bf16-master", FP16: "fp16-master"}[dtype]
        policy = policy.replace("master", "true") if optimizer.param_groups[0]["master"] == "none" else policy
        scale = halfstep.StaticScale(8.0)
        optimizer.the_stepper = halfstep.Stepper(
            model, optimizer, policy=policy, scale=scale, on_overflow="ignore", on_repeat="ignore"
        )
    stepper = optimizer.the_stepper
    with stepper.forward():
        loss = loss_of(model, step, factor)
    stepper.backward(loss)
    assert stepper.step().is_skipped is (factor != 1.0)


WAYS = {
    "bare": step_bare,
    "torch's GradScaler": step_by_scaler(lambda: torch.amp.GradScaler("cpu", init_scale=8.0)),
    "GradScaler": step_by_scaler(lambda: halfstep.GradScaler("cpu", init_scale=8.0)),
    "Stepper": step_by_stepper,
}


@pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_leaves_every_bit(name, way):
    """Weights, rests, moments, scales and step counters, in every storage and executor."""
    for number, ((dtype, master), moments) in enumerate(STORAGES if way == "bare" else SOME):
        executor = executors()[number % 2]  # which are equal in every bit
        model = make_model(dtype)
        optimizer = RULES[name](model.parameters(), master=master, moments=moments, executor=executor)
        WAYS[way](model, optimizer, 0, 1.0)
        before = snapshot(model, optimizer)
        for bad in (INF, NAN):
            WAYS[way](model, optimizer, 1, bad)
            assert is_as(snapshot(model, optimizer), before), (dtype, master, moments, executor)
        WAYS[way](model, optimizer, 1, 1.0)
        after = snapshot(model, optimizer)
        assert all(after[f"{i}.step"] == 2 for i in range(4))
        assert not is_as(after, before)
        assert optimizer.skipped_steps == (2 if way == "bare" else 0)


@pytest.mark.parametrize("executor", ["torch", "numba"])
def test_one_bad_element_anywhere_skips_all(executor):
    executors()
    model = make_model()
    optimizer = AdamW(model.parameters(), policy="bf16-master", executor=executor)
    before = snapshot(model, optimizer)

    def bad_steps():
        for value in (NAN, INF, -INF):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            model[2].bias.grad[1] = value
            optimizer.step()

    with pytest.warns(SkippedStepWarning, match=r"parameter of shape \[2\] is nan.*This is said once") as caught:
        bad_steps()
    assert len(caught) == 1
    assert optimizer.skipped_steps == 3
    assert is_as(snapshot(model, optimizer), before)


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, halfstep.GradScaler])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")
def test_a_scaled_run_is_the_unscaled_one(cls, dtype, is_clipped):
    """Bit for bit, as the scale is a power of two; with unscale_ and clip_grad_norm_ between, too."""
    if is_clipped and dtype == FP16:
        pytest.skip("unscale_ refuses fp16 gradients, torch's and ours")
    runs = []
    for is_scaled in (False, True):
        model = make_model(dtype)
        optimizer, scaler = AdamW(model.parameters(), lr=1e-2), cls("cpu", init_scale=4.0, enabled=is_scaled)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, factor=INF if is_scaled and step == 2 else 1.0)).backward()
            if is_clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if is_scaled or step != 2:
                scaler.step(optimizer)
                scaler.update()
        runs.append(snapshot(model, optimizer))
    assert all(runs[0][f"{i}.step"] == 4 for i in range(4))
    assert is_as(*runs)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, halfstep.GradScaler])
def test_clip_norm_sees_the_true_norm_under_a_scaler(cls):
    runs = []
    for scale in (1.0, 1024.0):
        model = make_model(BF16)
        optimizer = SGD(model.parameters(), lr=1.0, clip_norm=0.01)
        scaler = cls("cpu", init_scale=scale)
        scaler.scale(loss_of(model, 0)).backward()
        start = {p: optimizer.full_weight(p) for p in model.parameters()}
        scaler.step(optimizer)
        moved = torch.cat([(optimizer.full_weight(p) - start[p]).flatten() for p in model.parameters()])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
        runs.append(snapshot(model, optimizer))
    assert is_as(*runs)


# -- the Stepper ------------------------------------------------------------------------------------------------------

POLICIES = ["bf16-master", "bf16-master,master=split8,moments=int8", "bf16-master,moments=bf16", "fp16-master"]


def stepper_run(policy, steps, *, accumulate=1, bad=(), **options):
    """A run, and a plain fp32 optimizer that is fed what the Stepper must have summed: in fp32, then divided."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy)
    shadow = [nn.Parameter(optimizer.full_weight(p)) for p in model.parameters()]
    plain = AdamW(shadow, lr=1e-2)
    scale = halfstep.DynamicScale(2.0**10) if policy.startswith("fp16") else None
    stepper = halfstep.Stepper(
        model, optimizer, policy=policy, accumulate=accumulate, scale=scale, on_overflow="ignore", **options
    )
    for step in range(steps):
        sums = [torch.zeros(p.shape) for p in shadow]
        scale = stepper.scale.get()
        for number in range(accumulate):
            factor = INF if step in bad and number == 0 else 1.0
            with stepper.forward():
                loss = loss_of(model, 10 * step + number, factor)
            scaled = torch.autograd.grad(loss * scale, list(model.parameters()), retain_graph=True)
            for total, gradient in zip(sums, scaled, strict=True):
                total += gradient.float()
            stepper.backward(loss)
            outcome = stepper.step()
        assert outcome.is_skipped is (step in bad)
        if outcome.is_applied:
            for p, total in zip(shadow, sums, strict=True):
                p.grad = total / (scale * accumulate)
            if stepper.clip_norm is not None:
                nn.utils.clip_grad_norm_(shadow, stepper.clip_norm)
            plain.step()
    return model, optimizer, shadow, stepper


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master,master=fp32", "fp16-master"])
def test_a_stepper_steps_with_the_fp32_sum_of_the_window(policy, accumulate):
    model, optimizer, shadow, stepper = stepper_run(policy, 8, accumulate=accumulate, bad=(3,))
    assert stepper.skipped_steps == 1
    for p, s in zip(model.parameters(), shadow, strict=True):
        bound = 2.0**-24 if policy == "fp16-master" else 0.0  # of fp16 a split rest holds all but the smallest weights'
        assert (optimizer.full_weight(p) - s).abs().max() <= bound
    assert {float(s["step"]) for s in optimizer.state.values()} == {7.0}
    assert all(getattr(p, "fp32_grad", None) is None and p.grad is None for p in model.parameters())


def test_a_stepper_clips_and_averages():
    torch.manual_seed(0)
    model, optimizer, shadow, stepper = stepper_run("bf16-master", 6, accumulate=2, clip_norm=0.05)
    for p, s in zip(model.parameters(), shadow, strict=True):
        assert torch.allclose(optimizer.full_weight(p), s.detach(), rtol=1e-4, atol=1e-5)
    assert stepper.policy.param_dtype == BF16


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stepper_with_everything_attached_learns(policy):
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy)
    kept = optimizer.state[model[0].weight]
    name, dtype = {"int8": ("exp_avg_codes", torch.int8), "bf16": ("exp_avg", BF16)}.get(
        policy[-4:].lstrip("="), ("exp_avg", FP32)
    )
    assert kept[name].dtype == dtype
    ema = halfstep.EMA(model, decay=0.5)
    stepper = halfstep.Stepper(
        model,
        optimizer,
        policy=policy,
        clip_norm=1.0,
        ema=ema,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step),
    )
    losses = [stepper.run(lambda: loss_of(model, 0)).loss for _ in range(30)]
    assert losses[-1] < losses[0] / 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.99**30)
    with ema.swapped():
        assert loss_of(model, 0) < losses[0] / 5
    before = {p: optimizer.full_weight(p) for p in model.parameters()}
    assert all(torch.equal(optimizer.full_weight(p), value) for p, value in before.items())


def test_an_overflow_is_retried_with_a_lower_scale():
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, policy="fp16-master")
    scale = halfstep.DynamicScale(2.0**24)
    stepper = halfstep.Stepper(model, optimizer, policy="fp16-master", scale=scale, on_overflow="ignore")
    outcome = stepper.run(lambda: loss_of(model, 0, factor=64.0), retries=24)
    assert outcome.is_applied
    assert stepper.scale.get() < 2.0**24
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stepper_resumes_bit_for_bit(policy):
    """12 windows = 6, save, load into new objects, 6; a skip and an open scale in both halves."""

    def build():
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy)
        scale = halfstep.DynamicScale(2.0**10, growth_interval=3) if policy.startswith("fp16") else None
        options = {"accumulate": 2, "clip_norm": 0.5, "scale": scale, "on_overflow": "ignore", "on_repeat": "ignore"}
        return model, optimizer, halfstep.Stepper(model, optimizer, policy=policy, **options)

    def run(model, stepper, windows):
        for window in windows:
            for number in range(2):
                with stepper.forward():
                    loss = loss_of(model, 2 * window + number, INF if window in (2, 8) else 1.0)
                stepper.backward(loss)
                stepper.step()

    model, optimizer, stepper = build()
    run(model, stepper, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), stepper.state_dict()))
    run(model, stepper, range(6, 12))
    other_model, other, other_stepper = build()
    for part, state in zip((other_model, other, other_stepper), saved, strict=True):
        part.load_state_dict(state)
    run(other_model, other_stepper, range(6, 12))
    assert is_as(snapshot(model, optimizer), snapshot(other_model, other))
    assert stepper.scale.get() == other_stepper.scale.get()
    assert stepper.skipped_steps == other_stepper.skipped_steps == 2


# -- invariant 10: a device is not read -------------------------------------------------------------------------------

HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that needs a device value on the host, and on copies from a device to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} reads the device"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_", "_foreach_copy_"):
            source, target = (args[0], out) if name == "_to_copy" else (args[1], args[0])
            if name == "_foreach_copy_":
                source, target = source[0], target[0]
            assert source.device.type == "cpu" or target.device.type != "cpu", f"{name} copies to the host"
        return out


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA tensors without values, on a machine without CUDA."""

    def first_columns(tensor, index):  # what a step takes of a tensor by brackets
        assert index[0] == slice(None)
        return tensor.narrow(1, 0, index[1].stop)

    # These ask the driver, though others do the same without.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "__getitem__", first_columns)
    monkeypatch.setattr(torch.Tensor, "__invert__", lambda tensor: tensor.bitwise_not())
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: torch._foreach_copy_([target], [source]))
    with FakeTensorMode():
        yield torch.device("cuda")


class Told:
    """What a scaler tells an optimizer."""

    def __init__(self, optimizer, device, flag=True):
        self.optimizer = optimizer
        if flag:
            optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=device), torch.empty((), device=device)


@pytest.mark.parametrize("name", RULES)
def test_invariant_10_a_step_on_tensors_without_values(fake_cuda, name):
    """Told by a scaler or bare, clipped or not, the learning rate a number or a tensor on the device."""
    for number, ((dtype, master), moments) in enumerate(SOME):
        clip_norm, told = (None, 1.0)[number % 2], bool(number % 3)
        weights = [nn.Parameter(torch.empty(shape, dtype=dtype, device=fake_cuda)) for shape in ((3, 40), (5,))]
        options = {"master": master, "moments": moments, "clip_norm": clip_norm, "executor": "torch"}
        optimizer = RULES[name](weights, **options)
        optimizer.param_groups[0]["lr"] = torch.empty((), device=fake_cuda)
        optimizer.add_param_group({"params": [nn.Parameter(torch.empty(7, dtype=dtype, device=fake_cuda))], "lr": 0.1})
        optimizer.count_stalled = True
        Told(optimizer, fake_cuda, told)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        with NoHostRead():
            optimizer.step()
            optimizer.zero_grad()
        assert all(
            v.device == fake_cuda or v.device.type == "cuda" for s in optimizer.state.values() for v in s.values()
        )


def test_invariant_10_can_fail(fake_cuda):
    """A 0-dim tensor that is taken for a number: torch reads it, without a word."""
    steps, taken = [torch.zeros((), device=fake_cuda)], torch.ones((), device=fake_cuda)
    with pytest.raises(AssertionError, match="reads the device"), NoHostRead():
        torch._foreach_add_(steps, taken)


def play_device(patch):
    """Let the optimizers believe that CPU tensors live on an accelerator."""
    for module in ("packed", "packed_numbers", "optimizers"):
        patch.setattr(f"halfstep.optim.{module}.is_host", lambda device: False)


@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
@pytest.mark.parametrize("name", RULES)
def test_a_devices_path_gives_the_same_bits(name, monkeypatch):
    """Constants computed on the device in fp64, from step counters that live there; a flag that nobody reads."""
    runs = []
    for is_device in (False, True):
        with monkeypatch.context() as patch:
            if is_device:
                play_device(patch)
            states = []
            for (dtype, master), moments in SOME:
                model = make_model(dtype)
                optimizer = RULES[name](model.parameters(), master=master, moments=moments, executor="torch")
                optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64)
                for step, factor in enumerate((1.0, NAN, 1.0, 1.0)):
                    optimizer.zero_grad()
                    loss_of(model, step, factor).backward()
                    optimizer.step()
                assert optimizer.skipped_steps == 1
                states.append(snapshot(model, optimizer))
            runs.append(states)
    assert all(map(is_as, *runs))


def test_a_learning_rate_on_a_device_that_is_nan_skips(monkeypatch):
    """The host cannot see it; the weights must not become NaN by it."""
    play_device(monkeypatch)
    model = make_model(BF16)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2), executor="torch")
    optimizer.param_groups[0]["lr"].fill_(NAN)
    before = snapshot(model, optimizer)
    step_bare(model, optimizer, 0, 1.0)
    assert is_as(snapshot(model, optimizer), before)
    optimizer.param_groups[0]["lr"].fill_(1e-2)
    step_bare(model, optimizer, 0, 1.0)
    assert optimizer.state[model[0].weight]["step"] == 1


# -- two ranks --------------------------------------------------------------------------------------------------------

TWO_RANKS = """
import sys, warnings, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
warnings.simplefilter("ignore")
torch.set_num_threads(1)
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
import halfstep
from halfstep.optim import AdamW, Lion

def same_everywhere(tensor):
    tensor = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    assert torch.equal(*parts)

for policy in ("bf16-master", "bf16-master,master=stochastic,moments=bf16", "fp16-master,master=split8,moments=int8"):
    for accumulate in (1, 3):
        torch.manual_seed(0)
        bare = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = AdamW(bare.parameters(), lr=1e-2, policy=policy)
        model = DistributedDataParallel(bare)
        scale = halfstep.StaticScale(8.0) if policy.startswith("fp16") else None
        stepper = halfstep.Stepper(model, optimizer, policy=policy, accumulate=accumulate, clip_norm=1.0, scale=scale,
                                   on_overflow="ignore", on_repeat="ignore")
        for step in range(4):
            for number in range(accumulate):
                x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + number + 1000 * rank))
                with stepper.forward():
                    loss = model(x.to(bare[0].weight.dtype)).float().square().mean()
                    if step == 2 and rank == 0 and number == 0:
                        loss = loss * float("inf")
                stepper.backward(loss)
                outcome = stepper.step()
            assert outcome.is_skipped == (step == 2), (policy, step)
            for p in bare.parameters():
                same_everywhere(p)
                for value in optimizer.state[p].values():
                    same_everywhere(value)
        assert optimizer.state[bare[0].weight]["step"].item() == 3
dist.destroy_process_group()
print("done")
"""


def test_two_ranks_keep_the_same_bits(tmp_path):
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=200)
        assert out.strip() == "done", err[-2000:]


def test_a_missing_package_that_makes_steps_slow_is_said_once(monkeypatch):
    monkeypatch.setattr(choose, "_missing_numba", lambda: "numba is not installed (pip install 'halfstep[cpu]')")
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(choose, "FEWEST", 10)
    p = nn.Parameter(torch.randn(4, 4))
    p.grad = torch.ones(4, 4)
    optimizer = AdamW([p])
    with pytest.warns(HalfstepWarning, match="many times slower"):
        optimizer.step()
    optimizer.step()  # warnings are errors here
    AdamW([p], executor="torch").step()
