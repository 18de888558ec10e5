"""Sums, means and Euclidean norms of 16-bit tensors, added up and returned in fp32.

A sum of 262 144 fp16 ones is inf in fp16, and the norm of 100 fp16 values of 60 000 is. torch adds 16-bit tensors up
in fp32 inside but rounds the result to 16 bits; here the result stays fp32. Squares can leave fp32's range (bf16 and
fp32 hold 1e20 and 1e-30): on a CPU the norm is taken again where the sum of squares shows that they did, of numbers
divided by the largest magnitude. On a GPU, which would have to be waited for, they are divided from the start.

Not here: other norms (``torch.linalg.vector_norm(x, ord, dtype=torch.float32)`` is right for those), compensated sums.

Source: Blue, "A Portable Fortran Program to Find the Euclidean Norm of a Vector" (ACM TOMS 4, 1978), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import ArgumentError
from halfstep.ops.checks import autocast_off, check_floating, is_narrow, seen_on_host
from halfstep.ops.chunks import in_chunks

Dims: TypeAlias = "int | Sequence[int] | None"

_PIECE = 2**18  # elements; 1 MiB of fp32 stays in a core's cache

# A square loses at most 2**-150 where fp32 cannot hold it; of a sum of 2**-80 a billion of these are nothing.
_LEAST_NORM = 2.0**-40


def sum(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Sum in fp32: ``torch.sum(x, dim, dtype=torch.float32)`` for 16-bit tensors.

    Args:
        x: floating tensor of any shape; the sum of no elements is 0.
        dim: dimension or dimensions to add up; None, or none at all, means all, as in torch.
        keepdim: whether they stay, with size 1.

    Returns:
        fp32 for 16-bit tensors, else the dtype of ``x``; under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, or has no such dimension.

    Example:
        >>> sum(torch.ones(512 * 512, dtype=torch.half))
        tensor(262144.)
    """
    check_floating(x, "sum")
    with autocast_off(x):
        dtype = torch.float32 if is_narrow(x) else x.dtype
        dims = _positive(dim, x.dim())
        is_cut = is_narrow(x) and is_host(x.device) and x.dim() and x.numel() and not torch.compiler.is_compiling()
        if is_cut and (len(dims) == x.dim() or math.prod(x.shape[1:]) <= _PIECE):
            total: Tensor = _Sum.apply(x, dims)  # type: ignore[no-untyped-call]
        else:
            total = torch.sum(x, dims, keepdim=True, dtype=dtype)
        return total if keepdim else total.reshape(reduced_shape(x, dim))


