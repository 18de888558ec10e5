"""Moments in int8: groups of up to 32 elements inside one row share a 16-bit scale. See ``kernels/storage.py``.

``at`` is the first element of a group, and a block of ``n`` elements ends where one does. Nearly all groups are whole:
for these the length is a constant, and LLVM makes a handful of vector instructions of each.

Division by a scale: x / s is nearly all that encoding costs, so it is done as s has it. A scale has 9 significant bits.
With r = 1 / s and q the upper 15 bits of x r, q s is exact, and so is x - q s; then q + (x - q s) r is off by less than
2**-36 of itself before it is rounded. x / s, where it is no fp32 number, is 2**-34 of itself or more from the middle
between two. So the sum is the quotient, in every bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int8, int32, uint8, uint16, uint32

from halfstep.kernels.numba_ import memory as m
from halfstep.kernels.numba_.bits import F32, I8, U16, bits_of, float_of, largest_magnitude, load, store
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
_jit = numba.njit(nogil=True, error_model="numpy")

_U15, _U16 = uint32(15), uint32(16)
_HALF15, _ALMOST15, _LARGEST_SCALE = uint32(0x4000), uint32(0x7FFF), uint32(0xFEFF)
# Between these a quotient of more than 2**-20 has no subnormal steps; below, every code is the same.
_SMALLEST_PLAIN, _LARGEST_PLAIN = np.float32(2.0**-90), np.float32(2.0**100)
_UPPER15 = uint32(0xFFFFFE00)
_ONE, _2P16 = np.float32(1), np.float32(2.0**16)
_254, _255 = np.float32(254), np.float32(255)
_STILL = np.float32(2.0**-12)
_STILL_CHANCE = uint32(15)  # of 2**16: what is not above it is less than _STILL
_MAGIC = np.float32(1.5 * 2.0**23)  # plus this, a number's integer is in its lowest bits, rounded to nearest
_255_UPPER = np.float32(float.fromhex("0x1.0101p-8"))  # of 1/255: 16 bits, whose product with a code is exact
_255_LOWER = np.float32(1.0 / 255.0 - float.fromhex("0x1.0101p-8"))


# ---- geometry -------------------------------------------------------------------------------------------------------


@_jit
def group_start(element: V, row: V) -> V:
    """The first element of the group that ``element`` lies in, where groups start anew in every row."""
    column = element % row
    return element - column + (column // GROUP) * GROUP


@_jit
def _group_index(start: V, row: V) -> V:
    """The number of the group that starts at an element."""
    return (start // row) * ((row + GROUP - 1) // GROUP) + (start % row) // GROUP


@_jit
def _scale_of(bits: V) -> V:
    return float_of(uint32(uint32(bits) << _U15))


# ---- read -----------------------------------------------------------------------------------------------------------


@_jit
def read_first(codes: V, scales: V, at: V, n: V, row: V, values: V) -> None:
    """Decode a block into its buffer."""
    column, group, start = at % row, _group_index(at, row), 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        unit = _scale_of(load(FIRST_SCALES, U16, scales, group))
        if length == GROUP:
            _decode_first(codes, at + start, values, start, unit, GROUP)
        else:
            _decode_first(codes, at + start, values, start, unit, length)
        start, group, column = start + length, group + 1, column + length
        column = 0 if column == row else column


@_jit
def read_second(codes: V, scales: V, at: V, n: V, row: V, values: V) -> None:
    """Decode a block into its buffer."""
    column, group, start = at % row, _group_index(at, row), 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        unit = _scale_of(load(SECOND_SCALES, U16, scales, group))
        if length == GROUP:
            _decode_second(codes, at + start, values, start, unit, GROUP)
        else:
            _decode_second(codes, at + start, values, start, unit, length)
        start, group, column = start + length, group + 1, column + length
        column = 0 if column == row else column


@_jit
def _decode_first(codes: V, at: V, values: V, start: V, unit: V, n: V) -> None:
    for i in range(n):
        code = np.float32(load(FIRST, I8, codes, at + i))
        store(NEXT_FIRST, F32, values, start + i, code / (_254 - abs(code)) * unit)


@_jit
def _decode_second(codes: V, at: V, values: V, start: V, unit: V, n: V) -> None:
    for i in range(n):
        code = np.float32(int32(uint8(load(SECOND, I8, codes, at + i))))
        root = (code * _255_UPPER + code * _255_LOWER) * unit  # code / 255 in every bit, for all codes
        store(NEXT_SECOND, F32, values, start + i, root * root)


# ---- written --------------------------------------------------------------------------------------------------------


@_jit
def write_first(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V, chance: V) -> None:
    """A block's scales, then its codes."""
    column, group, start, place = at % row, _group_index(at, row), 0, 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        if length == GROUP:
            top = largest_magnitude(NEXT_FIRST, GROUP, values, start)
        else:
            top = uint32(0)
            for i in range(length):
                top = max(top, m.magnitude_of(load(NEXT_FIRST, F32, values, start + i)))
        bits = min(uint32(uint32(top + _ALMOST15) >> _U15), _LARGEST_SCALE)  # up
        store(FIRST_SCALES, U16, scales, group, uint16(bits))
        _keep_unit(units, place, bits)
        start, group, column, place = start + length, group + 1, column + length, place + 2
        column = 0 if column == row else column
    column, start, place = at % row, 0, 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        unit, share = load(UNITS, F32, units, place), load(UNITS, F32, units, place + 1)
        if length == GROUP and share > 0:
            _encode_first(codes, at + start, values, start, unit, share, GROUP, chance)
        else:
            _encode_first_by_division(codes, at + start, values, start, unit, length, chance)
        start, column, place = start + length, column + length, place + 2
        column = 0 if column == row else column


