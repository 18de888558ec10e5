"""Between storage and fp32: the compiled form of ``kernels/storage.py``, for weights and moments that stand alone.

What is read becomes fp32 element by element, inside the loop of a rule. What is written comes from fp32 buffers that
stay in a core's first cache, a block at a time: ``address`` is that of a tensor, ``at`` the index of the block's first
element in it, ``n`` the block's length.

A block is written as if nothing in it were too large, and its largest magnitude is looked at on the way. If it is too
large after all, the buffer is clamped and written once more: clamping every number would cost more than the rest.

Pairs: where everything of a parameter is bf16 (``layout`` is 1), two neighbours are read as one 32-bit word, and each
is made fp32 by a shift or a mask; to widen eight 16-bit numbers to eight 32-bit ones is slower, and so is the way back.
The buffers then hold the elements 0, 2, 4, ... in their first half and 1, 3, 5, ... in their second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int8, int16, int32, uint16, uint32

from halfstep.formats import FP16 as FP16_FORMAT
from halfstep.kernels.numba_.bits import (
    F32,
    I8,
    I16,
    INFINITY,
    MAGNITUDE,
    PAIR,
    U16,
    U32,
    bits_of,
    float_of,
    float_to_fp16,
    fp16_to_float,
    load,
    prefetch,
    store,
)
from halfstep.kernels.numba_.compiling import inner
from halfstep.kernels.storage import BF16_BOUND, Master, Moment

V = Any

# What a tensor's row of addresses holds; roles of memory.
WEIGHT, REST, GRADIENT, FIRST, SECOND, FIRST_SCALES, SECOND_SCALES, STEP = range(8)
# What the buffers hold; roles of memory too. ``NEXT`` are the values to be written. (A second moment that is kept in
# groups is there as its root.)
NEXT_WEIGHT, NEXT_FIRST, NEXT_SECOND, BEFORE, CHANCE, UNITS = range(8, 14)
BLOCK = 512  # elements: the buffers fit any core's first cache, with room for what comes from memory
NUM_BUFFERS = 6

FP32, BF16, FP16 = 0, 1, 2  # dtypes of weights and gradients; a loop knows integers only
MASTER_FP32, SPLIT, SPLIT8, STOCHASTIC = map(int, (Master.FP32, Master.SPLIT, Master.SPLIT8, Master.STOCHASTIC))
MOMENT_NONE, MOMENT_FP32, MOMENT_BF16, MOMENT_INT8 = map(int, (Moment.NONE, Moment.FP32, Moment.BF16, Moment.INT8))
PLAIN, LOWER, UPPER, LAST = range(4)  # an element by itself, those of a pair, and the last one of an odd number

_LARGEST = np.float32(np.finfo(np.float32).max)
_FP16_LARGEST = np.float32(FP16_FORMAT.largest)
_FP16_LIMIT = uint32(_FP16_LARGEST.view(np.uint32))
BOUND, _SPLIT_LIMIT, _SPLIT8_LIMIT = uint32(BF16_BOUND), uint32(BF16_BOUND - 1), uint32(BF16_BOUND - 0x81)
_CHANCE_LIMIT = uint32(0x7F7F0000)  # plus 16 random bits it is not yet bf16's infinity
_SIGN, _NAN = uint32(0x80000000), uint32(0x7FC00000)
_U8, _U16, _16 = uint32(8), uint32(16), int32(16)
_HALF8, _HALF16 = uint32(0x80), uint32(0x8000)
_LOW16, _HIGH16 = uint32(0xFFFF), uint32(0xFFFF0000)
_INFINITY, _NONE = int32(0x7F800000), int32(0)
_256 = int32(256)
_ZERO = np.float32(0)
_2P15, _2PM15, _2P7, _2PM7, _2P16 = (np.float32(2.0**n) for n in (15, -15, 7, -7, 16))
_HALF_BLOCK = BLOCK // 2


STRIP = 64  # elements
_AHEAD = 512  # elements, of all that is read: a few of the pages of memory before which a processor stops looking ahead
_LINE_BYTES = 64  # bytes


@inner
def fetch(address: V, width: V, at: V) -> None:
    """Ask for the part of a tensor that is read a few strips later, as long as it is a strip."""
    start = address + (at + _AHEAD) * width
    for ahead in range(0, STRIP * width, _LINE_BYTES):
        prefetch(start + ahead)


@inner
def buffer(buffers: V, role: V) -> V:
    """The address of a buffer."""
    return buffers + 4 * BLOCK * (role - NEXT_WEIGHT)


@inner
def place(i: V, part: V) -> V:
    """Where in a buffer an element is: ``i`` counts elements, or pairs."""
    return i + _HALF_BLOCK if part == UPPER else i


# ---- read, by elements ----------------------------------------------------------------------------------------------


def _pattern_of(role: int) -> Callable[..., Any]:
    @inner
    def pattern(address: V, at: V, i: V, part: V) -> V:
        """A bf16 element as an fp32 pattern."""
        if part == LOWER:
            return uint32(load(role, PAIR, address + 2 * at, i) << _U16)
        if part == UPPER:
            return uint32(load(role, PAIR, address + 2 * at, i) & _HIGH16)
        return uint32(uint32(load(role, U16, address + 2 * at, 2 * i if part == LAST else i)) << _U16)

    return pattern


_weight_pattern, _gradient_pattern = _pattern_of(WEIGHT), _pattern_of(GRADIENT)
_first_pattern, _second_pattern = _pattern_of(FIRST), _pattern_of(SECOND)


@inner
def gradient_at(dtype: V, address: V, at: V, i: V, part: V) -> V:
    """An element of a gradient in fp32."""
    if dtype == FP32:
        return load(GRADIENT, F32, address, at + i)
    if dtype == FP16:
        return fp16_to_float(load(GRADIENT, U16, address, at + i))
    return float_of(_gradient_pattern(address, at, i, part))


@inner
def first_at(kind: V, address: V, buffers: V, at: V, i: V, part: V) -> V:
    """An element of the first moment; that of a group has been decoded into its buffer."""
    if kind == MOMENT_NONE:
        return _ZERO
    if kind == MOMENT_FP32:
        return load(FIRST, F32, address, at + i)
    if kind == MOMENT_BF16:
        return float_of(_first_pattern(address, at, i, part))
    return load(NEXT_FIRST, F32, buffer(buffers, NEXT_FIRST), i)


@inner
def second_at(kind: V, address: V, buffers: V, at: V, i: V, part: V) -> V:
    """The same for the second."""
    if kind == MOMENT_FP32:
        return load(SECOND, F32, address, at + i)
    if kind == MOMENT_BF16:
        return float_of(_second_pattern(address, at, i, part))
    return load(NEXT_SECOND, F32, buffer(buffers, NEXT_SECOND), i)


@inner
def _exponent_fp16(half: V) -> V:
    return max(uint32((uint32(half) >> uint32(10)) & uint32(0x1F)), uint32(1))


@inner
def ulp_fp16(half: V) -> V:
    """The step to the next fp16 number."""
    return float_of(uint32(_exponent_fp16(half) + uint32(127 - 25)) << uint32(23))


@inner
def _per_ulp_fp16(half: V) -> V:
    """One divided by it: a power of two, so that the product is the quotient."""
    return float_of(uint32(uint32(127 + 25) - _exponent_fp16(half)) << uint32(23))


@inner
def _saturated(bits: V) -> V:
    """An fp32 pattern whose nearest bf16 number is finite; NaN stays."""
    magnitude = uint32(bits & MAGNITUDE)
    held = min(magnitude, _SPLIT_LIMIT) if magnitude <= INFINITY else magnitude
    return uint32((bits & _SIGN) | held)


@inner
def _joined(high: V, low: V) -> V:
    """A bf16 weight's pattern and its rest as one number; see ``storage.join``."""
    magnitude = int32(uint32(high & MAGNITUDE))
    low = max(low, int32(-magnitude))  # below a 0 is NaN
    low = _NONE if magnitude >= _INFINITY else low
    return float_of(uint32(high + uint32(low)))


