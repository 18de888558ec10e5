"""Between storage and fp32, a block at a time: the compiled form of ``kernels/storage.py``.

Every function fills or empties the first ``n`` elements of fp32 buffers that stay in a core's first cache. ``address``
is that of a tensor, ``at`` the index of the block's first element in it. The loops are short and do one thing each, so
that LLVM turns each into vector instructions; a fused one would need more checks for overlap than LLVM makes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, int8, int16, int32, uint8, uint16, uint32

from halfstep.formats import FP16 as FP16_FORMAT
from halfstep.kernels.numba_.bits import (
    INFINITY,
    MAGNITUDE,
    bf16_to_float,
    bits_of,
    bits_to_bf16,
    float_of,
    float_to_fp16,
    fp16_to_float,
    pointer,
)
from halfstep.kernels.storage import BF16_BOUND, GROUP, Master

V = Any
_jit = numba.njit(nogil=True, error_model="numpy")

FP32, BF16, FP16 = 0, 1, 2  # dtypes of weights and gradients; a loop knows integers only
MASTER_FP32, SPLIT, SPLIT8 = int(Master.FP32), int(Master.SPLIT), int(Master.SPLIT8)

_LARGEST = np.float32(np.finfo(np.float32).max)
_FP16_LARGEST = np.float32(FP16_FORMAT.largest)
_BOUND, _LARGEST_SPLIT, _LARGEST_SPLIT8 = uint32(BF16_BOUND), uint32(BF16_BOUND - 1), uint32(BF16_BOUND - 0x81)
_SIGN, _NAN = uint32(0x80000000), uint32(0x7FC00000)
_U8, _U15, _U16 = uint32(8), uint32(15), uint32(16)
_HALF8, _HALF15, _HALF16 = uint32(0x80), uint32(0x4000), uint32(0x8000)
_ALMOST15, _LARGEST_SCALE = uint32(0x7FFF), uint32(0xFEFF)
_STILL = np.float32(2.0**-12)
_LOW16 = uint32(0xFFFF)
_HALF_MAGNITUDE, _HALF_INFINITY, _NONE = uint32(0x7FFF), uint32(0x7F80), int32(0)
_256 = int32(256)
_ONE, _ZERO = np.float32(1), np.float32(0)
_2P15, _2PM15, _2P7, _2PM7 = (np.float32(2.0**n) for n in (15, -15, 7, -7))
_2P16, _2P24, _2PM24 = np.float32(2.0**16), np.float32(2.0**24), np.float32(2.0**-24)
_254, _255 = np.float32(254), np.float32(255)


# ---- plain elements -------------------------------------------------------------------------------------------------


@_jit
def read(dtype: V, address: V, at: V, buffer: V, n: V) -> None:
    """fp32, bf16 or fp16 elements."""
    if dtype == FP32:
        wide = carray(pointer(address + 4 * at), n, np.float32)
        for i in range(n):
            buffer[i] = wide[i]
    elif dtype == BF16:
        half = carray(pointer(address + 2 * at), n, np.uint16)
        for i in range(n):
            buffer[i] = bf16_to_float(half[i])
    else:
        half = carray(pointer(address + 2 * at), n, np.uint16)
        for i in range(n):
            buffer[i] = fp16_to_float(half[i])


@_jit
def write_fp32(address: V, at: V, buffer: V, n: V) -> int:
    """Saturates; how many values did."""
    wide = carray(pointer(address + 4 * at), n, np.float32)
    num_saturated = uint32(0)
    for i in range(n):
        magnitude = uint32(bits_of(buffer[i]) & MAGNITUDE)
        num_saturated = uint32(num_saturated + uint32(magnitude == INFINITY))
        value = buffer[i]
        value = _LARGEST if value > _LARGEST else value  # in this way NaN stays
        wide[i] = -_LARGEST if value < -_LARGEST else value
    return num_saturated


# ---- weights and masters --------------------------------------------------------------------------------------------


@_jit
def ulp_fp16(half: V) -> V:
    """The step to the next fp16 number."""
    exponent = uint32((uint32(half) >> uint32(10)) & uint32(0x1F))
    exponent = max(exponent, uint32(1))
    return float_of(uint32(exponent + uint32(127 - 25)) << uint32(23))


@_jit
def _saturated(bits: V) -> V:
    """An fp32 pattern whose nearest bf16 number is finite; NaN stays."""
    magnitude = uint32(bits & MAGNITUDE)
    held = min(magnitude, _LARGEST_SPLIT) if magnitude <= INFINITY else magnitude
    return uint32((bits & _SIGN) | held)


@_jit
def _joined(half: V, low: V) -> V:
    """A bf16 weight and its rest as one pattern; see ``storage.join``."""
    magnitude = uint32(half & _HALF_MAGNITUDE)
    low = int32(max(low, _NONE)) if magnitude == 0 else low
    low = _NONE if magnitude >= _HALF_INFINITY else low
    return uint32((uint32(half) << _U16) + uint32(low))


@_jit
def read_master(dtype: V, storage: V, weight: V, rest: V, at: V, buffer: V, n: V) -> None:
    """The fp32 master of a block."""
    if storage == MASTER_FP32:
        half = carray(pointer(weight + 2 * at), n, np.uint16)
        master = carray(pointer(rest + 4 * at), n, np.float32)
        if dtype == BF16:
            for i in range(n):
                bits = bits_of(master[i])
                buffer[i] = master[i] if bits_to_bf16(_saturated(bits)) == half[i] else bf16_to_float(half[i])
        else:
            for i in range(n):
                nearest = float_to_fp16(min(max(master[i], -_FP16_LARGEST), _FP16_LARGEST))
                buffer[i] = master[i] if nearest == half[i] else fp16_to_float(half[i])
    elif storage == SPLIT:
        half = carray(pointer(weight + 2 * at), n, np.uint16)
        low = carray(pointer(rest + 2 * at), n, np.int16)
        if dtype == BF16:
            for i in range(n):
                buffer[i] = float_of(_joined(half[i], int32(low[i])))
        else:
            for i in range(n):
                buffer[i] = fp16_to_float(half[i]) + np.float32(low[i]) * (ulp_fp16(half[i]) * _2PM15)
    elif storage == SPLIT8:
        half = carray(pointer(weight + 2 * at), n, np.uint16)
        low8 = carray(pointer(rest + at), n, np.int8)
        if dtype == BF16:
            for i in range(n):
                buffer[i] = float_of(_joined(half[i], int32(int32(low8[i]) * _256)))
        else:
            for i in range(n):
                buffer[i] = fp16_to_float(half[i]) + np.float32(low8[i]) * (ulp_fp16(half[i]) * _2PM7)
    else:
        read(dtype, weight, at, buffer, n)


@_jit
def saturate(dtype: V, buffer: V, n: V) -> int:
    """Make what the weight cannot hold its largest number; how many values that were. NaN stays."""
    num_saturated = 0
    if dtype == FP16:
        largest = _ZERO
        for i in range(n):
            largest = max(largest, abs(buffer[i]))
        if largest > _FP16_LARGEST:
            for i in range(n):
                if abs(buffer[i]) > _FP16_LARGEST:
                    num_saturated += 1
                    buffer[i] = _FP16_LARGEST if buffer[i] > 0 else -_FP16_LARGEST
    else:
        top = uint32(0)
        for i in range(n):
            top = max(top, uint32(bits_of(buffer[i]) & MAGNITUDE))
        if top >= _BOUND:
            for i in range(n):
                bits = bits_of(buffer[i])
                magnitude = uint32(bits & MAGNITUDE)
                if magnitude > INFINITY:
                    buffer[i] = float_of(_NAN)
                elif magnitude >= _BOUND:
                    num_saturated += 1
                    buffer[i] = float_of(uint32((bits & _SIGN) | _LARGEST_SPLIT))
    return num_saturated


@_jit
def write_halves(dtype: V, weight: V, at: V, buffer: V, n: V) -> None:
    """Nearest rounding of saturated values: the one by which every weight is written."""
    half = carray(pointer(weight + 2 * at), n, np.uint16)
    if dtype == BF16:
        for i in range(n):
            half[i] = bits_to_bf16(bits_of(buffer[i]))
    else:
        for i in range(n):
            half[i] = float_to_fp16(buffer[i])


@_jit
def write_split(dtype: V, weight: V, rest: V, at: V, buffer: V, n: V) -> None:
    """Weight and int16 rest of saturated values."""
    half = carray(pointer(weight + 2 * at), n, np.uint16)
    low = carray(pointer(rest + 2 * at), n, np.int16)
    if dtype == BF16:
        for i in range(n):
            bits = bits_of(buffer[i])
            high = uint32(uint32(bits + _HALF16) >> _U16)
            half[i] = uint16(high)
            low[i] = int16(uint32(bits - uint32(high << _U16)))
    else:
        for i in range(n):
            code = float_to_fp16(buffer[i])
            half[i] = code
            low[i] = int16(np.rint((buffer[i] - fp16_to_float(code)) / ulp_fp16(code) * _2P15))


@_jit
def write_split8(dtype: V, weight: V, rest: V, at: V, buffer: V, n: V) -> None:
    """Weight and int8 rest of saturated values."""
    half = carray(pointer(weight + 2 * at), n, np.uint16)
    low = carray(pointer(rest + at), n, np.int8)
    if dtype == BF16:
        for i in range(n):
            bits = bits_of(buffer[i])
            magnitude = uint32(bits & MAGNITUDE)
            magnitude = min(magnitude, _LARGEST_SPLIT8) if magnitude <= INFINITY else _NAN
            upper = uint32(uint32((uint32(bits & _SIGN) | magnitude) + _HALF8) >> _U8)
            high = uint32(uint32(upper + _HALF8) >> _U8)
            half[i] = uint16(high)
            low[i] = int8(uint32(upper - uint32(high << _U8)))
    else:
        for i in range(n):
            code = float_to_fp16(buffer[i])
            half[i] = code
            low[i] = int8(np.rint((buffer[i] - fp16_to_float(code)) / ulp_fp16(code) * _2P7))


# ---- chance ---------------------------------------------------------------------------------------------------------


@_jit
def random_bits(key: V, index: V) -> V:
    """32 random bits of an element; see ``storage.random_bits``."""
    word = uint32(uint32(uint32(index) * uint32(0x9E3779B1)) ^ key)
    word = uint32(word ^ (word >> uint32(16)))
    word = uint32(word * uint32(0x7FEB352D))
    word = uint32(word ^ (word >> uint32(15)))
    word = uint32(word * uint32(0x846CA68B))
    return uint32(word ^ (word >> uint32(16)))


@_jit
def _cut_to_bf16(bits: V, chance: V) -> V:
    """The pattern of an fp32 number plus 16 random bits, cut; saturates, and NaN stays."""
    magnitude = uint32(bits & MAGNITUDE)
    held = min(uint32(magnitude + chance), uint32(0x7F7FFFFF))
    held = held if magnitude <= INFINITY else _NAN
    return uint16(uint32((uint32(bits & _SIGN) | held) >> _U16))


@_jit
def write_by_chance(dtype: V, weight: V, at: V, buffer: V, n: V, key: V, index: V) -> None:
    """Stochastic rounding of saturated values to bf16 or fp16, by the lower 16 random bits."""
    half = carray(pointer(weight + 2 * at), n, np.uint16)
    if dtype == BF16:
        for i in range(n):
            chance = uint32(random_bits(key, index + i) & _LOW16)
            bits = bits_of(buffer[i])
            half[i] = _cut_to_bf16(bits, chance)
    else:
        for i in range(n):
            chance = np.float32(uint32(random_bits(key, index + i) & _LOW16))
            magnitude = min(abs(buffer[i]), _FP16_LARGEST)
            code = float_to_fp16(magnitude)
            code = uint16(code - uint16(fp16_to_float(code) > magnitude))
            unit = ulp_fp16(code)
            whole = magnitude / unit
            lower = np.floor(whole)
            up = np.floor((whole - lower) * _2P16) > chance
            code = float_to_fp16((lower + np.float32(up)) * unit)
            half[i] = uint16(code | uint16(uint32(bits_of(buffer[i]) & _SIGN) >> _U16))


# ---- moments --------------------------------------------------------------------------------------------------------


@_jit
def write_bf16_moment(address: V, at: V, buffer: V, n: V, key: V, index: V, which: V) -> None:
    """Stochastic rounding to bf16; ``which`` moment decides which of the random bits."""
    half = carray(pointer(address + 2 * at), n, np.uint16)
    for i in range(n):
        chance = random_bits(key, index + i)
        if which == 0:
            chance = uint32(chance * uint32(0x9E3779B1))
        chance = uint32(chance >> _U16)
        bits = bits_of(buffer[i])
        half[i] = _cut_to_bf16(bits, chance)


@_jit
def group_start(element: V, row: V) -> V:
    """The first element of the group that ``element`` lies in, where groups start anew in every row."""
    column = element % row
    return element - column + (column // GROUP) * GROUP


@_jit
def group_index(start: V, row: V) -> V:
    """The number of the group that starts at an element."""
    return (start // row) * ((row + GROUP - 1) // GROUP) + (start % row) // GROUP


@_jit
def group_length(start: V, row: V, stop: V) -> V:
    """How long that group is."""
    return min(GROUP, row - start % row, stop - start)


@_jit
def scale_of(bits: V) -> V:
    """The fp32 value of a scale's 16 bits."""
    return float_of(uint32(uint32(bits) << _U15))


