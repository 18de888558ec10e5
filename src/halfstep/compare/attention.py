"""Two attentions for one small language model of lines: as it is often written, and as 16 bits need it.

Purpose: show that fp16 weights ask for functions that are fp32 inside, with everything else equal. Method: lines of the
standard library's source, filled up with zero bytes *on the left*, as a batch is prepared for generating. A byte sees
the bytes of its line up to itself; so a filling sees nothing, and its row of the mask is full. Both attentions give
such a row zeros in fp32, where they agree to rounding.

What `naive_attention` does is in much public code, and right in fp32. In fp16

    -1e9            is -inf, for the largest number is 65504
    1e-9            is 0, for the smallest number is 6e-8: so a full row is 0/0, NaN
    exp(score)      is inf from a score of 11.1 on, and inf/inf is NaN

bf16 has the range for all three. So has autocast on CUDA, which runs exp and sum in fp32; on a CPU autocast has no rule
for either, and fp16 is lost there too.

Not here: the rest of the model (text.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import ops

LINE = 32  # bytes that the model sees at once: lines have at least two, and at most one more than this
PADDING = 0  # a byte that no source file holds


# ---- the lines ------------------------------------------------------------------------------------------------------


def lines(text: bytes, num_lines: int) -> tuple[Tensor, Tensor]:
    """Lines of a text at even distances from its beginning to its end, filled up on the left.

    Args:
        text: with at least ``num_lines`` lines of 2 to ``LINE`` + 1 bytes, their ends counted.
        num_lines: how many.

    Returns:
        Inputs and targets, int64 ``[num_lines, LINE]``; a target is the byte after its input, a filling's is `PADDING`.

    Example:
        >>> inputs, targets = lines(b"a = 1\\nb\\n", 1)
        >>> bytes(inputs[0, -6:].tolist()), bytes(targets[0, -6:].tolist())
        (b'\\x00a = 1', b'\\x00 = 1\\n')
    """
    assert PADDING not in text
    fitting = [line for line in text.splitlines(keepends=True) if 2 <= len(line) <= LINE + 1]
    assert len(fitting) >= num_lines, "too few lines"
    chosen = [fitting[index * len(fitting) // num_lines] for index in range(num_lines)]
    filled = [bytes(line[:-1].rjust(LINE, b"\0") + line[1:].rjust(LINE, b"\0")) for line in chosen]
    block = torch.frombuffer(bytearray(b"".join(filled)), dtype=torch.uint8).long().view(num_lines, 2, LINE)
    return block[:, 0].contiguous(), block[:, 1].contiguous()


def line_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, fillings left out, computed in fp32.

    Args:
        logits: [batch, time, NUM_BYTES], of any float dtype.
        targets: int64 [batch, time].

    Returns:
        A scalar, fp32.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PADDING)


# ---- the attentions -------------------------------------------------------------------------------------------------


def visible(tokens: Tensor) -> Tensor:
    """Which bytes each byte may attend to: those of its line up to itself; a filling has none.

    Args:
        tokens: int64 [batch, time].

    Returns:
        bool [batch, 1, time, time]: the dimensions of heads, queries and keys behind the batch.

    Example:
        >>> visible(torch.tensor([[PADDING, 97, 98]]))[0, 0].int().tolist()
        [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    """
    is_text = tokens != PADDING  # [batch, time]
    up_to_itself = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
    return (is_text[:, None, :] & is_text[:, :, None] & up_to_itself)[:, None]


def naive_attention(query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
    """Attention by the formula: right in fp32, lost in fp16.

    Args:
        query: [batch, heads, time, size].
        key: the same.
        value: the same.
        tokens: int64 [batch, time].

    Returns:
        [batch, heads, time, size].
    """
    mask = torch.zeros(visible(tokens).shape, device=tokens.device).masked_fill(~visible(tokens), -1e9)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = (scores + mask.to(scores.dtype)).exp()  # softmax by its formula
    mixed: Tensor = weights / (weights.sum(-1, keepdim=True) + 1e-9) @ value  # 1e-9 against the full rows' 0/0
    return mixed


def stable_attention(query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
    """The same by `halfstep.ops.attention`; arguments and result as in `naive_attention`."""
    return ops.attention(query, key, value, mask=visible(tokens))
