"""The stages of a step: a rule, which reads its operands wherever they are, and what packs its results.

A step is a list of stages, such as

    read_group 0, read_group 1, adam, chance, write_group 0, write_group 1, write_master

and each is compiled by itself, when a step first needs it. All have one signature, so that the loop over blocks
(step.py) calls whatever it is given: ``stage(addresses, facts, numbers, buffers, at, n)``, where the first four are the
addresses of a tensor's row of the tables and of the buffers of BLOCK elements each, ``at`` is the block's first element
in the tensor and ``n`` its length. What it returns, a count, is added up over the blocks.

Why not one loop: a processor looks ahead over some 250 instructions. A loop whose body is longer waits for its own
root and quotient; short ones overlap many elements, and the first cache between them costs little.

What reads memory is the rule. It asks for what comes a few strips later: a processor looks ahead in each tensor by
itself, but no further than the end of a page, and there is a new page every few strips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types, uint32

from halfstep.kernels import rules
from halfstep.kernels.numba_ import groups
from halfstep.kernels.numba_ import memory as m
from halfstep.kernels.numba_.bits import F32, INFINITY, load, pointer, store
from halfstep.kernels.numba_.compiling import compiled, inner
from halfstep.kernels.numba_.memory import (
    BEFORE,
    CHANCE,
    FIRST,
    FIRST_SCALES,
    GRADIENT,
    LAST,
    LOWER,
    NEXT_FIRST,
    NEXT_SECOND,
    NEXT_WEIGHT,
    PLAIN,
    REST,
    SECOND,
    UNITS,
    UPPER,
    WEIGHT,
)
from halfstep.kernels.slots import GRADIENT_CAP
from halfstep.kernels.storage import LARGEST_ROOT

V = Any
SIGNATURE = types.int64(*[types.int64] * 6)
ROW, INDEX, KEY = range(3)  # a tensor's row of facts
NUM_CONSTANTS = 10  # the factor on the gradient, and those of the rule that has most

_CAP, _NAN = np.float32(GRADIENT_CAP), np.float32(np.nan)
_LARGEST_ROOT = np.float32(LARGEST_ROOT)
_FP32, _BF16, _INT8 = m.MOMENT_FP32, m.MOMENT_BF16, m.MOMENT_INT8
_adam, _sgd, _lion = inner(rules.adam), inner(rules.sgd), inner(rules.lion)
_RULES = (rules.ADAM.name, rules.SGD.name, rules.LION.name)
_ADAM, _SGD, _ = range(3)  # their places


@inner
def _entry(table: V, place: V) -> V:
    return numba.carray(pointer(table), 8, np.int64)[place]


# ---- the rules ------------------------------------------------------------------------------------------------------


@inner
def _sqrt(x: V) -> V:
    return np.sqrt(x)


@inner
def _divide(x: V, y: V) -> V:
    return x / y


@inner
def _sign(x: V) -> V:
    return np.float32(x > 0) - np.float32(x < 0)


@inner
def _gradient(dtype: V, address: V, at: V, i: V, part: V, multiplier: V) -> V:
    value = m.gradient_at(dtype, address, at, i, part) * multiplier
    value = _CAP if value > _CAP else value  # in this way NaN stays
    return -_CAP if value < -_CAP else value


@inner
def _before(storage: V, part: V, weight: V) -> V:
    """What tells of a rest beside which a weight is no number."""
    return m.magnitude_of(weight) if storage == m.SPLIT and part != PLAIN else uint32(0)


@inner
def _put_weight(is_direct: V, address: V, buffers: V, at: V, i: V, part: V, value: V) -> V:
    """Where a new weight goes: into its memory if that is all, else into its buffer. What was written, as a pattern."""
    if is_direct:
        store(WEIGHT, F32, address, at + i, value)
        return m.magnitude_of(value)
    store(NEXT_WEIGHT, F32, m.buffer(buffers, NEXT_WEIGHT), m.place(i, part), value)
    return uint32(0)


@inner
def _put_first(kind: V, address: V, buffers: V, at: V, i: V, part: V, value: V) -> V:
    if kind == _FP32:
        store(FIRST, F32, address, at + i, value)
        return m.magnitude_of(value)
    if kind != m.MOMENT_NONE:
        store(NEXT_FIRST, F32, m.buffer(buffers, NEXT_FIRST), m.place(i, part), value)
    return uint32(0)


@inner
def _put_second(kind: V, address: V, buffers: V, at: V, i: V, part: V, value: V) -> V:
    if kind == _FP32:
        store(SECOND, F32, address, at + i, value)
        return m.magnitude_of(value)
    if kind == _INT8:  # the rule has this root already
        value = min(_sqrt(value), _LARGEST_ROOT)
    store(NEXT_SECOND, F32, m.buffer(buffers, NEXT_SECOND), m.place(i, part), value)
    return uint32(0)


@inner
def _hold(variant: V, where: V, at: V, n: V) -> int:
    """Saturate what a rule has written to memory; how many weights were."""
    weight, _, _, firsts, seconds = where
    if variant[3] == _FP32:
        m.hold_first(firsts, at, n)
    if variant[4] == _FP32:
        m.hold_second(seconds, at, n)
    return m.hold_weight(weight, at, n) if variant[5] else 0


@inner
def _step_adam(variant: V, where: V, c: V, buffers: V, at: V, i: V, part: V) -> V:
    """One element; the largest magnitude of what was written to memory, as a pattern."""
    gradient_dtype, dtype, storage, first_kind, second_kind, is_direct = variant
    weight, rest, gradient, firsts, seconds = where
    w = m.master_at(dtype, storage, weight, rest, at, i, part)
    before = _before(storage, part, w)
    g = _gradient(gradient_dtype, gradient, at, i, part, c[0])
    first = m.first_at(first_kind, firsts, buffers, at, i, part)
    second = m.second_at(second_kind, seconds, buffers, at, i, part)
    numbers = c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]
    w, first, second = _adam(w, g, first, second, numbers, _sqrt, _divide)
    top = max(before, _put_weight(is_direct, weight, buffers, at, i, part, w))
    top = max(top, _put_first(first_kind, firsts, buffers, at, i, part, first))
    return max(top, _put_second(second_kind, seconds, buffers, at, i, part, second))


@inner
def _step_sgd(variant: V, where: V, c: V, buffers: V, at: V, i: V, part: V) -> V:
    gradient_dtype, dtype, storage, first_kind, _, is_direct = variant
    weight, rest, gradient, firsts, _ = where
    w = m.master_at(dtype, storage, weight, rest, at, i, part)
    before = _before(storage, part, w)
    g = _gradient(gradient_dtype, gradient, at, i, part, c[0])
    first = m.first_at(first_kind, firsts, buffers, at, i, part)
    w, first = _sgd(w, g, first, (c[1], c[2], c[3], c[4], c[5], c[6]))
    top = max(before, _put_weight(is_direct, weight, buffers, at, i, part, w))
    return max(top, _put_first(first_kind, firsts, buffers, at, i, part, first))


@inner
def _step_lion(variant: V, where: V, c: V, buffers: V, at: V, i: V, part: V) -> V:
    gradient_dtype, dtype, storage, first_kind, _, is_direct = variant
    weight, rest, gradient, firsts, _ = where
    w = m.master_at(dtype, storage, weight, rest, at, i, part)
    before = _before(storage, part, w)
    g = _gradient(gradient_dtype, gradient, at, i, part, c[0])
    first = m.first_at(first_kind, firsts, buffers, at, i, part)
    w, first = _lion(w, g, first, (c[1], c[2], c[3], c[4], c[5], c[6]), _sign)
    top = max(before, _put_weight(is_direct, weight, buffers, at, i, part, w))
    return max(top, _put_first(first_kind, firsts, buffers, at, i, part, first))


@inner
def _where(addresses: V) -> V:
    weight, rest, gradient = _entry(addresses, WEIGHT), _entry(addresses, REST), _entry(addresses, GRADIENT)
    return weight, rest, gradient, _entry(addresses, FIRST), _entry(addresses, SECOND)


@inner
def _numbers(numbers: V) -> V:
    """The factor on the gradient and the rule's constants."""
    c = numba.carray(pointer(numbers), NUM_CONSTANTS, np.float32)
    return c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]


