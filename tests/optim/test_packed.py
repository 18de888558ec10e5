"""The packed optimizers: torch's rules, fp32 steps of 16-bit weights bit for bit, bytes per parameter, what stalls."""

import copy
import functools
import inspect
import itertools
import math
from importlib.util import find_spec
from statistics import mean

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep import fp32_state_dict
from halfstep.compare.digits import classification_data, trained_perceptron
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.rounding import rounded
from halfstep.optim import SGD, Adam, AdamW, Lion

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FASTEST = "numba" if find_spec("numba") else "torch"  # executors agree in every bit (below)
HALVES = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=["fp16", "bf16"])


def make_weights(*shapes, dtype=FP32):
    generator = torch.Generator().manual_seed(1)
    shapes = shapes or ((8, 5), (7,), (3, 2, 2))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(step, *runs, dtype=FP32, size=1.0):
    """Every run's weights get the same gradients, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(step)
    for together in zip(*runs, strict=True):
        gradient = (torch.randn(together[0].shape, generator=generator) * size).to(dtype)
        for w in together:
            w.grad = gradient.to(w.dtype)


def same_bits(a, b):
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# -- the rules --------------------------------------------------------------------------------------------------------

RULES = {
    "AdamW": (AdamW, {"lr": 1e-3}),
    "AdamW, all options": (AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    "AdamW, lr as a tensor": (AdamW, {"lr": torch.tensor(1e-2)}),
    "AdamW, maximize": (AdamW, {"lr": 1e-2, "maximize": True}),
    "Adam": (Adam, {"lr": 1e-3}),
    "Adam, weight decay": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "Adam, decoupled": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "SGD": (SGD, {"lr": 0.1}),
    "SGD, weight decay": (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "SGD, momentum": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "SGD, dampening": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD, nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, lr as a tensor": (SGD, {"lr": torch.tensor(0.1, dtype=torch.float64), "momentum": 0.9}),
}


class PlainLion(torch.optim.Optimizer):
    """Chen et al., Algorithm 2, as torch would write it."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                gradient = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (m * beta1 + gradient * (1 - beta1)).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                m.mul_(beta2).add_(gradient, alpha=1 - beta2)


def torch_of(cls):
    return PlainLion if cls is Lion else getattr(torch.optim, cls.__name__)


RULES["Lion"] = (Lion, {"lr": 1e-3})
RULES["Lion, all options"] = (Lion, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": True})


def units(found, wanted):
    """The largest difference, in fp32 units in the last place of the tensor's largest value.

    Sums cancel: an element near 0 comes from larger ones, whose rounding it keeps.
    """
    largest = wanted.detach().double().abs().amax()
    return float((found.detach().double() - wanted.detach().double()).abs().amax() / (largest * 2.0**-23))


@pytest.mark.parametrize("name", RULES)
def test_200_steps_of_fp32_weights_are_torchs(name):
    """Each step within 3 units of torch's (our order: one scale of the root for torch's two divisions); they add up."""
    cls, options = RULES[name]
    ours, theirs = make_weights(), make_weights()
    optimizer, reference = cls(ours, **options), torch_of(cls)(theirs, **options)
    for step in range(200):
        before = [w.detach().clone() for w in theirs]
        drift = [a.detach() - b.detach() for a, b in zip(ours, theirs, strict=True)]
        give_gradients(step, ours, theirs, size=10.0 ** (step % 5 - 2))
        optimizer.step()
        reference.step()
        for a, b, old, gap in zip(ours, theirs, before, drift, strict=True):
            assert units(a, b) <= 8, step
            assert units(a.detach() - gap, b) <= 3, step
            assert not torch.equal(b, old)


def test_the_comparison_can_fail():
    ours, theirs = make_weights(), make_weights()
    optimizer, reference = AdamW(ours, lr=1e-3, betas=(0.9, 0.9992)), torch.optim.AdamW(theirs, lr=1e-3)
    for step in range(200):
        give_gradients(step, ours, theirs, size=10.0 ** (step % 5 - 2))
        optimizer.step()
        reference.step()
    assert max(map(units, ours, theirs)) > 8


@pytest.mark.parametrize("cls", [AdamW, Adam, SGD])
def test_the_constructor_is_torchs(cls):
    """The same names, in the same order as far as they may be positional."""
    ours, theirs = (inspect.signature(one).parameters for one in (cls, torch_of(cls)))
    assert list(theirs) == [name for name in ours if name in theirs]
    assert [p.kind for p in theirs.values()] == [ours[name].kind for name in theirs]
    assert [p.default for p in theirs.values()] == [ours[name].default for name in theirs]
    assert {ours[name].kind for name in ours.keys() - theirs.keys()} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }


