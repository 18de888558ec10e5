"""Numbers and their bit patterns, as numba's compiler sees them: each function here is a machine instruction or two.

numba knows neither bf16 nor fp16, and cannot look at the bits of a scalar. So 16-bit elements are read and written as
``uint16``, and these functions turn them into fp32 and back; LLVM makes vector instructions of them.

``load`` and ``store`` are told an element's role, and tell LLVM that memories of different roles do not overlap
("type-based alias analysis"). Otherwise a loop over more than a few arrays would need more checks at run time than
LLVM makes, and would stay scalar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from halfstep.kernels.numba_.compiling import inner

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


# Kinds of elements in memory.
F32, U32, PAIR, U16, I16, I8 = range(6)  # PAIR: two 16-bit elements in 32 bits, the first one in the lower half
_KINDS = (
    (_FLOAT, types.float32, 4),
    (_I32, types.uint32, 4),
    (_I32, types.uint32, 2),
    (_I16, types.uint16, 2),
    (_I16, types.int16, 2),
    (ir.IntType(8), types.int8, 1),
)


def _element(builder: Any, role: int, kind: int, address: Any, index: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Where an element is, and what marks an access to it with its role."""
    module, zero = builder.module, ir.Constant(ir.IntType(64), 0)
    name = module.add_metadata([f"role {role}", module.add_metadata(["halfstep"]), zero])
    tag = module.add_metadata([name, name, zero])
    where = builder.gep(builder.inttoptr(address, _KINDS[kind][0].as_pointer()), [index], inbounds=True)

    def marked(access: Any) -> Any:
        access.align = _KINDS[kind][2]
        access.set_metadata("tbaa", tag)
        return access

    return where, marked


@intrinsic(prefer_literal=True)
def load(context: Any, role: Any, kind: Any, address: Any, index: Any) -> Any:
    """An element of the array at an address; role and kind are constants."""

    constants = role.literal_value, kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, marked = _element(builder, *constants, *arguments[2:])
        return marked(builder.load(where))

    return _KINDS[kind.literal_value][1](role, kind, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def store(context: Any, role: Any, kind: Any, address: Any, index: Any, value: Any) -> Any:
    """Write an element of the array at an address."""

    constants = role.literal_value, kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, marked = _element(builder, *constants, *arguments[2:4])
        marked(builder.store(arguments[4], where))
        return context.get_dummy_value()

    return types.void(role, kind, types.int64, types.int64, _KINDS[kind.literal_value][1]), generate


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for a line of memory that will be read and perhaps written soon; an address where nothing is does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(arguments[0], cgutils.voidptr_t), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)
def largest_magnitude(context: Any, role: Any, number: Any, address: Any, index: Any) -> Any:
    """Of so many fp32 elements from an index on, as a pattern: a loop of so few would stay scalar."""
    role_value, vector = role.literal_value, ir.VectorType(_I32, number.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, marked = _element(builder, role_value, U32, *arguments[2:])
        elements = marked(builder.load(builder.bitcast(where, vector.as_pointer())))
        magnitudes = builder.and_(elements, ir.Constant(vector, [0x7FFFFFFF] * vector.count))
        name, kind = f"llvm.vector.reduce.umax.v{vector.count}i32", ir.FunctionType(_I32, [vector])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [magnitudes])

    return types.uint32(role, number, types.int64, types.int64), generate


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


@intrinsic
def clamp(context: Any, value: Any, largest: Any) -> Any:
    """A number, not NaN, made ``largest`` or ``-largest`` if it is beyond: two instructions, where a test makes six."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        binary = ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT])
        lower, upper = (builder.module.declare_intrinsic(f"llvm.{n}num", [_FLOAT], binary) for n in ("min", "max"))
        value = builder.call(lower, arguments, fastmath=("nnan",))
        return builder.call(upper, [value, builder.fneg(arguments[1])], fastmath=("nnan",))

    return types.float32(types.float32, types.float32), generate


@inner
def bf16_to_float(half: Any) -> Any:
    """The value of a bf16 pattern, exactly."""
    return float_of(numba.uint32(half) << _SIXTEEN)


@inner
def bits_to_bf16(bits: Any) -> Any:
    """The nearest bf16 pattern of an fp32 pattern, ties away from zero, infinity beyond the largest."""
    return numba.uint16((bits + _HALF_UNIT) >> _SIXTEEN)


@functools.cache
def has_fp16() -> bool:
    """Whether this CPU converts fp16 by itself; elsewhere LLVM calls a function that nobody has linked."""
    if not llvmlite.binding.get_process_triple().startswith(("x86_64", "i686", "amd64")):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))
