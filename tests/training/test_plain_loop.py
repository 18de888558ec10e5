"""Policy fp32 against the loop written by hand: the same bits without clipping, a few ulp with it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep

EPSILON = torch.finfo(torch.float32).eps  # one ulp is between half of this and all of it, relative to the value

OPTIMIZERS = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 3e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 3e-3, fused=True),
}


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3)).to(dtype)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.98**step)


def batches(number, size=8, dtype=torch.float32):
    source = torch.Generator().manual_seed(2)
    for _ in range(number):
        x = torch.randn(size, 5, generator=source, dtype=dtype)
        yield x, torch.randint(3, (size,), generator=source)


def by_stepper(model, optimizer, accumulate, steps, **options):
    """Train with a Stepper; the norms and coefficients that it reports."""
    options = {"scheduler": warm_up(optimizer)} | options
    stepper = halfstep.Stepper(model, optimizer, policy="fp32", accumulate=accumulate, **options)
    outcomes = []
    for x, y in batches(steps * accumulate):
        with stepper.forward():
            loss = F.cross_entropy(model(x), y)
        stepper.backward(loss)
        outcomes.append(stepper.step())
    stepper.flush()
    return [outcome for outcome in outcomes if outcome.kind != "accumulating"]


def by_hand(model, optimizer, accumulate, steps, clip_norm=None, divides_sum=False):
    """The loop of torch's recipes."""
    scheduler = warm_up(optimizer)
    for number, (x, y) in enumerate(batches(steps * accumulate)):
        loss = F.cross_entropy(model(x), y)
        (loss if divides_sum else loss / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if divides_sum:
            for p in model.parameters():
                p.grad.div_(accumulate)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return scheduler


def assert_same_bits(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def states_of(model, optimizer):
    state = {
        f"{i}.{name}": value.clone()
        for i, one in optimizer.state_dict()["state"].items()
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
    }
    return {**model.state_dict(), **state}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_100_steps_of_4_micro_batches_with_a_scheduler_are_the_plain_loop_bit_for_bit(delay, name):
    mine, theirs = network(), network()
    my_optimizer, their_optimizer = OPTIMIZERS[name](mine.parameters()), OPTIMIZERS[name](theirs.parameters())
    outcomes = by_stepper(mine, my_optimizer, 4, 100)
    by_hand(theirs, their_optimizer, 4, 100)
    assert_same_bits(states_of(mine, my_optimizer), states_of(theirs, their_optimizer))
    assert my_optimizer.param_groups[0]["lr"] == their_optimizer.param_groups[0]["lr"]
    assert {outcome.kind for outcome in outcomes} == {"applied"}
    assert len(outcomes) == 100
    assert {outcome.scale for outcome in outcomes} == {1.0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_3_micro_batches_are_their_summed_gradient_divided_by_3(delay, name):
    """The sum is divided, once: 1/3 of each loss, as recipes have it, rounds three times more."""
    mine, theirs = network(), network()
    my_optimizer, their_optimizer = OPTIMIZERS[name](mine.parameters()), OPTIMIZERS[name](theirs.parameters())
    by_stepper(mine, my_optimizer, 3, 40)
    by_hand(theirs, their_optimizer, 3, 40, divides_sum=True)
    assert_same_bits(states_of(mine, my_optimizer), states_of(theirs, their_optimizer))


# -- clipping: one division where torch multiplies twice --------------------------------------------------------------


def ulp(x):
    """Distance to the next fp32 number, for each element of an fp64 tensor."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-126)))).mul(EPSILON)


def gradients_seen(optimizer):
    """What the optimizer steps with: read after the step, since fused kernels divide on their way."""
    seen = []

    def note(optimizer, args, kwargs):
        seen[:] = [p.grad.double() for group in optimizer.param_groups for p in group["params"]]

    optimizer.register_step_post_hook(note)
    return seen


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw-fused"])
@pytest.mark.parametrize("clip_norm", [0.01, 0.1])
def test_one_clipped_step_is_within_4_ulp_of_torchs(delay, name, clip_norm):
    """And within 3 of what fp64 says; torch's norm, sum, quotient and product err by up to 3.6 (worst of 270 steps)."""
    for width in (8, 40, 200):
        torch.manual_seed(width)
        mine = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        theirs = copy.deepcopy(mine)
        optimizer = OPTIMIZERS[name](mine.parameters())
        seen = gradients_seen(optimizer)
        stepper = halfstep.Stepper(mine, optimizer, policy="fp32", accumulate=4, clip_norm=clip_norm)
        for x, y in batches(4):
            with stepper.forward():
                loss = F.cross_entropy(mine(x), y)
            stepper.backward(loss)
            outcome = stepper.step()
            F.cross_entropy(theirs(x), y).div(4).backward()
        exact = [p.grad.double() for p in theirs.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in exact])).item()
        coefficient = min(1.0, clip_norm / (norm + 1e-6))
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        assert coefficient < 1.0
        assert outcome.grad_norm == pytest.approx(norm, rel=2 * EPSILON)
        assert outcome.clip_coefficient == pytest.approx(coefficient, rel=2 * EPSILON)
        for mine_seen, g, p in zip(seen, exact, theirs.parameters(), strict=True):
            spacing = ulp(g * coefficient)
            assert ((mine_seen - p.grad.double()).abs() <= 4 * spacing).all()
            assert ((mine_seen - g * coefficient).abs() <= 3 * spacing).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [0.05, 0.5])
