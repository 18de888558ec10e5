"""MasterWeights against the same optimizer on fp32 weights, and everything a torch Optimizer promises."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep.errors import CallOrderError, PrecisionWarning
from halfstep.kernels.rounding import rounded
from halfstep.optim import step_parts
from halfstep.optim.export import fp32_state_dict
from halfstep.optim.masters import MasterWeights

optim = torch.optim
OPTIMIZERS = {
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adafactor": lambda p: optim.Adafactor(p),
    "Adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adagrad-fused": lambda p: optim.Adagrad(p, fused=True),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 1e-2, foreach=True),
    "AdamW-fused": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "Muon": lambda p: optim.Muon(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p),
    "SGD": lambda p: optim.SGD(p, 0.05),
    "SGD-momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD-dampening": lambda p: optim.SGD(p, 0.05, momentum=0.9, dampening=0.5),
    "SGD-fused": lambda p: optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "SGD-fused-dampening": lambda p: optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, fused=True),
}
WITHOUT = {"SparseAdam": "takes sparse gradients only", "LBFGS": "evaluates the loss itself; tested below"}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def bits(tensor):
    tensor = tensor.detach()
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def make_weights(num=3):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(4 + i, 5, generator=generator)) for i in range(num)]


def pair(make, dtype, num=3):
    """The optimizer with masters, and the same one on fp32 weights."""
    weights, references = make_weights(num), make_weights(num)
    return weights, MasterWeights(make(weights), dtype), references, make(references)


def give_gradients(weights, references, step, dtype, absent=()):
    generator = torch.Generator().manual_seed(step)
    for index, (w, r) in enumerate(zip(weights, references, strict=True)):
        g = (torch.randn(r.shape, generator=generator) * 0.1).to(dtype)
        w.grad, r.grad = (None, None) if index in absent else (g.to(w.dtype), g.float())


def masters_of(optimizer, weights):
    return [optimizer.state[w]["master"] for w in weights]


def test_every_optimizer_of_torch_is_listed():
    known = {
        name for name, value in vars(optim).items() if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    assert known - {"Optimizer"} == {name.split("-")[0] for name in OPTIMIZERS} | set(WITHOUT)


@HALVES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_are_the_fp32_run_bit_for_bit(name, dtype, monkeypatch):
    monkeypatch.setattr(step_parts, "PART_ON_HOST", 40)  # more than one part
    weights, optimizer, references, reference = pair(OPTIMIZERS[name], dtype)
    warm_up = lambda step: min(1.0, (step + 1) / 20)  # noqa: E731
    schedules = [LambdaLR(one, warm_up) for one in (optimizer, reference)]
    for step in range(200):
        # torch's fused SGD cannot take a parameter in later than the others.
        absent = (1,) if step < 3 and not name.startswith("SGD-fused") else ()
        give_gradients(weights, references, step, dtype, absent)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        for w, master, r in zip(weights, masters_of(optimizer, weights), references, strict=True):
            assert same_bits(master, r), (name, step)
            assert same_bits(w, rounded(r.detach(), dtype))
    assert optimizer.saturated_weights == optimizer.adopted_weights == 0
    state = optimizer.state[weights[0]]
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())


def test_LBFGS_runs_the_model_with_16_bit_weights():
    target = torch.tensor([1.0, -2.0, 3.0])
    weight = nn.Parameter(torch.zeros(3))
    optimizer = MasterWeights(optim.LBFGS([weight], line_search_fn="strong_wolfe"), torch.bfloat16)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append((weight.dtype, weight.detach().clone()))
        loss = (weight.float() - target).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() == 14.0
    assert torch.allclose(optimizer.state[weight]["master"], target, atol=1e-2)
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert any(not torch.equal(value, seen[0][1]) for _, value in seen)


def test_an_unknown_optimizer_sees_all_its_masters_in_one_call():
    class Global(optim.Optimizer):
        """Divides by the norm of everything, and counts in its group: parameters depend on each other."""

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "calls": 0})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["calls"] += 1
                norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
                for p in group["params"]:
                    self.state[p]["seen"] = p.grad.clone()
                    p.add_(p.grad / norm, alpha=-group["lr"])

    weights, optimizer, references, reference = pair(Global, torch.bfloat16)
    for step in range(5):
        give_gradients(weights, references, step, torch.bfloat16)
        optimizer.step()
        reference.step()
    assert optimizer.param_groups[0]["calls"] == 5
    assert all(map(same_bits, masters_of(optimizer, weights), references))
    assert optimizer.state[weights[0]]["seen"].dtype == torch.float32


# -- which parameters -------------------------------------------------------------------------------------------------


def test_only_trainable_16_bit_parameters_have_masters():
    half, frozen = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).half(), requires_grad=False)
    single, double = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    integer = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    optimizer = MasterWeights(optim.AdamW([half, frozen, single, double, integer], lr=0.1))
    references = [nn.Parameter(p.detach().clone()) for p in (single, double)]
    reference = optim.AdamW(references, lr=0.1)
    for p in (half, single, double, *references):
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    reference.step()
    assert [p for p in optimizer.state if "master" in optimizer.state[p]] == [half]
    assert torch.equal(single, references[0])
    assert torch.equal(double, references[1])
    assert optimizer.state[double]["exp_avg"].dtype == torch.float64
    assert frozen.tolist() == [1.0, 1.0]
    assert frozen not in optimizer.state


def test_tied_weights_have_one_master():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    exact = model["a"].weight.detach().clone()
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), torch.bfloat16)
    assert len(optimizer.state) == 1
    exported = fp32_state_dict(model, optimizer)
    assert torch.equal(exported["a.weight"], exact)
    assert torch.equal(exported["b.weight"], exact)


@HALVES
def test_casting_keeps_every_bit_and_the_parameter_objects(dtype):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    calls = []
    for p in parameters:
        p.register_hook(lambda g: calls.append(g.dtype))
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))
    model(torch.randn(5, 3)).sum().backward()  # the graph of the fp32 weights exists
    calls.clear()
    model.zero_grad()
    optimizer = MasterWeights(optim.AdamW(parameters), dtype)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    for name, p in model.named_parameters():
        assert p.dtype == dtype
        assert same_bits(optimizer.state[p]["master"], before[name])
        assert same_bits(p, rounded(before[name], dtype))
    (model[0](torch.randn(5, 3, dtype=dtype)).sum() + model[1].weight.sum() + model[1].bias.sum()).backward()
    assert calls == [dtype] * (2 * len(parameters))  # hooks on parameters work on


def test_casting_needs_no_second_copy_of_the_weights():
    weight = nn.Parameter(torch.randn(1000))
    memory = weight.data_ptr()
    optimizer = MasterWeights(optim.SGD([weight], lr=0.1), "bf16")
    assert optimizer.state[weight]["master"].data_ptr() == memory


def test_bytes_per_parameter():
    """DESIGN 7, second row, with the gradient in 16 bits as it is between steps: 2 + 4 + 2 + 8."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = MasterWeights(optim.AdamW(model.parameters()), torch.bfloat16)
    for _step in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    gc.collect()
    own = list(model.parameters()) + [p.grad for p in model.parameters()]
    held = own + [v for p in model.parameters() for k, v in optimizer.state[p].items() if k != "step"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) == 16 * num_params
    # Nothing else of the size of a weight is alive, as far as Python knows.
    inner = {m.untyped_storage().data_ptr() for m in (optimizer._masters[p] for p in model.parameters())}
    assert inner <= storages.keys()
    assert all(m.grad is None for m in optimizer._masters.values())


