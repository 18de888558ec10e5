"""The Triton executor: the bits of the plain step, and what its machine code for two generations of GPUs says.

Where there is no GPU, Triton's interpreter runs the kernels on the CPU. It has to be asked for before they are defined,
so those tests run in a process of their own, which ``test_in_the_interpreter`` starts.
"""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.errors import UnsupportedError
from halfstep.kernels import rules, storage, torch_step
from halfstep.kernels.slots import Kept, Slot, Turn, finite
from halfstep.kernels.storage import Master, Moment

pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from halfstep.kernels.triton_ import executor, kernel

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETS else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETS, reason="runs in test_in_the_interpreter")
compiles = pytest.mark.skipif(INTERPRETS, reason="has nothing to do with the interpreter")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RULES = [rules.ADAM, rules.SGD, rules.LION]
GROUPS = {
    "adam": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
}
MASTERS = [(FP32, Master.NONE), *itertools.product((BF16, FP16), Master)]
MOMENTS = [Moment.FP32, Moment.BF16, Moment.INT8]
SHAPES = [(3, 64), (2, 3, 16), (7, 31)]  # whole groups; rows of a group and a half; odd ones


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # the interpreter is NumPy, and says so of every NaN and overflow
        yield


@pytest.mark.skipif(INTERPRETS or DEVICE == "cuda", reason="the tests run by themselves")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", str(Path(__file__))]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= 18, ended.stdout


# ---- slots ----------------------------------------------------------------------------------------------------------


def new_slot(shape, dtype, master, moment, num_moments=2):
    """Numbers from fp16's subnormals to some hundreds."""
    value = torch.randn(shape) * 2.0 ** torch.randint(-27, 8, shape)
    weight, rest = value.to(dtype), None
    if master == Master.FP32:
        rest = value.clone()
    elif master in (Master.SPLIT, Master.SPLIT8):
        weight, rest = (storage.split if master == Master.SPLIT else storage.split8)(value, dtype)
    return Slot(weight, master, rest, tuple(new_moment(shape, moment) for _ in range(num_moments)))


