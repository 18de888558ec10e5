"""Norms and largest magnitudes of gradients on the CPU, where the host is the device: Python's numbers.

A gradient is cut into rows of at most 2**14 elements, whose norms are taken in fp32 in one call and put together in
fp64. Only a row that fp32 cannot judge (its norm is inf, 0 or so small that squares may have vanished) is read again,
by itself, in fp64. Many elements together go through a compiled loop, which does the same (numba_/norms.py).

Error: the largest magnitude is exact. A norm on the CPU is right to 2**-14 relative at worst: a lane of the sum (of at
least 8, on x86) rounds 2**11 times by 2**-24. Measured worst, over rows of 2**14: 1.4e-5 for constants, 2e-6 for sorted
log-normal values, 6e-7 for unsorted ones, 4e-8 for normal ones. Its bits do not depend on the number of threads. Fewer
and longer sums (one dot product of 2**20 elements) would be wrong by 4.5e-4 for constants.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep._compat import is_dense

BLOCK = 2**14  # elements of one fp32 sum: short sums keep their bits, and the rows of a gradient share the threads
_BUFFER = 2**16  # 16-bit elements that are widened at once: 256 KiB of fp32, which stay in a core's cache

# A norm of a row is trusted from here up to the largest finite number. Squares below fp32's smallest normal, 2**-126,
# may be flushed to 0: 2**14 of them are 2**-112, which is 2**-16 of the square of this norm. A sum of squares that
# overflowed, in whatever lane, is inf, and a finite row never makes a NaN.
_TRUSTED_NORM = 2.0**-48

_HOST = torch.device("cpu")  # named wherever a tensor is made: the user may have set another default device
_WIDE_DTYPES = frozenset({torch.float32, torch.float64})
_vector_norm = torch.linalg.vector_norm


def norms_in_one_pass(values: list[Tensor]) -> list[float]:
    """The L2 norm of each gradient, by a compiled loop where it serves; values as :func:`norm_of` takes them."""
    compiled = importlib.import_module("halfstep.kernels.numba_.norms")
    served = [compiled.is_served(v) for v in values]
    found = iter(compiled.norms([v for v, is_served in zip(values, served, strict=True) if is_served]))
    return [next(found) if is_served else norm_of(v) for v, is_served in zip(values, served, strict=True)]


def whole_norms(values: Sequence[Tensor]) -> list[float] | None:
    """The same for contiguous ones with all of their memory; None if one of them is not served."""
    compiled = importlib.import_module("halfstep.kernels.numba_.norms")
    norms: list[float] | None = compiled.norms(values) if all(map(compiled.is_served_whole, values)) else None
    return norms


def norm_of(values: Tensor) -> float:
    """The norm of one CPU gradient; finite exactly when every element is, NaN before inf."""
    if not values.is_contiguous():
        values = _flat_view(values)
    size = values.numel()
    if values.dtype not in _WIDE_DTYPES:
        if size > _BUFFER:
            return _norm_of_long_16_bit(values)
        values = values.float()
    if size > BLOCK:
        return _norm_of_rows(values)
    norm: float = _vector_norm(values).tolist()
    return norm if _TRUSTED_NORM <= norm < math.inf or math.isnan(norm) else _exact_norm(values)


def _norm_of_long_16_bit(values: Tensor) -> float:
    # Widened one piece at a time, into a buffer that stays in cache: no fp32 copy of the gradient is ever held.
    buffer = torch.empty(_BUFFER, dtype=torch.float32, device=_HOST)
    pieces = torch.split(values.view(-1), _BUFFER)
    return together([norm_of(buffer[: len(piece)].copy_(piece)) for piece in pieces])


def _norm_of_rows(values: Tensor) -> float:
    """The norm of a contiguous fp32 or fp64 tensor of more than one row: row by row, and doubtful rows once more."""
    size = values.numel()
    num_rows, length = _rows_of(size)
    num_left = size - num_rows * length
    rows = (values.view(-1)[:-num_left] if num_left else values).view(num_rows, length)
    norms: list[float] = _vector_norm(rows, dim=1).tolist()
    total = sum(norms)
    if not (total < math.inf and min(norms) >= _TRUSTED_NORM) and not math.isnan(total):
        _judge_again(rows, norms)
    if num_left:
        norms.append(norm_of(values.view(-1)[-num_left:]))
    return together(norms)


@functools.lru_cache(maxsize=4096)
def _rows_of(size: int) -> tuple[int, int]:
    """How many rows of which length, at most BLOCK: all of equal length if that can be had, else fewest."""
    fewest = -(-size // BLOCK)
    # Up to twice as many; what does not divide costs another call, which only a gradient of few rows would notice.
    for num_rows in range(fewest, min(2 * fewest, fewest + 64) + 1):
        if size % num_rows == 0:
            return num_rows, size // num_rows
    return fewest, size // fewest


def _judge_again(rows: Tensor, norms: list[float]) -> None:
    """Put right, in place, the norms that fp32 cannot be trusted with; stop at the first that is really inf."""
    start = 0
    for is_doubtful, group in itertools.groupby(norms[:], lambda norm: not _TRUSTED_NORM <= norm < math.inf):
        stop = start + len(list(group))
        # Neighbours first together: the gradient of an embedding is zero in most of its rows, and that is all to know.
        if is_doubtful and (norms[start] or norms[stop - 1] or largest_of([rows[start:stop]]) != [0.0]):
            for row in range(start, stop):
                norms[row] = _exact_norm(rows[row])
                if norms[row] == math.inf:
                    return
        start = stop


def _exact_norm(values: Tensor) -> float:
    """The fp64 norm of at most a row of a CPU gradient; inf or NaN only if an element is."""
    (largest,) = largest_of([values])
    if largest == 0 or not math.isfinite(largest):
        return largest
    # A power of two near the largest, so that fp64 gradients beyond 1e154 do not overflow when squared.
    unit = 2.0 ** math.floor(math.log2(largest))
    norm: float = _vector_norm(values.double() / unit).tolist()
    return min(norm * unit, sys.float_info.max)  # finite elements, a norm beyond fp64: still finite


def largest_of(values: Sequence[Tensor]) -> list[float]:
    """The largest magnitude in each CPU tensor; NaN if there is one."""
    # At memory bandwidth, where torch 2.13's inf-norm takes several times as long.
    return [abs(max(-low.tolist(), high.tolist())) for low, high in map(torch.aminmax, values)]  # type: ignore[operator]


def together(norms: list[float]) -> float:
    """The norm of parts whose norms are given: NaN before inf, and finite if every part is."""
    total = sum(norms)
    if math.isnan(total) or math.inf in norms:
        return total
    return min(math.hypot(*norms), sys.float_info.max)


def _flat_view(values: Tensor) -> Tensor:
    """The elements as one row; their order does not matter. A copy only where strides leave gaps or overlap."""
    return values.as_strided((values.numel(),), (1,)) if is_dense(values) else values.reshape(-1)