# -- an Optimizer like any other --------------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=12),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "sequence": lambda o: SequentialLR(o, [ConstantLR(o, 0.1), ExponentialLR(o, 0.9)], [3]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    make = lambda p: optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.2}], lr=0.1, momentum=0.9)  # noqa: E731
    weights, optimizer, references, reference = pair(make, torch.bfloat16)
    schedules = [SCHEDULERS[name](one) for one in (optimizer, reference)]
    for step in range(10):
        give_gradients(weights, references, step, torch.bfloat16)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step(*((1.0,) if name == "plateau" else ()))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    assert all(map(same_bits, masters_of(optimizer, weights), references))


def test_learning_rate_as_a_tensor():
    make = lambda p: optim.AdamW(p, lr=torch.tensor(0.1), fused=True)  # noqa: E731
    weights, optimizer, references, reference = pair(make, torch.float16)
    for step in range(5):
        for one in (optimizer, reference):
            one.param_groups[0]["lr"].fill_(0.1 / (step + 1))
        give_gradients(weights, references, step, torch.float16)
        optimizer.step()
        reference.step()
    assert all(map(same_bits, masters_of(optimizer, weights), references))


def test_hooks_run_once_and_see_the_wrapper(monkeypatch):
    monkeypatch.setattr(step_parts, "PART_ON_HOST", 1)
    weights, optimizer, references, _ = pair(OPTIMIZERS["AdamW-fused"], torch.bfloat16)
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", o))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", o))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: calls.append(("global", o))),
    ]
    give_gradients(weights, references, 0, torch.bfloat16)
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert calls == [("before", optimizer), ("after", optimizer), ("global", optimizer)]


