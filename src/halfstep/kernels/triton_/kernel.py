"""One optimizer step over many tensors in one launch: gradient, master and moments are read once and written once.

A program takes BLOCK elements of one tensor. Which, it finds in two tables: ``programs`` has for each program a tensor
and the first group in it, ``table`` for each tensor a row of addresses and facts. The storages are compile-time
constants, so each recipe is a kernel of its own, and a launch takes all tensors of a recipe.

BLOCK and NUM_WARPS: memory bounds the step, so what counts is how many bytes are on their way. An H200 reads 4.8 TB/s;
if an answer takes 1 us, that is 36 KB for each of its 132 multiprocessors. At 8 elements a thread, one load of 16 bytes
of each 16-bit array, ptxas takes 64 registers (96 with int8 moments) for sm_90: 1024 (640) threads at once, which wait
for 131 KB in fp32, 82 KB with bf16 moments and 36 KB with int8. Twice as many elements take 96 to 164 registers, and no
fewer instructions to speak of. Nothing is shared between programs, so there is no loop and no order.
"""

# ruff: noqa: N803, SIM300 - Triton's custom: compile-time arguments in capitals

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from halfstep.kernels import rules
from halfstep.kernels.slots import GRADIENT_CAP
from halfstep.kernels.storage import GROUP
from halfstep.kernels.triton_ import memory as m
from halfstep.kernels.triton_.memory import MOMENT_BF16, MOMENT_FP32, MOMENT_INT8

V = Any
NUM_WARPS = 4
BLOCK = 1024  # elements
GROUPS = BLOCK // GROUP

# The columns of a tensor's row in the table: addresses, 0 where there is nothing; how many elements, how many in a row
# (that many in all, unless groups end inside the tensor), the index of the first one, which row of the constants, and
# where its steps are counted.
_WEIGHT, _REST, _GRADIENT, _FIRST, _SECOND, _FIRST_SCALES, _SECOND_SCALES = map(tl.constexpr, range(7))
_SIZE, _ROW, _INDEX, _PLACE, _STEP = map(tl.constexpr, range(7, 12))
COLUMNS = 12

_GROUPS, _COLUMNS = tl.constexpr(GROUPS), tl.constexpr(COLUMNS)
_CAP = tl.constexpr(GRADIENT_CAP)


# ---- the rules ------------------------------------------------------------------------------------------------------


def _compiled_rule(rule: rules.Rule) -> Any:
    """The rule's own code; Triton's interpreter looks for ``tl`` among what a function knows."""
    return triton.jit(FunctionType(rule.function.__code__, {**vars(rules), "tl": tl}, rule.name))


_adam, _sgd, _lion = map(_compiled_rule, (rules.ADAM, rules.SGD, rules.LION))
_ADAM, _SGD, _LION = (tl.constexpr(rule.name) for rule in (rules.ADAM, rules.SGD, rules.LION))


@triton.jit
def _sqrt(x: "V") -> "V":
    return tl.sqrt_rn(x)


@triton.jit
def _divide(x: "V", y: "V") -> "V":
    return tl.div_rn(x, y)


@triton.jit
def _sign(x: "V") -> "V":
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


# ---- the kernel -----------------------------------------------------------------------------------------------------


@triton.jit
def _stepped(weight: "V", gradient: "V", first: "V", second: "V", constants: "V", RULE: tl.constexpr) -> "V":
    """A tensor's row of constants: the factor on the gradient, then the rule's numbers."""
    gradient = m.cut(gradient * tl.load(constants), _CAP)
    c1, c2, c3 = tl.load(constants + 1), tl.load(constants + 2), tl.load(constants + 3)
    c4, c5, c6 = tl.load(constants + 4), tl.load(constants + 5), tl.load(constants + 6)
    if RULE == _ADAM:
        c7, c8, c9 = tl.load(constants + 7), tl.load(constants + 8), tl.load(constants + 9)
        numbers = (c1, c2, c3, c4, c5, c6, c7, c8, c9)
        weight, first, second = _adam(weight, gradient, first, second, numbers, _sqrt, _divide)
    elif RULE == _SGD:
        weight, first = _sgd(weight, gradient, first, (c1, c2, c3, c4, c5, c6))
    else:
        weight, first = _lion(weight, gradient, first, (c1, c2, c3, c4, c5, c6), _sign)
    return weight, first, second