@_jit
def read_int8(address: V, scales: V, at: V, buffer: V, n: V, row: V, is_second: V) -> None:
    """Groups of a moment; ``at`` is the first element of one."""
    code = carray(pointer(address + at), n, np.int8)
    start = 0
    scale = carray(pointer(scales + 2 * group_index(at, row)), n, np.uint16)
    group = 0
    while start < n:
        length = group_length(at + start, row, at + n)
        unit = scale_of(scale[group])
        codes, values = code[start : start + length], buffer[start : start + length]
        if is_second:
            _decode_second(codes, values, unit, length)
        else:
            _decode_first(codes, values, unit, length)
        start += length
        group += 1


@_jit
def write_int8(address: V, scales: V, at: V, buffer: V, n: V, row: V, is_second: V, key: V, index: V) -> None:
    """The same, back: every group's scale, and its codes; those of the second moment by chance."""
    code = carray(pointer(address + at), n, np.int8)
    start = 0
    scale = carray(pointer(scales + 2 * group_index(at, row)), n, np.uint16)
    group = 0
    if is_second:
        for i in range(n):
            buffer[i] = np.sqrt(buffer[i])
    while start < n:
        length = group_length(at + start, row, at + n)
        codes, values = code[start : start + length], buffer[start : start + length]
        offset = _ALMOST15 if is_second else _HALF15  # up, or to nearest
        bits = uint16(min(uint32(uint32(_largest_magnitude(values, length) + offset) >> _U15), _LARGEST_SCALE))
        scale[group] = bits
        unit = scale_of(bits)
        unit = unit if unit > 0 else _ONE  # all are 0 then
        if is_second:
            _encode_second(codes, values, unit, length, key, index + start)
        else:
            _encode_first(codes, values, unit, length)
        start += length
        group += 1