def test_hooks_of_the_inner_optimizer_still_run():
    weights, references = make_weights(), make_weights()
    inner, calls = optim.AdamW(weights), []
    inner.register_step_post_hook(lambda o, args, kwargs: calls.append(o))
    optimizer = MasterWeights(inner, torch.bfloat16)
    give_gradients(weights, references, 0, torch.bfloat16)
    optimizer.step()
    assert calls == [inner]


def test_closures_and_zero_grad():
    weights, optimizer, references, _ = pair(OPTIMIZERS["SGD"], torch.bfloat16)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum(w.float().square().sum() for w in weights)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert torch.allclose(optimizer.state[weights[0]]["master"], references[0] * 0.9, atol=1e-2)
    optimizer.zero_grad()
    assert all(w.grad is None for w in weights)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("name", ["AdamW-fused", "SGD-dampening"])
def test_copies_go_on_alone(name, copy_of):
    weights, optimizer, references, _reference = pair(OPTIMIZERS[name], torch.bfloat16)

    def train(weights, optimizer, steps):
        for step in steps:
            give_gradients(weights, references, step, torch.bfloat16)
            optimizer.step()

    train(weights, optimizer, range(3))
    other_weights, other = copy_of((weights, optimizer))
    train(weights, optimizer, range(3, 6))
    before = [w.detach().clone() for w in weights]
    train(other_weights, other, range(3, 6))
    assert all(map(same_bits, masters_of(other, other_weights), masters_of(optimizer, weights)))
    assert all(map(same_bits, weights, before))
    assert other._is_fused == optimizer._is_fused


def test_groups_added_later():
    weights, optimizer, references, reference = pair(OPTIMIZERS["AdamW-fused"], torch.bfloat16, num=2)
    late, late_reference = nn.Parameter(torch.randn(3).bfloat16()), None
    late_reference = nn.Parameter(late.detach().float())
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    reference.add_param_group({"params": [late_reference], "lr": 0.5})
    for step in range(4):
        give_gradients([*weights, late], [*references, late_reference], step, torch.bfloat16)
        optimizer.step()
        reference.step()
    assert all(map(same_bits, masters_of(optimizer, [*weights, late]), [*references, late_reference]))
    assert optimizer.param_groups[1]["lr"] == 0.5
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 2


def test_named_parameters_and_repr():
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(optim.AdamW(model.named_parameters()), "bf16")
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert "AdamW" in repr(optimizer)
    assert "masters of 6 weights" in repr(optimizer)
    assert optimizer.defaults is optimizer.inner.defaults


# -- weights that somebody else writes --------------------------------------------------------------------------------


