"""halfstep.nn: torch's modules by name and state, and stabilize, which says what it did."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import halfstep.nn as hnn
from halfstep import Policy, ops
from halfstep.errors import ArgumentError
from halfstep.formats import BF16, FP16, FP32, round_to

PAIRS = [
    (nn.LayerNorm, (6,), {"eps": 1e-6}),
    (nn.LayerNorm, ((2, 3),), {"bias": False}),
    (nn.RMSNorm, (6,), {"eps": 1e-6}),
    (nn.Softmax, (), {"dim": -1}),
    (nn.LogSoftmax, (), {"dim": 1}),
    (nn.CrossEntropyLoss, (), {"label_smoothing": 0.1, "ignore_index": 1, "weight": torch.arange(1.0, 7.0)}),
    (nn.BCELoss, (), {"reduction": "sum"}),
    (nn.BCEWithLogitsLoss, (), {"pos_weight": torch.arange(1.0, 7.0)}),
]
every_pair = pytest.mark.parametrize(
    ("cls", "args", "options"), PAIRS, ids=lambda value: getattr(value, "__name__", "")
)


def inputs_of(cls, shape):
    if cls is nn.CrossEntropyLoss:
        return torch.randn(4, 6), torch.tensor([0, 1, 5, 1])
    if cls is nn.BCELoss:
        return torch.rand(4, 6), torch.rand(4, 6)
    if cls is nn.BCEWithLogitsLoss:
        return torch.randn(4, 6), torch.rand(4, 6)
    return (torch.randn(4, *shape),)


@every_pair
def test_modules_are_torchs_in_fp32(cls, args, options):
    ours, torchs = getattr(hnn, cls.__name__)(*args, **options), cls(*args, **options)
    inputs = inputs_of(cls, (2, 3) if args == ((2, 3),) else (6,))
    torch.testing.assert_close(ours(*inputs), torchs(*inputs), rtol=1e-5, atol=1e-6)
    assert isinstance(ours, cls)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())


@every_pair
def test_stabilize_replaces_in_place_and_once(cls, args, options):
    module = cls(*args, **options)
    model = nn.Sequential(nn.Linear(2, 2), module)
    state, seen = copy.deepcopy(model.state_dict()), []
    module.register_forward_hook(lambda *a: seen.append(a))
    (change,) = hnn.stabilize(model, torch.bfloat16)
    assert change.path == "1"
    assert (change.before, change.after) == (f"torch.nn.{cls.__name__}", f"halfstep.nn.{cls.__name__}")
    assert change.is_change
    assert len(change.reason) > 20
    assert model[1] is module
    assert type(module) is getattr(hnn, cls.__name__)
    module(*inputs_of(cls, (2, 3) if args == ((2, 3),) else (6,)))
    assert len(seen) == 1
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert hnn.stabilize(model, torch.bfloat16) == []


def test_the_model_itself_and_tied_modules():
    norm = nn.LayerNorm(4)
    assert [change.path for change in hnn.stabilize(norm, "fp16")] == [""]
    tied = nn.LayerNorm(4)
    model = nn.Sequential(tied, tied)
    assert len(hnn.stabilize(model, "fp16")) == 1
    assert model[0] is model[1]


def test_what_derives_from_torchs_modules_is_left():
    class Mine(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 2

    assert hnn.stabilize(nn.Sequential(Mine(4)), "fp16") == []


class HandMade(nn.Module):
    """An RMS norm that computes in the dtype of its input, as many models have."""

    def __init__(self, eps):
        super().__init__()
        self.variance_epsilon = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("fmt", [FP16, BF16])
@pytest.mark.parametrize("eps", [1e-3, 1e-6, 3e-8, 2.0**-25, 1e-8, 1e-12, 1e-45])
def test_an_eps_is_raised_exactly_where_the_format_rounds_it_to_zero(fmt, eps):
    model = HandMade(eps)
    changes = hnn.stabilize(model, fmt)
    is_lost = round_to(torch.tensor(eps), fmt).item() == 0.0
    assert bool(changes) == is_lost
    if is_lost:
        assert model.variance_epsilon == fmt.smallest_normal
        assert changes[0].before == f"variance_epsilon={eps:g}"
        assert "0/0" in changes[0].reason
        assert model(torch.zeros(2, 4, dtype=fmt.dtype)).isfinite().all()
        assert HandMade(eps)(torch.zeros(2, 4, dtype=fmt.dtype)).isnan().all()
    else:
        assert model.variance_epsilon == eps


def test_torchs_own_norms_keep_an_eps_that_their_kernel_adds_in_fp32():
    model = nn.Sequential(nn.GroupNorm(2, 4, eps=1e-8), nn.BatchNorm1d(4, eps=1e-8), nn.CosineSimilarity(eps=1e-8))
    (change,) = hnn.stabilize(model, "fp16")
    assert (change.path, change.before) == ("2", "eps=1e-08")
    assert model[2](torch.zeros(1, 4).half(), torch.zeros(1, 4).half()).item() == 0.0
    tiny = nn.Sequential(nn.GroupNorm(2, 4, eps=1e-12), nn.BatchNorm1d(4, eps=1e-12), nn.InstanceNorm1d(4, eps=1e-12))
    assert [change.path for change in hnn.stabilize(tiny, "fp16")] == ["0", "1", "2"]
    x = torch.full((4, 4, 5), 3.0).half().requires_grad_()
    for module in tiny.half():
        module(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("fmt", [FP16, BF16])
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_saturation_is_where_the_gradient_becomes_zero(fmt, name):
    """Exhaustive: every positive number of the format through torch's own function and gradient."""
    every = torch.arange(2**15, dtype=torch.int16).view(fmt.dtype)
    x = every[every.isfinite()].clone().requires_grad_()
    getattr(torch, name)(x).sum().backward()
    first = x[x.grad == 0][0].item()
    assert (x.grad[x > first] == 0).all()
    limit = hnn.saturation(name, fmt)
    assert first - fmt.ulp(first) <= limit <= first