@inner
def _joined_pair(high: V, low: V) -> V:
    """The same without a look at what somebody else may have written: then it is not below BF16_BOUND."""
    return float_of(uint32(high + uint32(low)))


@inner
def mend_rests(weight: V, rest: V, at: V, n: V) -> None:
    """Clear rests beside which a weight is no number: those below a 0, beside an infinity and a NaN."""
    for i in range(at, at + n):
        high = uint32(uint32(load(WEIGHT, U16, weight, i)) << _U16)
        low = int32(load(REST, I16, rest, i))
        if bits_of(_joined(high, low)) == high:
            store(REST, I16, rest, i, int16(0))


@inner
def _rest16_at(rest: V, at: V, i: V, part: V) -> V:
    if part == LOWER:
        return int32(uint32(load(REST, PAIR, rest + 2 * at, i) << _U16)) >> _16
    if part == UPPER:
        return int32(load(REST, PAIR, rest + 2 * at, i)) >> _16
    return int32(load(REST, I16, rest + 2 * at, 2 * i if part == LAST else i))


@inner
def _bf16_master_at(storage: V, weight: V, rest: V, at: V, i: V, part: V) -> V:
    pattern = _weight_pattern(weight, at, i, part)
    if storage == MASTER_FP32:
        master = load(REST, F32, rest, at + i)
        nearest = uint32(uint32(_saturated(bits_of(master)) + _HALF16) & _HIGH16)
        return master if nearest == pattern else float_of(pattern)
    if storage == SPLIT:
        low = int32(_rest16_at(rest, at, i, part))
        return _joined(pattern, low) if part == PLAIN else _joined_pair(pattern, low)
    if storage == SPLIT8:
        return _joined(pattern, int32(int32(load(REST, I8, rest, at + i)) * _256))
    return float_of(pattern)


