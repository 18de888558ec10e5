"""What a flash attention kernel on Tensor Cores computes, on a CPU: fp32 sums, 16-bit operands of every product.

Method: scores are formed from the 16-bit inputs and summed in fp32; the probabilities are rounded to 16 bits, because
the next product reads them from there; the output is rounded once. Backward forms the scores again, and rounds
probabilities and gradients of the scores before the products that read them. A single rounding at the end would hide
the underflow of those gradients.

Source: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1 and 2, and its kernels for what is held in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores that attention holds at once: 2**17 fp32 numbers are 512 KiB, which stays in a core's own cache.
_MAX_SCORES = 2**17
_MIN_QUERY_ROWS = 64


@dataclass(frozen=True)
class Attention:
    """One call of torch's CPU flash attention: its arguments as in the schema, and the arithmetic of a flash kernel.

    Heads of all samples are laid out one after the other, ``[batch * heads, length, width]``, in fp32. Blocks of them,
    or of the query rows of one, are taken in turn, so that the scores never lie in memory as a whole.
    """

    query: Tensor  # [batch, heads, queries, width]
    key: Tensor  # [batch, key heads, keys, width]; each key head serves a group of query heads
    value: Tensor  # as key
    dropout_p: float = 0.0
    is_causal: bool = False
    attn_mask: Tensor | None = None  # added to the scores; broadcasts to [batch, heads, queries, keys]
    scale: float | None = None

    def is_covered(self, covers: Callable[[tuple[Tensor, ...]], bool], dtype: torch.dtype) -> bool:
        """False where the tensors are not ours, and where torch refuses the arguments and should say so itself."""
        inputs = (self.query, self.key, self.value)
        if not covers(inputs) or any(tensor.dim() != 4 for tensor in inputs):
            return False
        mask = self.attn_mask
        if mask is not None and (mask.dtype not in (dtype, torch.float32) or mask.dim() not in (2, 4)):
            return False
        return self.dropout_p == 0.0 and self.query.shape[-1] == self.key.shape[-1] == self.value.shape[-1]

    def forward(self, round: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and in fp32 the logarithm of the softmax's denominators [batch, heads, queries]."""
        query, key, value = self._wide_inputs()
        out, logsumexp = torch.empty_like(query), torch.empty_like(query[:, :, :1])
        for heads, rows, keys in self._blocks():
            scores = self._scores(query, key, heads, rows, keys)
            largest = _row_max(scores)
            weights = scores.sub_(largest).exp_()  # at most 1
            total = weights.sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)  # a row that may look at no key gives zeros, as in torch's kernel
            out[heads, rows] = torch.bmm(round(weights).float(), value[heads, keys]).div_(total)
            logsumexp[heads, rows] = total.log_().add_(largest)
        rounded = torch.empty_like(self.query).copy_(out.view(self.query.shape))  # the one rounding of the output
        return rounded, _by_length(logsumexp.view(self.query.shape[:3]))

    def backward(
        self, grad_out: Tensor, out: Tensor, logsumexp: Tensor, round: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value: summed in fp32, rounded once."""
        query, key, value = self._wide_inputs()
        grad_out = _per_head(grad_out)
        row_sums = (grad_out * _per_head(out)).sum(-1, keepdim=True)
        logsumexp = _per_head(logsumexp.unsqueeze(-1))
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for heads, rows, keys in self._blocks():
            grad_rows = grad_out[heads, rows]
            weights = self._scores(query, key, heads, rows, keys).sub_(logsumexp[heads, rows]).exp_()
            grad_value[heads, keys].baddbmm_(round(weights).float().mT, grad_rows)
            grad_scores = torch.bmm(grad_rows, value[heads, keys].mT).sub_(row_sums[heads, rows]).mul_(weights)
            grad_scores = round(grad_scores).float()
            grad_query[heads, rows] = torch.bmm(grad_scores, key[heads, keys])
            grad_key[heads, keys].baddbmm_(grad_scores.mT, query[heads, rows])  # query carries the scale
        grads = ((grad_query.mul_(self._scale()), self.query), (grad_key, self.key), (grad_value, self.value))
        grad_query, grad_key, grad_value = (round(_by_length(_sum_groups(grad, given))) for grad, given in grads)
        return grad_query, grad_key, grad_value

    def _wide_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query times scale, key and value in fp32, with a key head for every query head."""
        key, value = self.key, self.value
        group_size = self.query.shape[1] // max(key.shape[1], 1)
        if group_size > 1:
            key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
        return _per_head(self.query).mul_(self._scale()), _per_head(key), _per_head(value)

    def _scale(self) -> float:
        return self.scale if self.scale is not None else float(self.query.shape[-1]) ** -0.5

    def _blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Heads, query rows, and the keys that these rows may look at."""
        batch, num_heads, num_queries, _ = self.query.shape
        num_keys = self.key.shape[2]
        num_rows = max(_MAX_SCORES // max(num_keys, 1), _MIN_QUERY_ROWS)
        for heads in _slices(batch * num_heads, max(_MAX_SCORES // max(num_queries * num_keys, 1), 1)):
            for rows in _slices(num_queries, num_rows):
                yield heads, rows, slice(0, min(rows.stop, num_keys) if self.is_causal else num_keys)

    def _scores(self, query: Tensor, key: Tensor, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Scaled and masked scores of a block, in fp32: [heads, rows, keys]."""
        scores = torch.bmm(query[heads, rows], key[heads, keys].mT)
        if self.attn_mask is not None:
            batch, num_heads, num_queries, _ = self.query.shape
            mask = self.attn_mask.expand(batch, num_heads, num_queries, self.key.shape[2])
            head = torch.arange(heads.start, heads.stop)
            scores += mask[head // num_heads, head % num_heads, rows, keys]
        if self.is_causal:  # query i looks at keys 0 to i
            later = scores[..., rows.start :]
            later.masked_fill_(torch.ones(later.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)
        return scores


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _per_head(tensor: Tensor) -> Tensor:
    """[batch, heads, length, width] in any layout -> a new fp32 tensor [batch * heads, length, width]."""
    return torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor).flatten(0, 1)


def _sum_groups(grad: Tensor, given: Tensor) -> Tensor:
    """Gradient per query head [batch * heads, length, width] -> the shape of the tensor that was given."""
    batch, num_heads, length, width = given.shape
    group_size = grad.shape[0] // max(batch * num_heads, 1)
    return grad.view(batch, num_heads, group_size, length, width).sum(2) if group_size > 1 else grad.view(given.shape)


def _by_length(tensor: Tensor) -> Tensor:
    """The same values laid out in memory as [batch, length, heads, ...], as torch's attention returns them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _row_max(scores: Tensor) -> Tensor:
    """The largest score of each row; 0 where there is none: no keys, or all of them masked."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], 1)
    largest = scores.amax(-1, keepdim=True)
    return largest.masked_fill_(largest == -torch.inf, 0.0)
