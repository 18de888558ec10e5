"""Time per step of each regime relative to fp32, on an otherwise idle process.

Purpose: what half precision buys in speed here. Method: the regimes take turns, a few steps each, again and again in
one process, and medians are compared; whatever else the machine does then hits all alike. Emulated regimes are left
out: the time of an emulation says nothing about the hardware that it stands for. Not here: warm-up effects such as
compilation; the first turn is thrown away.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from itertools import islice

import torch

from halfstep.compare.regimes import Regime
from halfstep.compare.task import Task
from halfstep.compare.trainer import Precision, Trainer, num_steps, one_thread
from halfstep.errors import HalfstepWarning

NUM_TURNS = 9
STEPS_PER_TURN = 5


def time_steps(task: Task, regimes: Sequence[Regime], *, device: torch.device) -> dict[str, float]:
    """Median seconds per step of every regime that runs natively on the device.

    Args:
        task: whose step is timed.
        regimes: those to time; emulated ones are skipped.
        device: where.

    Returns:
        Regime's name -> seconds per step. Empty if fewer than two can be compared.
    """
    native = [regime for regime in regimes if not Precision(regime, device).is_emulated]
    if len(native) < 2:
        return {}
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore", HalfstepWarning)
        steps = num_steps(task, task.epochs)
        trainers = {regime.name: Trainer(task, regime, 0, device, steps) for regime in native}
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(NUM_TURNS):
            for name, trainer in trainers.items():
                seconds[name].append(_turn(trainer))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _turn(trainer: Trainer) -> float:
    batches = list(islice(trainer.batches(STEPS_PER_TURN), STEPS_PER_TURN))
    _wait(trainer.device)
    started = time.perf_counter()
    for batch in batches:
        trainer.backward(batch)
        trainer.step()
    _wait(trainer.device)
    return (time.perf_counter() - started) / len(batches)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
