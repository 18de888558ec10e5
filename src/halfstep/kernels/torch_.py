"""The executor that runs everywhere: torch's multi-tensor calls, and the arithmetic as one can read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep._compat import is_host, moved
from halfstep.kernels import rounding

PIECE = 2**20  # elements, 4 MiB of fp32: see benchmarks/bench_accumulation.py


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


def add(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add 16-bit gradients to fp32 sums.

    On the CPU torch widens the whole gradient first. Beyond 32 MiB that memory is the system's, new each time, and its
    page faults cost four times what the addition does: large gradients are added in pieces.

    Args:
        sums: fp32; written.
        gradients: fp16, bf16 or fp32, of the same shapes.
    """
    for wide, narrow in zip(sums, gradients, strict=True):
        if _is_cut(wide) and _is_cut(narrow):
            wide, narrow = wide.view(-1), narrow.view(-1)
            for start in range(0, wide.numel(), PIECE):
                wide[start : start + PIECE].add_(narrow[start : start + PIECE])
        else:
            wide.add_(narrow)


def _is_cut(tensor: Tensor) -> bool:
    is_one_row = tensor.layout == torch.strided and tensor.is_contiguous()
    return is_one_row and is_host(tensor.device) and tensor.numel() > PIECE


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
