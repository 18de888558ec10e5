"""The executor that runs everywhere: torch's multi-tensor calls, and the arithmetic as one can read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep._compat import moved
from halfstep.kernels import rounding


def widen(destinations: Sequence[Tensor], sources: Sequence[Tensor], divisor: Tensor | None) -> None:
    """Copy 16-bit tensors into fp32 ones, and divide there: one rounding.

    Args:
        destinations: fp32, all on one device; overwritten.
        sources: fp16, bf16 or fp32, of the same shapes.
        divisor: 0-dim, fp32, on any device; None: copy.
    """
    if not destinations:
        return
    torch._foreach_copy_(list(destinations), list(sources))
    if divisor is not None:
        torch._foreach_div_(list(destinations), moved(divisor, destinations[0].device))


def round_into(weights: Sequence[Tensor], masters: Sequence[Tensor], scratch: Sequence[Tensor | None]) -> list[Tensor]:
    """Write 16-bit weights from their masters: :func:`halfstep.kernels.rounding.round_into` for each.

    Args:
        weights: fp16 or bf16; written.
        masters: fp32, of the same shapes; read.
        scratch: fp32, of the same shapes, that may be overwritten; None where there is none.

    Returns:
        Numbers, 0-dim, that add up to how many values were saturated: none if the host knows that none was.
    """
    triples = zip(weights, masters, scratch, strict=True)
    counts = [rounding.round_into(weight, master, spare) for weight, master, spare in triples]
    return [count for count in counts if count is not None]