def test_activations_are_judged_and_left():
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.MultiheadAttention(4, 1))
    changes = hnn.stabilize(model, "fp16")
    assert [(c.path, c.before, c.is_change) for c in changes] == [
        ("0", "torch.nn.Sigmoid", False),
        ("1", "torch.nn.Tanh", False),
        ("3", "torch.nn.MultiheadAttention", False),
    ]
    assert "8.32" in changes[0].reason
    assert "BCEWithLogitsLoss" in changes[0].reason
    assert "4.51" in changes[1].reason
    assert type(model[0]) is nn.Sigmoid
    assert dataclasses.is_dataclass(changes[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        changes[0].path = "x"


@pytest.mark.parametrize("policy", ["fp32", torch.float32, "tf32", FP32, Policy.parse("fp32")])
def test_fp32_needs_nothing(policy):
    assert hnn.stabilize(nn.Sequential(nn.Softmax(-1), nn.Sigmoid()), policy) == []


def test_a_policy_is_taken_by_its_compute_dtype():
    assert len(hnn.stabilize(nn.Softmax(-1), Policy.parse("fp16-mixed"))) == 1
    assert len(hnn.stabilize(nn.Softmax(-1), Policy.parse("bf16-master"))) == 1
    with pytest.raises(ArgumentError, match=r"stabilize for 3[\s\S]*Policy\.parse"):
        hnn.stabilize(nn.Softmax(-1), 3)
    with pytest.raises(ArgumentError, match="Softmax\\(dim=None\\)"):
        hnn.Softmax()(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stabilized_model_trains_where_the_plain_one_gives_nan(dtype):
    """A classifier whose attention has a row of padding, and a batch without labels."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.softmax, self.out = nn.LayerNorm(8, eps=1e-12), nn.Softmax(dim=-1), nn.Linear(8, 3)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x, keep, target):
            h = self.norm(x)
            p = self.softmax((h @ h.mT).masked_fill(~keep, float("-inf")))
            return self.loss(self.out(p @ h).flatten(0, 1), target)

    x = torch.randn(2, 4, 8).to(dtype)
    x[0] = 3.0
    keep, target = torch.ones(2, 4, 4, dtype=torch.bool), torch.randint(0, 3, (8,))
    keep[1, 2] = False
    for labels in (target, torch.full((8,), -100)):
        plain = Net().to(dtype)
        safe = copy.deepcopy(plain)
        assert len(hnn.stabilize(safe, dtype)) == 3
        plain(x, keep, labels).backward()
        loss = safe(x, keep, labels)
        loss.backward()
        assert not all(p.grad.isfinite().all() for p in plain.parameters())
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in safe.parameters())


def test_rotary_module_rotates():
    module = hnn.RotaryEmbedding(4, base=100.0, interleaved=True)
    x, positions = torch.randn(3, 4), torch.arange(3)
    cos, sin = ops.rotary_embedding(positions, 4, base=100.0)
    assert torch.equal(module(x, positions), ops.apply_rotary(x, cos, sin, interleaved=True))
    assert repr(module) == "RotaryEmbedding(4, base=100.0, interleaved=True)"
