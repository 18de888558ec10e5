"""One step on every executor: the same bits, whatever the rule, the storage, the shape and the number of threads."""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.kernels import rounding, rules, storage, torch_step
from halfstep.kernels.slots import Kept, Slot, Turn, finite
from halfstep.kernels.storage import Master, Moment

executor = pytest.importorskip("halfstep.kernels.numba_.executor")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RULES = [rules.ADAM, rules.SGD, rules.LION]
GROUPS = {
    "adam": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
}
MASTERS = [(FP32, Master.NONE), *itertools.product((BF16, FP16), Master)]
MOMENTS = [Moment.FP32, Moment.BF16, Moment.INT8]
SHAPES = [(40, 70), (3, 32), (5, 1030), (2, 3, 4, 5), (1, 1), (7, 31)]


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request, monkeypatch):
    monkeypatch.setattr("halfstep.kernels.numba_.loops.FEWEST", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def new_slot(shape, dtype, master, rule, moment):
    value = torch.randn(shape)
    weight, rest = value.to(dtype), None
    if master == Master.FP32:
        rest = value.clone()
    elif master in (Master.SPLIT, Master.SPLIT8):
        weight, rest = (storage.split if master == Master.SPLIT else storage.split8)(value, dtype)
    moments = tuple(new_moment(shape, moment) for _ in rule.moments)
    return Slot(weight, master, rest, moments)


def new_moment(shape, kind):
    if kind != Moment.INT8:
        return Kept(kind, torch.zeros(shape, dtype={Moment.FP32: FP32, Moment.BF16: BF16}[kind]))
    row = torch.Size(shape).numel() // shape[0]
    scales = torch.zeros(shape[0], -(-row // storage.GROUP), dtype=torch.int16)
    return Kept(kind, torch.zeros(shape, dtype=torch.int8), scales)


def copy_of(slot):
    moments = tuple(
        Kept(m.kind, m.values.clone(), None if m.scales is None else m.scales.clone()) for m in slot.moments
    )
    rest = None if slot.rest is None else slot.rest.clone()
    return Slot(slot.weight.clone(), slot.master, rest, moments, slot.index)


def tensors(slot):
    yield slot.weight
    if slot.rest is not None:
        yield slot.rest
    for moment in slot.moments:
        yield moment.values
        if moment.scales is not None:
            yield moment.scales


def assert_same_bits(ours, wanted):
    for found, right in zip(tensors(ours), tensors(wanted), strict=True):
        kind = {4: torch.int32, 2: torch.int16, 1: torch.int8}[found.element_size()]
        assert torch.equal(found.view(kind), right.view(kind))


def turn_of(rule, slots, gradients, numbers, multiplier=1.0, keys=None, found_inf=None, counts_stalled=False):
    constants = finite(torch.tensor([(multiplier, *numbers)] * len(slots), dtype=torch.float64))
    keys = torch.tensor(keys or [0] * len(slots))
    return Turn(rule, slots, gradients, constants, keys, found_inf, counts_stalled)


def run(step, rule, slots, num_steps=3, found_inf=None, gradient_dtype=None):
    """Gradients, multipliers and keys differ from step to step; they are the same for whoever runs it."""
    total = 0
    for number in range(1, num_steps + 1):
        gradients, keys = [], []
        for place, slot in enumerate(slots):
            generator = torch.Generator().manual_seed(number + 9 * place)
            gradient = torch.randn(slot.weight.shape, generator=generator)
            gradients.append(gradient.to(gradient_dtype or slot.weight.dtype))
            keys.append(storage.random_key(5, number, place))
            slot.index = 17 * place
        numbers, multiplier = rule.numbers(GROUPS[rule.name], number), (1.0, -0.3, 2.0**-10)[number % 3]
        total += int(step(turn_of(rule, slots, gradients, numbers, multiplier, keys, found_inf)).saturated)
    return total


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.name)
@pytest.mark.parametrize(("dtype", "master"), MASTERS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_compiled_and_plain_agree_in_every_bit(rule, dtype, master, moment):
    ours = [new_slot(shape, dtype, master, rule, moment) for shape in SHAPES]
    wanted = [copy_of(slot) for slot in ours]
    before = [copy_of(slot) for slot in ours]
    assert run(executor.step, rule, ours) == run(torch_step.step, rule, wanted)
    for our, right in zip(ours, wanted, strict=True):
        assert_same_bits(our, right)
    assert any((our.weight != old.weight).any() for our, old in zip(ours, before, strict=True))


@pytest.mark.parametrize("gradient_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_gradients_of_another_dtype(dtype, gradient_dtype):
    """Sums in fp32 over a window come with 16-bit weights."""
    master = Master.NONE if dtype == FP32 else Master.SPLIT
    ours = [new_slot((40, 70), dtype, master, rules.ADAM, Moment.FP32)]
    wanted = [copy_of(slot) for slot in ours]
    run(executor.step, rules.ADAM, ours, gradient_dtype=gradient_dtype)
    run(torch_step.step, rules.ADAM, wanted, gradient_dtype=gradient_dtype)
    assert_same_bits(ours[0], wanted[0])


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.name)
@pytest.mark.parametrize(("dtype", "master"), MASTERS, ids=str)
def test_a_few_rows_at_a_time_are_the_same_bits(dtype, master, moment, monkeypatch):
    """Counts, skipped steps and counters included; what is unpacked at once is bounded."""
    sizes = []

    def watched(weight, *arguments):
        sizes.append(weight.numel())
        return rules.adam(weight, *arguments)

    ungrouped = Moment.BF16 if moment == Moment.INT8 else moment
    kinds = [(shape, moment) for shape in SHAPES] + [(shape, ungrouped) for shape in [(0, 4), (), (400,)]]
    ours = [new_slot(shape, dtype, master, rules.ADAM, kind) for shape, kind in kinds]
    for place, slot in enumerate(ours):
        slot.index, slot.step = 17 * place, torch.tensor(4.0)
    wanted = [copy_of(slot) for slot in ours]
    gradients = [torch.randn(slot.weight.shape).to(dtype) for slot in ours]
    keys = [*range(len(ours))]
    for number, (lr, found_inf) in enumerate([(1e-2, 0.0), (1e-2, 1.0), *[(3e38, 0.0)] * 4], 1):
        numbers = rules.adam_numbers({**GROUPS["adam"], "lr": lr, "weight_decay": 0.0}, number)
        arguments = gradients, numbers, 1.0, keys, torch.tensor(found_inf), True
        whole = torch_step.step(turn_of(rules.ADAM, wanted, *arguments))
        with monkeypatch.context() as patch:
            patch.setattr(torch_step, "AT_ONCE", 150)
            counts = torch_step.step(turn_of(dataclasses.replace(rules.ADAM, function=watched), ours, *arguments))
        assert list(map(int, counts)) == list(map(int, whole))
        assert (counts.updated > 0) == (found_inf == 0.0)
        for our, right in zip(ours, wanted, strict=True):
            assert_same_bits(our, right)
    assert counts.saturated > 0
    assert sizes == [*[140] * 20, 96, *[1030] * 5, 120, 1, 124, 93, 1, 150, 150, 100] * 6
    assert [slot.step.item() for slot in ours] == [9.0] * len(ours)


def test_nothing_is_read_by_the_host(monkeypatch):
    """Of fake tensors it could not be; nor of a device without a wait."""
    monkeypatch.setattr(torch_step, "AT_ONCE", 150)
    with FakeTensorMode():
        slot = new_slot((40, 70), BF16, Master.SPLIT8, rules.ADAM, Moment.INT8)
        numbers, options = rules.adam_numbers(GROUPS["adam"], 1), {"keys": [3], "counts_stalled": True}
        turn = turn_of(rules.ADAM, [slot], [torch.randn(40, 70)], numbers, found_inf=torch.zeros(()), **options)
        assert torch_step.step(turn).stalled.shape == ()


def test_kinds_and_sizes_mixed_in_one_call():
    kinds = itertools.product(MASTERS, MOMENTS)
    ours = [new_slot((index % 5 + 1, 37), *kind, rules.ADAM, moment) for index, (kind, moment) in enumerate(kinds)]
    ours.append(new_slot((100,), BF16, Master.SPLIT, rules.ADAM, Moment.BF16))
    ours.append(new_slot((), FP32, Master.NONE, rules.ADAM, Moment.FP32))
    ours.append(new_slot((0, 4), BF16, Master.SPLIT, rules.ADAM, Moment.FP32))
    wanted = [copy_of(slot) for slot in ours]
    run(executor.step, rules.ADAM, ours)
    run(torch_step.step, rules.ADAM, wanted)
    for our, right in zip(ours, wanted, strict=True):
        assert_same_bits(our, right)


def test_sgd_without_momentum_keeps_nothing():
    group = {**GROUPS["sgd"], "momentum": 0.0, "nesterov": False}
    slot = Slot(torch.ones(3), Master.NONE, None, ())
    same = copy_of(slot)
    numbers = rules.sgd_numbers(group, 1)
    executor.step(turn_of(rules.SGD, [slot], [torch.ones(3)], numbers))
    torch_step.step(turn_of(rules.SGD, [same], [torch.ones(3)], numbers))
    assert torch.equal(slot.weight, same.weight)
    assert slot.weight[0].item() == pytest.approx(1 - 1e-2 * 1.1)


@pytest.mark.parametrize("step", [executor.step, torch_step.step], ids=["numba", "torch"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_skipped_step_leaves_every_bit(rule, step):
    """Invariant 1, for every storage; non-finite gradients included."""
    for (dtype, master), moment in itertools.product(MASTERS, MOMENTS):
        slot = new_slot((5, 70), dtype, master, rule, moment)
        run(step, rule, [slot], num_steps=1)
        before = copy_of(slot)
        gradient = torch.full_like(slot.weight, torch.nan)
        numbers = rule.numbers(GROUPS[rule.name], 2)
        turn = turn_of(rule, [slot], [gradient], numbers, found_inf=torch.tensor(1.0), counts_stalled=True)
        assert list(map(int, step(turn))) == [0, 0, 0]
        assert_same_bits(slot, before)


@pytest.mark.parametrize("step", [executor.step, torch_step.step], ids=["numba", "torch"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_nothing_non_finite_is_written(rule, step):
    """Invariant 2: the largest finite gradients, weights and learning rates."""
    for (dtype, master), moment in itertools.product(MASTERS, MOMENTS):
        slot = new_slot((5, 70), dtype, master, rule, moment)
        gradient = torch.full((5, 70), min(3e38, torch.finfo(dtype).max), dtype=dtype)
        gradient[::2] *= -1
        counts = 0
        for number in range(1, 13):
            numbers = rule.numbers({**GROUPS[rule.name], "lr": 2e38, "weight_decay": 0.0}, number)
            counts += int(step(turn_of(rule, [slot], [gradient], numbers, found_inf=torch.tensor(0.0))).saturated)
        assert counts > 0
        for tensor in tensors(slot):
            assert not tensor.is_floating_point() or tensor.isfinite().all()
        assert torch_step.read_master(slot).isfinite().all()


def test_threads_change_no_bit(monkeypatch):
    slots = [new_slot((64, 70), BF16, Master.SPLIT8, rules.ADAM, Moment.INT8) for _ in range(4)]
    others = [copy_of(slot) for slot in slots]
    run(executor.step, rules.ADAM, slots)
    torch.set_num_threads(7)
    run(executor.step, rules.ADAM, others)
    for our, right in zip(slots, others, strict=True):
        assert_same_bits(our, right)


def test_a_shard_has_the_random_bits_of_the_whole():
    whole = new_slot((6, 40), BF16, Master.STOCHASTIC, rules.ADAM, Moment.BF16)
    weight, gradient = whole.weight.clone(), torch.randn(6, 40).bfloat16()
    numbers = rules.adam_numbers(GROUPS["adam"], 1)
    executor.step(turn_of(rules.ADAM, [whole], [gradient], numbers, keys=[99]))
    for rows, index in ((slice(0, 2), 0), (slice(2, 6), 80)):
        moments = tuple(new_moment((rows.stop - rows.start, 40), Moment.BF16) for _ in range(2))
        part = Slot(weight[rows].clone(), Master.STOCHASTIC, None, moments, index)
        executor.step(turn_of(rules.ADAM, [part], [gradient[rows].clone()], numbers, keys=[99]))
        assert torch.equal(part.weight, whole.weight[rows])
        assert torch.equal(part.moments[1].values, whole.moments[1].values[rows])


@pytest.mark.parametrize("step", [executor.step, torch_step.step], ids=["numba", "torch"])
@pytest.mark.parametrize(("dtype", "master"), [kind for kind in MASTERS if kind[1] != Master.NONE], ids=str)
def test_what_somebody_else_writes_into_a_weight_holds(dtype, master, step):
    """Zeros (pruning) beside a rest below them, infinities, other numbers: the step begins with what is there."""
    slot = new_slot((4, 64), dtype, master, rules.SGD, Moment.FP32)
    slot.weight[0], slot.weight[1], slot.weight[2] = 0.0, -0.0, torch.linspace(-3, 3, 64).to(dtype)
    written = slot.weight.clone()
    no_gradient, numbers = torch.zeros(4, 64), rules.sgd_numbers({**GROUPS["sgd"], "weight_decay": 0.0}, 1)
    step(turn_of(rules.SGD, [slot], [no_gradient], numbers))
    kept = torch_step.read_master(slot)
    assert (kept - written.float()).abs().div(storage._ulp_fp16(written) if dtype == FP16 else 1.0).max() <= 0.5
    if dtype == BF16:  # fp16: at ties and powers of two, the number next to it
        assert torch.equal(slot.weight, written)
        assert torch.equal(rounding.rounded(kept, dtype), written)
    slot.weight[3] = torch.inf
    assert (torch_step.read_master(slot)[3] == torch.inf).all()


def test_the_meter_counts_updates_that_round_to_nothing():
    """Plain 16-bit weights: against the definition; no other number changes."""
    for rule, (dtype, master) in itertools.product(RULES, MASTERS):
        slots = [new_slot((40, 70), dtype, master, rule, Moment.BF16) for _ in range(2)]
        with_meter, others = [copy_of(slot) for slot in slots], [copy_of(slot) for slot in slots]
        gradients = [torch.randn(40, 70) * 1e-3 for _ in slots]
        gradients[0][:20] = 0
        group = {**GROUPS[rule.name], "lr": 1e-3, "weight_decay": 0.0}
        arguments = gradients, rule.numbers(group, 1), 1.0, [7, 8], None
        executor.step(turn_of(rule, slots, *arguments))
        counts = executor.step(turn_of(rule, with_meter, *arguments, counts_stalled=True))
        same = torch_step.step(turn_of(rule, others, *arguments, counts_stalled=True))
        assert list(map(int, counts)) == list(map(int, same))
        for slot, metered, other in zip(slots, with_meter, others, strict=True):
            assert_same_bits(metered, slot)
            assert_same_bits(other, slot)
        assert 0 < counts.updated <= 2 * 40 * 70
        share = counts.stalled / counts.updated
        if master == Master.NONE and dtype == BF16 and rule is not rules.SGD:
            assert 0.2 < share < 0.95
        elif master in (Master.FP32, Master.SPLIT) or dtype == FP32:
            assert share < (0.05 if rule is rules.SGD else 1e-3)


@pytest.mark.parametrize("step", [executor.step, torch_step.step], ids=["numba", "torch"])
def test_a_step_is_counted_once_for_every_tensor_and_a_skipped_one_never(step):
    slots = [new_slot(shape, BF16, Master.SPLIT, rules.ADAM, Moment.BF16) for shape in [*SHAPES, (0, 4), (3,)]]
    for slot in slots:
        slot.step = torch.tensor(4.0)
    run(step, rules.ADAM, slots, num_steps=2)
    run(step, rules.ADAM, slots, num_steps=1, found_inf=torch.tensor(1.0))
    assert [slot.step.item() for slot in slots] == [6.0] * len(slots)


def test_what_was_prepared_serves_the_next_step_and_nothing_else():
    """Gradients lie elsewhere each time, and may come in another dtype."""
    ours = [new_slot((40, 70), BF16, Master.SPLIT, rules.ADAM, Moment.INT8) for _ in range(3)]
    wanted, prepared = [copy_of(slot) for slot in ours], {}
    plans = []
    for number, dtype in enumerate([BF16, BF16, FP32, BF16], 1):
        gradients = [torch.randn(40, 70).to(dtype) for _ in ours]
        numbers = rules.adam_numbers(GROUPS["adam"], number)
        turn = turn_of(rules.ADAM, ours, gradients, numbers, keys=[number, 7, 8])
        turn.prepared = prepared
        executor.step(turn)
        plans.append(prepared["numba"])
        torch_step.step(turn_of(rules.ADAM, wanted, gradients, numbers, keys=[number, 7, 8]))
    for our, right in zip(ours, wanted, strict=True):
        assert_same_bits(our, right)
    assert plans[0] is plans[1]
    assert plans[2] is not plans[1]


@pytest.mark.parametrize("step", [executor.step, torch_step.step], ids=["numba", "torch"])
def test_first_moments_saturate_and_keep_their_sign(step):
    slots = [new_slot((2, length), FP32, Master.NONE, rules.SGD, moment) for moment in MOMENTS for length in (32, 31)]
    for slot in slots:
        slot.moments[0].values.fill_(127 if slot.moments[0].scales is not None else 1e38)
        slot.moments[0].values[1] *= -1
        if slot.moments[0].scales is not None:
            slot.moments[0].scales.fill_(storage.LARGEST_SCALE - 2**16)
    wanted = [copy_of(slot) for slot in slots]
    gradients = [torch.zeros_like(slot.weight) for slot in slots]
    for momentum in (3.0, 1e9):
        numbers = (0.0, momentum, 0.0, 1.0, 0.0, 0.0)
        step(turn_of(rules.SGD, slots, gradients, numbers))
        torch_step.step(turn_of(rules.SGD, wanted, gradients, numbers))
        for slot, right in zip(slots, wanted, strict=True):
            assert_same_bits(slot, right)
            value = torch_step.read_moment(slot.moments[0], 0)
            assert value.isfinite().all()
            assert (value[0] > 5e37).all()
            assert (value[1] < -5e37).all()


@pytest.mark.parametrize("default", [BF16, torch.float64])
def test_the_default_dtype_changes_nothing(default):
    ours = [new_slot((40, 70), BF16, Master.SPLIT8, rules.ADAM, Moment.INT8)]
    wanted = [copy_of(slot) for slot in ours]
    run(torch_step.step, rules.ADAM, wanted, gradient_dtype=BF16)
    for step, slots in ((torch_step.step, [copy_of(slot) for slot in ours]), (executor.step, ours)):
        torch.set_default_dtype(default)
        try:
            numbers = [rules.adam_numbers(GROUPS["adam"], number) for number in (1, 2, 3)]
            for number, constants in enumerate(numbers, 1):
                generator = torch.Generator().manual_seed(number)
                gradient = torch.randn((40, 70), generator=generator, dtype=FP32).to(BF16)
                slots[0].index = 0
                multiplier = (1.0, -0.3, 2.0**-10)[number % 3]
                step(turn_of(rules.ADAM, slots, [gradient], constants, multiplier, [storage.random_key(5, number, 0)]))
        finally:
            torch.set_default_dtype(FP32)
        assert_same_bits(slots[0], wanted[0])


def test_a_turn_in_which_some_have_no_plain_memory_counts_each_once():
    slots = [new_slot((40, 70), BF16, Master.SPLIT, rules.ADAM, Moment.INT8) for _ in range(3)]
    slots.append(new_slot((3, 1), BF16, Master.SPLIT, rules.ADAM, Moment.INT8))
    for slot in slots:
        slot.step = torch.tensor(0.0)
    wanted = [copy_of(slot) for slot in slots]
    gradients = [torch.randn(slot.weight.shape).to(BF16) for slot in slots]

    class Odd(torch.Tensor):
        """Of which the loops know nothing."""

    numbers = rules.adam_numbers(GROUPS["adam"], 1)
    executor.step(
        turn_of(rules.ADAM, slots, [gradients[0].as_subclass(Odd), *gradients[1:]], numbers, keys=[1, 2, 3, 4])
    )
    torch_step.step(turn_of(rules.ADAM, wanted, gradients, numbers, keys=[1, 2, 3, 4]))
    for slot, right in zip(slots, wanted, strict=True):
        assert_same_bits(slot, right)
        assert slot.step == 1
