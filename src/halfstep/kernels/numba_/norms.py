"""The norms of many gradients in one read, as ``kernels/inspect.py`` wants them.

Squares are added up in blocks: in fp32, which is vector instructions, and once more in fp64 where that sum is not to be
trusted (it overflowed, it is NaN, or squares may have vanished in it). The blocks of a tensor are added in fp64, in an
order that does not depend on the number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep._compat import is_dense
from halfstep.kernels.numba_.bits import F32, U16, bf16_to_float, fp16_to_float, has_fp16, load, prefetch
from halfstep.kernels.numba_.compiling import compiled, inner
from halfstep.kernels.numba_.loops import Table, has_plain_memory

_BLOCK = 512  # elements
_AHEAD_BYTES = 4096  # bytes: a page
_LINE_BYTES = 64
# What fp32 drops of squares below its smallest number is less than 2**-24 of a sum from here on.
_TRUSTED = np.float32(2.0**-90)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP32, _BF16, _ = range(3)  # their places
_GRADIENT = 0  # the role of all that is read


def is_served(gradient: Tensor) -> bool:
    """Whether :func:`norms` takes it."""
    if gradient.dtype not in _DTYPES or (gradient.dtype is torch.float16 and not has_fp16()):
        return False
    return has_plain_memory(gradient) and is_dense(gradient) and gradient.numel() > 0


def is_served_whole(gradient: Tensor) -> bool:
    """The same of one that is strided, contiguous and on the CPU, with all of its memory."""
    if type(gradient) is not Tensor or (gradient.dtype is torch.float16 and not has_fp16()):
        return False
    return gradient.numel() > 0


def norms(gradients: Sequence[Tensor]) -> list[float]:
    """The L2 norm of each gradient: finite exactly when every element is, and NaN before inf.

    Args:
        gradients: on the CPU, each served.
    """
    found = [0.0] * len(gradients)
    places: dict[torch.dtype, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(gradient.dtype, []).append(place)
    for dtype, group in places.items():
        for place, norm in zip(group, _norms([gradients[place] for place in group], dtype), strict=True):
            found[place] = norm
    return found


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[float]:
    table = Table(gradients)
    ends = np.cumsum(-(-table.sizes // _BLOCK))
    firsts = np.concatenate([[0], ends[:-1]])
    sums = np.zeros(int(ends[-1]), dtype=np.float64)
    table.run(_squares(_DTYPES.index(dtype)), firsts, sums)
    norms: list[float] = np.sqrt(np.add.reduceat(sums, firsts)).tolist()
    return norms


@inner
def _value(dtype: Any, address: Any, i: Any) -> Any:
    if dtype == _FP32:
        return load(_GRADIENT, F32, address, i)
    if dtype == _BF16:
        return bf16_to_float(load(_GRADIENT, U16, address, i))
    return fp16_to_float(load(_GRADIENT, U16, address, i))


@inner(fastmath={"reassoc"})  # NaN and infinities stay what they are
def _sum(dtype: Any, address: Any, size: Any) -> Any:
    total = np.float32(0)
    for i in range(size):
        value = _value(dtype, address, i)
        total += value * value
    return total


@inner
def _careful_sum(dtype: Any, address: Any, size: Any) -> Any:
    total = 0.0
    for i in range(size):
        value = np.float64(_value(dtype, address, i))
        total += value * value
    return total


@functools.cache
def _squares(dtype: int) -> Callable[..., Any]:
    """One loop for each dtype. (What it closes over are numbers: numba would not find again what was compiled else.)"""
    width = 4 if dtype == _FP32 else 2

    @compiled(numba.njit)
    def squares(addresses: Any, sizes: Any, start: int, stop: int, firsts: Any, sums: Any) -> int:
        base = 0
        for tensor in range(sizes.size):
            size = sizes[tensor]
            # A block is whose thread its first element falls to.
            low = max(0, (start - base + _BLOCK - 1) // _BLOCK)
            high = min((size + _BLOCK - 1) // _BLOCK, (stop - base + _BLOCK - 1) // _BLOCK)
            for block in range(low, high):
                address, length = addresses[tensor, 0] + width * block * _BLOCK, min(_BLOCK, size - block * _BLOCK)
                for ahead in range(0, length * width, _LINE_BYTES):
                    prefetch(address + _AHEAD_BYTES + ahead)
                total = _sum(dtype, address, length)
                is_trusted = _TRUSTED <= total < np.float32(np.inf)
                sums[firsts[tensor] + block] = total if is_trusted else _careful_sum(dtype, address, length)
            base += size
        return 0

    return squares
