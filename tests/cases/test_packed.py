"""MP-16, 25, 37, 41, 52 and 56 for the optimizers of halfstep.optim, which keep masters and moments in few bytes."""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import HalfstepError, PrecisionWarning, StateError, UnsupportedError
from halfstep.optim import SGD, Adam, AdamW, Lion

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STORAGES = ["fp32", "split", "split8", "stochastic"]
KEPT = STORAGES[:3]  # stochastic weights are the value, but for a unit
quiet = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")


def step_with_ones(optimizer, *weights):
    optimizer.zero_grad()
    sum(w.float().sum() for w in weights).backward()
    optimizer.step()


# -- MP-16: parameters that come later --------------------------------------------------------------------------------


@pytest.mark.parametrize("master", KEPT)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_MP_16_a_group_added_later_trains_with_its_own_settings(param, dtype, master):
    a, b = param([1.0], dtype), param([1.0], dtype)
    optimizer = SGD([a], 0.1, master=master)
    optimizer.add_param_group({"params": [b], "lr": 0.1, "weight_decay": 0.5})
    assert optimizer.param_groups[1]["weight_decay"] == 0.5
    optimizer.param_groups[1]["weight_decay"] = 0.0
    step_with_ones(optimizer, a, b)
    assert a.item() == b.item() == torch.tensor(0.9).to(dtype).item()
    assert [optimizer.full_weight(w).item() for w in (a, b)] == pytest.approx([0.9, 0.9], abs=2e-5)


@pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])
def test_MP_16_a_group_of_fp32_weights_is_cast_as_the_first_ones_were(param, policy):
    a, b = param([1.0]), param([1 / 3])
    optimizer = SGD([a], 0.0, policy=policy)
    optimizer.add_param_group({"params": [b]})
    assert a.dtype == b.dtype != FP32
    assert optimizer.full_weight(b).item() == torch.tensor(1 / 3).item()


@pytest.mark.parametrize("master", KEPT)
def test_MP_16_unfreezing_later_has_the_same_effect(param, master):
    a, b = param([1.0], FP16), param([1.0], FP16).requires_grad_(False)
    optimizer = SGD([a, b], 0.1, master=master)
    step_with_ones(optimizer, a)
    assert b.item() == 1.0
    b.requires_grad_(True)
    step_with_ones(optimizer, a, b)
    assert b.item() == 0.89990234375
    assert optimizer.full_weight(b).item() == pytest.approx(0.9, abs=2e-5)


@pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])
def test_MP_16_in_the_middle_of_a_stepper(policy):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)])
    optimizer = SGD(model.parameters(), 0.1, policy=policy)
    model[1].data = model[1].data.to(model[0].dtype)
    stepper = halfstep.Stepper(model, optimizer, policy=policy)
    for _ in range(2):
        assert stepper.run(lambda: sum(p.float().sum() for p in model)).is_applied
        model[1].requires_grad_(True)
    assert optimizer.full_weight(model[0]).tolist() == pytest.approx([0.8] * 2)
    assert optimizer.full_weight(model[1]).tolist() == pytest.approx([0.9] * 2)


# -- MP-25: eps = 1e-8 is 0 in fp16 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gradient", "wanted"), [(0.0, 1.0), (1e-4, 0.999), (1.0, 0.999)])
@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", KEPT)
def test_MP_25_adam_computes_in_fp32(cls, gradient, wanted, master, moments):
    p = nn.Parameter(torch.ones(2, 40, dtype=FP16))
    optimizer = cls([p], lr=1e-3, weight_decay=0.0, master=master, moments=moments)
    p.grad = torch.full((2, 40), gradient).half()
    optimizer.step()
    assert (optimizer.full_weight(p) - wanted).abs().max() <= (
        1e-6 if moments == "fp32" and master != "split8" else 2e-5
    )
    assert torch.equal(p.detach(), torch.full((2, 40), wanted).half())


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-45])
@pytest.mark.parametrize("master", STORAGES)
def test_MP_25_nothing_over_nothing_is_nothing(master, eps):
    """Even with an eps of 0: a weight that never had a gradient stays."""
    p = nn.Parameter(torch.ones(2, 40, dtype=FP16))
    optimizer = Adam([p], lr=1e-3, eps=eps, master=master, moments="int8")
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones_like(p))


