"""Windows of several micro-batches sum 16-bit gradients in fp32, as each gradient comes into being.

A hook on each 16-bit parameter moves its gradient into the sum right after autograd has accumulated it, so that never
more than the largest 16-bit gradient waits. DistributedDataParallel reduces gradients after such hooks have run: there
they are moved when backward has returned, and all of them wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.formats import HALF_DTYPES
from halfstep.kernels.gradients import add_to_fp32_sum


class Fp32Sums:
    """Sums the gradients of 16-bit parameters while it is on. Keeps no parameter alive, and is kept alive by none."""

    def __init__(self, model: nn.Module) -> None:
        self._is_on = False
        self._waits_for_reduction = isinstance(model, nn.parallel.DistributedDataParallel)
        self._handles: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()

    def watch(self, parameters: Iterable[Tensor], *, is_on: bool) -> None:
        """A window opens: see that each 16-bit parameter has its hook, if the window may hold several micro-batches."""
        self._is_on = is_on
        if not is_on or self._waits_for_reduction:
            return
        for parameter in parameters:
            if parameter.dtype in HALF_DTYPES and parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _Hook(weakref.ref(self))
                )

    def add(self, parameter: Tensor) -> None:
        """A gradient has come into being."""
        if self._is_on:
            add_to_fp32_sum(parameter)

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Backward has returned: what no hook has moved is moved now."""
        if self._is_on:
            for parameter in parameters:
                if parameter.dtype in HALF_DTYPES:
                    add_to_fp32_sum(parameter)


class _Hook:
    def __init__(self, sums: weakref.ref[Fp32Sums]) -> None:
        self._sums = sums

    def __call__(self, parameter: Tensor) -> None:
        sums = self._sums()
        if sums is not None:
            sums.add(parameter)
