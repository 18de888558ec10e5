"""Run a function in fp32 over 16-bit tensors, a few rows at a time, and keep nothing but the 16-bit tensors.

The function is written once, for fp32, out of torch's own differentiable operations. Forward cuts the tensors along
dimension 0, widens one piece, computes, and narrows the result. Backward widens the piece again and asks autograd for
its gradient: the derivative is torch's, and no formula is written twice. It costs one more forward, in pieces that
stay in the processor's cache; what it saves is the fp32 copy that autograd would keep from forward to backward.

Where that is too slow, a function brings the gradient of its first tensor along, written by hand: a few passes over a
piece, where autograd makes one for each operation of forward and backward. The tests hold the two against each other.

Under a second backward, and under torch.compile (whose partitioner decides by itself what to keep), the function runs
in one piece as ordinary operations.

Not here: torch.func's transforms, and forward-mode derivatives.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 3, applied inside one
operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.ops.checks import autocast_off, is_narrow, widened

# fp32 elements of one piece, of all tensors that are cut: 1 MiB stays in a core's cache; a GPU wants few launches, 256
# MiB bounds what is transient.
_HOST_ELEMENTS, _DEVICE_ELEMENTS = 2**18, 2**26

Rows = Callable[..., Tensor]
Gradient = Callable[..., "Tensor | None"]


def in_chunks(
    function: Rows,
    *cut: Tensor,
    shared: Sequence[Tensor] = (),
    dtype: torch.dtype,
    gradient: Gradient | None = None,
    keeps_result: bool = False,
) -> Tensor:
    """``function(*cut, *shared)`` in fp32, piece by piece.

    Args:
        function: takes the tensors in their order, 16-bit ones widened to fp32. Its result has one row for each row
            of ``cut``, computed from that row alone; or, if it is a reduction, one row ``[1, ...]`` for each piece.
        cut: tensors of equal size in dimension 0, cut there.
        shared: tensors that every piece needs whole, such as weights.
        dtype: of the result.
        gradient: takes the incoming gradient, in the dtype of the function's result, and then what the function takes.
            It returns the gradient of ``cut[0]``, or None to leave this piece to autograd. It is asked where no other
            tensor needs a gradient. It may write into its copy of ``cut[0]``, if it does not return None then.
        keeps_result: keep the result too, for ``gradient`` to take after the incoming gradient: for one number a row.

    Returns:
        The results of the pieces, joined along dimension 0.
    """
    with autocast_off(cut[0]):
        if torch.compiler.is_compiling() or not cut[0].numel():
            return function(*(widened(t) for t in (*cut, *shared))).to(dtype)
        result: Tensor = _InChunks.apply(  # type: ignore[no-untyped-call]
            function, (gradient, keeps_result), dtype, len(cut), *cut, *shared
        )
        return result


def pieces_of(*cut: Tensor) -> Iterator[slice]:
    """Slices of dimension 0, each of as many rows as a piece of all these tensors may have, and of one at least."""
    num_rows = cut[0].shape[0]
    limit = _HOST_ELEMENTS if is_host(cut[0].device) else _DEVICE_ELEMENTS
    step = max(1, limit // max(1, sum(math.prod(t.shape[1:]) for t in cut)))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Rows,
        by_hand: tuple[Gradient | None, bool],
        dtype: torch.dtype,
        num_cut: int,
        *tensors: Tensor,
    ) -> Any:
        ctx.function, ctx.dtype, ctx.num_cut, ctx.num = function, dtype, num_cut, len(tensors)
        ctx.gradient, keeps_result = by_hand
        cut, shared = tensors[:num_cut], [widened(t) for t in tensors[num_cut:]]
        pieces = list(pieces_of(*cut))
        result, begin = None, 0
        ctx.ends = []
        for rows in pieces:
            part = function(*(widened(t[rows]) for t in cut), *shared)
            if len(pieces) == 1:
                result = part.to(dtype)
            elif result is None:
                is_reduction = part.shape[0] != rows.stop - rows.start
                size = len(pieces) if is_reduction else cut[0].shape[0]
                result = part.new_empty((size, *part.shape[1:]), dtype=dtype)
            if len(pieces) > 1:
                result[begin : begin + part.shape[0]] = part
            begin += part.shape[0]
            ctx.ends.append(begin)
        ctx.save_for_backward(*tensors, *([result] if keeps_result and result is not None else []))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with autocast_off(gradient):
            found = _differentiable(ctx, gradient) if torch.is_grad_enabled() else _by_pieces(ctx, gradient)
        return None, None, None, None, *found


def _wanted(ctx: Any) -> list[int]:
    return [index for index, needed in enumerate(ctx.needs_input_grad[4:]) if needed]


def _differentiable(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradient as ordinary operations on the saved tensors, for a second backward."""
    saved = ctx.saved_tensors  # asked once: checkpointing runs the forward pass again for each
    wanted, tensors = _wanted(ctx), saved[: ctx.num]
    result = ctx.function(*(widened(t) for t in tensors)).to(ctx.dtype)
    if result.shape != gradient.shape:  # a reduction: every piece is a reduction of its own
        pieces = list(pieces_of(*tensors[: ctx.num_cut]))
        rows = [[t[piece] for t in tensors[: ctx.num_cut]] + list(tensors[ctx.num_cut :]) for piece in pieces]
        result = torch.cat([ctx.function(*(widened(t) for t in row)) for row in rows]).to(ctx.dtype)
    got = torch.autograd.grad(result, [tensors[i] for i in wanted], gradient, create_graph=True, materialize_grads=True)
    found: list[Tensor | None] = [None] * len(tensors)
    for index, value in zip(wanted, got, strict=True):
        found[index] = value
    return found


def _by_pieces(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    saved = ctx.saved_tensors  # asked once: checkpointing runs the forward pass again for each
    wanted, tensors, results = _wanted(ctx), saved[: ctx.num], saved[ctx.num :]
    found: list[Tensor | None] = [None] * len(tensors)
    begin = 0
    pieces = list(pieces_of(*tensors[: ctx.num_cut]))
    for rows, end in zip(pieces, ctx.ends, strict=True):
        inputs = [widened(t[rows] if i < ctx.num_cut else t) for i, t in enumerate(tensors)]
        part = widened(gradient[begin:end])
        value = None
        if ctx.gradient is not None and wanted == [0]:
            first = inputs[0] if is_narrow(tensors[0]) else inputs[0].clone()  # it may be written into
            value = ctx.gradient(part, *(r[begin:end] for r in results), first, *inputs[1:])
        got = _by_autograd(ctx, part, inputs) if value is None else [value]
        for index, value in zip(wanted, got, strict=True):
            found[index] = _joined(found[index], value, tensors[index], rows if index < ctx.num_cut else None)
        begin = end
    return found


def _by_autograd(ctx: Any, part: Tensor, inputs: list[Tensor]) -> Sequence[Tensor]:
    inputs = [t.detach() for t in inputs]
    sources = [inputs[i].requires_grad_() for i in _wanted(ctx)]
    with torch.enable_grad():
        result = ctx.function(*inputs)
    return torch.autograd.grad(result, sources, part.to(result.dtype), materialize_grads=True)


def _joined(whole: Tensor | None, part: Tensor, like: Tensor, rows: slice | None) -> Tensor:
    """Write a piece's gradient into that of the whole; those of shared tensors add up in fp32."""
    if rows is None:
        return part if whole is None else whole.add_(part)
    if whole is None:
        whole = torch.empty_like(like)
    whole[rows] = part
    return whole