@_jit
def _largest_magnitude(values: V, n: V) -> V:
    largest = uint32(0)
    if n == GROUP:  # a constant length is unrolled
        for i in range(GROUP):
            largest = max(largest, uint32(bits_of(values[i]) & MAGNITUDE))
    else:
        for i in range(n):
            largest = max(largest, uint32(bits_of(values[i]) & MAGNITUDE))
    return largest


@_jit
def _decode_first(codes: V, values: V, unit: V, n: V) -> None:
    for i in range(n):
        value = np.float32(codes[i])
        values[i] = value / (_254 - abs(value)) * unit


@_jit
def _decode_second(codes: V, values: V, unit: V, n: V) -> None:
    for i in range(n):
        root = np.float32(uint8(codes[i])) / _255 * unit
        values[i] = root * root


@_jit
def _encode_first(codes: V, values: V, unit: V, n: V) -> None:
    for i in range(n):
        x = min(max(values[i] / unit, -_ONE), _ONE)
        codes[i] = int8(int32(np.rint(x * _254 / (abs(x) + _ONE))))


@_jit
def _encode_second(codes: V, values: V, unit: V, n: V, key: V, index: V) -> None:
    for i in range(n):
        chance = np.float32(uint32(random_bits(key, index + i) >> _U16))
        code = min(values[i] / unit, _ONE) * _255
        lower = np.floor(code + _STILL)
        above = code - lower
        above = _ZERO if above < _STILL else above
        code = lower + np.float32(np.floor(above * _2P16) > chance)
        code = max(code, np.float32(values[i] > 0))
        codes[i] = int8(uint8(int32(code)))
