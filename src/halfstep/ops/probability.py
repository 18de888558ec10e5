"""Binary cross entropy, and probabilities that stay away from 0 and 1.

``p.clamp(max=1 - 1e-6)`` does nothing in 16 bits: 1 - 1e-6 rounds to 1 (the number below 1 is 1 - 2**-11 in fp16, 1 -
2**-8 in bf16). The forward value may look right while log1p(-1) = -inf makes the gradient NaN. ``clamp_probability``
takes its bounds from the format.

The binary cross entropy of a 16-bit probability is computed in fp32 with the same bounds, each on its own side: log(p)
where p is large needs no bound, nor log(1 - p) where p is small. The gradient is that of the bounded value, so a
confident error is still corrected: at p = 1 and target 0 it is 2048 (fp16) or 256 (bf16), and finite. From logits none
of this arises: prefer them.

Not here: focal and other losses built from these logarithms (``clamp_probability`` is what they need).

Sources: pytorch/pytorch#41663, kornia/kornia#2115 for the fault; torch's own floor of 1e-12 on the divisor p (1 - p).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.ops.checks import (
    autocast_off,
    check_floating,
    check_reduction,
    check_same_shape,
    is_narrow,
    seen_on_host,
)
from halfstep.ops.chunks import in_chunks

# torch's binary_cross_entropy divides by at least this in backward.
_TORCH_FLOOR = 1e-12


def probability_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest probability of a dtype whose logarithms, and their gradients, are usable.

    Args:
        dtype: a floating dtype that is one of halfstep's formats, or fp64.

    Returns:
        ``(low, high)``: 1e-12 or the smallest normal number, whichever is larger; and the largest number below 1.

    Example:
        >>> probability_bounds(torch.float16)
        (6.103515625e-05, 0.99951171875)
    """
    limits = torch.finfo(dtype)
    return max(limits.tiny, _TORCH_FLOOR), 1 - limits.eps / 2


def clamp_probability(p: Tensor, eps: float | None = None) -> Tensor:
    """Keep probabilities inside (0, 1), by bounds that the dtype can hold.

    Args:
        p: floating tensor of any shape. NaN stays NaN.
        eps: distance from 0 and 1 that is wanted. What the dtype cannot hold is widened to what it can: near 1 to half
            its epsilon, near 0 to its smallest normal number. None asks for the closest bounds.

    Returns:
        A tensor like ``p``. As with ``torch.clamp``, the gradient is 0 where ``p`` was outside, finite everywhere.

    Raises:
        ArgumentError: ``p`` is not floating, or ``eps`` is not in ``[0, 0.5)``.

    Example:
        >>> p = torch.tensor([1.0, 0.5]).half().requires_grad_()
        >>> torch.log1p(-clamp_probability(p, 1e-6)).sum().backward()
        >>> p.grad
        tensor([ 0., -2.], dtype=torch.float16)
    """
    check_floating(p, "clamp_probability", "p")
    if eps is not None and not 0 <= eps < 0.5:
        raise ArgumentError(
            asked=f"clamp_probability(eps={eps})",
            true="it is the distance kept from 0 and from 1",
            why="from one half on nothing is left between the bounds",
            fix="pass a small number such as 1e-6, or leave it out",
        )
    low, high = probability_bounds(p.dtype)
    wanted = 0.0 if eps is None else eps
    # Clamping compares in fp32 but stores in 16 bits, so bounds must not round outward: the dtype's own do not round.
    return p.clamp(max(low, wanted), min(high, _rounded_down(1 - wanted, p.dtype)))


def _rounded_down(bound: float, dtype: torch.dtype) -> float:
    """The largest number of the dtype in (0.5, 1] that is at most ``bound``."""
    spacing = torch.finfo(dtype).eps / 2
    return bound // spacing * spacing


