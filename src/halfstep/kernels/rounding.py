"""From an fp32 master to its 16-bit weight: the one rounding that every weight is written by.

bf16 rounds to nearest, ties away from zero, which in the bit pattern is ``(bits + 0x8000) >> 16``:

    | sign 1 | exponent 8 | mantissa 7 | dropped 16 |      a tie: dropped == 0x8000

so that ``bits - (bf16 << 16)`` always fits into 16 bits: what 16-bit masters ("split") rely on. Method: set the lowest
of the dropped bits. A tie is then just above the middle, every other value stays on its side of it, and torch's own
cast, fast and ties to even, rounds as wanted.

fp16 is no part of an fp32 pattern and has nothing to gain from that: it rounds to nearest, ties to even, as torch
casts, so that ``weight == master.half()``.

In both a value beyond the largest finite one becomes that one, and is counted. NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.formats import format_of

_LOWEST_BIT = 1


def round_into(weight: Tensor, master: Tensor, scratch: Tensor | None = None) -> Tensor | None:
    """Write a 16-bit weight from its master.

    Args:
        weight: fp16 or bf16, of any shape; written.
        master: fp32, of the same shape; read.
        scratch: fp32, of the same shape, that is overwritten; made here if there is none.

    Returns:
        How many values were beyond the largest finite one, 0-dim; None if the host knows that there were none.
    """
    if master.numel() == 0:
        return None
    if scratch is None:
        scratch = torch.empty_like(master)
    largest = format_of(weight.dtype).largest
    source, num_saturated = master, None
    if not (is_host(master.device) and _is_within(master, largest)):
        num_saturated = (master.abs() > largest).sum()
        source = torch.clamp(master, -largest, largest, out=scratch)
    if weight.dtype == torch.bfloat16:
        torch.bitwise_or(source.view(torch.int32), _LOWEST_BIT, out=scratch.view(torch.int32))
        source = scratch
    torch._foreach_copy_([weight], [source])  # as copy_, which autograd does not take on tensors without values
    return num_saturated


def _is_within(master: Tensor, largest: float) -> bool:
    lowest, highest = torch.aminmax(master)
    return bool(-largest <= lowest.item() and highest.item() <= largest)  # False for NaN


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit weight of a master, as a new tensor: the bits that :func:`round_into` writes.

    Example:
        >>> tie = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8])
        >>> rounded(tie, torch.bfloat16).tolist(), tie.bfloat16().tolist()
        ([1.0078125, 1.015625], [1.0, 1.015625])
    """
    weight = torch.empty_like(master, dtype=dtype)
    round_into(weight, master)
    return weight


def adopt(master: Tensor, weight: Tensor) -> Tensor | None:
    """Where the weight is not its master's rounding, somebody wrote it: the master becomes the weight.

    Returns:
        How many values were taken over, 0-dim; None if the host knows that there were none.
    """
    wanted = rounded(master, weight.dtype).view(torch.int16)
    found = weight.view(torch.int16)  # bit for bit: -0.0 is not 0.0, and a NaN is equal to itself
    if is_host(master.device) and torch.equal(wanted, found):
        return None
    differs = wanted != found
    torch._foreach_copy_([master], [torch.where(differs, weight.float(), master)])
    return differs.sum()