@HALVES
def test_loaded_weights_reach_the_masters(dtype):
    model = nn.Linear(4, 4)
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.5), dtype)
    other = nn.Linear(4, 4).to(dtype)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    exact = optimizer.state[model.bias]["master"].clone()
    with torch.no_grad():
        model.weight.copy_(other.weight)
    assert torch.equal(fp32_state_dict(model, optimizer)["weight"], other.weight.detach().float())
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["master"], other.weight.detach().float())
    assert same_bits(model.weight, other.weight)
    assert same_bits(optimizer.state[model.bias]["master"], exact)  # not written: keeps its lower bits
    assert optimizer.adopted_weights == 16


def test_a_weight_written_back_keeps_the_bits_of_its_master():
    weight = nn.Parameter(torch.randn(8))
    exact = weight.detach().clone()
    optimizer = MasterWeights(optim.SGD([weight], lr=0.0), "bf16")
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
        weight.copy_(saved)
        weight[0] = 77.0
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert same_bits(optimizer.state[weight]["master"], torch.cat([torch.tensor([77.0]), exact[1:]]))
    assert optimizer.adopted_weights == 1


def test_writes_that_torch_does_not_count():
    weight = nn.Parameter(torch.ones(4))
    optimizer = MasterWeights(optim.SGD([weight], lr=0.0), "bf16")
    weight.grad = torch.zeros_like(weight)
    weight.data = torch.full((4,), 2.0, dtype=torch.bfloat16)  # other memory: seen
    optimizer.step()
    assert optimizer.state[weight]["master"].tolist() == [2.0] * 4
    weight.data.fill_(3.0)
    optimizer.adopt_weights()
    optimizer.step()
    assert weight.tolist() == [3.0] * 4
    assert optimizer.adopted_weights == 8


def test_unfreezing_makes_a_master_at_the_next_step():
    weights = make_weights(2)
    weights[1].requires_grad_(False)
    for w in weights:
        w.data = w.data.bfloat16()
    optimizer = MasterWeights(optim.AdamW(weights, lr=0.1, fused=True))
    assert len(optimizer.state) == 1
    weights[1].requires_grad_(True)
    assert set(optimizer.state_dict()["state"]) == {0, 1}  # a checkpoint knows of it at once
    start = weights[1].detach().float()
    reference = nn.Parameter(start.clone())
    plain = optim.AdamW([reference], lr=0.1, fused=True)
    for step in range(3):
        give_gradients(weights[1:], [reference], step, torch.bfloat16)
        optimizer.step()
        plain.step()
    assert same_bits(optimizer.state[weights[1]]["master"], reference)


def test_saturation_is_counted_and_the_master_goes_on():
    weight = nn.Parameter(torch.tensor([65000.0, 1.0]))
    optimizer = MasterWeights(optim.SGD([weight], lr=1.0), "fp16")
    weight.grad = torch.tensor([-1000.0, 0.0], dtype=torch.float16)
    optimizer.step()
    assert weight.tolist() == [65504.0, 1.0]
    assert optimizer.state[weight]["master"].tolist() == [66000.0, 1.0]
    assert optimizer.saturated_weights == 1
    weight.grad = torch.tensor([1000.0, 0.0], dtype=torch.float16)
    optimizer.step()
    assert optimizer.state[weight]["master"].tolist() == [65000.0, 1.0]
    assert optimizer.saturated_weights == 1


def test_sparse_gradients_are_widened_before_duplicates_are_added():
    weight = nn.Parameter(torch.zeros(3).half())
    optimizer = MasterWeights(optim.SGD([weight], lr=1e-4))
    torch.tensor([40000.0, 40000.0]).half()
    weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.tensor([40000.0, 40000.0]).half(), (3,), check_invariants=True
    )
    optimizer.step()
    assert optimizer.state[weight]["master"].tolist() == [0.0, -8.0, 0.0]


