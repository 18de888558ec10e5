"""Moments in int8: groups of up to 32 elements inside one row share a 16-bit scale. See ``kernels/storage.py``.

``at`` is the first element of a group, and a block of ``n`` elements ends where one does. Where rows are made of whole
groups, which is nearly always, their length is a constant, and LLVM makes a handful of vector instructions of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int8, int32, uint8, uint16, uint32

from halfstep.kernels import storage
from halfstep.kernels.numba_ import memory as m
from halfstep.kernels.numba_.bits import F32, I8, U16, float_of, largest_magnitude, load, store
from halfstep.kernels.numba_.compiling import inner
from halfstep.kernels.numba_.memory import (
    FIRST,
    FIRST_SCALES,
    NEXT_FIRST,
    NEXT_SECOND,
    SECOND,
    SECOND_SCALES,
    UNITS,
)
from halfstep.kernels.storage import GROUP

V = Any

_U15, _UP = uint32(15), uint32(0x7FFF)
_SMALLEST_SCALE, _LARGEST_SCALE = uint32(storage.SMALLEST_SCALE), uint32(storage.LARGEST_SCALE)
_LARGEST_FIRST = uint32(np.float32(storage.LARGEST_FIRST).view(np.uint32))
_UP_FROM_1, _UP_FROM_128 = uint32(storage.UP_FROM_1), uint32(storage.UP_FROM_128)
_254, _255 = np.float32(254), np.float32(255)
_ELEVEN = uint32(0xFFE00000)  # the upper 11 of 32 random bits


# ---- geometry -------------------------------------------------------------------------------------------------------


@inner
def group_start(element: V, row: V) -> V:
    """The first element of the group that ``element`` lies in, where groups start anew in every row."""
    column = element % row
    return element - column + (column // GROUP) * GROUP


@inner
def _group_index(start: V, row: V) -> V:
    """The number of the group that starts at an element."""
    return (start // row) * ((row + GROUP - 1) // GROUP) + (start % row) // GROUP


@inner
def _length(start: V, at: V, n: V, row: V) -> V:
    """Of the group that starts at an element of the block: rows end inside it."""
    return min(GROUP, row - (at + start) % row, n - start)


@inner
def _scale_of(bits: V) -> V:
    return float_of(uint32(uint32(bits) << _U15))


# ---- read -----------------------------------------------------------------------------------------------------------


@inner
def read_first(codes: V, scales: V, at: V, n: V, row: V, values: V) -> None:
    """Decode a block into its buffer."""
    group = _group_index(at, row)
    if row % GROUP == 0:
        for i in range(n // GROUP):
            unit = _scale_of(load(FIRST_SCALES, U16, scales, group + i))
            _decode_first(codes, at + i * GROUP, values, i * GROUP, unit, GROUP)
        return
    start = 0
    while start < n:
        length = _length(start, at, n, row)
        _decode_first(codes, at + start, values, start, _scale_of(load(FIRST_SCALES, U16, scales, group)), length)
        start, group = start + length, group + 1


@inner
def read_second(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V) -> None:
    """Decode a block into its buffer."""
    group = _group_index(at, row)
    if row % GROUP == 0:
        for i in range(n // GROUP):
            store(UNITS, F32, units, i, _scale_of(load(SECOND_SCALES, U16, scales, group + i)) / _255)
        for i in range(n // GROUP):
            length = min(GROUP, n - i * GROUP)  # no constant: LLVM would unroll so short a loop into scalars
            _decode_second(codes, at + i * GROUP, values, i * GROUP, load(UNITS, F32, units, i), length)
        return
    start = 0
    while start < n:
        length = _length(start, at, n, row)
        unit = _scale_of(load(SECOND_SCALES, U16, scales, group)) / _255
        _decode_second(codes, at + start, values, start, unit, length)
        start, group = start + length, group + 1


@inner
def _decode_first(codes: V, at: V, values: V, start: V, unit: V, n: V) -> None:
    for i in range(n):
        code = np.float32(load(FIRST, I8, codes, at + i))
        store(NEXT_FIRST, F32, values, start + i, code / (_254 - abs(code)) * unit)


@inner
def _decode_second(codes: V, at: V, values: V, start: V, unit: V, n: V) -> None:
    for i in range(n):
        root = np.float32(int32(uint8(load(SECOND, I8, codes, at + i)))) * unit
        store(NEXT_SECOND, F32, values, start + i, root * root)


# ---- written --------------------------------------------------------------------------------------------------------
#
# All scales of a block first, then all codes: what is found in a register of eight takes its time to be one number.


@inner
def write_first(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V, chance: V) -> None:
    """A block's scales, then its codes."""
    if _write_first(codes, scales, at, n, row, values, units, chance) > _LARGEST_FIRST:
        m.clamp_firsts(values, n, _LARGEST_FIRST, _LARGEST_FIRST)
        _write_first(codes, scales, at, n, row, values, units, chance)


