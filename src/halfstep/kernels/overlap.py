"""Whether parameters share memory, so that writing one of them writes another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor


def overlap(parameters: Iterable[Tensor]) -> bool:
    """Whether any byte belongs to two of them; views of one flat buffer, side by side, do not overlap.

    Views that interleave count as overlapping. Sparse, wrapped and empty ones are passed over.
    """
    spans: dict[object, list[tuple[int, int]]] = {}
    for p in parameters:
        if p.layout != torch.strided or type(p.data) is not Tensor or p.numel() == 0:
            continue
        first = int(p.storage_offset()) * p.element_size()
        last = int(sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)))
        spans.setdefault(p.untyped_storage()._cdata, []).append((first, first + (last + 1) * p.element_size()))
    return any(end > start for in_one in spans.values() for (_, end), (start, _) in itertools.pairwise(sorted(in_one)))