def test_100_clipped_steps_stay_together(delay, name, clip_norm):
    """Measured: weights differ by at most 1.1e-7 of the largest one after 100 steps; here up to 1e-6 may."""
    mine, theirs = network(), network()
    my_optimizer, their_optimizer = OPTIMIZERS[name](mine.parameters()), OPTIMIZERS[name](theirs.parameters())
    outcomes = by_stepper(mine, my_optimizer, 4, 100, clip_norm=clip_norm)
    by_hand(theirs, their_optimizer, 4, 100, clip_norm=clip_norm)
    assert sum(outcome.clip_coefficient < 1.0 for outcome in outcomes) >= 80
    largest = max(p.abs().max().item() for p in theirs.parameters())
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max().item() <= 1e-6 * largest


def test_a_norm_below_clip_norm_changes_no_bit(delay):
    mine, theirs = network(), network()
    by_stepper(mine, OPTIMIZERS["adamw-fused"](mine.parameters()), 2, 10, clip_norm=1e6)
    by_hand(theirs, OPTIMIZERS["adamw-fused"](theirs.parameters()), 2, 10)
    assert_same_bits(mine.state_dict(), theirs.state_dict())


# -- windows by weight: one big batch, in fp64 ------------------------------------------------------------------------

FP64_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


def rows_of(sizes):
    source = torch.Generator().manual_seed(3)
    size = sum(sizes)
    x = torch.randn(size, 5, generator=source, dtype=torch.float64)
    return list(zip(x.split(sizes), torch.randint(3, (size,), generator=source).split(sizes), strict=True))


def assert_is_one_big_batch(name, windows, weigh, accumulate=None):
    """Each window steps as its rows, put together, would: weights equal to 1e-12, relative to the largest."""
    torch.manual_seed(4)
    mine = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    theirs = copy.deepcopy(mine)
    optimizer, reference = FP64_OPTIMIZERS[name](mine.parameters()), FP64_OPTIMIZERS[name](theirs.parameters())
    stepper = halfstep.Stepper(mine, optimizer, policy="fp32", accumulate=accumulate)
    for sizes in windows:
        rows = rows_of(sizes)
        for x, y in rows:
            with stepper.forward():
                loss = F.cross_entropy(mine(x), y)
            stepper.backward(loss, weight=weigh(len(x)))
            stepper.step()
        if stepper.num_micro_batches:
            stepper.flush()
        x, y = (torch.cat(part) for part in zip(*rows, strict=True))
        F.cross_entropy(theirs(x), y).backward()
        reference.step()
        reference.zero_grad()
        largest = max(p.abs().max().item() for p in theirs.parameters())
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (a - b).abs().max().item() <= 1e-12 * largest
    assert stepper.steps == len(windows)


@pytest.mark.parametrize("name", FP64_OPTIMIZERS)
@pytest.mark.parametrize("weigh", [float, torch.tensor], ids=["number", "tensor"])
def test_unequal_micro_batches_by_weight_are_one_big_batch(delay, name, weigh):
    assert_is_one_big_batch(name, [(7, 3, 5), (1, 11), (6,), (3, 3, 3, 1), (1, 2, 13)], weigh)


@pytest.mark.parametrize("name", FP64_OPTIMIZERS)
def test_a_short_last_window_is_one_big_batch(delay, name):
    assert_is_one_big_batch(name, [(4, 4, 4, 4), (4, 4, 4)], lambda size: None, accumulate=4)
    assert_is_one_big_batch(name, [(5, 5, 5), (5,)], lambda size: None, accumulate=3)


def test_token_weights_are_one_big_batch_of_tokens(delay):
    """Sequences of many lengths, padded: the loss is a mean over tokens, and so is the step of their window."""
    source = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    mine = nn.Linear(6, 4).double()
    theirs = copy.deepcopy(mine)
    optimizer = torch.optim.SGD(mine.parameters(), 0.5)
    stepper = halfstep.Stepper(mine, optimizer, policy="fp32", accumulate=3)
    lengths = [[2, 9, 4], [1, 1], [30, 7, 12, 5]]
    padded = max(max(batch) for batch in lengths)
    total = torch.zeros((), dtype=torch.float64)
    for batch in lengths:
        x = torch.randn(len(batch), padded, 6, generator=source, dtype=torch.float64)
        y = torch.randint(4, (len(batch), padded), generator=source)
        for row, length in enumerate(batch):
            y[row, length:] = -100  # cross_entropy's word for "no target"
        with stepper.forward():
            loss = F.cross_entropy(mine(x).flatten(0, 1), y.flatten())
        stepper.backward(loss, weight=(y != -100).sum())
        outcome = stepper.step()
        total = total + F.cross_entropy(theirs(x).flatten(0, 1), y.flatten(), reduction="sum")
    (total / sum(map(sum, lengths))).backward()
    torch.optim.SGD(theirs.parameters(), 0.5).step()
    assert outcome.kind == "applied"
    assert outcome.grad_norm == pytest.approx(
        torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in theirs.parameters()])).item(), rel=1e-6
    )
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max().item() <= 1e-12