def binary_cross_entropy(p: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """``-(t log p + (1 - t) log(1 - p))`` in fp32, finite in value and gradient at p = 0 and p = 1.

    Args:
        p: probabilities in ``[0, 1]``, floating, of any shape. fp32 and fp64 go to torch's kernel, whose logarithms
            stop at -100.
        target: 0, 1 or soft, of the same shape; any real dtype.
        weight: factor of each element, broadcastable to ``p``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        An fp32 tensor (fp64 for fp64), under autocast too, where torch refuses its own. The mean of no elements is 0.

    Raises:
        ArgumentError: ``p`` is not floating or (seen on the CPU) leaves ``[0, 1]``, shapes differ, or the reduction is
            unknown.

    Example:
        >>> p = torch.tensor([1.0, 0.0]).half().requires_grad_()
        >>> binary_cross_entropy(p, torch.tensor([0.0, 0.0]), reduction="sum").backward()
        >>> p.grad.tolist()
        [2048.0, 1.0]
    """
    _check(p, target, reduction, "binary_cross_entropy")
    # NaN is no number outside: it goes through.
    if seen_on_host(((p < 0) | (p > 1)).any()):
        raise ArgumentError(
            asked=f"binary_cross_entropy of values from {p.min().item():.6g} to {p.max().item():.6g}",
            true="probabilities lie in [0, 1]",
            why="the logarithm of a negative number does not exist",
            fix="apply a sigmoid, or call binary_cross_entropy_with_logits on the scores",
        )
    low, high = probability_bounds(p.dtype)
    is_16_bit = is_narrow(p)

    def of_rows(x: Tensor, t: Tensor) -> Tensor:
        if not is_16_bit:
            return F.binary_cross_entropy(x, t, reduction="none")
        return -(t * _bounded(x, low, high=1.0).log() + (1 - t) * torch.log1p(-_bounded(x, 0.0, high)))

    return _losses(of_rows, p, target, weight, reduction)


def _bounded(x: Tensor, low: float, high: float) -> Tensor:
    """``x.clamp(low, high)`` with the gradient of ``x``: what lies outside is still pulled back."""
    return x + (x.detach().clamp(low, high) - x.detach())


def binary_cross_entropy_with_logits(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Binary cross entropy of ``sigmoid(logits)`` in fp32, without a difference of large numbers.

    ``-(t log sigmoid(x) + (1 - t) log sigmoid(-x))``: torch's form, ``(1 - t) x - log sigmoid(x)``, cancels where x is
    far below 0 and loses losses smaller than 1e-7 |x|.

    Args:
        logits: floating scores of any shape.
        target: 0, 1 or soft, of the same shape; any real dtype.
        weight: factor of each element, broadcastable to ``logits``.
        pos_weight: factor of the positive part, broadcastable to ``logits``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        An fp32 tensor (fp64 for fp64), under autocast too. The mean of no elements is 0.

    Raises:
        ArgumentError: ``logits`` are not floating, shapes differ, or the reduction is unknown.

    Example:
        >>> binary_cross_entropy_with_logits(torch.tensor([30.0, -3e4]).half(), torch.tensor([0.0, 0.0]))
        tensor(15.)
    """
    _check(logits, target, reduction, "binary_cross_entropy_with_logits")

    def of_rows(x: Tensor, t: Tensor, positive: Tensor | None = None) -> Tensor:
        of_ones = t * F.logsigmoid(x)
        return -((of_ones if positive is None else positive * of_ones) + (1 - t) * F.logsigmoid(-x))

    extra = () if pos_weight is None else (pos_weight.expand_as(logits),)
    return _losses(of_rows, logits, target, weight, reduction, *extra)


def _check(x: Tensor, target: Tensor, reduction: str, function: str) -> None:
    check_floating(x, function, "predictions")
    check_same_shape(x, target, function)
    check_reduction(reduction, function)


def _losses(
    of_rows: Callable[..., Tensor], x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, *extra: Tensor
) -> Tensor:
    """The reduced losses of elements; sums are taken piece by piece, so that nothing of fp32 is stored."""
    dtype = torch.float32 if is_narrow(x) else x.dtype
    tensors = [x, *(t if t.is_floating_point() else t.to(x.dtype) for t in (target, *extra))]
    if weight is not None:
        tensors.append(weight.expand_as(x))

    def reduced(*rows: Tensor) -> Tensor:
        rows = tuple(t.to(rows[0].dtype) for t in rows)
        losses = of_rows(*rows) if weight is None else of_rows(*rows[:-1]) * rows[-1]
        return losses if reduction == "none" else losses.sum().unsqueeze(0)

    with autocast_off(x):
        flat = [t.reshape(-1) for t in tensors]
        losses = in_chunks(reduced, *flat, dtype=dtype) if is_narrow(x) else reduced(*flat)
        if reduction == "none":
            return losses.view(x.shape)
        return losses.sum() / max(1, x.numel()) if reduction == "mean" else losses.sum()
