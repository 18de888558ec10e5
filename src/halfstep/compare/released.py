"""The loop whose gradients are used and freed inside the backward pass, and what it held of them on the way.

Purpose: the row with the fewest bytes. Method: `halfstep.optim.release_gradients` steps each parameter when its
gradient is complete; the schedule moves with applied steps. Clipping is by the previous step's norm, for this step's is
not known yet. A hook that comes before the releasing one copies each gradient, for the statistics of a row, and notes
the most bytes of gradients that were there at once; the copies are the study's and not counted.

Not here: windows of several micro-batches, loss scaling, which a release does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from halfstep.compare.measure import storage_bytes
from halfstep.optim import release_gradients
from halfstep.optim.packed import PackedOptimizer


class ReleasedLoop:
    """Forward, and a backward pass that steps.

    Args:
        model: whose parameters are stepped.
        optimizer: of ``halfstep.optim``.
        scheduler: moves with applied steps; or None.
        clip_norm: largest norm of the gradient, as far as the step before tells; or None.
    """

    def __init__(self, model: nn.Module, optimizer: PackedOptimizer, scheduler: Any, clip_norm: float | None) -> None:
        self.scheduler = scheduler
        self.gradients: dict[Tensor, Tensor] = {}
        self.gradient_bytes = 0
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        self._release = release_gradients(model, optimizer, clip_norm=clip_norm)
        self._is_applied = False

    def _note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients[parameter] = parameter.grad.clone()
        alive = storage_bytes(p.grad for p in self._parameters if p.grad is not None)
        self.gradient_bytes = max(self.gradient_bytes, alive)

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Forward, backward and the step of every parameter; leaves no gradient."""
        self.gradients.clear()
        self._is_applied = self._release.backward(loss_of()).is_applied

    def step(self) -> bool:
        """Move the schedule; returns whether every parameter was stepped."""
        if self._is_applied and self.scheduler is not None:
            self.scheduler.step()
        return self._is_applied

    def scale(self) -> float:
        """The scale of the next loss: none."""
        return 1.0
