"""Loops with one mistake each, as they are found in public code, around torch's own GradScaler.

Purpose: show what a wrong order costs, and a wrong sum. Method: everything else is done right: clipping after
unscaling, the learning rate moves with applied steps only. None of these loops raises an error, and none can be written
with the Stepper. Torch warns of one of them, once, and only if the very first step of all is skipped
("lr_scheduler.step() before optimizer.step()"); these loops keep that quiet.

Source: the documentation of torch.amp.GradScaler for the right order; reports of the wrong ones are many, for clipping
apex#1512, for the scheduler pytorch#55585 and Lightning#18828, for update between two optimizers what Accelerate's and
Lightning's wrapped optimizers do.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

INIT_SCALE = 2.0**16  # torch's default
GROWTH_INTERVAL = 200  # clean steps; the runs of the study are short


class Mistake(enum.Enum):
    """What a loop does wrong."""

    CLIP_SCALED = "clip-before-unscale"  # clips gradients that are still multiplied by the scale
    UPDATE_BETWEEN = "update-between"  # two optimizers; the scale moves before the second one has stepped
    SCHEDULE_SKIPPED = "schedule-on-skip"  # the learning rate moves with skipped steps too
    HALF_SUMS = "sums-in-16-bits"  # autograd adds the micro-batches' 16-bit gradients to each other as they are


class MistakenLoop:
    """Forward, backward and step, with a mistake.

    Args:
        mistake: what is done wrong.
        parameters: of the model, in order; ``UPDATE_BETWEEN`` splits them between two optimizers, and ``HALF_SUMS``
            needs 16-bit ones.
        build_optimizer: makes an optimizer.
        build_scheduler: makes its schedule, or None.
        clip_norm: largest norm of the gradient, or None.
        autocast: makes the context of a forward pass.
        num_micro_batches: of a window; each brings its share of the mean.
    """

    def __init__(
        self,
        mistake: Mistake,
        parameters: Iterable[nn.Parameter],
        *,
        build_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        build_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        clip_norm: float | None,
        autocast: Callable[[], AbstractContextManager[object]],
        num_micro_batches: int = 1,
    ) -> None:
        self.parameters = list(parameters)
        self.mistake, self.clip_norm, self.autocast = mistake, clip_norm, autocast
        self.num_micro_batches, self._num_done = num_micro_batches, 0
        half = len(self.parameters) // 2
        parts = [self.parameters]
        if mistake is Mistake.UPDATE_BETWEEN:
            parts = [self.parameters[:half], self.parameters[half:]]
        self.optimizers = [build_optimizer(part) for part in parts]
        self.schedulers = [build_scheduler(optimizer) for optimizer in self.optimizers if build_scheduler is not None]
        self.scaler = torch.amp.GradScaler(
            self.parameters[0].device.type,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
            enabled=mistake is not Mistake.HALF_SUMS,  # bf16 needs no scale
        )

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Forward and backward of one micro-batch; leaves scaled gradients, added to those of its window so far."""
        if self._num_done == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = loss_of() / self.num_micro_batches
        torch.autograd.backward(self.scaler.scale(loss))
        self._num_done += 1

    def step(self) -> bool:
        """Clip, step, update, in the mistaken order; returns whether every optimizer took its step."""
        self._num_done = 0
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        applied = [self._step_and_update(optimizer) for optimizer in self.optimizers]
        for scheduler, is_applied in zip(self.schedulers, applied, strict=bool(self.schedulers)):
            if is_applied:
                scheduler.step()
            elif self.mistake is Mistake.SCHEDULE_SKIPPED:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    scheduler.step()
        return all(applied)

    def scale(self) -> float:
        """The scale of the next loss."""
        return float(self.scaler.get_scale())

    def _step_and_update(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before  # torch tells of a skipped step in no other public way

    def _clip(self, max_norm: float) -> None:
        if self.mistake is Mistake.UPDATE_BETWEEN:
            # Unscaling for the clip would be forgotten by the first update and done twice; a limit times the scale on
            # scaled gradients is the same clip. An inf in one optimizer's part is no reason to erase the other's.
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            if bool(norm.isfinite()):
                nn.utils.clip_grads_with_norm_(self.parameters, max_norm * self.scale(), norm)
            return
        if self.mistake is not Mistake.CLIP_SCALED:
            self.scaler.unscale_(self.optimizers[0])
        nn.utils.clip_grad_norm_(self.parameters, max_norm)
