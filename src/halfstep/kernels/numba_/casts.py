"""Between 16-bit and fp32 memory, many tensors in one pass.

    widen    fp32 <- 16-bit, divided on the way
    add      fp32 <- fp32 + 16-bit
    round    16-bit <- fp32, by the rounding of weights, counting what was saturated

They do what the functions of the same names in ``kernels/torch_.py`` do, bit for bit but for the payload of a NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, uint16, uint32
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep._compat import is_dense
from halfstep.formats import FP16, HALF_DTYPES
from halfstep.kernels import torch_
from halfstep.kernels.numba_.bits import (
    BF16_LARGEST,
    INFINITY,
    MAGNITUDE,
    bf16_to_float,
    bits_of,
    bits_to_bf16,
    float_to_fp16,
    fp16_to_float,
    has_fp16,
    pointer,
)
from halfstep.kernels.numba_.compiling import compiled, inner
from halfstep.kernels.numba_.loops import Table, has_plain_memory, share_out

_BLOCK = 2048  # elements whose largest magnitude is asked for: small enough to be in the first cache for a second pass
_FEWEST_TO_ADD = 2**15  # elements: below, torch's one call is as fast
_FP16_LARGEST = np.float32(FP16.largest)
_FP16_LARGEST_BITS = uint32(_FP16_LARGEST.view(np.uint32))
_BF16_NAN, _SIGN, _BF16_TOP, _SIXTEEN = uint16(0x7FC0), uint32(0x8000), uint16(0x7F7F), uint32(16)


def widen(destinations: Sequence[Tensor], sources: Sequence[Tensor], divisor: Tensor | None) -> None:
    """As ``kernels/torch_.py`` does it."""
    compiled_pairs, others = _sorted_out(sources, destinations)
    number = np.float32(1.0 if divisor is None else divisor.item())
    for dtype, pairs in compiled_pairs.items():
        halves, wides = zip(*pairs, strict=True)
        Table(wides, halves).run(_widening(dtype == torch.bfloat16), number)
        increment_version(wides)
    torch_.widen([wide for _, wide in others], [half for half, _ in others], divisor)


def add(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """As ``kernels/torch_.py`` does it. A call for each tensor: a hook brings them one by one."""
    compiled_pairs, others = _sorted_out(gradients, sums)
    for dtype, pairs in compiled_pairs.items():
        for half, wide in pairs:
            if half.numel() < _FEWEST_TO_ADD:
                others.append((half, wide))
                continue
            share_out(_adding(dtype == torch.bfloat16), (wide.data_ptr(), half.data_ptr()), wide.numel())
            increment_version(wide)
    torch_.add([wide for _, wide in others], [half for half, _ in others])


def round_into(weights: Sequence[Tensor], masters: Sequence[Tensor], scratch: Sequence[Tensor | None]) -> list[Tensor]:
    """As ``kernels/torch_.py`` does it; what has no compiled loop needs ``scratch`` as little as the rest."""
    del scratch
    compiled_pairs, others = _sorted_out(weights, masters)
    num_saturated = 0
    for dtype, pairs in compiled_pairs.items():
        halves, wides = zip(*pairs, strict=True)
        num_saturated += sum(Table(halves, wides).run(_rounding(dtype == torch.bfloat16)))
        increment_version(halves)
    counts = [torch.tensor(num_saturated)] if num_saturated else []
    rest = [half for half, _ in others]
    return counts + torch_.round_into(rest, [wide for _, wide in others], [None] * len(rest))


def _is_paired(half: Tensor, wide: Tensor) -> bool:
    """Whether the n-th numbers in memory belong together."""
    return half.shape == wide.shape and half.stride() == wide.stride() and is_dense(half)


_Pairs = list[tuple[Tensor, Tensor]]


def _sorted_out(halves: Sequence[Tensor], wides: Sequence[Tensor]) -> tuple[dict[torch.dtype, _Pairs], _Pairs]:
    """Pairs that one loop over their memory serves, by the 16-bit dtype; and those that it does not."""
    served: dict[torch.dtype, _Pairs] = {dtype: [] for dtype in HALF_DTYPES if dtype != torch.float16 or has_fp16()}
    others: _Pairs = []
    for pair in zip(halves, wides, strict=True):
        half, wide = pair
        is_served = half.dtype in served and wide.dtype == torch.float32
        if is_served and has_plain_memory(half) and has_plain_memory(wide) and _is_paired(half, wide):
            served[half.dtype].append(pair)
        else:
            others.append(pair)
    served = {dtype: pairs for dtype, pairs in served.items() if pairs}
    return served, others


@functools.cache
def _widening(is_bf16: bool) -> Callable[..., Any]:
    @compiled(numba.njit)
    def widening(addresses: Any, sizes: Any, start: int, stop: int, divisor: Any) -> int:
        base = 0
        for tensor in range(sizes.size):
            low, high = max(start - base, 0), min(stop - base, sizes[tensor])
            base += sizes[tensor]
            if low < high:
                wide = carray(pointer(addresses[tensor, 0] + 4 * low), high - low, np.float32)
                half = carray(pointer(addresses[tensor, 1] + 2 * low), high - low, np.uint16)
                for i in range(wide.size):
                    value = bf16_to_float(half[i]) if is_bf16 else fp16_to_float(half[i])
                    wide[i] = value / divisor
        return 0

    return widening


@functools.cache
def _adding(is_bf16: bool) -> Callable[..., Any]:
    @compiled(numba.njit)
    def adding(wide_address: int, half_address: int, start: int, stop: int) -> int:
        wide = carray(pointer(wide_address + 4 * start), stop - start, np.float32)
        half = carray(pointer(half_address + 2 * start), stop - start, np.uint16)
        for i in range(wide.size):
            wide[i] += bf16_to_float(half[i]) if is_bf16 else fp16_to_float(half[i])
        return 0

    return adding


@functools.cache
def _rounding(is_bf16: bool) -> Callable[..., Any]:
    @compiled(numba.njit)
    def rounding(addresses: Any, sizes: Any, start: int, stop: int) -> int:
        base, num_saturated = 0, 0
        for tensor in range(sizes.size):
            low, high = max(start - base, 0), min(stop - base, sizes[tensor])
            base += sizes[tensor]
            for first in range(low, high, _BLOCK):
                length = min(_BLOCK, high - first)
                half = carray(pointer(addresses[tensor, 0] + 2 * first), length, np.uint16)
                wide = carray(pointer(addresses[tensor, 1] + 4 * first), length, np.float32)
                num_saturated += _round_block_to_bf16(half, wide) if is_bf16 else _round_block_to_fp16(half, wide)
        return num_saturated

    return rounding


@inner
def _round_block_to_bf16(half: Any, wide: Any) -> int:
    largest = uint32(0)
    for i in range(half.size):
        bits = bits_of(wide[i])
        largest = max(largest, uint32(bits & MAGNITUDE))
        half[i] = bits_to_bf16(bits)
    num_saturated = 0
    if largest > BF16_LARGEST:  # hardly ever: once more, with care
        for i in range(half.size):
            bits = bits_of(wide[i])
            magnitude = uint32(bits & MAGNITUDE)
            if magnitude > INFINITY:
                half[i] = _BF16_NAN
            elif magnitude > BF16_LARGEST:
                half[i] = uint16((bits >> _SIXTEEN) & _SIGN) | _BF16_TOP
                num_saturated += 1
    return num_saturated


@inner
def _round_block_to_fp16(half: Any, wide: Any) -> int:
    largest = uint32(0)
    for i in range(half.size):
        largest = max(largest, uint32(bits_of(wide[i]) & MAGNITUDE))
        half[i] = float_to_fp16(wide[i])
    num_saturated = 0
    if largest > _FP16_LARGEST_BITS:
        for i in range(half.size):
            value = wide[i]
            if abs(value) > _FP16_LARGEST:  # false for NaN, which stays
                half[i] = float_to_fp16(_FP16_LARGEST if value > 0 else -_FP16_LARGEST)
                num_saturated += 1
    return num_saturated
