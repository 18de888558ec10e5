"""One optimizer step over many tensors: gradient, master and moments are read once and written once.

A block of elements passes through a list of stages (stages.py): widened into fp32 buffers, stepped by the rule, written
back. Memory sees the stored bytes, once in and once out.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from halfstep.kernels.numba_.bits import F32, load, store
from halfstep.kernels.numba_.compiling import compiled
from halfstep.kernels.numba_.groups import group_start
from halfstep.kernels.numba_.memory import BLOCK, NUM_BUFFERS, STEP
from halfstep.kernels.numba_.stages import ROW

_LINE_FLOATS = 16  # fp32 numbers in a line of the cache: vectors of a buffer shall not cross one


@intrinsic
def _call(context: Any, stage: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the stage at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(i64, [i64] * 6).as_pointer())
        return builder.call(function, arguments[1:])

    return types.int64(*[types.int64] * 7), generate


@compiled(numba.njit)
def step(addresses: Any, sizes: Any, start: int, stop: int, stages: Any, facts: Any, numbers: Any) -> Any:
    """Run all stages over the elements from ``start`` to ``stop``; for each stage the sum of what it returned.

    Args:
        addresses: int64 ``[tensors, 8]``.
        sizes: int64 ``[tensors]``.
        start: counted through all tensors.
        stop: likewise.
        stages: their addresses, int64.
        facts: int64 ``[tensors, 8]``; a row length above 0 says that moments are in groups, which are not cut.
        numbers: fp32 ``[tensors, NUM_CONSTANTS]``: the factor on the gradient, and the rule's constants.
    """
    memory = np.zeros(NUM_BUFFERS * BLOCK + _LINE_FLOATS, np.float32)
    buffers = (memory.ctypes.data + 4 * _LINE_FLOATS - 1) // (4 * _LINE_FLOATS) * (4 * _LINE_FLOATS)
    totals = np.zeros(stages.size, np.int64)
    base = 0
    for tensor in range(sizes.size):
        size = sizes[tensor]
        low, high = max(start - base, 0), min(stop - base, size)
        base += size
        if low >= high:
            continue
        if low == 0 and addresses[tensor, STEP] != 0:
            store(STEP, F32, addresses[tensor, STEP], 0, load(STEP, F32, addresses[tensor, STEP], 0) + np.float32(1))
        row = facts[tensor, ROW]
        if row > 0:
            low = group_start(low, row)
            high = high if high == size else group_start(high, row)
        a, k, c = addresses[tensor].ctypes.data, facts[tensor].ctypes.data, numbers[tensor].ctypes.data
        while low < high:
            n = min(BLOCK, high - low)
            if row > 0 and low + n < high:
                n = group_start(low + n, row) - low
            for place in range(stages.size):
                totals[place] += _call(stages[place], a, k, c, buffers, low, n)
            low += n
    return totals
