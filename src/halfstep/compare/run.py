"""The study: tasks x regimes x seeds, in as many processes as there are cores.

Purpose: everything that table, report and JSON are made from, in one value. Method: every run is one job for a pool of
spawned processes with one thread each, longest first; time per step is measured afterwards, alone, in this process.
fp32 is always among the regimes, for it is what the others are compared with.

Not here: any output; a caller that wants a progress bar passes a callable.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch

import halfstep
from halfstep.compare.regimes import Regime
from halfstep.compare.rows import Row, limits_of, make_row
from halfstep.compare.settings import REFERENCE, Settings, num_cores
from halfstep.compare.task import Task, as_plain
from halfstep.compare.timing import time_steps
from halfstep.compare.train import Run, train
from halfstep.compare.trainer import Precision, num_steps, one_thread
from halfstep.hardware import probe

SCHEMA = 1

Progress = Callable[[int, int, str], None]
"""Called with (runs done, runs in all, name of the run that just ended)."""


@dataclass(frozen=True)
class Study:
    """What came out.

    Args:
        settings: what was run.
        machine: plain facts about hardware and versions.
        rows: one per task and regime that it shows, in the order of the settings.
        runs: the single runs behind them.
    """

    settings: Settings
    machine: dict[str, Any]
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]

    def runs_of(self, task: str, seed: int = 0) -> dict[str, Run]:
        """Regime's name -> run, for one task and seed."""
        return {run.regime: run for run in self.runs if run.task == task and run.seed == seed}

    def rows_of(self, task: str) -> list[Row]:
        """The rows of one task."""
        return [row for row in self.rows if row.task == task]

    def as_plain(self) -> dict[str, Any]:
        """The study as JSON holds it; schema 1.

        Returns:
            ``schema``, ``machine``, ``rows`` (fields of `Row`; a task has rows for the regimes that it shows alone, so
            not every pair has one) and ``settings``: ``quick``; ``seeds``; ``tasks`` by name, with the ``regimes`` that
            each shows and the ``data`` that it read (empty where that is the same on every machine); ``regimes`` by
            name, with ``format``, ``scale``, ``policy`` and ``mistake`` (None, or what its loop does wrong);
            ``thresholds`` by task.
        """
        settings = self.settings
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "settings": {
                "quick": settings.is_quick,
                "seeds": list(range(settings.num_seeds)),
                "tasks": {task.name: _task_as_plain(task, settings) for task in settings.tasks},
                "regimes": {regime.name: _regime_as_plain(regime) for regime in settings.regimes},
                "thresholds": {task.name: asdict(limits_of(task)) for task in settings.tasks},
            },
            "rows": [row.as_plain() for row in self.rows],
        }


def compare(settings: Settings, progress: Progress | None = None) -> Study:
    """Run the study.

    Args:
        settings: from `choose`.
        progress: called after every run, if given.

    Returns:
        The study; nothing is printed and nothing written.

    Example:
        >>> from halfstep.compare.settings import choose
        >>> study = compare(choose(["linear-small-units"], ["fp16-unscaled", "fp16-static-1024"], num_jobs=1))
        >>> [row.verdict.value for row in study.rows]
        ['matches fp32', 'stalls', 'matches fp32']
    """
    jobs = _jobs(settings)
    results = _in_this_process(jobs) if settings.num_jobs == 1 else _in_processes(jobs, settings.num_jobs)
    runs: dict[tuple[str, str, int], Run] = {}
    for run in results:
        runs[run.task, run.regime, run.seed] = run
        if progress is not None:
            progress(len(runs), len(jobs), f"{run.task} / {run.regime}")
    rows = [row for task in settings.tasks for row in _rows_of(task, settings, runs)]
    ordered = [runs[job.task.name, job.regime.name, job.seed] for job in jobs]
    return Study(settings, machine_facts(settings), tuple(rows), tuple(ordered))


def machine_facts(settings: Settings) -> dict[str, Any]:
    """What a reader needs to know of the machine to believe a number."""
    emulated = [regime for regime in settings.regimes if Precision(regime, settings.device).is_emulated]
    hardware = probe(settings.device)
    return {
        "device": settings.device.type,
        "name": hardware.name,
        "cores": num_cores(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "halfstep": halfstep.__version__,
        "emulated_regimes": [regime.name for regime in emulated],
        "emulated_formats": list(dict.fromkeys(regime.format.name for regime in emulated)),
    }


# ---- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    task: Task
    regime: Regime
    seed: int
    num_epochs: int
    device: str

    def effort(self) -> tuple[int, bool]:
        """What sorts jobs from short to long: steps, then whether the arithmetic is emulated."""
        return num_steps(self.task, self.num_epochs), Precision(self.regime, torch.device(self.device)).is_emulated

    def run(self) -> Run:
        return train(self.task, self.regime, self.seed, num_epochs=self.num_epochs, device=self.device)


def _jobs(settings: Settings) -> list[_Job]:
    return [
        _Job(task, regime, seed, task.num_epochs(is_quick=settings.is_quick), str(settings.device))
        for task in settings.tasks
        for seed in range(settings.num_seeds)
        for regime in settings.regimes_of(task)
    ]


def _in_this_process(jobs: Sequence[_Job]) -> Iterator[Run]:
    with one_thread():
        for job in jobs:
            yield job.run()


def _in_processes(jobs: Sequence[_Job], num_jobs: int) -> Iterator[Run]:
    """Results in the order in which they come; longest jobs first, so that no core idles at the end."""
    spawn = multiprocessing.get_context("spawn")  # fork would copy torch's thread pool in an unusable state
    pool = ProcessPoolExecutor(
        min(num_jobs, len(jobs)), mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures = [pool.submit(job.run) for job in sorted(jobs, key=_Job.effort, reverse=True)]
        for future in as_completed(futures):
            yield future.result()
    finally:
        # Not waited for: the processes take seconds to unload torch, and the report can be drawn meanwhile.
        pool.shutdown(wait=False, cancel_futures=True)


def _rows_of(task: Task, settings: Settings, runs: dict[tuple[str, str, int], Run]) -> Iterator[Row]:
    regimes = settings.regimes_of(task)
    seconds = time_steps(task, regimes, device=settings.device)
    seeds = range(settings.num_seeds)
    references = [runs[task.name, REFERENCE.name, seed] for seed in seeds]
    for regime in regimes:
        ratio = seconds[regime.name] / seconds[REFERENCE.name] if regime.name in seconds else None
        ratio = 1.0 if regime == REFERENCE else ratio
        yield make_row(task, [runs[task.name, regime.name, seed] for seed in seeds], references, step_time_ratio=ratio)


def _task_as_plain(task: Task, settings: Settings) -> dict[str, Any]:
    shown = [regime.name for regime in settings.regimes_of(task)]
    return {**as_plain(task), "regimes": shown, "data": task.build_data().source}


def _regime_as_plain(regime: Regime) -> dict[str, Any]:
    mistake = None if regime.mistake is None else regime.mistake.value
    scale = regime.scale_settings()
    return {"format": regime.format.name, "policy": regime.policy, "scale": scale, "mistake": mistake}