def test_the_defaults_are_torchs():
    for cls in (AdamW, Adam, SGD):
        plain = torch_of(cls)(make_weights()).defaults
        ours = cls(make_weights()).defaults
        assert {name: ours[name] for name in plain} == plain
        assert ours.keys() - plain.keys() == {"master", "moments", "seed"}


# -- what every torch optimizer does ----------------------------------------------------------------------------------

SCHEDULES = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 20)),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=50),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.05, total_steps=200),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.05, step_size_up=10),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_schedulers(name, momentum):
    """OneCycleLR and CyclicLR set SGD's momentum too, even where it was built without."""
    ours, theirs = make_weights(), make_weights()
    optimizer, reference = SGD(ours, 0.1, momentum=momentum), torch.optim.SGD(theirs, 0.1, momentum=momentum)
    schedules = [SCHEDULES[name](one) for one in (optimizer, reference)]
    for step in range(100):
        give_gradients(step, ours, theirs)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert max(map(units, ours, theirs)) <= 8, step
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]


def test_groups_with_options_of_their_own_and_groups_added_later():
    ours, theirs = make_weights((8, 5), (7,), (3, 40), (4,)), make_weights((8, 5), (7,), (3, 40), (4,))
    built = []
    for cls, weights in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        groups = [
            {"params": [weights[0]], "lr": 1e-2},
            {"params": weights[1:2], "weight_decay": 0.0, "betas": (0.5, 0.9)},
        ]
        built.append(cls(groups, lr=1e-3, weight_decay=0.1))
    for step in range(40):
        if step == 10:
            for optimizer, weights in zip(built, (ours, theirs), strict=True):
                optimizer.add_param_group({"params": weights[2], "maximize": True})
        give_gradients(step, ours[:3], theirs[:3])
        for optimizer in built:
            optimizer.step()
        assert max(map(units, ours, theirs)) <= 8
    optimizer = built[0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    assert optimizer.state[ours[2]]["step"] == 30
    optimizer.add_param_group({"params": ours[3:], "moments": "bf16"})
    assert optimizer.state[ours[3]]["exp_avg"].dtype == BF16


def test_a_group_may_have_storages_of_its_own():
    weights = make_weights((8, 40), (8, 40), (8, 40))
    optimizer = AdamW(
        [{"params": weights[0]}, {"params": weights[1], "master": "split8"}, {"params": weights[2], "moments": "int8"}],
        policy="bf16-master",
    )
    kept = [{name: v.dtype for name, v in optimizer.state[w].items()} for w in weights]
    assert [k["rest"] for k in kept] == [torch.int16, torch.int8, torch.int16]
    assert [k.get("exp_avg") for k in kept] == [FP32, FP32, None]
    assert kept[2]["exp_avg_codes"] == torch.int8
    give_gradients(0, weights)
    optimizer.step()
    assert all(optimizer.state[w]["step"] == 1 for w in weights)


def test_named_parameters():
    model = nn.Linear(40, 3)
    optimizer = AdamW(model.named_parameters(), policy="bf16-master", moments="int8")
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert model.weight.dtype == BF16
    again = AdamW(nn.Linear(40, 3).named_parameters(), policy="bf16-master", moments="int8")
    again.load_state_dict(optimizer.state_dict())
    assert "param_names" in again.param_groups[0]


def test_closures_and_hooks():
    weights, calls = make_weights(), []
    optimizer = SGD(weights, lr=0.5, policy="bf16-master")
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", o))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", o))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: calls.append(("global", o))),
    ]
    before = [optimizer.full_weight(w) for w in weights]

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum(w.float().square().sum() for w in weights) / 2
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert calls == [("before", optimizer), ("after", optimizer), ("global", optimizer)]
    for w, old in zip(weights, before, strict=True):
        assert torch.allclose(optimizer.full_weight(w), old * 0.5, rtol=1e-2, atol=1e-2)
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    assert all(w.grad is None for w in weights)
    weights[0].fp32_grad = torch.ones(8, 5)
    weights[1].grad = torch.ones_like(weights[1])
    optimizer.zero_grad(set_to_none=False)
    assert not hasattr(weights[0], "fp32_grad")
    assert not weights[1].grad.any()