def new_moment(shape, kind):
    """As if there had been steps."""
    if kind != Moment.INT8:
        value = torch.randn(shape).square() * 2.0 ** torch.randint(-20, 2, shape)
        return Kept(kind, value.to({Moment.FP32: FP32, Moment.BF16: BF16}[kind]))
    groups = shape[0], -(-torch.Size(shape).numel() // shape[0] // storage.GROUP)
    scales = storage.encode_scale(2.0 ** -torch.rand(groups).mul(20))
    return Kept(kind, torch.randint(-127, 128, shape, dtype=torch.int8), scales)


def moved(slot, device):
    """A copy on a device."""

    def copy(tensor):
        return None if tensor is None else tensor.to(device, copy=True)

    moments = tuple(Kept(m.kind, copy(m.values), copy(m.scales)) for m in slot.moments)
    return Slot(copy(slot.weight), slot.master, copy(slot.rest), moments, slot.index)


def tensors(slot):
    kept = itertools.chain.from_iterable((m.values, m.scales) for m in slot.moments)
    return [tensor for tensor in (slot.weight, slot.rest, *kept) if tensor is not None]


def assert_same_bits(ours, wanted):
    for found, right in zip(tensors(ours), tensors(wanted), strict=True):
        kind = {4: torch.int32, 2: torch.int16, 1: torch.int8}[found.element_size()]
        bits, right_bits = found.cpu().view(kind), right.view(kind)
        if right.is_floating_point():  # the payload of a NaN is nobody's business
            bits, right_bits = (b.masked_fill(v.isnan(), 0) for b, v in ((bits, found.cpu()), (right_bits, right)))
            assert torch.equal(found.cpu().isnan(), right.isnan())
        assert torch.equal(bits, right_bits), (ours.master, ours.weight.dtype, [m.kind for m in ours.moments])


def key_of(place):
    return storage.random_key(5, 1, place)


def turn_of(rule, slots, gradients, numbers, *, factor=1.0, keys=None, found_inf=None, counts_stalled=False):
    device = slots[0].weight.device
    constants = finite(torch.tensor([(factor, *numbers)] * len(slots), dtype=torch.float64)).to(device)
    keys = torch.tensor(keys or list(map(key_of, range(len(slots)))), device=device)
    found_inf = None if found_inf is None else torch.tensor(found_inf, device=device)
    gradients = [gradient.to(device) for gradient in gradients]
    return Turn(rule, slots, gradients, constants, keys, found_inf, counts_stalled)


def agree(rule, slots, gradients, numbers, **options):
    """Take a turn on copies of the slots, ours and the plain one; the counts."""
    ours = [moved(slot, DEVICE) for slot in slots]
    counts = executor.step(turn_of(rule, ours, gradients, numbers, **options))
    wanted = torch_step.step(turn_of(rule, slots, gradients, numbers, **options))
    assert [None if c is None else int(c) for c in counts] == [None if c is None else int(c) for c in wanted]
    for our, right in zip(ours, slots, strict=True):
        assert_same_bits(our, right)
    return counts


EACH_MASTER = list(zip(MASTERS, itertools.cycle(MOMENTS), strict=False))  # and each moment with some of them


def slots_of(rule, shapes, kinds=EACH_MASTER):
    return [
        new_slot(shape, *kind, moment, len(rule.moments))
        for (kind, moment), shape in zip(kinds, itertools.cycle(shapes), strict=False)
    ]


# ---- the same bits --------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_storage_in_one_turn(rule):
    kinds = itertools.product(MASTERS, MOMENTS) if rule is rules.ADAM else EACH_MASTER
    slots = slots_of(rule, SHAPES, kinds)
    gradients = []
    for place, slot in enumerate(slots):
        slot.index = 17 * place
        gradients.append((torch.randn(slot.weight.shape) * (torch.rand(slot.weight.shape) > 0.3)).to(slot.weight))
    agree(rule, slots, gradients, rule.numbers(GROUPS[rule.name], 2), factor=-0.3)


@pytest.fixture
def _large_blocks(monkeypatch):
    """For the interpreter 2**16 elements are as quick as 2**10."""
    if INTERPRETS:
        monkeypatch.setattr(kernel, "_GROUPS", tl.constexpr(2**11))
        monkeypatch.setattr(kernel, "GROUPS", 2**11)
        executor._programs.cache_clear()
        yield
        executor._programs.cache_clear()
    else:
        yield


NO_CHANGE = (0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)  # numbers of Adam that keep all as it is
TAKE_MOMENTUM = (0.0, 1.0, 0.0, 0.0, 1.0, -1.0)  # of SGD: what is added to the weight is the momentum,
TAKE_GRADIENT = (0.0, 0.0, 1.0, 1.0, 0.0, -1.0)  # or the gradient, which becomes the momentum


def near(values):
    """Each fp32 value or a neighbour of it."""
    return (values.view(torch.int32) + torch.randint(-1, 2, values.shape, dtype=torch.int32)).view(FP32)


def every_16_bit_number(dtype):
    return torch.arange(2**16).to(torch.int16).view(dtype)


@runs
@pytest.mark.usefixtures("_large_blocks")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_roundings_at_every_number_and_every_tie(dtype):
    """Near each 16-bit number and near the middle to the next, and where chance just decides for up or down."""
    bits = storage.random_bits(key_of(Master.STOCHASTIC), 2**17, 2**16, torch.device("cpu")) & 0xFFFF
    parts = bits + torch.randint(-1, 3, bits.shape)
    chances = ((0x40000000 - parts).to(torch.int32).view(FP32)) if dtype == BF16 else (parts / 2 + bits / 2) * 2.0**-40
    numbers = every_16_bit_number(dtype)
    middles = (numbers.double() + numbers.roll(-1).double()) / 2
    wanted = torch.cat([near(numbers.float()), near(middles.float()), chances]).view(-1, 64)
    wanted[~wanted.isfinite()] = 3e38
    slots = [new_slot(wanted.shape, dtype, master, Moment.FP32, 1) for master in Master]
    for slot in slots:
        for tensor in tensors(slot):
            tensor.zero_()
        slot.moments[0].values.copy_(wanted)
    counts = agree(rules.SGD, slots, [torch.zeros_like(wanted) for _ in slots], TAKE_MOMENTUM)
    assert counts.saturated > 0
    assert torch.equal(slots[Master.FP32].rest, wanted)
    moments = [new_slot(wanted.shape, FP32, Master.NONE, moment, 1) for moment in (Moment.BF16, Moment.INT8)]
    agree(rules.SGD, moments, [wanted for _ in moments], TAKE_GRADIENT)


@runs
@pytest.mark.usefixtures("_large_blocks")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_weight_beside_some_rest(dtype):
    """Infinities and NaN too; and moments in bf16."""
    slots = []
    for master in Master:
        slot = new_slot((1024, 64), dtype, master, Moment.BF16, 1)
        slot.weight.copy_(every_16_bit_number(dtype).view(1024, 64))
        slot.moments[0].values.copy_(every_16_bit_number(BF16).nan_to_num(0.0).view(1024, 64))
        if master == Master.FP32:
            slot.rest.copy_(slot.weight * (1 + 2.0**-9 * torch.rand(1024, 64)))
        elif slot.rest is not None:
            limits = torch.iinfo(slot.rest.dtype)
            slot.rest.copy_(torch.randint(limits.min, limits.max + 1, (1024, 64)))
        slots.append(slot)
    gradients = [torch.zeros(1024, 64) for _ in slots]
    agree(rules.SGD, slots, gradients, (*NO_CHANGE[:5], 0.0), counts_stalled=True)


@runs
@pytest.mark.usefixtures("_large_blocks")
def test_every_code_of_a_moment_and_every_scale():
    slot = new_slot((2**11, 32), FP32, Master.NONE, Moment.INT8)
    for moment in slot.moments:
        moment.values.copy_(torch.randint(-127, 128, (2**11, 32)))
        moment.scales.copy_((torch.arange(2**11).view(-1, 1) * 32 % 0xFF00).to(torch.int16))
    gradients = [torch.zeros(2**11, 32)]
    agree(rules.ADAM, [slot], gradients, NO_CHANGE)
    agree(rules.ADAM, [slot], gradients, (0.0, 1.0, 0.9, 0.1, 0.999, 0.001, 0.0, 1.0, 1.0))


@runs
@pytest.mark.parametrize(("chance", "sign"), [(0xFFFF, 1), (0, -1)])
def test_a_code_that_comes_back_by_a_rounding_less_or_more_stays(chance, sign):
    """Only the rarest chance would show it."""
    unit = 0x7F80 if sign > 0 else 0x7F85  # there are units whose codes come back as more, and such as less
    codes, scale = torch.arange(256).to(torch.uint8).view(8, 32), torch.full((8,), unit).to(torch.int16)
    root = storage.decode_second(codes, scale).sqrt()
    off = root * (torch.full((8,), 255.0) / storage.decode_scale(scale)).view(-1, 1) - codes
    codes = codes[off.sign() == sign][:4]
    bits = storage.random_bits(9, 0, 2**20, torch.device("cpu")) >> 16
    slots = []
    for code, index in zip(codes, (bits == chance).nonzero(), strict=False):
        slots.append(new_slot((1, 2), FP32, Master.NONE, Moment.INT8))
        slots[-1].index = int(index)
        slots[-1].moments[1].values.view(torch.uint8).copy_(torch.tensor([[code, 255]]))
        slots[-1].moments[1].scales.fill_(unit)
    agree(rules.ADAM, slots, [torch.zeros(1, 2) for _ in slots], NO_CHANGE, keys=[9] * len(slots))
    assert [int(slot.moments[1].values.view(torch.uint8)[0, 0]) for slot in slots] == codes.tolist()
    assert len(slots) == 4


@runs
def test_tensors_of_many_programs_in_one_launch():
    """Rows that end in groups, and a tensor that ends in a block; others beside them."""
    shapes = [(5, 515), (40, 64), (1, 1), (3, 1100)]
    kinds = [(BF16, Master.SPLIT, Moment.INT8), (BF16, Master.STOCHASTIC, Moment.BF16)]
    slots = [new_slot(shape, *kind) for kind in kinds for shape in shapes]
    slots.append(new_slot((100,), FP16, Master.SPLIT8, Moment.BF16))
    slots.append(new_slot((), FP32, Master.NONE, Moment.FP32))
    slots.append(new_slot((0, 4), BF16, Master.SPLIT, Moment.FP32))
    gradients = [torch.randn(slot.weight.shape).to(slot.weight) for slot in slots]
    agree(rules.ADAM, slots, gradients, rules.adam_numbers(GROUPS["adam"], 1))


@runs
def test_gradients_of_another_dtype_and_unaligned_views():
    slots, gradients = [], []
    for dtype, gradient_dtype in itertools.product((FP32, BF16, FP16), repeat=2):
        slots.append(new_slot((3, 32), dtype, Master.NONE if dtype == FP32 else Master.SPLIT, Moment.FP32))
        gradients.append(torch.randn(97).to(gradient_dtype)[1:].view(3, 32))
    agree(rules.ADAM, slots, gradients, rules.adam_numbers(GROUPS["adam"], 1))


@runs
def test_sgd_without_momentum_keeps_nothing():
    group = {**GROUPS["sgd"], "momentum": 0.0, "nesterov": False}
    slot = Slot(torch.ones(3), Master.NONE, None, ())
    agree(rules.SGD, [slot], [torch.ones(3)], rules.sgd_numbers(group, 1))
    assert slot.weight[0].item() == pytest.approx(1 - 1e-2 * 1.1)


@runs
@pytest.mark.parametrize(("rule", "found_inf"), list(zip(RULES, (1.0, 3.0, True), strict=True)))
def test_a_skipped_step_leaves_every_bit(rule, found_inf):
    """Invariant 1, for every storage; the gradients are NaN."""
    slots = [moved(slot, DEVICE) for slot in slots_of(rule, SHAPES)]
    before = [moved(slot, "cpu") for slot in slots]
    gradients = [torch.full_like(slot.weight, torch.nan) for slot in slots]
    numbers = rule.numbers(GROUPS[rule.name], 2)
    turn = turn_of(rule, slots, gradients, numbers, found_inf=found_inf, counts_stalled=True)
    assert list(map(int, executor.step(turn))) == [0, 0, 0]
    for slot, old in zip(slots, before, strict=True):
        assert_same_bits(slot, old)


@runs
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_nothing_non_finite_is_written(rule):
    """Invariant 2: the largest finite weights, gradients and learning rates; what is saturated is counted."""
    slots = slots_of(rule, [(2, 48)])
    signs = torch.tensor([1.0, -1.0]).repeat(48).view(2, 48)
    for slot in slots:
        slot.weight.copy_(torch.finfo(slot.weight.dtype).max * -signs)
    gradients = [3e38 * signs for _ in slots]
    numbers = rule.numbers({**GROUPS[rule.name], "lr": 2e38, "weight_decay": 0.0}, 1)
    counts = agree(rule, slots, gradients, numbers, found_inf=0.0)
    assert counts.saturated == len(slots) * 96
    for tensor in itertools.chain.from_iterable(map(tensors, slots)):
        assert not tensor.is_floating_point() or tensor.isfinite().all()


@runs
def test_moments_saturate():
    slots = [new_slot((2, 32), FP32, Master.NONE, moment, 1) for moment in MOMENTS]
    for slot in slots:
        slot.moments[0].values.fill_(127 if slot.moments[0].scales is not None else 3e38)
        slot.moments[0].values[1] *= -1
    slots[-1].moments[0].scales.fill_(-0x101)  # 0xFEFF: the largest
    agree(rules.SGD, slots, [torch.zeros(2, 32) for _ in slots], (0.0, 4.0, 0.0, 1.0, 0.0, 0.0))
    for slot in slots:
        value = torch_step.read_moment(slot.moments[0], 0)
        assert value.isfinite().all()
        assert (value[0] > 1e37).all()
        assert (value[1] < -1e37).all()


@runs
def test_what_somebody_else_writes_into_a_weight_holds():
    """Zeros beside a rest below them, infinities, NaN, other numbers: the step begins with what is there."""
    slots = [new_slot((5, 64), *kind, Moment.FP32, 1) for kind in MASTERS]
    for slot in slots:
        slot.weight[0], slot.weight[1], slot.weight[2] = 0.0, -0.0, torch.linspace(-3, 3, 64)
        slot.weight[3], slot.weight[4, :9] = torch.inf, torch.nan
    no_gradients = [torch.zeros(5, 64) for _ in slots]
    numbers = rules.sgd_numbers({**GROUPS["sgd"], "weight_decay": 0.0}, 1)
    agree(rules.SGD, slots, no_gradients, numbers, counts_stalled=True)


@runs
def test_a_shard_has_the_random_bits_of_the_whole():
    whole = new_slot((6, 40), BF16, Master.STOCHASTIC, Moment.INT8)
    shards = [(slice(0, 2), 0), (slice(2, 6), 80)]
    parts = [moved(whole, DEVICE) for _ in shards]
    for place, (rows, index) in enumerate(shards):
        moments = tuple(Kept(m.kind, m.values[rows].clone(), m.scales[rows].clone()) for m in parts[place].moments)
        parts[place] = Slot(parts[place].weight[rows].clone(), Master.STOCHASTIC, None, moments, index)
    gradient, numbers = torch.randn(6, 40).bfloat16(), rules.adam_numbers(GROUPS["adam"], 1)
    torch_step.step(turn_of(rules.ADAM, [whole], [gradient], numbers, keys=[99]))
    gradients = [gradient[rows].clone() for rows, _ in shards]
    executor.step(turn_of(rules.ADAM, parts, gradients, numbers, keys=[99, 99]))
    for part, (rows, _) in zip(parts, shards, strict=True):
        for ours, right in zip(tensors(part), tensors(whole), strict=True):
            assert torch.equal(ours.cpu(), right[rows])


@runs
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_meter_counts_updates_that_round_to_nothing(rule):
    slots = [new_slot((7, 70), *kind, Moment.BF16, len(rule.moments)) for kind in MASTERS]
    gradients = [torch.randn(7, 70) * 1e-3 for _ in slots]
    gradients[0][:4] = 0
    numbers = rule.numbers({**GROUPS[rule.name], "lr": 1e-3, "weight_decay": 0.0}, 1)
    counts = agree(rule, slots, gradients, numbers, counts_stalled=True)
    assert 0 < counts.stalled < counts.updated <= len(MASTERS) * 7 * 70


@runs
def test_a_step_is_counted_once_for_every_tensor_and_a_skipped_one_never():
    """Ragged rows, several programs of one tensor, pieces of 16 bytes and single elements, empty and 0-dim ones."""
    kinds = [((40, 70), Moment.INT8), ((64, 64), Moment.INT8), ((3,), Moment.BF16), ((5001,), Moment.BF16)]
    slots = [
        new_slot(shape, BF16, Master.STOCHASTIC, kind)
        for shape, kind in [*kinds, ((0, 4), Moment.BF16), ((), Moment.BF16)]
    ]
    for slot in slots:
        slot.step = torch.tensor(4.0, device=DEVICE)
    slots = [dataclasses.replace(moved(slot, DEVICE), step=slot.step) for slot in slots]
    for found_inf, wanted in ((None, 5.0), (0.0, 6.0), (1.0, 6.0), (math.inf, 6.0)):
        gradients = [torch.randn(slot.weight.shape).bfloat16() for slot in slots]
        numbers = rules.adam_numbers(GROUPS["adam"], 5)
        executor.step(turn_of(rules.ADAM, slots, gradients, numbers, found_inf=found_inf))
        assert [slot.step.item() for slot in slots] == [wanted] * len(slots)


@runs
def test_what_is_written_says_so_to_autograd():
    slot = moved(new_slot((2, 32), BF16, Master.SPLIT, Moment.INT8), DEVICE)
    version = slot.weight._version
    executor.step(turn_of(rules.ADAM, [slot], [torch.ones(2, 32)], rules.adam_numbers(GROUPS["adam"], 1)))
    assert slot.weight._version > version


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_step_waits_for_nothing():
    slots = [moved(slot, DEVICE) for slot in slots_of(rules.ADAM, SHAPES)]
    gradients = [torch.ones_like(slot.weight) for slot in slots]
    turn = turn_of(rules.ADAM, slots, gradients, rules.adam_numbers(GROUPS["adam"], 1), found_inf=0.0)
    executor.step(turn)
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.step(turn)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@compiles
def test_programs_cover_every_group_once():
    sizes = np.array([(1030, 1030), (5 * 515, 515), (1, 1), (3 * 4096, 4096)])
    programs = executor._programs(sizes.tobytes(), torch.device("cpu"), 0).tolist()
    taken = [(t, g) for t, first in programs for g in range(first, first + kernel.GROUPS)]
    assert len(set(taken)) == len(taken)
    wanted = {(t, g) for t, groups in enumerate([33, 5 * 17, 1, 3 * 128]) for g in range(groups)}
    assert wanted <= set(taken)
    assert len(programs) == 2 + 3 + 1 + 12


@compiles
def test_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    executor._refuse_capture(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"(?s)inside a CUDA graph.*a replay would copy.*outside the graph"):
        executor._refuse_capture(torch.device("cuda"))


@compiles
def test_choosing_an_executor_does_not_import_triton():
    code = "import sys, halfstep.kernels.choose as c, torch; c.choose(torch.device('cpu'), 9); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "halfstep.kernels.choose" in loaded
    assert not [name for name in loaded if name.split(".")[0] == "triton" or "kernels.triton_" in name]


# ---- machine code ---------------------------------------------------------------------------------------------------


def recipe_of(rule, slot, gradient):
    ((recipe, _),) = executor._launches(turn_of(rule, [slot], [gradient], rule.numbers(GROUPS[rule.name], 1)))
    return recipe


def machine_code(capability, rule, slot, gradient):
    num_constants = 1 + len(rule.numbers(GROUPS[rule.name], 1))
    constants = {**recipe_of(rule, slot, gradient), "RULE": rule.name, "NUM_CONSTANTS": num_constants}
    constants["COUNTS_STALLED"] = False
    types = {"table": "*i64", "programs": "*i32", "constants": "*fp32", "keys": "*i64", "found_inf": "*fp32"}
    signature = {**types, "counts": "*i64", **dict.fromkeys(constants, "constexpr")}
    options = {"num_warps": kernel.NUM_WARPS, "enable_fp_fusion": False}
    target = GPUTarget("cuda", capability, 32)
    return compile(ASTSource(kernel.step, signature, constants), target=target, options=options).asm["ptx"]


def wide_bytes(ptx, direction):
    """How many bytes a thread moves by instructions that move several words at once."""
    found = re.findall(rf"{direction}\.global\S*\.v(\d)\.b(\d+)", ptx)
    return sum(int(words) * int(bits) // 8 for words, bits in found)


def narrow(ptx, direction):
    """Elements of 8 or 16 bits that are moved one by one; tables are wider."""
    return re.findall(rf"{direction}\.global\S*\.[bu](?:8|16)\s", ptx)


PLAIN = re.compile(r"\b(?:div|sqrt)\.rn\.f32")
APPROXIMATE = re.compile(
    r"\b(?:fma|mad\S*f32|rcp|rsqrt|ex2|lg2|(?:div|sqrt)\.(?:approx|full)|(?:add|sub|mul|div|sqrt)\S*\.ftz)\S*"
)
ELEMENTS = kernel.BLOCK // (32 * kernel.NUM_WARPS)


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("rule", "dtype", "master", "moment", "shape", "bytes_read", "bytes_written"),
    [
        (rules.ADAM, BF16, Master.SPLIT, Moment.BF16, (40, 64), 10, 8),
        (rules.ADAM, FP32, Master.NONE, Moment.FP32, (40, 64), 16, 12),
        (rules.SGD, FP16, Master.FP32, Moment.FP32, (40, 64), 12, 10),
        (rules.LION, BF16, Master.STOCHASTIC, Moment.BF16, (1000,), 6, 4),
        (rules.ADAM, BF16, Master.SPLIT8, Moment.INT8, (40, 48), 7, 5),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_exact_arithmetic_and_wide_loads(
    capability, rule, dtype, master, moment, shape, bytes_read, bytes_written, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    slot = new_slot(shape, dtype, master, moment, len(rule.moments))
    ptx = machine_code(capability, rule, slot, torch.zeros_like(slot.weight))
    assert f".target sm_{capability}" in ptx
    assert APPROXIMATE.findall(ptx) == []
    num_exact = {rules.ADAM: 2, rules.SGD: 0, rules.LION: 0}[rule] * ELEMENTS
    if moment == Moment.INT8:  # a quotient for each moment's code, and two for each group; the root is there already
        num_exact += 2 * ELEMENTS + 2
    assert len(PLAIN.findall(ptx)) == num_exact
    assert wide_bytes(ptx, "ld") == ELEMENTS * bytes_read
    assert wide_bytes(ptx, "st") == ELEMENTS * bytes_written
    if moment != Moment.INT8:  # whose scales are one by one
        assert narrow(ptx, "ld") == narrow(ptx, "st") == []


@compiles
def test_unaligned_tensors_are_read_one_by_one(tmp_path, monkeypatch):
    """What the test above would see if it could not be otherwise."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    slot = new_slot((40, 64), BF16, Master.SPLIT, Moment.BF16, 1)
    gradient = torch.zeros(40 * 64 + 1, dtype=BF16)[1:].view(40, 64)
    ptx = machine_code(90, rules.LION, slot, gradient)
    assert wide_bytes(ptx, "ld") == wide_bytes(ptx, "st") == 0
    assert len(narrow(ptx, "ld")) == 4 * ELEMENTS


@compiles
@pytest.mark.parametrize(
    ("shape", "moment", "gradient_dtype", "width"),
    [
        ((4, 48), Moment.BF16, BF16, 8),
        ((4, 48), Moment.BF16, FP32, 4),  # the widest array sets the pace
        ((4, 48), Moment.FP32, BF16, 4),
        ((4, 48), Moment.INT8, BF16, 8),  # rows of a group and a half
        ((4, 36), Moment.INT8, BF16, 1),  # 4.5 times 8
        ((4, 36), Moment.BF16, BF16, 8),
        ((3, 3), Moment.BF16, BF16, 1),
    ],
)
def test_how_many_elements_are_read_at_once(shape, moment, gradient_dtype, width):
    slot = new_slot(shape, BF16, Master.SPLIT, moment)
    recipe = recipe_of(rules.ADAM, slot, torch.zeros(shape, dtype=gradient_dtype))
    assert recipe["WIDTH"] == width
    assert recipe["IS_RAGGED"] == (moment == Moment.INT8 and shape[1] % 32 != 0)