def _widths(
    gradient_dtype: int, dtype: int, storage: int, first_kind: int, second_kind: int, _: int
) -> tuple[int, ...]:
    """Bytes of an element in each of the tensors that are read."""
    rest = {m.MASTER_FP32: 4, m.SPLIT: 2, m.SPLIT8: 1}.get(storage, 0)
    moments = {_FP32: 4, _BF16: 2, _INT8: 1, m.MOMENT_NONE: 0}
    weight, gradient = (4 if d == m.FP32 else 2 for d in (dtype, gradient_dtype))
    return weight, rest, gradient, moments[first_kind], moments[second_kind]


@inner
def _fetch(where: V, widths: V, at: V) -> None:
    m.fetch(where[0], widths[0], at)
    m.fetch(where[1], widths[1], at)
    m.fetch(where[2], widths[2], at)
    m.fetch(where[3], widths[3], at)
    m.fetch(where[4], widths[4], at)


@inner
def _step(rule: V, variant: V, where: V, c: V, buffers: V, at: V, i: V, part: V) -> V:
    if rule == _ADAM:
        return _step_adam(variant, where, c, buffers, at, i, part)
    if rule == _SGD:
        return _step_sgd(variant, where, c, buffers, at, i, part)
    return _step_lion(variant, where, c, buffers, at, i, part)