def test_absent_gradients_and_frozen_weights_are_left_alone():
    weights = make_weights(dtype=BF16)
    weights[2].requires_grad_(False)
    optimizer = AdamW(weights, lr=0.1)
    before = [w.detach().clone() for w in weights]
    optimizer.step()
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert [float(optimizer.state[w]["step"]) for w in weights[:2]] == [1.0, 0.0]
    assert weights[2] not in optimizer.state
    assert not torch.equal(weights[0], before[0])
    assert all(map(same_bits, weights[1:], before[1:]))


# -- fp32 steps of 16-bit weights -------------------------------------------------------------------------------------

STEPPED = {
    "AdamW": (AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adam": (Adam, {"lr": 1e-4, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "Lion": (Lion, {"lr": 1e-5, "weight_decay": 0.1}),
}


def storage_runs(name, policy, master, steps, check):
    """An optimizer of 16-bit weights and the same one of fp32 weights, fed the same gradients; checked as they go."""
    cls, options = STEPPED[name]
    ours, plain = make_weights((20, 30), (7,)), make_weights((20, 30), (7,))
    optimizer = cls(ours, **options, policy=policy, master=master, executor=FASTEST)
    reference = cls(plain, **options, executor=FASTEST)
    schedules = [CosineAnnealingLR(one, T_max=steps) for one in (optimizer, reference)]
    for step in range(steps):
        give_gradients(step, ours, plain, dtype=ours[0].dtype, size=1e-2)
        for one in (optimizer, reference, *schedules):
            one.step()
        if step % 50 == 49:
            for a, b in zip(ours, plain, strict=True):
                check(optimizer, reference, a, b)
    assert optimizer.saturated_weights == 0
    moved = [(a.float() - b).abs().amax() for a, b in zip(ours, make_weights((20, 30), (7,)), strict=True)]
    assert min(moved) > 1e-3, "the run went somewhere"
    assert any((w != w.to(ours[0].dtype).float()).any() for w in plain), "and 16 bits alone could not hold it"


EXACT = [
    *((name, "bf16-master", "split") for name in STEPPED),
    ("AdamW", "bf16-master", "fp32"),
    ("SGD", "fp16-master", "fp32"),
]


@pytest.mark.parametrize(("name", "policy", "master"), EXACT)
def test_500_steps_of_16_bit_weights_are_the_fp32_run_bit_for_bit(name, policy, master):
    def check(optimizer, reference, a, b):
        assert same_bits(optimizer.full_weight(a), b)
        assert same_bits(a, rounded(b.detach(), a.dtype))
        for moment in optimizer.state[a].keys() - {"rest", "master"}:
            assert same_bits(optimizer.state[a][moment], reference.state[b][moment])

    storage_runs(name, policy, master, 500, check)


def test_a_forward_with_the_weights_rounded_is_the_same_run():
    """As above, with gradients from a model: the fp32 run computes its loss with its weights rounded."""
    ours, plain = make_weights((6, 5), (5,), (5, 3)), make_weights((6, 5), (5,), (5, 3))
    optimizer, reference = AdamW(ours, lr=1e-3, policy="bf16-master"), AdamW(plain, lr=1e-3)
    for step in range(100):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        for weights in (ours, plain):
            seen = [(w.detach() if w.dtype == BF16 else rounded(w.detach(), BF16)).requires_grad_() for w in weights]
            (torch.tanh(x @ seen[0] + seen[1]) @ seen[2]).float().square().mean().backward()
            for w, one in zip(weights, seen, strict=True):
                w.grad = one.grad.to(w.dtype)
        optimizer.step()
        reference.step()
    assert all(same_bits(optimizer.full_weight(a), b) for a, b in zip(ours, plain, strict=True))


# The unit in the last place of the largest weights, which are between 2 and 4.
NEAR = {
    ("fp16-master", "split"): 2.0**-24,
    ("bf16-master", "split8"): 2.0**-14,
    ("fp16-master", "split8"): 2.0**-16,
    ("bf16-master", "stochastic"): 2.0**-6,
    ("fp16-master", "stochastic"): 2.0**-9,
}


@pytest.mark.parametrize(("name", "policy", "master"), [*(("AdamW", *kind) for kind in NEAR), ("SGD", *list(NEAR)[3])])
def test_the_other_storages_stay_near_the_fp32_run(name, policy, master):
    """200 roundings to nearest are a walk of 4 units; by chance, one of the root of path times unit. Within 6 sigma."""
    unit = NEAR[policy, master]
    path = 200 * (1e-3 if name == "AdamW" else 1e-3 * 10 * 4e-2)
    sigma = (path * unit) ** 0.5 + unit / 2 if master == "stochastic" else unit * (200 / 12) ** 0.5

    def check(optimizer, reference, a, b):
        assert (optimizer.full_weight(a) - b).abs().max() <= 6 * sigma

    storage_runs(name, policy, master, 200, check)


def test_casting_keeps_every_bit_and_the_parameter_objects():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    exact, objects = {n: p.detach().clone() for n, p in model.named_parameters()}, list(model.parameters())
    model[0].bias.requires_grad_(False)
    optimizer = AdamW(model.parameters(), policy="bf16-master")
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert [p.dtype for p in objects] == [BF16, FP32, BF16, BF16], "frozen weights keep their dtype"
    exported = fp32_state_dict(model, optimizer)
    assert all(same_bits(exported[name], value) for name, value in exact.items())
    assert exported.keys() == model.state_dict().keys()
    assert {v.dtype for v in exported.values()} == {FP32, torch.int64}


# -- bytes ------------------------------------------------------------------------------------------------------------

LEDGER = {  # what DESIGN 7 says of AdamW, in bytes per parameter
    "fp32": ({"policy": None}, 16.0, False),
    "fp32 master, fp32 gradient": ({"master": "fp32"}, 18.0, True),
    "fp32 master": ({"master": "fp32"}, 16.0, False),
    "split": ({}, 14.0, False),
    "split, fp16": ({"policy": "fp16-master"}, 14.0, False),
    "split, bf16 moments": ({"moments": "bf16"}, 10.0, False),
    "split, int8 moments": ({"moments": "int8"}, 8.125, False),
    "split8, int8 moments": ({"master": "split8", "moments": "int8"}, 7.125, False),
    "stochastic, int8 moments": ({"master": "stochastic", "moments": "int8"}, 6.125, False),
    "split8, int8 moments, a window's sums": ({"master": "split8", "moments": "int8"}, 9.125, True),
    "Lion: split8, int8 moment": ({"cls": Lion, "master": "split8", "moments": "int8"}, 6.0625, False),
    "SGD: split8, int8 moment": ({"cls": SGD, "momentum": 0.9, "master": "split8", "moments": "int8"}, 6.0625, False),
    "SGD: split8, no moment": ({"cls": SGD, "master": "split8"}, 5.0, False),
}


def storage_bytes(tensors):
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def ledger_model():
    """A million parameters: matrices, an embedding, biases and a norm, as transformers have them."""
    return nn.Sequential(nn.Embedding(997, 256), nn.Linear(256, 1024), nn.LayerNorm(1024), nn.Linear(1024, 500))


@pytest.mark.parametrize("name", LEDGER)
def test_the_ledger_from_live_tensors(name):
    options, wanted, has_sums = LEDGER[name]
    options = {"policy": "bf16-master", **options}
    model = ledger_model()
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = options.pop("cls", AdamW)(model.parameters(), lr=1e-3, **options)
    for p in model.parameters():
        gradient = torch.full_like(p, 1e-3, dtype=FP32 if has_sums else p.dtype)
        setattr(p, "fp32_grad" if has_sums else "grad", gradient)
    optimizer.step()
    gradients = [p.fp32_grad if has_sums else p.grad for p in model.parameters()]
    state = [v for s in optimizer.state.values() for v in s.values()]
    found = storage_bytes([*(p.data for p in model.parameters()), *gradients, *state])
    assert found / num_parameters == pytest.approx(wanted, rel=0.01)
    assert optimizer.num_bytes == storage_bytes(state)


# -- executors --------------------------------------------------------------------------------------------------------

MIXED = ((20, 70), (3, 33), (5,), (), (2, 3, 4, 5), (1, 1))


@pytest.mark.parametrize(
    ("dtype", "clip_norm"), [(FP32, None), (BF16, 1.0), (FP16, None)], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("name", STEPPED)
def test_executors_agree_in_every_bit_of_a_run(name, dtype, clip_norm):
    pytest.importorskip("numba")
    cls, options = STEPPED[name]
    kinds = itertools.product(("fp32", "split", "split8", "stochastic"), ("fp32", "bf16", "int8"))
    for master, moments in kinds if dtype != FP32 else ((None, m) for m in ("fp32", "bf16", "int8")):
        runs = [make_weights(*MIXED, dtype=dtype) for _ in range(2)]
        both = [
            cls(weights, **options, master=master, moments=moments, executor=executor, clip_norm=clip_norm)
            for weights, executor in zip(runs, ("torch", "numba"), strict=True)
        ]
        for optimizer in both:
            optimizer.count_stalled = True
        for step in range(4):
            give_gradients(step, *runs, dtype=dtype)
            for optimizer in both:
                optimizer.step()
        for a, b in zip(*runs, strict=True):
            assert same_bits(a, b), (master, moments)
            one, other = (optimizer.state[w] for optimizer, w in zip(both, (a, b), strict=True))
            assert all(same_bits(one[part], other[part]) for part in one), (master, moments)
        assert both[0].stalled == both[1].stalled
        assert both[0].saturated_weights == both[1].saturated_weights
        assert [str(*{e.name for e in o.executors.values()}) for o in both] == ["torch", "numba"]


def test_an_executor_that_was_chosen_says_why():
    assert "too few" in next(iter(AdamW(make_weights()).executors.values())).reason
    assert "asked for" in next(iter(AdamW(make_weights(), executor="torch").executors.values())).reason


def test_seeds_choose_the_random_bits_and_nothing_else():
    weights = [make_weights((30, 40), dtype=BF16) for _ in range(3)]
    for seed, run in zip((0, 0, 1), weights, strict=True):
        optimizer = AdamW(run, lr=1e-4, master="stochastic", seed=seed)
        give_gradients(0, run, dtype=BF16)
        optimizer.step()
    assert same_bits(weights[0][0], weights[1][0])
    assert not same_bits(weights[0][0], weights[2][0])
    twins = [nn.Parameter(torch.ones(30, 40, dtype=BF16)) for _ in range(2)]
    optimizer = AdamW(twins, lr=1e-4, master="stochastic")
    for _ in range(3):
        for w in twins:
            w.grad = torch.ones_like(w)
        optimizer.step()
    assert not same_bits(*twins), "each tensor has bits of its own"
    exact = [make_weights((30, 40), dtype=BF16) for _ in range(2)]
    for seed, run in enumerate(exact):
        optimizer = AdamW(run, lr=1e-4, seed=seed)
        give_gradients(0, run, dtype=BF16)
        optimizer.step()
    assert same_bits(*[run[0] for run in exact])


# -- clipping, and steps that are skipped -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_clipping_is_torchs(dtype):
    ours, theirs = make_weights(dtype=dtype), [nn.Parameter(w.detach().float()) for w in make_weights(dtype=dtype)]
    optimizer, reference = SGD(ours, lr=0.1, clip_norm=0.5), torch.optim.SGD(theirs, lr=0.1)
    for step in range(20):
        give_gradients(step, ours, theirs, dtype=dtype, size=10.0 ** (step % 4 - 2))
        nn.utils.clip_grad_norm_(theirs, 0.5)
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert units(optimizer.full_weight(a), b) <= 30, "torch's factor is rounded to fp32 before ours"
    optimizer.clip_norm = None
    before = [optimizer.full_weight(w) for w in ours]
    give_gradients(99, ours, dtype=dtype, size=100.0)
    optimizer.step()
    gone = torch.cat([(optimizer.full_weight(w) - b).flatten() for w, b in zip(ours, before, strict=True)])
    assert gone.norm() > 10, "not clipped any more"


def test_a_norm_beyond_fp16_is_no_overflow():
    weight = nn.Parameter(torch.zeros(1_000_000, dtype=FP16))
    optimizer = SGD([weight], lr=1.0, clip_norm=1.0)
    weight.grad = torch.full_like(weight, 100.0)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert torch.allclose(optimizer.full_weight(weight), torch.tensor(-1e-3), rtol=1e-5)


# -- what others write into weights -----------------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("master", ["fp32", "split", "split8", "stochastic"])
def test_what_others_write_between_steps_holds(dtype, master):
    """Loading, pruning, clamping, EMA's swap: the next step begins with what is there."""
    weights = make_weights((20, 40))
    optimizer = SGD(weights, lr=0.25, policy="fp16-master" if dtype == FP16 else "bf16-master", master=master)
    (weight,) = weights
    give_gradients(0, weights, dtype=dtype)
    optimizer.step()
    with torch.no_grad():
        weight[0] = 0.0
        weight[1].clamp_(-0.1, 0.1)
        weight[2].copy_(torch.linspace(-3, 3, 40))
        weight[3].neg_()
    written, untouched = weight.detach().clone(), optimizer.full_weight(weight)[4:]
    weight.grad = torch.zeros_like(weight)
    weight.grad[:, :10] = 1.0
    optimizer.step()
    found, unit = optimizer.full_weight(weight), {BF16: 2.0**-8, FP16: 2.0**-11}[dtype]
    error = (found[:4, 10:] - written[:4, 10:].float()).abs()
    assert (error <= written[:4, 10:].float().abs() * unit + 1e-7).all()
    assert torch.allclose(found[:4, :10], written[:4, :10].float() - 0.25, atol=4 * unit)
    assert same_bits(found[4:, 10:], untouched[:, 10:]), "what nobody wrote keeps its lower bits"


# -- updates that round to nothing ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
@pytest.mark.parametrize(
    ("master", "dtype"),
    [*itertools.product(["none", "fp32", "split", "split8", "stochastic"], [BF16, FP16]), (None, FP32)],
    ids=str,
)
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_the_meter_is_its_definition(cls, master, dtype):
    """Updated: fp32 arithmetic changes the value. Stalled: what is kept of it is what it was."""
    weights = make_weights((40, 50), (30,), dtype=dtype)
    optimizer = cls(weights, lr=1e-4, weight_decay=0.0, master=master)
    assert math.isnan(optimizer.stalled)
    optimizer.count_stalled = True
    for step in range(3):
        before = [optimizer.full_weight(w) for w in weights]
        plain = [nn.Parameter(b.clone()) for b in before]
        exact = cls(plain, lr=1e-4, weight_decay=0.0)
        for w, p in zip(weights, plain, strict=True):
            exact.state[p].update({name: v.clone() for name, v in optimizer.state[w].items() if name in exact.state[p]})
        give_gradients(step, weights, plain, dtype=dtype, size=1e-2)
        weights[0].grad[:20] = plain[0].grad[:20] = 0
        optimizer.step()
        exact.step()
        updated = [p.detach() != b for p, b in zip(plain, before, strict=True)]
        stalled = [u & (optimizer.full_weight(w) == b) for u, w, b in zip(updated, weights, before, strict=True)]
        share = sum(map(torch.sum, stalled)) / sum(map(torch.sum, updated))
        assert optimizer.stalled == pytest.approx(float(share), abs=1e-6)
    optimizer.count_stalled = False
    give_gradients(7, weights, dtype=dtype)
    optimizer.step()
    assert optimizer.stalled == pytest.approx(float(share), abs=1e-6), "the last step that was counted"


@functools.cache
def start():
    """Three layers that have read the digits five times in fp32, then rounded to bf16."""
    torch.manual_seed(0)
    return trained_perceptron(), classification_data()


@functools.cache
def fine_tune(lr, master, dtype=BF16):
    """300 steps of Adam: the mean share of lost updates, and the loss at the end."""
    model, data = copy.deepcopy(start())
    torch.manual_seed(1)
    optimizer, shares = Adam(model.to(dtype).parameters(), lr, master=master, executor=FASTEST), []
    optimizer.count_stalled = True
    orders = itertools.chain.from_iterable(torch.randperm(len(data.train_x)).split(64) for _ in range(20))
    for batch in itertools.islice(orders, 300):
        wide = {name: p.float() for name, p in model.named_parameters()}  # exact; products are the same in every run
        optimizer.zero_grad()
        output = functional_call(model, wide, (data.train_x[batch],))
        nn.functional.cross_entropy(output, data.train_y[batch]).backward()
        optimizer.step()
        shares.append(optimizer.stalled)
    full = {name: optimizer.full_weight(p) for name, p in model.named_parameters()}
    return mean(shares), nn.functional.cross_entropy(functional_call(model, full, (data.train_x,)), data.train_y).item()


@pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
@pytest.mark.parametrize(("lr", "lost", "gap"), [(1e-4, 0.937, 0.04), (1e-5, 0.990, 0.01)])
def test_a_fine_tune_of_plain_bf16_weights_loses_most_updates(lr, lost, gap):
    """93.7 % and 99.0 % of the updates round to nothing, and the loss shows it."""
    exact, plain = fine_tune(lr, None, FP32), fine_tune(lr, "none")
    assert exact[0] == 0.0
    assert plain[0] == pytest.approx(lost, abs=0.015)
    assert plain[1] > exact[1] + gap


@pytest.mark.parametrize("master", ["split", "split8", "stochastic"])
def test_a_fine_tune_with_something_kept_loses_nothing(master):
    exact, kept = fine_tune(1e-4, None, FP32), fine_tune(1e-4, master)
    assert kept[1] == pytest.approx(exact[1], abs=0.002)
    if master != "stochastic":  # whose weights stand still, and then make a whole step
        assert kept[0] < 0.05, "24 bits: an update of 1e-4 is small beside the largest weights"


def test_nobody_counts_unasked():
    weights = make_weights(dtype=BF16)
    optimizer = AdamW(weights)
    give_gradients(0, weights)
    optimizer.step()
    assert math.isnan(optimizer.stalled)
