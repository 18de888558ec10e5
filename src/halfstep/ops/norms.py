"""Layer norm, RMS norm and division by the Euclidean norm, with statistics in fp32.

``layer_norm`` and ``rms_norm`` are torch's fused kernels on GPUs, which keep statistics in fp32. On the CPU both run in
fp32 pieces: torch 2.13's layer_norm keeps mean and reciprocal deviation in the dtype of the weights, so that gradients
around a mean of 1000 are off by percents and a constant row with eps below 2e-10 gives NaN in fp16; and it adds the
gradients of weight and bias up in 16 bits, where 8192 ones make 256 in bf16. Its rms_norm keeps five fp32 tensors for
backward. ``normalize`` runs in pieces everywhere: torch's rounds its eps of 1e-12 to the input's dtype, 0 in fp16.

Limit: torch's kernels square in fp32: layer_norm of a bf16 value beyond 1.8e19 is NaN, and rms_norm of it on a GPU 0.

Sources: Ba et al., "Layer Normalization" (arXiv 1607.06450), section 3; Zhang and Sennrich, "Root Mean Square Layer
Normalization" (arXiv 1910.07467), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import ArgumentError
from halfstep.formats import FP16
from halfstep.ops.checks import autocast_off, check_floating, is_narrow
from halfstep.ops.chunks import in_chunks
from halfstep.ops.reductions import any_row_norm, lie_within, row_norm, row_size

# torch's rms_norm takes the epsilon of the input's dtype (0.0078 for bf16) where none is given: fp32's is the same for
# every dtype, and what a model was trained with in fp32.
_DEFAULT_RMS_EPS = torch.finfo(torch.float32).eps

_NORMALIZE_EPS = 1e-12  # torch's


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Subtract the mean, divide by the deviation, scale and shift; statistics and weights in fp32.

    Args:
        x: floating tensor ``[..., *normalized_shape]``.
        normalized_shape: the last dimensions, over which mean and variance are taken.
        weight: of ``normalized_shape``, in any floating dtype: fp32 weights beside a 16-bit ``x`` keep their bits.
        bias: of ``normalized_shape``, likewise.
        eps: added to the variance, in fp32: 1e-12 does not round to zero.

    Returns:
        A tensor like ``x``, of its dtype, under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, or shapes do not fit.

    Example:
        >>> layer_norm(torch.tensor([[1000.0, 1002.0]]).half(), 2, eps=1e-12)
        tensor([[-1.,  1.]], dtype=torch.float16)
    """
    check_floating(x, "layer_norm")
    shape = _checked_shape(x, normalized_shape, "layer_norm", weight=weight, bias=bias)
    with autocast_off(x):
        if not is_narrow(x):
            return F.layer_norm(x, shape, _as(weight, x.dtype), _as(bias, x.dtype), eps)
        if not is_host(x.device) and all(t is None or t.dtype == x.dtype for t in (weight, bias)):
            return F.layer_norm(x, shape, weight, bias, eps)  # GPU kernels keep their statistics in fp32
        return _layer_norm_in_fp32(x, shape, weight, bias, eps)