@triton.jit
def _read_master(
    weight: "V", rest: "V", at: "V", mask: "V",
    WEIGHT: tl.constexpr, MASTER: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
) -> "V":  # fmt: skip
    if WEIGHT == tl.float32:
        master = m.read(weight, at, mask, tl.float32, WIDTH)
    else:
        halves = m.read(weight, at, mask, tl.uint16, WIDTH)
        low = halves
        if REST is not None:
            low = m.read(rest, at, mask, REST, WIDTH)
        master = m.joined(halves, low, WEIGHT, MASTER)
    return master


@triton.jit
def _write_master(
    weight: "V", rest: "V", at: "V", mask: "V", master: "V", random: "V",
    WEIGHT: tl.constexpr, MASTER: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
) -> "V":  # fmt: skip
    """Returns what is kept, as the next step will read it."""
    if WEIGHT == tl.float32:
        kept = m.cut(master, m.LARGEST)
        m.write(weight, at, mask, kept, tl.float32, WIDTH)
    else:
        halves, low = m.taken_apart(master, random, WEIGHT, MASTER)
        m.write(weight, at, mask, halves, tl.uint16, WIDTH)
        if REST is not None:
            m.write(rest, at, mask, low, REST, WIDTH)
        kept = m.joined(halves, low, WEIGHT, MASTER)
    return kept


@triton.jit
def _read_moment(
    address: "V", scales: "V", at: "V", mask: "V", group: "V", group_mask: "V",
    KIND: tl.constexpr, IS_SECOND: tl.constexpr, WIDTH: tl.constexpr,
) -> "V":  # fmt: skip
    if KIND == MOMENT_INT8:
        codes = m.read(address, at, mask, tl.int8, WIDTH)
        values = m.decoded(codes, m.read(scales, group, group_mask, tl.uint16, 1), IS_SECOND)
    elif KIND == MOMENT_BF16:
        values = m.widened(m.read(address, at, mask, tl.uint16, WIDTH), tl.bfloat16)
    elif KIND == MOMENT_FP32:
        values = m.read(address, at, mask, tl.float32, WIDTH)
    else:
        values = 0.0  # SGD without momentum
    return values


