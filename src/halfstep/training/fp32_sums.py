"""Windows of several micro-batches sum 16-bit gradients in fp32, as each gradient comes into being.

A hook on each 16-bit parameter moves its gradient into the sum right after autograd has accumulated it, so that never
more than the largest 16-bit gradient waits. DistributedDataParallel reduces gradients after such hooks have run: there
they are moved when backward has returned, and all of them wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.formats import HALF_DTYPES
from halfstep.kernels.choose import TORCH, Executor, choose
from halfstep.kernels.gradients import add_to_fp32_sums
from halfstep.training import refusals


class Fp32Sums:
    """Sums the gradients of 16-bit parameters while it is on. Keeps no parameter alive, and is kept alive by none."""

    def __init__(self, model: nn.Module) -> None:
        self._is_on = False
        is_replicated = isinstance(model, nn.parallel.DistributedDataParallel)
        self._replicated = weakref.ref(model) if is_replicated else None
        self._executors: dict[torch.device, Executor] = {}
        self._handles: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()

    def watch(self, parameters: Iterable[Tensor], *, is_on: bool) -> None:
        """A window opens: see that each 16-bit parameter has its hook, if the window may hold several micro-batches."""
        self._is_on = is_on
        if not is_on:
            return
        halves = [p for p in parameters if p.dtype in HALF_DTYPES and p.requires_grad]
        for device in {p.device for p in halves} - self._executors.keys():
            self._executors[device] = choose(device, sum(p.numel() for p in halves if p.device == device))
        if self._replicated is not None:
            return
        for parameter in halves:
            if parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _Hook(weakref.ref(self))
                )

    def stop(self) -> None:
        """The window is over: gradients stay where autograd puts them."""
        self._is_on = False

    def check_reduction(self, parameters: Iterable[Tensor]) -> None:
        """Refuse a micro-batch whose 16-bit gradients stay on their rank: moved into the sum, nobody reduces them."""
        model = self._replicated() if self._replicated is not None else None
        if not self._is_on or model is None or model.require_backward_grad_sync:
            return
        if any(p.dtype in HALF_DTYPES and p.requires_grad for p in parameters):
            raise refusals.no_sync_with_16_bit()

    def add(self, parameter: Tensor) -> None:
        """A gradient has come into being."""
        if self._is_on:
            add_to_fp32_sums((parameter,), self._executors.get(parameter.device, TORCH))

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Backward has returned: what no hook has moved is moved now."""
        if not self._is_on:
            return
        left: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.dtype in HALF_DTYPES and parameter.grad is not None:
                left.setdefault(parameter.device, []).append(parameter)
        for device, of_device in left.items():
            add_to_fp32_sums(of_device, self._executors.get(device, TORCH))


class _Hook:
    def __init__(self, sums: weakref.ref[Fp32Sums]) -> None:
        self._sums = sums

    def __call__(self, parameter: Tensor) -> None:
        sums = self._sums()
        if sums is not None:
            sums.add(parameter)