def _rule(rule: int, layout: int, *variant: int) -> Callable[..., Any]:
    widths = _widths(*variant)

    def rule_stage(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        where, c, top = _where(addresses), _numbers(numbers), uint32(0)
        if layout:
            for _ in range(2):
                for strip in range(0, n // 2, m.STRIP // 2):
                    _fetch(where, widths, at + 2 * strip)
                    for i in range(strip, min(strip + m.STRIP // 2, n // 2)):
                        top = max(top, _step(rule, variant, where, c, buffers, at, i, LOWER))
                        top = max(top, _step(rule, variant, where, c, buffers, at, i, UPPER))
                if n % 2:
                    top = max(top, _step(rule, variant, where, c, buffers, at, n // 2, LAST))
                if top < m.BOUND:
                    break
                m.mend_rests(where[0], where[1], at, n)  # and again: nothing has been written yet
            return 0
        for strip in range(0, n, m.STRIP):
            _fetch(where, widths, at + strip)
            for i in range(strip, min(strip + m.STRIP, n)):
                top = max(top, _step(rule, variant, where, c, buffers, at, i, PLAIN))
        return _hold(variant, where, at, n) if top >= INFINITY else 0

    return rule_stage


# ---- what packs -----------------------------------------------------------------------------------------------------


def _chance(layout: int) -> Callable[..., Any]:
    def chance(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        m.write_chance(layout, m.buffer(buffers, CHANCE), uint32(_entry(facts, KEY)), _entry(facts, INDEX) + at, n)
        return 0

    return chance


def _write_master(layout: int, dtype: int, storage: int) -> Callable[..., Any]:
    def write_master(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        weight, rest = _entry(addresses, WEIGHT), _entry(addresses, REST)
        values, chance = m.buffer(buffers, NEXT_WEIGHT), m.buffer(buffers, CHANCE)
        if dtype == m.FP32:
            return m.write_fp32(values, weight, at, n)
        return m.write_weight(dtype, storage, layout, values, weight, rest, at, n, chance)

    return write_master


def _count_updated(dtype: int, storage: int) -> Callable[..., Any]:
    """Runs before the master is written."""

    def count_updated(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        weight, rest = _entry(addresses, WEIGHT), _entry(addresses, REST)
        values, old = m.buffer(buffers, NEXT_WEIGHT), m.buffer(buffers, BEFORE)
        num_updated = 0
        for i in range(n):
            before = m.master_at(dtype, storage, weight, rest, at, i, PLAIN)
            is_updated = load(NEXT_WEIGHT, F32, values, i) != before
            num_updated += is_updated
            store(BEFORE, F32, old, i, before if is_updated else _NAN)  # what did not change cannot be lost
        return num_updated

    return count_updated


def _count_stalled(dtype: int, storage: int) -> Callable[..., Any]:
    """Runs after the master was written."""

    def count_stalled(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        weight, rest, old = _entry(addresses, WEIGHT), _entry(addresses, REST), m.buffer(buffers, BEFORE)
        num_stalled = 0
        for i in range(n):
            num_stalled += m.master_at(dtype, storage, weight, rest, at, i, PLAIN) == load(BEFORE, F32, old, i)
        return num_stalled

    return count_stalled


def _read_moment(which: int) -> Callable[..., Any]:
    """One in groups."""

    def read_moment(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        codes, scales = _entry(addresses, FIRST + which), _entry(addresses, FIRST_SCALES + which)
        row, values, units = _entry(facts, ROW), m.buffer(buffers, NEXT_FIRST + which), m.buffer(buffers, UNITS)
        if which == 0:
            groups.read_first(codes, scales, at, n, row, values)
        else:
            groups.read_second(codes, scales, at, n, row, values, units)
        return 0

    return read_moment


def _write_moment(layout: int, kind: int, which: int) -> Callable[..., Any]:
    def write_moment(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        address, values = _entry(addresses, FIRST + which), m.buffer(buffers, NEXT_FIRST + which)
        scales, row = _entry(addresses, FIRST_SCALES + which), _entry(facts, ROW)
        units, chance = m.buffer(buffers, UNITS), m.buffer(buffers, CHANCE)
        if kind == _BF16:
            if which == 0:
                m.write_bf16_first(layout, values, address, at, n, chance)
            else:
                m.write_bf16_second(layout, values, address, at, n, chance)
        elif which == 0:
            groups.write_first(address, scales, at, n, row, values, units, chance)
        else:
            groups.write_second(address, scales, at, n, row, values, units, chance)
        return 0

    return write_moment


_FAMILIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "rule": _rule,
    "chance": _chance,
    "write_master": _write_master,
    "count_updated": _count_updated,
    "count_stalled": _count_stalled,
    "read_moment": _read_moment,
    "write_moment": _write_moment,
}
Stages = list[tuple[str, tuple[int, ...]]]


def stages_of(rule: rules.Rule, recipe: tuple[int, ...], *, counts_stalled: bool = False) -> Stages:
    """The stages of a step, in order: their names and variants.

    Args:
        rule: the arithmetic.
        recipe: dtypes of weight and gradient, kinds of master, first and second moment.
        counts_stalled: whether lost updates are counted.
    """
    dtype, gradient_dtype, storage, *kinds = recipe
    moments = list(zip(kinds, (0, 1), strict=True))[: len(rule.moments)]
    is_direct = dtype == m.FP32 and not counts_stalled
    needs_chance = storage == m.STOCHASTIC or _BF16 in kinds or _INT8 in kinds
    is_bf16 = dtype == gradient_dtype == m.BF16 and all(kind == _BF16 for kind, _ in moments)
    layout = int(is_bf16 and storage not in (m.MASTER_FP32, m.SPLIT8) and not counts_stalled)
    stages: Stages = [("read_moment", (which,)) for kind, which in moments if kind == _INT8]
    variant = gradient_dtype, dtype, storage, *kinds, int(is_direct)
    stages.append(("rule", (_RULES.index(rule.name), layout, *variant)))
    stages += [("chance", (layout,))] * needs_chance
    stages += [("write_moment", (layout, *moment)) for moment in moments if moment[0] in (_BF16, _INT8)]
    write_master = "write_master", (layout, dtype, storage)
    if counts_stalled:
        return [*stages, ("count_updated", (dtype, storage)), write_master, ("count_stalled", (dtype, storage))]
    return stages if is_direct else [*stages, write_master]


@functools.cache
def address_of(name: str, *variant: int) -> int:
    """Where the machine code of a stage is; compiled when it is first asked for."""
    stage = compiled(numba.cfunc, SIGNATURE)(_FAMILIES[name](*variant))
    _kept.append(stage)  # its code must outlive the address
    return int(stage.address)


_kept: list[Any] = []
