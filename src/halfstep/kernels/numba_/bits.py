"""Numbers and their bit patterns, as numba's compiler sees them: each function here is a machine instruction or two.

numba knows neither bf16 nor fp16, and cannot look at the bits of a scalar. So 16-bit elements are read and written as
``uint16``, and these functions turn them into fp32 and back; LLVM makes vector instructions of them.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FLOAT, _HALF, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)

MAGNITUDE = numba.uint32(0x7FFFFFFF)
BF16_LARGEST = numba.uint32(0x7F7F0000)  # as an fp32 pattern
INFINITY = numba.uint32(0x7F800000)
_HALF_UNIT, _SIXTEEN = numba.uint32(0x8000), numba.uint32(16)


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An address as numba's ``carray`` wants it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The fp32 value of a pattern."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    """The pattern of an fp32 value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def fp16_to_float(context: Any, half: Any) -> Any:
    """The value of an fp16 pattern, exactly."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALF), _FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def float_to_fp16(context: Any, value: Any) -> Any:
    """The nearest fp16 pattern, ties to even, infinity beyond the largest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _HALF), _I16)

    return types.uint16(types.float32), generate


@numba.njit(nogil=True)
def bf16_to_float(half: Any) -> Any:
    """The value of a bf16 pattern, exactly."""
    return float_of(numba.uint32(half) << _SIXTEEN)


@numba.njit(nogil=True)
def bits_to_bf16(bits: Any) -> Any:
    """The nearest bf16 pattern of an fp32 pattern, ties away from zero, infinity beyond the largest."""
    return numba.uint16((bits + _HALF_UNIT) >> _SIXTEEN)


@functools.cache
def has_fp16() -> bool:
    """Whether this CPU converts fp16 by itself; elsewhere LLVM calls a function that nobody has linked."""
    if not llvmlite.binding.get_process_triple().startswith(("x86_64", "i686", "amd64")):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))
