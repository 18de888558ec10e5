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

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import ArgumentError
from halfstep.ops.checks import autocast_off, check_floating, check_reduction, check_same_shape, is_narrow
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
        p: floating tensor of any shape. NaN stays NaN, and so does its gradient where the one that comes in is NaN.
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
    inside = p.clamp(max(low, wanted), min(high, _rounded_down(1 - wanted, p.dtype)))
    return torch.where(p.isnan(), p, inside)  # clamp's own gradient at NaN is 0: a loss of NaN would go unseen


def _rounded_down(bound: float, dtype: torch.dtype) -> float:
    """The largest number of the dtype in (0.5, 1] that is at most ``bound``."""
    spacing = torch.finfo(dtype).eps / 2
    return bound // spacing * spacing


def binary_cross_entropy(p: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """``-(t log p + (1 - t) log(1 - p))`` in fp32, finite in value and gradient at p = 0 and p = 1.

    Args:
        p: probabilities in ``[0, 1]``, floating, of any shape. fp32 and fp64 go to torch's kernel, whose logarithms
            stop at -100. NaN gives NaN (in fp32 and fp64 on a GPU torch stops the process).
        target: 0, 1 or soft, of the same shape; any real dtype.
        weight: factor of each element, broadcastable to ``p``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        An fp32 tensor (fp64 for fp64), under autocast too, where torch refuses its own. The mean of no elements is 0.

    Raises:
        ArgumentError: ``p`` is not floating, or it or the target (seen on the CPU) leaves ``[0, 1]``, shapes differ, or
            the reduction is unknown.

    Example:
        >>> p = torch.tensor([1.0, 0.0]).half().requires_grad_()
        >>> binary_cross_entropy(p, torch.tensor([0.0, 0.0]), reduction="sum").backward()
        >>> p.grad.tolist()
        [2048.0, 1.0]
    """
    _check(p, target, reduction, "binary_cross_entropy")
    ranges = [_range_on_host(p), _range_on_host(target)]
    for values, (low, high) in zip(("values", "targets"), ranges, strict=True):
        if low < 0 or high > 1:  # NaN is no number outside: it goes through
            raise ArgumentError(
                asked=f"binary_cross_entropy of {values} from {low:.6g} to {high:.6g}",
                true="probabilities lie in [0, 1]",
                why="the logarithm of a negative number does not exist",
                fix="apply a sigmoid, or call binary_cross_entropy_with_logits on the scores",
            )
    low, high = probability_bounds(p.dtype)
    # torch's kernel refuses NaN, as if it were a number outside.
    is_torchs = not is_narrow(p) and not any(map(math.isnan, (*ranges[0], *ranges[1])))

    def of_rows(x: Tensor, t: Tensor) -> Tensor:
        if is_torchs:
            return F.binary_cross_entropy(x, t, reduction="none")
        return -(t * _bounded(x, low, high=1.0).log() + (1 - t) * torch.log1p(-_bounded(x, 0.0, high)))

    def gradient(x: Tensor, t: Tensor) -> Tensor:
        of_ones = t / x.clamp(low, 1.0)
        return (1 - t).div_(1 - x.clamp_(0.0, high)).sub_(of_ones)

    return _losses(of_rows, gradient, (p, target), weight, reduction)


def _range_on_host(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest element, NaN if there is one; (0, 1) where that cannot be seen without waiting."""
    if not is_host(x.device) or torch.compiler.is_compiling() or not x.numel() or x.dtype == torch.bool:
        return 0.0, 1.0
    try:
        smallest, largest = torch.aminmax(x.detach())
        return smallest.item(), largest.item()
    except RuntimeError:  # what vmap and fake tensors answer
        return 0.0, 1.0


def _bounded(x: Tensor, low: float, high: float) -> Tensor:
    """``x.clamp(low, high)`` with the gradient of ``x``: what lies outside is still pulled back."""
    if not torch.is_grad_enabled():
        return x.clamp(low, high)
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
        ones, zeros = (t if positive is None else positive * t), 1 - t  # shares
        if torch.is_grad_enabled():
            return -(ones * F.logsigmoid(x) + zeros * F.logsigmoid(-x))
        # The same with one exponential and one logarithm: -log sigmoid(x) = max(-x, 0) + log1p(exp(-|x|)). Not for
        # autograd, for which |x| has no derivative at 0.
        tail = x.abs().neg_().exp_().log1p_()
        tail = tail if positive is None else tail.mul_(ones + zeros)
        return tail.addcmul_(zeros, x.clamp(min=0.0)).addcmul_(ones, x.clamp(max=0.0), value=-1)

    def gradient(x: Tensor, t: Tensor, positive: Tensor | None = None) -> Tensor:
        # zeros * sigmoid(x) - ones * sigmoid(-x), by the smaller sigmoid: 1 minus it is the other, and exact enough.
        # torch's own is 0 from -89 on, though fp32 and bf16 hold numbers down to exp(-104) and exp(-92).
        tail = x.abs().neg_().exp_()
        tail = tail.div_(1 + tail)
        sign = x.sign_()  # on a CPU torch.where takes several times as long as a product (2.13)
        is_above = sign.mul(0.5).add_(0.5)  # 1 or 0, and one half at 0, where both sigmoids are
        if positive is None:
            return is_above.sub_(t).addcmul_(sign, tail, value=-1)
        ones, zeros = positive * t, 1 - t
        tail.mul_(ones + zeros)
        return (is_above * zeros).addcmul_(is_above - 1, ones).addcmul_(sign, tail, value=-1)

    extra = () if pos_weight is None else (pos_weight.expand_as(logits),)
    return _losses(of_rows, gradient, (logits, target, *extra), weight, reduction)


def _check(x: Tensor, target: Tensor, reduction: str, function: str) -> None:
    check_floating(x, function, "predictions")
    check_same_shape(x, target, function)
    check_reduction(reduction, function)


def _losses(
    of_rows: Callable[..., Tensor],
    gradient_of_rows: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    reduction: str,
) -> Tensor:
    """The reduced losses of elements; sums are taken piece by piece, so that nothing of fp32 is stored.

    The gradient of each element's own loss may write into the first tensor it takes.
    """
    x = inputs[0]
    dtype = torch.float32 if is_narrow(x) else x.dtype
    tensors = [t if t.is_floating_point() else t.to(x.dtype) for t in inputs]
    if weight is not None:
        tensors.append(weight.expand_as(x))

    def reduced(*rows: Tensor) -> Tensor:
        rows = tuple(t.to(rows[0].dtype) for t in rows)
        losses = of_rows(*rows) if weight is None else of_rows(*rows[:-1]) * rows[-1]
        return losses if reduction == "none" else losses.sum().unsqueeze(0)

    def gradient(incoming: Tensor, *rows: Tensor) -> Tensor:
        rows = tuple(t.to(rows[0].dtype) for t in rows)
        found = gradient_of_rows(*rows[: len(inputs)]).mul_(incoming)
        return found if weight is None else found.mul_(rows[-1])

    with autocast_off(x):
        flat = [t.reshape(-1) for t in tensors]
        losses = in_chunks(reduced, *flat, dtype=dtype, gradient=gradient) if is_narrow(x) else reduced(*flat)
        if reduction == "none":
            return losses.view(x.shape)
        return losses.sum() / max(1, x.numel()) if reduction == "mean" else losses.sum()
