"""The rules against torch.optim, and Lion against its paper in fp64; what a step may not do to a moment."""

import pytest
import torch

from halfstep.kernels import rules, storage, torch_step
from halfstep.kernels.slots import Kept, Slot, Turn, finite
from halfstep.kernels.storage import Master, Moment

executor = pytest.importorskip("halfstep.kernels.numba_.executor")
STEPS = [executor.step, torch_step.step]
both = pytest.mark.parametrize("step", STEPS, ids=["numba", "torch"])

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, other betas": (torch.optim.AdamW, {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4}),
    "AdamW, no first moment": (torch.optim.AdamW, {"lr": 3e-3, "betas": (0.0, 0.95), "eps": 1e-4}),
    "AdamW, a short one": (torch.optim.AdamW, {"lr": 3e-3, "betas": (0.3, 0.95), "eps": 1e-4}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "SGD, dampening": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def turn_of(rule, slot, gradient, numbers, key=0):
    constants = finite(torch.tensor([(1.0, *numbers)], dtype=torch.float64))
    return Turn(rule, [slot], [gradient], constants, torch.tensor([key]))


def rule_of(optimizer):
    return rules.SGD if isinstance(optimizer, torch.optim.SGD) else rules.ADAM


@both
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_beside_torch(name, step):
    """Torch multiplies and divides in another order: a unit or two in the last place of the largest weight."""
    kind, options = OPTIMIZERS[name]
    theirs = torch.nn.Parameter(torch.randn(20, 30))
    optimizer = kind([theirs], **options)
    rule, group = rule_of(optimizer), optimizer.param_groups[0]
    moments = tuple(Kept(Moment.FP32, torch.zeros(20, 30)) for _ in rule.moments)
    ours = Slot(theirs.detach().clone(), Master.NONE, None, moments)
    for number in range(1, 201):
        theirs.grad = torch.randn(20, 30)
        step(turn_of(rule, ours, theirs.grad.clone(), rule.numbers(group, number)))
        optimizer.step()
    error = (ours.weight - theirs.detach()).abs().max() / theirs.detach().abs().max()
    assert error < 4 * 2.0**-23


@both
def test_200_steps_of_lion_beside_the_paper(step):
    """Algorithm 2, word for word, in fp64. A sign may differ where the direction is all but zero: none does here."""
    lr, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.1
    weight = torch.randn(20, 30).double()
    memory = torch.zeros(20, 30).double()
    ours = Slot(weight.float(), Master.NONE, None, (Kept(Moment.FP32, torch.zeros(20, 30)),))
    numbers = rules.lion_numbers({"lr": lr, "betas": (beta1, beta2), "weight_decay": decay}, 1)
    for _ in range(200):
        narrow = torch.randn(20, 30)
        gradient = narrow.double()
        direction = beta1 * memory + (1 - beta1) * gradient
        weight = weight - lr * (direction.sign() + decay * weight)
        memory = beta2 * memory + (1 - beta2) * gradient
        step(turn_of(rules.LION, ours, narrow, numbers))
    assert ((ours.weight - weight).abs().max() / weight.abs().max()) < 200 * 2.0**-23  # 200 roundings


@both
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_weight_without_gradients_stays(eps, step):
    group = {**torch.optim.AdamW([torch.zeros(1)], eps=1e-8).defaults, "decoupled_weight_decay": True, "eps": eps}
    moments = tuple(Kept(Moment.FP32, torch.zeros(4)) for _ in range(2))
    slot = Slot(torch.ones(4), Master.NONE, None, moments)
    step(turn_of(rules.ADAM, slot, torch.zeros(4), rules.adam_numbers(group, 1)))
    assert torch.equal(slot.weight, torch.full((4,), 1 - 1e-3 * 1e-2))


def second_after(step, kind, gradients):
    """The second moment of 32 x 64 weights after these steps of Adam."""
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}
    shape = (32, 64)
    dtype = {Moment.FP32: torch.float32, Moment.BF16: torch.bfloat16, Moment.INT8: torch.int8}[kind]
    moments = tuple(
        Kept(
            kind,
            torch.zeros(shape, dtype=dtype),
            torch.zeros(32, 2, dtype=torch.int16) if kind == Moment.INT8 else None,
        )
        for _ in range(2)
    )
    slot = Slot(torch.ones(shape), Master.NONE, None, moments)
    for number, gradient in enumerate(gradients, 1):
        numbers = rules.adam_numbers(group, number)
        step(turn_of(rules.ADAM, slot, gradient, numbers, storage.random_key(0, number, 0)))
    return torch_step.read_moment(slot.moments[1], 1)


