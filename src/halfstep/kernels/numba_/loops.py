"""How a compiled loop runs over the elements of many tensors, on as many threads as torch uses.

A loop gets a table of addresses, one row for each tensor and one column for each role (weight, gradient, ...), and a
range of elements, counted through all tensors in order. Every thread gets one range of equal length, so that one large
tensor is shared and ten thousand small ones cost one call. The loops let go of Python's lock; threads are Python's own,
since numba's pool cannot be entered from two threads at once, and two OpenMP pools would fight for the cores.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

FEWEST = 2**16  # elements worth a second thread


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are what its memory holds, in order of its strides, and somebody may write them."""
    kind = type(tensor)
    if not (kind is Tensor or kind is Parameter) or tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    return not (tensor.is_neg() or tensor.is_inference())


def has_plain_memory(tensor: Tensor) -> bool:
    """The same, and whether that memory is there: nobody has freed the storage, or cut it."""
    if not is_plain(tensor):
        return False
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


class Table:
    """Where the elements of some tensors are.

    Args:
        columns: for each role, its tensor of each parameter: all dense, and equal in shape and strides within a row.
            (An executor that keeps a table fills in the column of gradients, which lie elsewhere in every step.)
    """

    def __init__(self, *columns: Sequence[Tensor]) -> None:
        self.addresses = np.array([[t.data_ptr() for t in column] for column in columns], dtype=np.int64).T.copy()
        self.sizes = np.array([t.numel() for t in columns[0]], dtype=np.int64)
        self._tensors = columns  # alive as long as their addresses

    def run(self, loop: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``loop(addresses, sizes, start, stop, *arguments)`` once a thread; what each call returned."""
        return share_out(loop, (self.addresses, self.sizes), int(self.sizes.sum()), *arguments)


def share_out(loop: Callable[..., Any], where: tuple[Any, ...], total: int, *arguments: Any) -> list[Any]:
    """Call ``loop(*where, start, stop, *arguments)`` once a thread, for equal parts of ``total`` elements."""
    num_threads = max(1, min(torch.get_num_threads(), total // FEWEST))
    if num_threads == 1:
        return [loop(*where, 0, total, *arguments)]
    cuts = [total * number // num_threads for number in range(num_threads + 1)]
    first, *rest = itertools.pairwise(cuts)
    try:
        others = [_threads_of(os.getpid()).submit(loop, *where, *part, *arguments) for part in rest]
    except RuntimeError:  # the interpreter is shutting down: no thread begins any more
        return [loop(*where, 0, total, *arguments)]
    try:
        return [loop(*where, *first, *arguments), *(other.result() for other in others)]
    finally:
        _wait(others)


def _wait(others: Sequence[Future[Any]]) -> None:
    """Even where interrupts strike: the memory behind the addresses must outlive the loops."""
    interrupt: BaseException | None = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except BaseException as error:  # noqa: PERF203 - hardly ever
            interrupt = error
    if interrupt is not None:
        raise interrupt


@functools.cache
def _threads_of(process_id: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1)), thread_name_prefix=f"halfstep-{process_id}")
