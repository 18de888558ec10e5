"""Softmax and its logarithm, with rows in which nothing is left to choose.

A row whose scores are all -inf has no probabilities: exp(-inf) / 0. torch gives NaN, and its backward spreads NaN to
everything the row shared. Here such a row is zero, and so is its gradient: nothing was attended to, nothing is learned.

``softmax`` is torch's kernel for the last dimension, which computes in fp32 inside for 16-bit tensors and rounds once
(for other dimensions of 16-bit tensors on the CPU torch 2.13 rounds some columns twice, so the dimension is moved).
``log_softmax`` is torch's kernel too, except for 16-bit tensors on the CPU: there torch 2.13 holds the sum of the
exponentials in the 16-bit dtype, so that 70 000 equal fp16 scores give -inf. Those rows are computed in fp32, a few at
a time.

Not here: sparse softmax; a mask that is added (add it before; -inf means masked).

Sources: pytorch/pytorch#131060 for the meaning of a fully masked row; Milakov and Gimelshein, "Online normalizer
calculation for softmax" (arXiv 1805.02867), section 2, for why the largest score is subtracted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import ArgumentError
from halfstep.formats import FloatFormat, format_of
from halfstep.ops.checks import autocast_off, check_floating, is_narrow, seen_on_host
from halfstep.ops.chunks import in_chunks


def mask_value(dtype: str | torch.dtype | FloatFormat) -> float:
    """The most negative number that may be added to scores of a format, twice, without reaching -inf.

    Half of the largest value: a causal and a padding mask can be stacked, and a score of either sign added, before
    anything overflows; exp of it is zero in every format. Prefer a boolean mask: it needs no such number, and a fully
    masked row comes out zero instead of uniform.

    Args:
        dtype: the scores' format, by name, dtype or as a FloatFormat.

    Returns:
        A negative float that the format holds exactly.

    Raises:
        ArgumentError: the format is unknown.

    Example:
        >>> mask_value("fp16"), torch.tensor(mask_value("bf16")).bfloat16().isfinite().item()
        (-32752.0, True)
    """
    return -format_of(dtype).largest / 2


def softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Probabilities from scores; a fully masked row gives zeros.

    Args:
        x: floating tensor of any shape. -inf means masked; +inf or NaN makes its row NaN, as in torch.
        dim: the dimension whose probabilities add up to 1.
        mask: boolean, broadcastable to ``x``; True means keep, as in torch's attention.

    Returns:
        A tensor like ``x``, of its dtype, under autocast too. Within half an ulp plus fp32's rounding.

    Raises:
        ArgumentError: ``x`` is not floating, or the mask is not boolean or does not fit.

    Example:
        >>> softmax(torch.zeros(2, 2), mask=torch.tensor([[True, True], [False, False]]))
        tensor([[0.5000, 0.5000],
                [0.0000, 0.0000]])
    """
    x = _masked(x, mask, "softmax")
    return _on_live_rows(_softmax_of_last if is_narrow(x) and is_host(x.device) else F.softmax, x, dim)


def log_softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Logarithms of probabilities from scores; a fully masked row gives zeros.

    Args:
        x: floating tensor of any shape. -inf means masked; +inf or NaN makes its row NaN, as in torch.
        dim: the dimension whose probabilities add up to 1.
        mask: boolean, broadcastable to ``x``; True means keep. Masked places of other rows are -inf.

    Returns:
        A tensor like ``x``, of its dtype, under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, or the mask is not boolean or does not fit.

    Example:
        >>> log_softmax(torch.zeros(1, 70_000, dtype=torch.half))[0, 0]
        tensor(-11.1562, dtype=torch.float16)
    """
    x = _masked(x, mask, "log_softmax")
    return _on_live_rows(_log_softmax_in_fp32 if is_narrow(x) and is_host(x.device) else F.log_softmax, x, dim)


def _masked(x: Tensor, mask: Tensor | None, function: str) -> Tensor:
    check_floating(x, function)
    if mask is None:
        return x
    check_mask(mask, x.shape, function)
    return x.masked_fill(~mask, -math.inf)


def check_mask(mask: Tensor, shape: torch.Size, function: str) -> None:
    """Refuse a mask that is not boolean, or that cannot be broadcast to the scores.

    Args:
        mask: the caller's mask.
        shape: of the scores.
        function: for the message.

    Raises:
        ArgumentError: dtype or shape do not fit.
    """
    if mask.dtype != torch.bool:
        raise ArgumentError(
            asked=f"{function} with a mask of dtype {mask.dtype}",
            true="a mask is boolean, True where a score counts",
            why="0 and 1 could mean keep or drop, and an added mask means neither",
            fix="pass mask.bool() if 1 means keep, mask == 0 if 1 means drop; add an additive mask to the scores",
        )
    fits = len(mask.shape) <= len(shape) and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ArgumentError(
            asked=f"{function} with a mask of shape {tuple(mask.shape)}",
            true=f"the scores have shape {tuple(shape)}",
            why="the mask cannot be broadcast to them",
            fix="give every dimension of the mask, counted from the last, the scores' size or 1",
        )


def _on_live_rows(function: Callable[[Tensor, int], Tensor], x: Tensor, dim: int) -> Tensor:
    """Apply to rows with something to choose from; zeros, with zero gradients, for the others."""
    with autocast_off(x):
        if not x.numel():
            return x.clone()
        if not x.dim():
            return _on_live_rows(function, x.unsqueeze(0), dim).squeeze(0)
        # A fully masked row is NaN throughout, so one column tells on the CPU whether there may be any: almost free.
        if seen_on_host(x.new_zeros((), dtype=torch.bool)) is not None:
            y = function(x, dim)
            if seen_on_host(y.detach().select(dim, 0).isnan().any()) is False:
                return y
        is_dead = x.detach().amax(dim, keepdim=True) == -math.inf
        return function(x.masked_fill(is_dead, 0.0), dim).masked_fill(is_dead, 0.0)


def _softmax_of_last(x: Tensor, dim: int) -> Tensor:
    return F.softmax(x.movedim(dim, -1), -1).movedim(-1, dim)


def _log_softmax_in_fp32(x: Tensor, dim: int) -> Tensor:
    rows = x.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    result = in_chunks(_rows_of_log_softmax, flat, dtype=x.dtype, gradient=_gradient_of_log_softmax)
    return result.view(rows.shape).movedim(-1, dim)


def _rows_of_log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


def _gradient_of_log_softmax(incoming: Tensor, x: Tensor) -> Tensor:
    return torch.addcmul(incoming, F.softmax(x, -1), incoming.sum(-1, keepdim=True), value=-1, out=x)