def test_MP_25_without_masters_only_by_name_and_with_a_warning(param):
    with pytest.warns(PrecisionWarning, match="nothing keeps their full value"):
        optimizer = Adam([p := param([1.0, 1.0], FP16)], lr=1e-3, master="none")
    p.grad = torch.tensor([0.0, 1e-4]).half()
    optimizer.step()
    assert p.tolist() == [1.0, torch.tensor(0.999).half().item()]


# -- MP-37: sparse gradients ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_MP_37_sparse_gradients_are_refused_with_a_remedy_that_works(cls):
    table = nn.Embedding(4, 1, sparse=True).half()
    optimizer = cls(table.parameters(), lr=0.1)
    (table(torch.tensor([1, 1])) * torch.full((2, 1), 40000.0).half()).sum().backward()
    before = optimizer.full_weight(table.weight)
    with pytest.raises(UnsupportedError, match=r"MasterWeights\(torch.optim.SparseAdam") as caught:
        optimizer.step()
    assert "nn.Embedding(sparse=False)" in caught.value.fix
    assert torch.equal(optimizer.full_weight(table.weight), before)
    remedy = halfstep.MasterWeights(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    remedy.step()
    assert remedy.state[table.weight]["master"][1].item() == pytest.approx(before[1].item() - 0.1, abs=1e-3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_MP_37_beside_an_optimizer_for_the_sparse_ones():
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    sparse = halfstep.MasterWeights(torch.optim.SparseAdam(model[0].parameters(), lr=0.1), BF16)
    dense = AdamW(model[1].parameters(), lr=0.1, policy="bf16-master")
    stepper = halfstep.Stepper(model, [sparse, dense], policy="bf16-master")
    before = copy.deepcopy(model.state_dict())
    assert stepper.run(lambda: model(torch.tensor([1, 1])).float().sum()).is_applied
    moved = {name: not torch.equal(value, before[name]) for name, value in model.state_dict().items()}
    assert moved == {"0.weight": True, "1.weight": True, "1.bias": True}


# -- MP-41: the first step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", KEPT)
@pytest.mark.parametrize("by", ["stepper", "scaler"])
def test_MP_41_the_first_step_is_not_lost(by, master):
    """The gradient that arrives at a sum over a 16-bit product is the scale itself, in fp16."""
    model = nn.ParameterList([nn.Parameter(torch.eye(2))])
    optimizer = SGD(model.parameters(), 0.1, policy="fp16-master", master=master)

    def loss_of():
        return (torch.ones(2, 2).half() @ model[0]).sum()

    if by == "stepper":
        assert halfstep.Stepper(model, optimizer, policy="fp16-master").run(loss_of).is_applied
    else:
        scaler = halfstep.GradScaler("cpu", scale=halfstep.DynamicScale())  # its own start, not torch's
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 0
    assert torch.allclose(optimizer.full_weight(model[0]), torch.eye(2) - 0.2, atol=1e-5)


# -- MP-52: bf16 gradients with an enabled scaler, and all dtypes together --------------------------------------------


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, halfstep.GradScaler])
def test_MP_52_the_reported_bf16_model_steps(scaler_class):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1, policy="bf16-master")
    before = {p: optimizer.full_weight(p) for p in model.parameters()}
    scaler = scaler_class("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 2).bfloat16()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    for p, value in before.items():
        assert torch.allclose(optimizer.full_weight(p), value - 0.1, atol=1e-6)


@quiet
@pytest.mark.parametrize("bad", [None, FP32, BF16, FP16])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, halfstep.GradScaler])
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_MP_52_all_dtypes_in_one_optimizer_are_unscaled_alike(param, cls, scaler_class, bad):
    weights = [param([1.0, 2.0], dtype) for dtype in (FP32, BF16, FP16)]
    plain = [param([1.0, 2.0]) for _ in range(3)]
    optimizer, reference = cls([{"params": [w]} for w in weights], lr=0.25), cls(plain, lr=0.25)
    scaler = scaler_class("cpu", init_scale=64.0)
    scaler.scale(torch.tensor(1.0))
    for w, p in zip(weights, plain, strict=True):
        w.grad, p.grad = torch.tensor([32.0, -128.0]).to(w.dtype), torch.tensor([0.5, -2.0])
        if w.dtype == bad:
            w.grad[1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        reference.step()
    for w, p in zip(weights, plain, strict=True):
        assert torch.allclose(optimizer.full_weight(w), p.detach(), atol=1e-6)
        assert float(optimizer.state[w]["step"]) == float(bad is None)


def test_MP_52_a_bf16_policy_scales_by_one_and_still_checks():
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters(), policy="bf16-master,master=split8")
    stepper = halfstep.Stepper(model, optimizer, policy="bf16-master", on_overflow="ignore")
    assert stepper.scale.get() == 1.0
    before = copy.deepcopy(optimizer.state_dict()["state"])
    outcome = stepper.run(lambda: model(torch.ones(1, 2).bfloat16()).float().sum() * math.inf)
    assert outcome.is_skipped
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[key][name]) for name, value in state.items())