def mean(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Mean in fp32: ``sum`` divided by the number of elements.

    Args:
        x: floating tensor of any shape.
        dim: dimension or dimensions to average; None, or none at all, means all.
        keepdim: whether they stay, with size 1.

    Returns:
        fp32 for 16-bit tensors, else the dtype of ``x``; under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, has no such dimension, or there is nothing to average.

    Example:
        >>> mean(torch.full((100_000,), 3.0, dtype=torch.half))
        tensor(3.)
    """
    check_floating(x, "mean")
    total = sum(x, dim, keepdim=keepdim)
    num_averaged = _num_reduced(x, dim)
    if not num_averaged:
        raise ArgumentError(
            asked=f"the mean of a tensor of shape {tuple(x.shape)} over dim={dim}",
            true="there are no elements to average",
            why="0 / 0 is NaN, which would look like an overflow later",
            fix="leave out empty batches, or use sum, which is 0 here",
        )
    return total / num_averaged


def norm(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Euclidean norm in fp32, right over the whole range of the format.

    Args:
        x: floating tensor of any shape.
        dim: dimension or dimensions to measure along; None, or none at all, means all.
        keepdim: whether they stay, with size 1.

    Returns:
        fp32 for 16-bit tensors, else the dtype of ``x``; under autocast too. inf if any element is, NaN if any is NaN.
        The gradient at a norm of 0 is 0, as in torch.

    Raises:
        ArgumentError: ``x`` is not floating, or has no such dimension, or no elements along it.

    Example:
        >>> norm(torch.full((1_000_000,), 100.0, dtype=torch.half))
        tensor(100000.)
        >>> norm(torch.full((4,), 1e30, dtype=torch.bfloat16))
        tensor(2.0005e+30)
    """
    check_floating(x, "norm")
    if not _num_reduced(x, dim):
        _refuse_empty(x, dim)
    of_rows = row_norm if x.dtype == torch.float16 else any_row_norm
    dtype = torch.float32 if is_narrow(x) else x.dtype

    def gradient(incoming: Tensor, norms: Tensor, rows: Tensor) -> Tensor | None:
        if not lie_within(norms, -1.0):  # finite numbers can have a norm that fp32 does not hold
            return None
        return rows.div_(norms.masked_fill(norms == 0, 1.0).unsqueeze(-1)).mul_(incoming.unsqueeze(-1))

    rows = as_rows(x, dim)
    if rows is not None:
        found = in_chunks(of_rows, rows, dtype=dtype, gradient=gradient, keeps_result=True)
    else:
        parts = in_chunks(
            lambda flat: of_rows(flat.unsqueeze(0)),
            x.reshape(-1),
            dtype=dtype,
            gradient=lambda incoming, norms, flat: gradient(incoming, norms, flat.unsqueeze(0)),
            keeps_result=True,
        )
        with autocast_off(x):
            found = scaled_row_norm(parts.unsqueeze(0))
    return found.view(reduced_shape(x, dim, keepdim=keepdim))


def as_rows(x: Tensor, dim: Dims) -> Tensor | None:
    """``[rows, n]`` with the dimensions of ``dim`` in the second; None where all are, and there is one row only."""
    dims = _positive(dim, x.dim())
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = (math.prod([x.shape[d] for d in kept]), _num_reduced(x, dim))
    return x.permute(*kept, *dims).reshape(shape) if kept else None


def reduced_shape(x: Tensor, dim: Dims, *, keepdim: bool = False) -> list[int]:
    """The shape of ``x.sum(dim, keepdim)``."""
    dims = _positive(dim, x.dim())
    return [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]


def row_norm(x: Tensor) -> Tensor:
    """Norm of each row ``[rows, n] -> [rows]``, for values whose squares fp32 holds: all of fp16's."""
    # torch.sum adds pairwise; vector_norm on a CPU adds in a few lanes and is off by 1e-4 for a million elements.
    squares = x.square().sum(-1)
    is_zero = squares == 0  # where the root has no derivative: 0, as in torch
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def any_row_norm(x: Tensor) -> Tensor:
    """Norm of each row ``[rows, n] -> [rows]``, scaled only where the squares need it, if that can be seen."""
    found = x.square().sum(-1).sqrt()
    if lie_within(found, _LEAST_NORM):
        return found
    is_out = ~((found > _LEAST_NORM) & found.isfinite())
    if seen_on_host(is_out.any()) is None:
        return scaled_row_norm(x)
    # Zeros in their place, for 0 * inf in backward would be NaN.
    found = row_norm(x.masked_fill(is_out.unsqueeze(-1), 0.0))
    return found.index_put((is_out,), scaled_row_norm(x[is_out]))


def lie_within(values: Tensor, least: float) -> bool:
    """Whether all values are finite and above the least, if that can be seen without waiting for a device."""
    if not is_host(values.device) or torch.compiler.is_compiling():
        return False
    try:
        smallest, largest = torch.aminmax(values.detach())
        return smallest.item() > least and largest.item() < math.inf
    except RuntimeError:  # what vmap and fake tensors answer
        return False


def scaled_row_norm(x: Tensor) -> Tensor:
    """Norm of each row ``[rows, n] -> [rows]``, for values of any size."""
    size = row_size(x)
    return row_norm(x / size) * size.squeeze(-1)


def row_size(x: Tensor) -> Tensor:
    """Largest magnitude of each row ``[rows, n] -> [rows, 1]``, without a gradient, as a number to divide by."""
    x = x.detach()
    # torch.aminmax along a dimension is ten times slower on a CPU (2.13), and abs() would be one more tensor.
    size = torch.maximum(-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
    # The reciprocal of a subnormal overflows, and inf / inf would turn an infinite norm into NaN.
    return torch.where(size.isfinite(), size.clamp(min=torch.finfo(size.dtype).tiny), 1.0)


def _positive(dim: Dims, num_dims: int) -> list[int]:
    """The dimensions, counted from the first; a number has none, and may be asked for 0 or -1, as in torch."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return list(range(num_dims))
    size = max(1, num_dims)
    found = [d % size for d in dims]
    if not all(-size <= d < size for d in dims) or len(set(found)) < len(found):
        raise ArgumentError(
            asked=f"dim={dim} of a tensor with {num_dims} dimensions",
            true=f"its dimensions are 0 to {size - 1}, or -{size} to -1 from the last",
            why="each can be reduced once, and no other exists",
            fix="name existing dimensions, each once; None means all",
        )
    return found if num_dims else []


def _num_reduced(x: Tensor, dim: Dims) -> int:
    return math.prod([x.shape[d] for d in _positive(dim, x.dim())])


def _refuse_empty(x: Tensor, dim: Dims) -> None:
    raise ArgumentError(
        asked=f"the norm of a tensor of shape {tuple(x.shape)} over dim={dim}",
        true="it has no elements there",
        why="a norm of 0 would be divided by next",
        fix="leave out empty tensors",
    )


class _Sum(torch.autograd.Function):
    """Sums ``[.., 1, ..]``, widened piece by piece: torch's own fp32 sum of 16-bit tensors is slow on CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        if len(dims) == x.dim():
            parts = [piece.float().sum() for piece in x.reshape(-1).split(_PIECE)]  # type: ignore[no-untyped-call]
            return torch.stack(parts).sum().reshape([1] * x.dim())
        rows = x.split(max(1, _PIECE // math.prod(x.shape[1:])))  # type: ignore[no-untyped-call]
        parts = [piece.float().sum(dims, keepdim=True) for piece in rows]
        return torch.stack(parts).sum(0) if 0 in dims else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype).expand(ctx.shape), None
