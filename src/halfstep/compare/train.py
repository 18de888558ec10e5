"""One run: one task, one regime, one seed.

Purpose: train with open eyes. Method: the model's first weights and the order of the batches depend on the seed alone,
so that runs of two regimes form a pair. Nothing is recorded within a step but its scale and whether it was applied;
gradients are looked at in the first and the last step, the test error about forty times.

Not here: the step itself (trainer.py), time per step (timing.py), verdicts (verdict.py).
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.compare.measure import (
    Footprint,
    GradientStats,
    SavedBytes,
    footprint,
    gradient_stats,
    saved_bytes,
)
from halfstep.compare.regimes import Regime
from halfstep.compare.task import Task
from halfstep.compare.trainer import CurvePoint, Trainer, num_steps
from halfstep.errors import HalfstepWarning

NUM_CURVE_POINTS = 40  # at most; enough for a smooth curve, and an evaluation costs about as much as a step


@dataclass(frozen=True)
class Run:
    """What one run did; plain values, so that it travels between processes and into JSON.

    Args:
        task: its name.
        regime: its name.
        seed: of first weights and batch order.
        curve: test errors from before the first step to after the last.
        scales: the scale that each step was taken with.
        skipped: numbers of the steps that were skipped, from 0.
        start: gradients of the first step, all layers, before unscaling.
        start_first_layer: the same of the first parameter tensor.
        end: gradients of the last step, all layers.
        footprint: bytes held.
        moved_share: share of the weight elements that differ from their first value, bit for bit.
        is_finite: whether every weight is finite at the end.
        final_scale: scale after the last update.
        is_emulated: whether forward and backward ran in emulated arithmetic.
        duration_s: wall time of the run, measuring included; busy cores show in it.
    """

    task: str
    regime: str
    seed: int
    curve: tuple[CurvePoint, ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]
    start: GradientStats
    start_first_layer: GradientStats
    end: GradientStats
    footprint: Footprint
    moved_share: float
    is_finite: bool
    final_scale: float
    is_emulated: bool
    duration_s: float

    @property
    def final_loss(self) -> float:
        """Test loss after the last step."""
        return self.curve[-1].loss

    @property
    def metric(self) -> float:
        """The task's test error after the last step; lower is better."""
        return self.curve[-1].metric


@dataclass
class _Notes:
    """What a run writes down on its way."""

    curve: list[CurvePoint] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    stats: list[GradientStats] = field(default_factory=list)  # first step, its first layer, last step
    gradient_bytes: int = 0
    saved: SavedBytes = field(default_factory=SavedBytes)


def train(task: Task, regime: Regime, seed: int, *, num_epochs: int, device: torch.device | str = "cpu") -> Run:
    """Train once and report.

    Args:
        task: what is learned.
        regime: in which precision.
        seed: of first weights and batch order.
        num_epochs: passes over the training data; at least 1.
        device: where to train.

    Returns:
        The run. Skipped steps are counted there and not warned about.

    Example:
        >>> from halfstep.compare.regimes import REGIMES
        >>> from halfstep.compare.tasks import TASKS
        >>> run = train(TASKS["linear-small-units"], REGIMES["fp16-unscaled"], seed=0, num_epochs=1)
        >>> run.start.zero_share, run.moved_share
        (1.0, 0.0)
    """
    started = time.perf_counter()
    notes = _Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        trainer = Trainer(task, regime, seed, torch.device(device), num_steps(task, num_epochs))
        if task.metric is None:
            trainer.watch_sums()
        first_weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        _loop(trainer, notes, num_epochs)
    weights = [parameter.detach() for parameter in trainer.model.parameters()]
    return Run(
        task=task.name,
        regime=regime.name,
        seed=seed,
        curve=tuple(notes.curve),
        scales=tuple(notes.scales),
        skipped=tuple(notes.skipped),
        start=notes.stats[0],
        start_first_layer=notes.stats[1],
        end=notes.stats[2],
        footprint=footprint(trainer.model, trainer.optimizers, notes.gradient_bytes, notes.saved),
        moved_share=_moved_share(first_weights, weights),
        is_finite=all(bool(weight.isfinite().all()) for weight in weights),
        final_scale=trainer.scale(),
        is_emulated=trainer.precision.is_emulated,
        duration_s=time.perf_counter() - started,
    )


def _loop(trainer: Trainer, notes: _Notes, num_epochs: int) -> None:
    batches = list(trainer.batches(num_epochs))
    every = math.ceil(len(batches) / NUM_CURVE_POINTS)
    for step, batch in enumerate(batches):
        if step % every == 0:
            notes.curve.append(trainer.evaluate(step))
        notes.scales.append(trainer.scale())
        if step == 0:
            _first_backward(trainer, batch, notes)
        else:
            trainer.backward(batch)
        if step == len(batches) - 1:
            notes.stats.append(gradient_stats(trainer.gradients()))
            notes.gradient_bytes = trainer.gradient_bytes()
        if not trainer.step():
            notes.skipped.append(step)
    notes.curve.append(trainer.evaluate(len(batches)))


def _first_backward(trainer: Trainer, batch: Tensor, notes: _Notes) -> None:
    trainer.backward(batch, around_first=saved_bytes(trainer.model, notes.saved))
    gradients = trainer.gradients()
    notes.stats += [gradient_stats(gradients), gradient_stats(gradients[:1])]


def _moved_share(before: list[Tensor], after: list[Tensor]) -> float:
    num_moved = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    return num_moved / sum(tensor.numel() for tensor in after)