# -- MP-56: optimizer state that is cast on load ----------------------------------------------------------------------


def test_MP_56_every_state_keeps_value_and_dtype(param):
    p = param([1.0], FP16)
    optimizer = Adam([p], master="fp32")
    for name, value in {"master": 1.00001, "step": 1.0, "exp_avg": 1e-9, "exp_avg_sq": 1e-9}.items():
        optimizer.state[p][name].fill_(value)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = param([1.0], FP16)
    resumed = Adam([fresh], master="fp32")
    resumed.load_state_dict(saved)
    for name, value in optimizer.state[p].items():
        assert resumed.state[fresh][name].dtype == value.dtype == FP32
        assert torch.equal(resumed.state[fresh][name], value), name


@pytest.mark.parametrize("master", STORAGES)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_MP_56_every_storage_keeps_every_bit(master, moments):
    weights = [nn.Parameter(torch.randn(3, 40)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    first, second = (AdamW([w], policy="fp16-master", master=master, moments=moments) for w in weights)
    for step in range(3):
        weights[0].grad = torch.full_like(weights[0], 1e-4 * (step + 1))
        first.step()
    weights[1].data.copy_(weights[0].data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name, value in first.state[weights[0]].items():
        found = second.state[weights[1]][name]
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name
    assert torch.equal(first.full_weight(weights[0]), second.full_weight(weights[1]))


def test_MP_56_a_checkpoint_with_fp16_moments_warns(param):
    p = param([1.0], FP16)
    plain = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    plain.step()
    with pytest.warns(PrecisionWarning, match="kept in 16 bits"):
        Adam([param([1.0], FP16)]).load_state_dict(plain.state_dict())


def test_MP_56_nothing_is_narrowed_in_silence(param):
    saved = Adam([p := param([1.0], BF16)])
    p.grad = torch.full_like(p, 1 / 3)
    saved.step()
    narrow = Adam([q := param([p.item()], BF16)], moments="bf16")
    with pytest.raises(StateError, match="a load drops nothing in silence") as caught:
        narrow.load_state_dict(saved.state_dict())
    assert isinstance(caught.value, HalfstepError)
    assert not narrow.state[q]["exp_avg"].any()
    narrow.load_state_dict(saved.state_dict(), lossy=True)
    assert narrow.state[q]["exp_avg"].item() == pytest.approx(0.1 / 3, rel=2**-7)
