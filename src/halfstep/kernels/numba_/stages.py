"""The stages of a step: each moves a block between memory and fp32 buffers, or runs a rule on them.

A step is a list of stages, such as

    read_bf16_gradient, read_split_bf16, read_fp32_first, read_bf16_second, adam, write_..., write_split_bf16

and each is compiled by itself, when a step first needs it. All have one signature, so that the loop over blocks
(step.py) calls whatever it is given: ``stage(addresses, facts, numbers, buffers, at, n)``, where the first four are the
addresses of a tensor's row of the tables and of four buffers of BLOCK elements, ``at`` is the block's first element in
the tensor and ``n`` its length. What it returns, a count, is added up over the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import carray, types, uint32

from halfstep.kernels import rules
from halfstep.kernels.numba_ import memory as m
from halfstep.kernels.numba_.bits import pointer
from halfstep.kernels.numba_.compiling import compiled
from halfstep.kernels.slots import GRADIENT_CAP
from halfstep.kernels.storage import Master, Moment

V = Any
BLOCK = 1024  # elements: four buffers of 4 KiB fit any core's first cache
SIGNATURE = types.int64(*[types.int64] * 6)

# What a tensor's row of addresses holds, and its row of facts.
WEIGHT, REST, GRADIENT, FIRST, SECOND, FIRST_SCALES, SECOND_SCALES = range(7)
ROW, INDEX, KEY = range(3)

_CAP, _NAN = np.float32(GRADIENT_CAP), np.float32(np.nan)
_STOCHASTIC = int(Master.STOCHASTIC)
_MOMENT_FP32, _MOMENT_BF16, _MOMENT_INT8 = int(Moment.FP32), int(Moment.BF16), int(Moment.INT8)
_jit = numba.njit(nogil=True, error_model="numpy")
_adam, _sgd, _lion = _jit(rules.adam), _jit(rules.sgd), _jit(rules.lion)


@_jit
def _address(table: V, place: V) -> V:
    return carray(pointer(table), 8, np.int64)[place]


@_jit
def _buffer(buffers: V, place: V) -> V:
    return carray(pointer(buffers + 4 * BLOCK * place), BLOCK, np.float32)


@_jit
def _w(buffers: V) -> V:
    return _buffer(buffers, 0)


@_jit
def _g(buffers: V) -> V:
    return _buffer(buffers, 1)


@_jit
def _first(buffers: V) -> V:
    return _buffer(buffers, 2)


@_jit
def _second(buffers: V) -> V:
    return _buffer(buffers, 3)


# ---- the rules ------------------------------------------------------------------------------------------------------


@_jit
def _sqrt(x: V) -> V:
    return np.sqrt(x)


@_jit
def _divide(x: V, y: V) -> V:
    return x / y


@_jit
def _sign(x: V) -> V:
    return np.float32(x > 0) - np.float32(x < 0)


def adam(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
    """The rule of the same name."""
    c = carray(pointer(numbers), 9, np.float32)
    constants = (c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8])
    w, g, first, second = _w(buffers), _g(buffers), _first(buffers), _second(buffers)
    for i in range(n):
        w[i], first[i], second[i] = _adam(w[i], g[i], first[i], second[i], constants, _sqrt, _divide)
    return 0


def sgd(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
    """The rule of the same name."""
    c = carray(pointer(numbers), 7, np.float32)
    constants = (c[1], c[2], c[3], c[4], c[5], c[6])
    w, g, first = _w(buffers), _g(buffers), _first(buffers)
    for i in range(n):
        w[i], first[i] = _sgd(w[i], g[i], first[i], constants)
    return 0


def lion(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
    """The rule of the same name."""
    c = carray(pointer(numbers), 7, np.float32)
    constants = (c[1], c[2], c[3], c[4], c[5], c[6])
    w, g, first = _w(buffers), _g(buffers), _first(buffers)
    for i in range(n):
        w[i], first[i] = _lion(w[i], g[i], first[i], constants, _sign)
    return 0


# ---- families of stages: one for each dtype or storage --------------------------------------------------------------


def _gradient(dtype: int) -> Callable[..., Any]:
    def read_gradient(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        g = _g(buffers)
        multiplier = carray(pointer(numbers), 1, np.float32)[0]
        m.read(dtype, _address(addresses, GRADIENT), at, g, n)
        for i in range(n):
            value = g[i] * multiplier
            value = _CAP if value > _CAP else value  # in this way NaN stays
            g[i] = -_CAP if value < -_CAP else value
        return 0

    return read_gradient


def _read_master(dtype: int, storage: int) -> Callable[..., Any]:
    def read_master(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        m.read_master(dtype, storage, _address(addresses, WEIGHT), _address(addresses, REST), at, _w(buffers), n)
        return 0

    return read_master


def _write_master(dtype: int, storage: int) -> Callable[..., Any]:
    def write_master(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        weight, rest, w = _address(addresses, WEIGHT), _address(addresses, REST), _w(buffers)
        if dtype == m.FP32:
            return m.write_fp32(weight, at, w, n)
        if storage == m.MASTER_FP32:
            m.write_fp32(rest, at, w, n)
        num_saturated = m.saturate(dtype, w, n)
        if storage == m.SPLIT:
            m.write_split(dtype, weight, rest, at, w, n)
        elif storage == m.SPLIT8:
            m.write_split8(dtype, weight, rest, at, w, n)
        elif storage == _STOCHASTIC:
            key, index = uint32(_address(facts, KEY)), _address(facts, INDEX)
            m.write_by_chance(dtype, weight, at, w, n, key, index + at)
        else:
            m.write_halves(dtype, weight, at, w, n)
        return num_saturated

    return write_master


def _count_updated(dtype: int, storage: int) -> Callable[..., Any]:
    """Runs before the master is written; the gradient is not needed any more."""

    def count_updated(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        before, w = _g(buffers), _w(buffers)
        m.read_master(dtype, storage, _address(addresses, WEIGHT), _address(addresses, REST), at, before, n)
        num_updated = 0
        for i in range(n):
            num_updated += w[i] != before[i]
        for i in range(n):  # where the rule changed nothing, nothing can be lost
            before[i] = before[i] if w[i] != before[i] else _NAN
        return num_updated

    return count_updated


def _count_stalled(dtype: int, storage: int) -> Callable[..., Any]:
    """Runs after the master and the moments were written."""

    def count_stalled(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        before, after = _g(buffers), _first(buffers)
        m.read_master(dtype, storage, _address(addresses, WEIGHT), _address(addresses, REST), at, after, n)
        num_stalled = 0
        for i in range(n):
            num_stalled += after[i] == before[i]
        return num_stalled

    return count_stalled


def _read_moment(storage: int, which: int) -> Callable[..., Any]:
    def read_moment(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        buffer, address = _buffer(buffers, 2 + which), _address(addresses, FIRST + which)
        if storage == _MOMENT_FP32:
            m.read(m.FP32, address, at, buffer, n)
        elif storage == _MOMENT_BF16:
            m.read(m.BF16, address, at, buffer, n)
        elif storage == _MOMENT_INT8:
            scales = _address(addresses, FIRST_SCALES + which)
            m.read_int8(address, scales, at, buffer, n, _address(facts, ROW), which == 1)
        else:
            for i in range(n):
                buffer[i] = np.float32(0)
        return 0

    return read_moment


def _write_moment(storage: int, which: int) -> Callable[..., Any]:
    def write_moment(addresses: V, facts: V, numbers: V, buffers: V, at: V, n: V) -> V:
        buffer, address = _buffer(buffers, 2 + which), _address(addresses, FIRST + which)
        if storage == _MOMENT_FP32:
            m.write_fp32(address, at, buffer, n)
        elif storage == _MOMENT_BF16:
            key, index = uint32(_address(facts, KEY)), _address(facts, INDEX)
            m.write_bf16_moment(address, at, buffer, n, key, index + at, which)
        elif storage == _MOMENT_INT8:
            scales = _address(addresses, FIRST_SCALES + which)
            key, index = uint32(_address(facts, KEY)), _address(facts, INDEX)
            m.write_int8(address, scales, at, buffer, n, _address(facts, ROW), which == 1, key, index + at)
        return 0

    return write_moment


_FAMILIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "gradient": _gradient,
    "read_master": _read_master,
    "write_master": _write_master,
    "count_updated": _count_updated,
    "count_stalled": _count_stalled,
    "read_moment": _read_moment,
    "write_moment": _write_moment,
}
_RULES = {"adam": adam, "sgd": sgd, "lion": lion}


@functools.cache
def address_of(name: str, *variant: int) -> int:
    """Where the machine code of a stage is; compiled when it is first asked for."""
    function = _RULES[name] if name in _RULES else _FAMILIES[name](*variant)
    return int(_compiled_stage(function).address)


_kept: list[Any] = []


def _compiled_stage(function: Callable[..., Any]) -> Any:
    stage = compiled(numba.cfunc, SIGNATURE)(function)
    _kept.append(stage)  # its code must outlive the address
    return stage