@inner
def _fp16_master_at(storage: V, weight: V, rest: V, at: V, i: V) -> V:
    half = load(WEIGHT, U16, weight, at + i)
    value = fp16_to_float(half)
    if storage == MASTER_FP32:
        master = load(REST, F32, rest, at + i)
        nearest = float_to_fp16(min(max(master, -_FP16_LARGEST), _FP16_LARGEST))
        return master if nearest == half else value
    if storage == SPLIT:
        return value + np.float32(load(REST, I16, rest, at + i)) * (ulp_fp16(half) * _2PM15)
    if storage == SPLIT8:
        return value + np.float32(load(REST, I8, rest, at + i)) * (ulp_fp16(half) * _2PM7)
    return value


@inner
def master_at(dtype: V, storage: V, weight: V, rest: V, at: V, i: V, part: V) -> V:
    """An element of a parameter, with all the bits that are kept of it."""
    if dtype == FP32:
        return load(WEIGHT, F32, weight, at + i)
    if dtype == FP16:
        return _fp16_master_at(storage, weight, rest, at, i)
    return _bf16_master_at(storage, weight, rest, at, i, part)


# ---- written, by blocks ---------------------------------------------------------------------------------------------


@inner
def magnitude_of(value: V) -> V:
    """The pattern of a value without its sign: it grows with the value, and NaN is above all."""
    return uint32(bits_of(value) & MAGNITUDE)


@inner
def _held(value: V) -> V:
    """A value with the largest number for infinity; NaN stays."""
    value = _LARGEST if value > _LARGEST else value
    return -_LARGEST if value < -_LARGEST else value


def _hold_memory(role: int) -> Callable[..., Any]:
    @inner
    def hold(address: V, at: V, n: V) -> int:
        """Saturate fp32 numbers where they are; how many were too large."""
        num_saturated = 0
        for i in range(at, at + n):
            value = load(role, F32, address, i)
            num_saturated += abs(value) > _LARGEST
            store(role, F32, address, i, _held(value))
        return num_saturated

    return hold


hold_weight, hold_first, hold_second = _hold_memory(WEIGHT), _hold_memory(FIRST), _hold_memory(SECOND)


def _clamp_buffer(role: int) -> Callable[..., Any]:
    @inner
    def clamp(values: V, n: V, limit: V, bound: V) -> int:
        """Clamp all of a buffer that may be in use to a magnitude; how many are not below the bound."""
        num_saturated = 0
        for i in range(n):
            bits = bits_of(load(role, F32, values, i))
            magnitude = uint32(bits & MAGNITUDE)
            num_saturated += (magnitude >= bound) & (magnitude <= INFINITY)
            held = uint32((bits & _SIGN) | min(magnitude, limit)) if magnitude <= INFINITY else _NAN
            store(role, F32, values, i, float_of(held))
        return num_saturated

    return clamp


_clamp_weights, clamp_firsts, _clamp_seconds = map(_clamp_buffer, (NEXT_WEIGHT, NEXT_FIRST, NEXT_SECOND))


@inner
def write_fp32(values: V, address: V, at: V, n: V) -> int:
    """An fp32 weight from its buffer; how many values were saturated."""
    top = uint32(0)
    for i in range(n):
        value = load(NEXT_WEIGHT, F32, values, i)
        top = max(top, magnitude_of(value))
        store(WEIGHT, F32, address, at + i, value)
    return hold_weight(address, at, n) if top >= INFINITY else 0