def test_channels_last_weights_keep_their_strides():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    reference = nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format))
    optimizer, plain = MasterWeights(optim.AdamW([weight]), "bf16"), optim.AdamW([reference])
    for step in range(3):
        give_gradients([weight], [reference], step, torch.bfloat16)
        optimizer.step()
        plain.step()
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert same_bits(optimizer.state[weight]["master"].contiguous(), reference.detach().contiguous())


# -- the way out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_to_torch_gives_the_plain_run_back(name):
    weights, optimizer, references, reference = pair(OPTIMIZERS[name], torch.bfloat16)
    for step in range(3):
        give_gradients(weights, references, step, torch.bfloat16)
        optimizer.step()
        reference.step()
    plain = optimizer.to_torch()
    assert plain is optimizer.inner
    assert {w.dtype for w in weights} == {torch.float32}
    assert list(map(id, plain.param_groups[0]["params"])) == list(map(id, weights))
    for step in range(3, 6):
        give_gradients(weights, references, step, torch.bfloat16)
        plain.step()
        reference.step()
    assert all(map(same_bits, weights, references))
    assert plain.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    with pytest.raises(RuntimeError, match=r"after to_torch\(\)"):
        optimizer.step()


def test_wrapping_in_the_middle_of_a_run_keeps_what_was_learned():
    weights, references = make_weights(), make_weights()
    inner, reference = optim.AdamW(weights, fused=True), optim.AdamW(references, fused=True)
    give_gradients(weights, references, 0, torch.float32)
    inner.step()
    reference.step()
    inner.zero_grad()
    optimizer = MasterWeights(inner, "bf16")
    for step in range(1, 4):
        give_gradients(weights, references, step, torch.bfloat16)
        optimizer.step()
        reference.step()
    assert all(map(same_bits, masters_of(optimizer, weights), references))


def test_moments_that_were_16_bit_are_widened_with_a_warning():
    weight = nn.Parameter(torch.ones(2).bfloat16())
    inner = optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    inner.step()
    with pytest.warns(PrecisionWarning, match="exp_avg, exp_avg_sq of Adam was kept in 16 bits"):
        optimizer = MasterWeights(inner)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


def test_export_widens_everything_and_shares_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    model[0].bias.data = model[0].bias.data.bfloat16()
    exact = model[0].weight.detach().clone()
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), "bf16")
    exported = fp32_state_dict(model, [optimizer])
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["0.weight"], exact)
    assert exported["0.bias"].dtype == torch.float32
    assert exported["1.num_batches_tracked"].dtype == torch.int64
    exported["0.weight"].zero_()
    assert torch.equal(optimizer.state[model[0].weight]["master"], exact)


def test_the_inner_optimizer_is_not_stepped_by_itself():
    """Whoever forgets to keep what MasterWeights returns would train nothing, in silence."""
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    forgotten = optim.SGD([p], lr=0.1)
    MasterWeights(forgotten)
    p.grad = torch.ones_like(p)
    with pytest.raises(CallOrderError, match=r"keep what MasterWeights returns and step that"):
        forgotten.step()
    assert torch.equal(p.detach(), torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("make", [lambda ps: optim.AdamW(ps, lr=0.1), lambda ps: optim.LBFGS(ps, lr=0.1)])
def test_the_guard_goes_with_copies_and_leaves_with_to_torch(make):
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = MasterWeights(make([p]))

    def closure():
        optimizer.zero_grad()
        loss = p.float().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    other = copy.deepcopy(optimizer)
    with pytest.raises(CallOrderError):
        other.inner.step(closure)
    plain = optimizer.to_torch()
    plain.step(closure)


def test_a_scheduler_of_the_inner_optimizer_is_noticed():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    inner = optim.SGD([p], lr=0.1)
    optimizer = MasterWeights(inner)
    LambdaLR(inner, lambda step: 0.5)
    p.grad = torch.ones_like(p)
    with pytest.raises(CallOrderError, match="make the scheduler from the MasterWeights"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(2, dtype=torch.bfloat16))