def _layer_norm_in_fp32(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """For CPUs, and for GPUs where the kernel would want fp32 weights cast to the input's dtype."""
    has_weight = weight is not None

    def of_rows(rows: Tensor, *shared: Tensor) -> Tensor:
        w = shared[0].float() if has_weight else None
        return F.layer_norm(rows, shape, w, shared[-1].float() if bias is not None else None, eps)

    shared = [t for t in (weight, bias) if t is not None]
    return in_chunks(of_rows, x.reshape(-1, *shape), shared=shared, dtype=x.dtype).view(x.shape)


def rms_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Divide by the root mean square and scale; statistics and weights in fp32, one rounding at the end.

    Args:
        x: floating tensor ``[..., *normalized_shape]``.
        normalized_shape: the last dimensions, over which squares are averaged.
        weight: of ``normalized_shape``, in any floating dtype: fp32 weights beside a 16-bit ``x`` keep their bits.
        eps: added to the mean square, in fp32. None means fp32's epsilon, 1.2e-7, whatever the dtype of ``x``.

    Returns:
        A tensor like ``x``, of its dtype, under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, or shapes do not fit.

    Example:
        >>> rms_norm(torch.tensor([[3e-4, -3e-4]]).half(), 2, eps=1e-12)
        tensor([[ 1., -1.]], dtype=torch.float16)
    """
    check_floating(x, "rms_norm")
    shape = _checked_shape(x, normalized_shape, "rms_norm", weight=weight)
    eps = _DEFAULT_RMS_EPS if eps is None else eps
    with autocast_off(x):
        is_fused = not is_host(x.device) and (weight is None or weight.dtype == x.dtype)
        if is_fused or x.dtype == torch.float64:
            return F.rms_norm(x, shape, _as(weight, x.dtype), eps)

        def of_rows(rows: Tensor, w: Tensor | None = None) -> Tensor:
            # Dividing by the largest magnitude, if above 1, keeps bf16's and fp32's squares finite.
            size = row_size(rows).clamp(min=1.0)
            scaled = rows / size
            scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps / size.square())
            return scaled if w is None else scaled * w.to(scaled.dtype)

        rows = x.reshape(-1, math.prod(shape))
        shared = () if weight is None else (weight.reshape(-1),)
        return in_chunks(of_rows, rows, shared=shared, dtype=x.dtype).view(x.shape)


def normalize(x: Tensor, dim: int = -1, *, eps: float | None = None) -> Tensor:
    """Divide by the Euclidean norm, ``x / max(norm, eps)``, computed in fp32 over the format's whole range.

    Args:
        x: floating tensor of any shape.
        dim: the dimension along which the norm becomes 1. (torch's default is 1; here it is the last.)
        eps: the least divisor, in fp32. A row of zeros gives zeros, and its gradient is divided by eps: None means
            torch's 1e-12, but for fp16, where that gradient would be inf, the smallest normal number, 6.1e-5.

    Returns:
        A tensor like ``x``, of its dtype, under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating.

    Example:
        >>> normalize(torch.tensor([[3e4, 4e4], [0.0, 0.0]]).half())
        tensor([[0.6001, 0.7998],
                [0.0000, 0.0000]], dtype=torch.float16)
    """
    check_floating(x, "normalize")
    floor = (FP16.smallest_normal if x.dtype == torch.float16 else _NORMALIZE_EPS) if eps is None else eps

    def of_rows(rows: Tensor) -> Tensor:
        norms = any_row_norm(rows).unsqueeze(-1) if is_host(x.device) else None
        if norms is not None and lie_within(norms, -1.0):
            return rows / norms.clamp(min=floor)
        size = row_size(rows)
        scaled = rows / size
        # The size cancels, so that it needs no gradient; the floor is measured in the same unit.
        return scaled / torch.maximum(row_norm(scaled).unsqueeze(-1), floor / size)

    def gradient(incoming: Tensor, rows: Tensor) -> Tensor | None:
        norms = any_row_norm(rows).unsqueeze(-1)
        if not lie_within(norms, -1.0):  # a norm that fp32 does not hold
            return None
        divisors = norms.clamp(min=floor)
        directions = rows.div_(divisors)
        along = (incoming * directions).sum(-1, keepdim=True).masked_fill(norms < floor, 0.0)
        return torch.addcmul(incoming, directions, along, value=-1).div_(divisors)

    if not x.numel():
        return x.clone()
    rows = x.movedim(dim, -1)
    result = in_chunks(of_rows, rows.reshape(-1, rows.shape[-1]), dtype=x.dtype, gradient=gradient)
    return result.view(rows.shape).movedim(-1, dim)


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _checked_shape(
    x: Tensor, normalized_shape: int | Sequence[int], function: str, **tensors: Tensor | None
) -> tuple[int, ...]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape or not math.prod(shape):
        raise ArgumentError(
            asked=f"{function} over normalized_shape={shape}",
            true=f"the input has shape {tuple(x.shape)}",
            why="the statistics are taken over its last dimensions, which must be these, and not empty",
            fix=f"pass normalized_shape={tuple(x.shape[-1:])}, or reshape the input",
        )
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(
                asked=f"{function} with {name} of shape {tuple(tensor.shape)}",
                true=f"normalized_shape is {shape}",
                why=f"every normalized element has its own {name}",
                fix=f"pass a {name} of shape {shape}",
            )
    return shape