@inner
def write_weight(dtype: V, storage: V, layout: V, values: V, weight: V, rest: V, at: V, n: V, chance: V) -> int:
    """A 16-bit weight and what is kept beside it; how many values were saturated."""
    if storage == MASTER_FP32:
        for i in range(n):
            store(REST, F32, rest, at + i, _held(load(NEXT_WEIGHT, F32, values, i)))
    limit, bound = _SPLIT_LIMIT, BOUND
    if dtype == FP16:
        limit, bound = _FP16_LIMIT, uint32(_FP16_LIMIT + uint32(1))
    elif storage == SPLIT8:
        limit = _SPLIT8_LIMIT
    elif storage == STOCHASTIC:
        limit = _CHANCE_LIMIT
    if _write_weight(dtype, storage, layout, values, weight, rest, at, n, chance) <= limit:
        return 0
    if layout:
        num_saturated = _clamp_weights(values, (n + 1) // 2, limit, bound)
        num_saturated += _clamp_weights(values + 4 * _HALF_BLOCK, n // 2, limit, bound)
    else:
        num_saturated = _clamp_weights(values, n, limit, bound)
    _write_weight(dtype, storage, layout, values, weight, rest, at, n, chance)
    return num_saturated


@inner
def _write_weight(dtype: V, storage: V, layout: V, values: V, weight: V, rest: V, at: V, n: V, chance: V) -> V:
    """Without care; the largest magnitude, as a pattern."""
    top = uint32(0)
    if layout:
        for i in range(n // 2):
            top = max(top, _write_pair(storage, values, weight, rest, at, i, chance))
        if n % 2:
            top = max(top, _write_bf16(storage, values, weight, rest, at, n // 2, n - 1, chance))
    elif dtype == BF16:
        for i in range(n):
            top = max(top, _write_bf16(storage, values, weight, rest, at, i, i, chance))
    else:
        for i in range(n):
            top = max(top, _write_fp16(storage, values, weight, rest, at, i, chance))
    return top


@inner
def _next_up(storage: V, bits: V, chance: V, i: V) -> V:
    """A pattern whose upper half is the bf16 weight."""
    if storage == STOCHASTIC:
        return uint32(bits + uint32(load(CHANCE, U32, chance, i) & _LOW16))
    return uint32(bits + _HALF16)


@inner
def _write_pair(storage: V, values: V, weight: V, rest: V, at: V, i: V, chance: V) -> V:
    lower = bits_of(load(NEXT_WEIGHT, F32, values, i))
    upper = bits_of(load(NEXT_WEIGHT, F32, values, i + _HALF_BLOCK))
    first, second = _next_up(storage, lower, chance, i), _next_up(storage, upper, chance, i + _HALF_BLOCK)
    store(WEIGHT, PAIR, weight + 2 * at, i, uint32((first >> _U16) | (second & _HIGH16)))
    if storage == SPLIT:  # what the pattern has below the weight's is the rest already
        store(REST, PAIR, rest + 2 * at, i, uint32((lower & _LOW16) | uint32(upper << _U16)))
    return max(uint32(lower & MAGNITUDE), uint32(upper & MAGNITUDE))


@inner
def _write_bf16(storage: V, values: V, weight: V, rest: V, at: V, i: V, j: V, chance: V) -> V:
    """Element ``j`` from place ``i``."""
    bits = bits_of(load(NEXT_WEIGHT, F32, values, i))
    if storage == SPLIT8:
        upper = uint32(uint32(bits + _HALF8) >> _U8)  # rounded once to 24 bits, which then split exactly
        half = uint16(uint32(uint32(upper + _HALF8) >> _U8))
        store(REST, I8, rest, at + j, int8(upper))
    else:
        half = uint16(_next_up(storage, bits, chance, i) >> _U16)
        if storage == SPLIT:
            store(REST, I16, rest, at + j, int16(bits))
    store(WEIGHT, U16, weight, at + j, half)
    return uint32(bits & MAGNITUDE)


@inner
def _write_fp16(storage: V, values: V, weight: V, rest: V, at: V, i: V, chance: V) -> V:
    value = load(NEXT_WEIGHT, F32, values, i)
    if storage == STOCHASTIC:
        half = _by_chance_to_fp16(value, uint32(load(CHANCE, U32, chance, i) & _LOW16))
    else:
        half = float_to_fp16(value)
    if storage == SPLIT:
        low = np.rint((value - fp16_to_float(half)) * (_per_ulp_fp16(half) * _2P15))
        store(REST, I16, rest, at + i, int16(int32(low)))
    elif storage == SPLIT8:
        low = np.rint((value - fp16_to_float(half)) * (_per_ulp_fp16(half) * _2P7))
        store(REST, I8, rest, at + i, int8(int32(low)))
    store(WEIGHT, U16, weight, at + i, half)
    return magnitude_of(value)


@inner
def _by_chance_to_fp16(value: V, chance: V) -> V:
    magnitude = min(abs(value), _FP16_LARGEST)
    code = float_to_fp16(magnitude)
    code = uint16(code - uint16(fp16_to_float(code) > magnitude))
    whole = magnitude * _per_ulp_fp16(code)
    lower = np.floor(whole)
    up = np.floor((whole - lower) * _2P16) > np.float32(chance)
    code = float_to_fp16((lower + np.float32(up)) * ulp_fp16(code))
    return uint16(code | uint16(uint32(bits_of(value) & _SIGN) >> _U16))


# ---- chance ---------------------------------------------------------------------------------------------------------

_GOLDEN = uint32(0x9E3779B1)


@inner
def _mixed(word: V) -> V:
    word = uint32(word ^ (word >> uint32(16)))
    word = uint32(word * uint32(0x7FEB352D))
    word = uint32(word ^ (word >> uint32(15)))
    word = uint32(word * uint32(0x846CA68B))
    return uint32(word ^ (word >> uint32(16)))


@inner
def write_chance(layout: V, bits: V, key: V, index: V, n: V) -> None:
    """32 random bits for each element; see ``storage.random_bits``."""
    word = uint32(uint32(index) * _GOLDEN)
    if layout:
        for i in range((n + 1) // 2):
            store(CHANCE, U32, bits, i, _mixed(uint32(word ^ key)))
            store(CHANCE, U32, bits, i + _HALF_BLOCK, _mixed(uint32(uint32(word + _GOLDEN) ^ key)))
            word = uint32(word + uint32(_GOLDEN + _GOLDEN))
    else:
        for i in range(n):
            store(CHANCE, U32, bits, i, _mixed(uint32(word ^ key)))
            word = uint32(word + _GOLDEN)


@inner
def first_word(chance: V, i: V) -> V:
    """An element's random bits for its first moment; the upper ones are used."""
    return uint32(load(CHANCE, U32, chance, i) * _GOLDEN)


@inner
def second_word(chance: V, i: V) -> V:
    """Others, for its second moment."""
    return load(CHANCE, U32, chance, i)


def _bf16_writer(role: int, next_role: int, clamp: Callable[..., Any], word_of: Callable[..., Any]) -> Any:
    @inner
    def chance_of(chance: V, i: V) -> V:
        return uint32(word_of(chance, i) >> _U16)

    @inner
    def write_once(layout: V, values: V, address: V, at: V, n: V, chance: V) -> V:
        top = uint32(0)
        if layout:
            for i in range(n // 2):
                lower = bits_of(load(next_role, F32, values, i))
                upper = bits_of(load(next_role, F32, values, i + _HALF_BLOCK))
                top = max(top, max(uint32(lower & MAGNITUDE), uint32(upper & MAGNITUDE)))
                lower = uint32(lower + chance_of(chance, i))
                upper = uint32(upper + chance_of(chance, i + _HALF_BLOCK))
                store(role, PAIR, address + 2 * at, i, uint32((lower >> _U16) | (upper & _HIGH16)))
            start, stop, ahead = n // 2, (n + 1) // 2, n // 2  # the last one of an odd number
        else:
            start, stop, ahead = 0, n, 0
        for i in range(start, stop):
            bits = bits_of(load(next_role, F32, values, i))
            top = max(top, uint32(bits & MAGNITUDE))
            store(role, U16, address + 2 * at, i + ahead, uint16(uint32(bits + chance_of(chance, i)) >> _U16))
        return top

    @inner
    def write(layout: V, values: V, address: V, at: V, n: V, chance: V) -> None:
        """Stochastic rounding of a moment to bf16."""
        if write_once(layout, values, address, at, n, chance) > _CHANCE_LIMIT:
            clamp(values, BLOCK, _CHANCE_LIMIT, BOUND)  # the whole buffer, whatever the layout
            write_once(layout, values, address, at, n, chance)

    return write


write_bf16_first = _bf16_writer(FIRST, NEXT_FIRST, clamp_firsts, first_word)
write_bf16_second = _bf16_writer(SECOND, NEXT_SECOND, _clamp_seconds, second_word)