@inner
def _write_first(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V, chance: V) -> V:
    """Without care; the largest magnitude, as a pattern."""
    group, largest = _group_index(at, row), uint32(0)
    if row % GROUP == 0:
        for i in range(n // GROUP):
            top = largest_magnitude(NEXT_FIRST, GROUP, values, i * GROUP)
            largest = max(largest, top)
            store(UNITS, F32, units, i, _put_scale(FIRST_SCALES, scales, group + i, top))
        for i in range(n // GROUP):
            _encode_first(codes, at + i * GROUP, values, i * GROUP, load(UNITS, F32, units, i), GROUP, chance)
        return largest
    start = 0
    while start < n:
        length, top = _length(start, at, n, row), uint32(0)
        for i in range(length):
            top = max(top, m.magnitude_of(load(NEXT_FIRST, F32, values, start + i)))
        largest = max(largest, top)
        unit = _put_scale(FIRST_SCALES, scales, group, top)
        _encode_first(codes, at + start, values, start, unit, length, chance)
        start, group = start + length, group + 1
    return largest


@inner
def write_second(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V, chance: V) -> None:
    """A block's scales, then its codes, from its roots."""
    group = _group_index(at, row)
    if row % GROUP == 0:
        for i in range(n // GROUP):
            top = largest_magnitude(NEXT_SECOND, GROUP, values, i * GROUP)
            store(UNITS, F32, units, i, _put_scale(SECOND_SCALES, scales, group + i, top))
        for i in range(n // GROUP):
            store(UNITS, F32, units, i, _255 / load(UNITS, F32, units, i))
        for i in range(n // GROUP):
            _encode_second(codes, at + i * GROUP, values, i * GROUP, load(UNITS, F32, units, i), GROUP, chance)
        return
    start = 0
    while start < n:
        length, top = _length(start, at, n, row), uint32(0)
        for i in range(length):
            top = max(top, m.magnitude_of(load(NEXT_SECOND, F32, values, start + i)))
        factor = _255 / _put_scale(SECOND_SCALES, scales, group, top)
        _encode_second(codes, at + start, values, start, factor, length, chance)
        start, group = start + length, group + 1


@inner
def _put_scale(role: V, scales: V, group: V, top: V) -> V:
    """Write the scale of a group whose largest magnitude has a pattern; its value."""
    bits = min(max(uint32(uint32(top + _UP) >> _U15), _SMALLEST_SCALE), _LARGEST_SCALE)
    store(role, U16, scales, group, uint16(bits))
    return _scale_of(bits)


@inner
def _encode_first(codes: V, at: V, values: V, start: V, unit: V, n: V, chance: V) -> None:
    for i in range(n):
        value = load(NEXT_FIRST, F32, values, start + i)
        random = uint32(m.first_word(chance, start + i) & _ELEVEN)
        up = float_of(uint32(uint32(random >> uint32(16)) | _UP_FROM_128))
        code = value / (unit + abs(value)) * _254
        store(FIRST, I8, codes, at + i, int8(int32(code + up) - int32(128)))


@inner
def _encode_second(codes: V, at: V, values: V, start: V, factor: V, n: V, chance: V) -> None:
    for i in range(n):
        root = load(NEXT_SECOND, F32, values, start + i)
        random = uint32(m.second_word(chance, start + i) & _ELEVEN)
        up = float_of(uint32(uint32(random >> uint32(9)) | _UP_FROM_1))
        code = int32(int32(root * factor + up) - int32(1))
        store(SECOND, I8, codes, at + i, int8(max(code, int32(root > 0))))