@triton.jit
def _write_moment(
    address: "V", scales: "V", at: "V", mask: "V", group: "V", group_mask: "V", values: "V", random: "V",
    KIND: tl.constexpr, IS_SECOND: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    if KIND == MOMENT_INT8:
        codes, units = m.encoded(values, random, IS_SECOND)
        m.write(address, at, mask, codes, tl.int8, WIDTH)
        m.write(scales, group, group_mask, units, tl.uint16, 1)
    elif KIND == MOMENT_BF16:
        m.write(address, at, mask, m.bf16_moment(values, random, IS_SECOND), tl.uint16, WIDTH)
    elif KIND == MOMENT_FP32:
        m.write(address, at, mask, m.cut(values, m.LARGEST), tl.float32, WIDTH)


@triton.jit
def _count(counts: "V", is_counted: "V") -> None:
    number = tl.sum(is_counted.to(tl.int32))
    if number > 0:  # saturated: nearly never, and an atomic of every program on one address would take its time
        tl.atomic_add(counts, number.to(tl.int64), sem="relaxed")


@triton.jit
def _block(
    row: "V", constants: "V", key: "V", counts: "V", at: "V", mask: "V", group: "V", group_mask: "V",
    RULE: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MASTER: tl.constexpr, REST: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr, COUNTS_STALLED: tl.constexpr,
) -> None:  # fmt: skip
    """What is masked is read as 0, and each rule makes 0 of zeros: no group's scale sees it, and no count."""
    weight_at, rest_at, gradient_at = tl.load(row + _WEIGHT), tl.load(row + _REST), tl.load(row + _GRADIENT)
    first_at, first_scales = tl.load(row + _FIRST), tl.load(row + _FIRST_SCALES)
    second_at, second_scales = tl.load(row + _SECOND), tl.load(row + _SECOND_SCALES)
    random = m.random_bits(key, at + tl.load(row + _INDEX))
    before = _read_master(weight_at, rest_at, at, mask, WEIGHT, MASTER, REST, WIDTH)
    if GRADIENT == tl.float32:
        gradient = m.read(gradient_at, at, mask, tl.float32, WIDTH)
    else:
        gradient = m.widened(m.read(gradient_at, at, mask, tl.uint16, WIDTH), GRADIENT)
    first = _read_moment(first_at, first_scales, at, mask, group, group_mask, FIRST, False, WIDTH)
    second = _read_moment(second_at, second_scales, at, mask, group, group_mask, SECOND, True, WIDTH)
    master, first, second = _stepped(before, gradient, first, second, constants, RULE)
    _write_moment(first_at, first_scales, at, mask, group, group_mask, first, random, FIRST, False, WIDTH)
    _write_moment(second_at, second_scales, at, mask, group, group_mask, second, random, SECOND, True, WIDTH)
    kept = _write_master(weight_at, rest_at, at, mask, master, random, WEIGHT, MASTER, REST, WIDTH)
    _count(counts, m.is_beyond(master, WEIGHT))
    if COUNTS_STALLED:
        _count(counts + 1, master != before)
        _count(counts + 2, (master != before) & (kept == before))


@triton.jit(do_not_specialize_on_alignment=["table", "programs", "constants", "keys", "found_inf", "counts"])
def step(
    table: "V", programs: "V", constants: "V", keys: "V", found_inf: "V", counts: "V",
    RULE: tl.constexpr, NUM_CONSTANTS: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MASTER: tl.constexpr, REST: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
    IS_RAGGED: tl.constexpr, WIDTH: tl.constexpr, COUNTS_STALLED: tl.constexpr,
) -> None:  # fmt: skip
    """Step BLOCK elements of one tensor, or none of any.

    Args:
        table: int64 ``[tensors, COLUMNS]``.
        programs: int32 ``[programs, 2]``: a row of the table, and the first group that the program takes.
        constants: fp32 ``[slots, 1 + numbers of the rule]``.
        keys: int64 ``[slots]``.
        found_inf: a number, or None.
        counts: int64 ``[3]``, added to: saturated, updated, stalled.
        RULE: its name.
        NUM_CONSTANTS: how many it has, the factor on the gradient among them.
        WEIGHT: the dtype.
        GRADIENT: likewise.
        MASTER: the kind.
        REST: the dtype of what is kept beside the weight; None if nothing is.
        FIRST: the moment's kind.
        SECOND: likewise.
        IS_RAGGED: whether groups end inside the tensor, with its rows.
        WIDTH: how many elements are read at once; all addresses and the lengths of rows are multiples of it.
        COUNTS_STALLED: see :class:`halfstep.kernels.slots.Turn`.
    """
    is_taken = True
    if found_inf is not None:
        is_taken = tl.load(found_inf) == 0
    if is_taken:
        program = programs + tl.program_id(0) * 2
        row = table + tl.load(program).to(tl.int64) * _COLUMNS
        first_group = tl.load(program + 1)
        group = first_group + tl.arange(0, _GROUPS)
        lane = tl.arange(0, m.GROUP)[None, :]
        size = tl.multiple_of(tl.load(row + _SIZE), WIDTH)  # so that masks are alike for as many
        if IS_RAGGED:
            length = tl.multiple_of(tl.load(row + _ROW), WIDTH)
            in_a_row = ((length + m.GROUP - 1) // m.GROUP).to(tl.int32)
            number = group // in_a_row
            column = (group - number * in_a_row)[:, None] * m.GROUP + lane
            start = number.to(tl.int64) * length
            at, group_mask = start[:, None] + column, start < size
            mask = group_mask[:, None] & (column < length)
        else:
            start = group.to(tl.int64) * m.GROUP
            at, group_mask = start[:, None] + lane, start < size
            mask = at < size
        counter = tl.load(row + _STEP)
        if first_group == 0 and counter != 0:
            steps = counter.to(tl.pointer_type(tl.float32))
            tl.store(steps, tl.load(steps) + 1.0)
        place = tl.load(row + _PLACE)
        numbers = constants + place * NUM_CONSTANTS
        _block(
            row, numbers, tl.load(keys + place).to(tl.uint32), counts, at, mask, group, group_mask,
            RULE, WEIGHT, GRADIENT, MASTER, REST, FIRST, SECOND, WIDTH, COUNTS_STALLED,
        )  # fmt: skip