@pytest.mark.parametrize("kind", [Moment.BF16, Moment.INT8])
@pytest.mark.parametrize("drop", [1.0, 0.1])
def test_second_moments_follow_gradients_that_shrink(kind, drop):
    """beta2 = .999 takes 5e-4 off a root: an eighth of a code of int8, a seventh of bf16's last place."""
    steps = [torch.randn(32, 64) * (1.0 if number < 1000 else drop) for number in range(4000)]
    found, wanted = (second_after(executor.step, one, steps) for one in (kind, Moment.FP32))
    assert 0.9 < (found.mean() / wanted.mean()).item() < 1.1


@both
def test_int8_of_empty_and_of_huge_moments(step):
    for shape in ((0, 4), (3, 0)):
        moments = tuple(
            Kept(
                Moment.INT8,
                torch.zeros(shape, dtype=torch.int8),
                torch.zeros(shape[0], -(-shape[1] // 32), dtype=torch.int16),
            )
            for _ in range(2)
        )
        slot = Slot(torch.zeros(shape), Master.NONE, None, moments)
        assert step(turn_of(rules.ADAM, slot, torch.zeros(shape), (0.0,) * 8)).saturated == 0
    huge = torch.full((1, 32), 3.4e38)
    assert storage.decode_first(*storage.encode_first(huge)).isfinite().all()
    assert storage.decode_second(*storage.encode_second(huge.clamp(max=2.0**126))).isfinite().all()  # the cap's square


@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, Master.NONE), *((d, m) for d in (torch.bfloat16, torch.float16) for m in Master)],
)
def test_nan_is_not_hidden(dtype, master):
    """Who steps without having looked at the gradients gets what the gradients are."""

    def stepped(step):
        weight, rest = torch.ones(3, 4, dtype=dtype), None
        if master == Master.FP32:
            rest = weight.float()
        elif master in (Master.SPLIT, Master.SPLIT8):
            weight, rest = (storage.split if master == Master.SPLIT else storage.split8)(weight.float(), dtype)
        moments = tuple(Kept(Moment.BF16, torch.zeros(3, 4, dtype=torch.bfloat16)) for _ in range(2))
        group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
        gradient = torch.ones(3, 4, dtype=dtype)
        gradient[1, 2] = torch.nan
        slot = Slot(weight, master, rest, moments)
        count = int(step(turn_of(rules.ADAM, slot, gradient, rules.adam_numbers(group, 1))).saturated)
        return count, torch_step.read_master(slot), slot.weight, *(moment.values for moment in slot.moments)

    for ours, wanted in zip(stepped(executor.step), stepped(torch_step.step), strict=True):
        if isinstance(ours, int):
            assert ours == wanted == 0
        else:
            assert ours[1, 2].isnan()
            assert ours.isnan().sum() == 1
            assert torch.equal(ours.nan_to_num(), wanted.nan_to_num())


def test_a_layout_that_does_not_fit_is_noticed():
    weight = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(AssertionError):
        Slot(weight, Master.NONE, None, ())


# How far 200 steps in fp32 may be from the same rule in fp64, in units of 2**-24 of the largest weight. Roundings go
# both ways, but that of the constant 1 - lr * decay acts in every step alike.
TOLERANCES = {"adam": 64, "sgd": 12, "lion": 64}
SETTINGS = {
    "adam": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
}
EXTRA = {"adam": (torch.sqrt, torch.div), "sgd": (), "lion": (torch.sign,)}


@both
@pytest.mark.parametrize("rule", [rules.ADAM, rules.SGD, rules.LION], ids=lambda r: r.name)
def test_200_steps_beside_the_same_rule_in_fp64(rule, step):
    """The rule's own function, on fp64 tensors and fp64 numbers, is the reference of every executor."""
    weight = torch.randn(20, 30, dtype=torch.float64)
    moments = [torch.zeros_like(weight) for _ in rule.moments]
    ours = Slot(weight.float(), Master.NONE, None, tuple(Kept(Moment.FP32, torch.zeros(20, 30)) for _ in moments))
    weight = ours.weight.double()
    for number in range(1, 201):
        gradient = torch.randn(20, 30)
        numbers = rule.numbers(SETTINGS[rule.name], number)
        weight, *moments = rule.function(weight, gradient.double(), *moments, numbers, *EXTRA[rule.name])
        step(turn_of(rule, ours, gradient, numbers))
    units = (ours.weight.double() - weight).abs().max() / (weight.abs().max() * 2.0**-24)
    assert units < TOLERANCES[rule.name], units