@_jit
def write_second(codes: V, scales: V, at: V, n: V, row: V, values: V, units: V, chance: V) -> None:
    """A block's scales, then its codes, from its roots."""
    column, group, start, place = at % row, _group_index(at, row), 0, 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        if length == GROUP:
            top = largest_magnitude(NEXT_SECOND, GROUP, values, start)
        else:
            top = uint32(0)
            for i in range(length):
                top = max(top, m.magnitude_of(load(NEXT_SECOND, F32, values, start + i)))
        bits = min(uint32(uint32(top + _ALMOST15) >> _U15), _LARGEST_SCALE)  # up
        store(SECOND_SCALES, U16, scales, group, uint16(bits))
        _keep_unit(units, place, bits)
        start, group, column, place = start + length, group + 1, column + length, place + 2
        column = 0 if column == row else column
    column, start, place = at % row, 0, 0
    while start < n:
        length = min(GROUP, row - column, n - start)
        unit, share = load(UNITS, F32, units, place), load(UNITS, F32, units, place + 1)
        if length == GROUP and share > 0:
            _encode_second(codes, at + start, values, start, unit, share, GROUP, chance)
        else:
            _encode_second_by_division(codes, at + start, values, start, unit, length, chance)
        start, column, place = start + length, column + length, place + 2
        column = 0 if column == row else column


@_jit
def _keep_unit(units: V, place: V, bits: V) -> None:
    """A scale's value (1 where it is 0: so is all of the group), and one divided by it if that can stand for it."""
    unit = _scale_of(bits)
    is_plain = (unit >= _SMALLEST_PLAIN) & (unit <= _LARGEST_PLAIN)
    store(UNITS, F32, units, place, unit if unit > 0 else _ONE)
    store(UNITS, F32, units, place + 1, _ONE / unit if is_plain else np.float32(0))


@_jit
def _quotient(value: V, unit: V, share: V) -> V:
    """``value / unit`` in every bit; see the top."""
    upper = float_of(uint32(bits_of(value * share) & _UPPER15))
    return upper + (value - upper * unit) * share


@_jit
def _encode_first(codes: V, at: V, values: V, start: V, unit: V, share: V, n: V, chance: V) -> None:
    for i in range(n):
        x = _quotient(load(NEXT_FIRST, F32, values, start + i), unit, share)
        store(FIRST, I8, codes, at + i, _first_code(x, m.first_chance(chance, start + i)))


@_jit
def _encode_first_by_division(codes: V, at: V, values: V, start: V, unit: V, n: V, chance: V) -> None:
    for i in range(n):
        x = load(NEXT_FIRST, F32, values, start + i) / unit
        store(FIRST, I8, codes, at + i, _first_code(x, m.first_chance(chance, start + i)))


@_jit
def _first_code(x: V, chance: V) -> V:
    share = min(abs(x), _ONE)
    whole = _by_chance(share * _254 / (share + _ONE), chance)
    return int8(whole if x >= 0 else int32(-whole))


@_jit
def _by_chance(code: V, chance: V) -> V:
    """Up if ``floor(2**16 above) > chance``, which for an integer is ``2**16 above >= chance + 1``."""
    lower = np.floor(code + _STILL)
    needed = np.float32(int32(uint32(max(chance, _STILL_CHANCE) + uint32(1))))
    return int32(int32(lower) + int32((code - lower) * _2P16 >= needed))


@_jit
def _encode_second(codes: V, at: V, values: V, start: V, unit: V, share: V, n: V, chance: V) -> None:
    for i in range(n):
        root = load(NEXT_SECOND, F32, values, start + i)
        x = _quotient(root, unit, share)
        store(SECOND, I8, codes, at + i, _second_code(root, x, m.second_chance(chance, start + i)))


@_jit
def _encode_second_by_division(codes: V, at: V, values: V, start: V, unit: V, n: V, chance: V) -> None:
    for i in range(n):
        root = load(NEXT_SECOND, F32, values, start + i)
        store(SECOND, I8, codes, at + i, _second_code(root, root / unit, m.second_chance(chance, start + i)))


@_jit
def _second_code(root: V, x: V, chance: V) -> V:
    return int8(max(_by_chance(min(x, _ONE) * _255, chance), int32(root > 0)))
