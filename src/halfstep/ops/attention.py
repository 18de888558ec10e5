"""Attention on torch's kernel, with masks that are checked, combined and allowed to be full.

``torch.nn.functional.scaled_dot_product_attention`` is right in 16 bits: its kernels hold the products in fp32, scale
them there, and give zeros with zero gradients for a fully masked row; where it falls back to plain operations it scales
before the product and widens 16-bit tensors. Written by hand in fp16, ``q @ k.T / sqrt(d)`` overflows before it is
scaled, a mask of -1e9 cannot be stored, and a fully masked row is NaN. So this is torch's function, with clear errors,
with causal and given masks at once, and with additive masks of any dtype.

One thing torch's CPU kernel (2.13) gets wrong: a row whose scores are all NaN counts as fully masked there and comes
out zero (its gradients are NaN). Such a call is repeated with torch's plain operations.

Not here: attention weights as a result; key-value caches; a second backward (torch's fused kernels have none).

Source: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), section 3.2.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep._compat import is_host
from halfstep.errors import ArgumentError
from halfstep.formats import FP32
from halfstep.ops.checks import check_floating, seen_on_host
from halfstep.ops.softmax import check_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``softmax(query key^T * scale + mask) value``; a query that may attend to nothing gets zeros.

    Args:
        query: ``[..., length, size]``, floating.
        key: ``[..., num_keys, size]``, of the same dtype (under autocast any, all are cast).
        value: ``[..., num_keys, value_size]``, likewise.
        mask: broadcastable to ``[..., length, num_keys]``. Boolean: True means attend. Floating: added to the scaled
            scores after a cast to their dtype; -inf means do not attend, and so does in fp16 anything below -65520.
            Large finite numbers that the dtype can hold are only added: a row of them all attends to everything.
        is_causal: whether a query attends only to keys at its own position and before, counted from the first key;
            may be combined with a mask.
        scale: factor on the products; None means ``1 / sqrt(size)``.
        dropout_p: share of attention weights dropped. There is no module here that knows whether it trains.

    Returns:
        ``[..., length, value_size]`` of the query's dtype; under autocast of autocast's dtype, as in torch. NaN where a
        query, a key that it attends to, or their product is NaN (compiled for a CPU, torch may give 0 there).

    Raises:
        ArgumentError: dtypes or shapes do not fit.

    Example:
        >>> q = torch.ones(1, 2, 4).half()
        >>> attention(q, q, q, mask=torch.tensor([[True, True], [False, False]]))[0, :, 0]
        tensor([1., 0.], dtype=torch.float16)
    """
    _check(query, key, value)
    # [length, num_keys] behind whatever the batch dimensions broadcast to
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    scores_shape = torch.Size((*batch, query.shape[-2], key.shape[-2]))
    if mask is not None:
        mask = _checked_mask(mask, scores_shape, _scores_dtype(query))
    # One call can take a mask or be causal, not both.
    if is_causal and mask is not None:
        mask, is_causal = _with_causal(mask, scores_shape), False
    # torch's fused kernels take [batch, heads, length, size] only; fewer dimensions cost fp32 copies for backward.
    missing = (1,) * (4 - query.dim()) if query.dim() == key.dim() == value.dim() else ()
    q, k, v = (t.reshape(missing + t.shape) for t in (query, key, value))
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p}
    result = F.scaled_dot_product_attention(q, k, v, **options)
    if _may_hide_nan(result, q, k, scale):
        with sdpa_kernel(SDPBackend.MATH):
            result = F.scaled_dot_product_attention(q, k, v, **options)
    return result.reshape(result.shape[len(missing) :])


def _may_hide_nan(result: Tensor, query: Tensor, key: Tensor, scale: float | None) -> bool:
    """Whether a row of zeros may stand for scores that are all NaN; one column is read, the inputs only if it has 0."""
    if not is_host(result.device) or not result.numel():
        return False
    if seen_on_host(result.detach().select(-1, 0).all()) is not False:  # no zero, or nothing to be seen
        return False
    sizes = [max(map(abs, torch.stack(torch.aminmax(t.detach())).tolist())) for t in (query, key) if t.numel()]
    # aminmax is NaN where an element is, and NaN is below nothing.
    factor = 1.0 if scale is None else abs(scale)  # NaN is below nothing
    return not math.prod(sizes) * query.shape[-1] * max(1.0, factor) < FP32.largest or math.isnan(factor)


def _scores_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype


def _checked_mask(mask: Tensor, scores_shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        check_mask(torch.empty(mask.shape, dtype=torch.bool, device="meta"), scores_shape, "attention")
        mask = mask.to(dtype)
    else:
        check_mask(mask, scores_shape, "attention")
    return mask.reshape((1,) * (2 - mask.dim()) + mask.shape)  # torch takes none of one dimension, [num_keys]


def _with_causal(mask: Tensor, scores_shape: torch.Size) -> Tensor:
    is_seen = torch.ones(scores_shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return mask & is_seen if mask.dtype == torch.bool else mask.masked_fill(~is_seen, float("-inf"))


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(tensor, "attention", name)
        if tensor.dim() < 2:
            raise ArgumentError(
                asked=f"attention with {name} of shape {tuple(tensor.shape)}",
                true="it needs [..., length, size]",
                why="there is no length to attend over",
                fix=f"give {name} a length and a size dimension",
            )
    is_cast = _scores_dtype(query) != query.dtype
    if len({query.dtype, key.dtype, value.dtype}) > 1 and not is_cast:
        raise ArgumentError(
            asked=f"attention of {query.dtype} queries, {key.dtype} keys and {value.dtype} values",
            true="the three are multiplied with each other",
            why="torch multiplies tensors of one dtype",
            fix="cast them to one dtype, or run under torch.autocast",
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ArgumentError(
            asked=f"attention of query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}",
            true="queries and keys share their last size, keys and values their length",
            why="the products are not defined",
            fix="check which tensors were transposed",
        )
