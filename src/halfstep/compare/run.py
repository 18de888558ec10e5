"""The study: tasks x regimes x seeds, in as many processes as there are cores.

Purpose: everything that table, report and JSON are made from, in one value. Method: every run is one job for a pool of spawned
processes with one thread each, longest first; time per step is measured afterwards, alone, in this process. fp32 is always
among the regimes, for it is what the others are compared with.

Not here: any output; a caller that wants a progress bar passes a callable.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

import halfstep
from halfstep.compare.regimes import REGIMES, Regime
from halfstep.compare.rows import Row, limits_of, make_row
from halfstep.compare.tasks import TASKS, Task, as_plain
from halfstep.compare.timing import time_steps
from halfstep.compare.train import Precision, Run, train
from halfstep.errors import ArgumentError
from halfstep.hardware import probe

SCHEMA = 1
REFERENCE = REGIMES["fp32"]

Progress = Callable[[int, int, str], None]
"""Called with (runs done, runs in all, name of the run that just ended)."""


@dataclass(frozen=True)
class Settings:
    """What to run; made by `choose`, which checks every value.

    Args:
        tasks: in the order of the report.
        regimes: the same; fp32 is among them.
        num_seeds: seeds 0 to this number minus 1.
        is_quick: whether each task is trained for its short form only.
        num_jobs: processes; 1 runs everything in this one.
        device: of all runs.
    """

    tasks: tuple[Task, ...]
    regimes: tuple[Regime, ...]
    num_seeds: int
    is_quick: bool
    num_jobs: int
    device: torch.device


@dataclass(frozen=True)
class Study:
    """What came out.

    Args:
        settings: what was run.
        machine: plain facts about hardware and versions.
        rows: one per task and regime, in the order of the settings.
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
        """The study as JSON holds it; schema 1."""
        settings = self.settings
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "settings": {
                "quick": settings.is_quick,
                "seeds": list(range(settings.num_seeds)),
                "tasks": {task.name: as_plain(task) for task in settings.tasks},
                "regimes": {regime.name: _regime_as_plain(regime) for regime in settings.regimes},
                "thresholds": {task.name: asdict(limits_of(task)) for task in settings.tasks},
            },
            "rows": [row.as_plain() for row in self.rows],
        }


def choose(
    tasks: Sequence[str] = (),
    regimes: Sequence[str] = (),
    *,
    num_seeds: int = 1,
    is_quick: bool = False,
    num_jobs: int | None = None,
    device: str = "auto",
) -> Settings:
    """Check what was asked for and turn names into tasks and regimes.

    Args:
        tasks: names; empty means all (in quick form, those that have one).
        regimes: names; empty means all (in quick form, those meant for it). fp32 is added where it is missing.
        num_seeds: 1 for a look, 3 for the full study.
        is_quick: a lecture demonstration: fewer tasks, regimes and epochs.
        num_jobs: processes; None means one per core on the CPU, and one on an accelerator.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``, which takes CUDA where there is some.

    Returns:
        Settings for `compare`.

    Raises:
        ArgumentError: a name is unknown or a number too small.

    Example:
        >>> settings = choose(["linear"], ["bf16"], num_jobs=1)
        >>> [regime.name for regime in settings.regimes]
        ['fp32', 'bf16']
    """
    place = _device(device)
    chosen_tasks = _pick(TASKS, tasks, "task") or [task for task in TASKS.values() if task.num_epochs(quick=is_quick)]
    chosen_regimes = _pick(REGIMES, regimes, "regime") or [r for r in REGIMES.values() if r.in_quick or not is_quick]
    if REFERENCE not in chosen_regimes:
        chosen_regimes.insert(0, REFERENCE)
    if num_jobs is None:
        num_jobs = (os.cpu_count() or 1) if place.type == "cpu" else 1
    return Settings(
        tasks=tuple(chosen_tasks),
        regimes=tuple(chosen_regimes),
        num_seeds=_at_least_one(num_seeds, "seeds"),
        is_quick=is_quick,
        num_jobs=_at_least_one(num_jobs, "jobs"),
        device=place,
    )


def compare(settings: Settings, progress: Progress = lambda done, total, name: None) -> Study:
    """Run the study.

    Args:
        settings: from `choose`.
        progress: called after every run.

    Returns:
        The study; nothing is printed and nothing written.

    Example:
        >>> study = compare(choose(["linear-small-units"], ["fp16-unscaled", "fp16-static-1024"], num_jobs=1))
        >>> [row.verdict.value for row in study.rows]
        ['matches fp32', 'stalls', 'matches fp32']
    """
    jobs = _jobs(settings)
    results = _in_this_process(jobs) if settings.num_jobs == 1 else _in_processes(jobs, settings.num_jobs)
    runs: dict[tuple[str, str, int], Run] = {}
    for run in results:
        runs[run.task, run.regime, run.seed] = run
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
        "cores": os.cpu_count(),
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

    def run(self) -> Run:
        return train(self.task, self.regime, self.seed, num_epochs=self.num_epochs, device=self.device)


def _jobs(settings: Settings) -> list[_Job]:
    return [
        # A task that was asked for by name but has no short form is trained in full.
        _Job(task, regime, seed, task.num_epochs(quick=settings.is_quick) or task.epochs, str(settings.device))
        for task in settings.tasks
        for seed in range(settings.num_seeds)
        for regime in settings.regimes
    ]


def _in_this_process(jobs: Sequence[_Job]) -> Iterator[Run]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker processes: matrices this small lose by being shared out
    try:
        for job in jobs:
            yield job.run()
    finally:
        torch.set_num_threads(num_threads)


def _in_processes(jobs: Sequence[_Job], num_jobs: int) -> Iterator[Run]:
    """Results in the order in which they come; longest jobs first, so that no core idles at the end."""
    spawn = multiprocessing.get_context("spawn")  # fork would copy torch's thread pool in an unusable state
    pool = ProcessPoolExecutor(min(num_jobs, len(jobs)), mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures = [pool.submit(job.run) for job in sorted(jobs, key=lambda job: -job.num_epochs)]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _rows_of(task: Task, settings: Settings, runs: dict[tuple[str, str, int], Run]) -> Iterator[Row]:
    seconds = time_steps(task, settings.regimes, device=settings.device)
    seeds = range(settings.num_seeds)
    references = [runs[task.name, REFERENCE.name, seed] for seed in seeds]
    for regime in settings.regimes:
        ratio = seconds[regime.name] / seconds[REFERENCE.name] if regime.name in seconds else None
        ratio = 1.0 if regime is REFERENCE else ratio
        yield make_row(task, [runs[task.name, regime.name, seed] for seed in seeds], references, step_time_ratio=ratio)


def _regime_as_plain(regime: Regime) -> dict[str, Any]:
    return {"format": regime.format.name, "scale": regime.build_scale().state_dict()}


# ---- checking what was asked ----------------------------------------------------------------------------------------

Named = TypeVar("Named")


def _pick(table: dict[str, Named], names: Sequence[str], kind: str) -> list[Named]:
    unknown = [name for name in names if name not in table]
    if unknown:
        raise ArgumentError(
            asked=f"the {kind} {', '.join(map(repr, unknown))}",
            true=f"the {kind}s are {', '.join(table)}",
            why=f"there is no {kind} of that name",
            fix=f"choose one of these, or leave --{kind} out to run all",
        )
    return [value for name, value in table.items() if name in names]


def _at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise ArgumentError(
            asked=f"{name}={value}",
            true=f"{name} is a count, 1 or more",
            why="nothing would run",
            fix=f"pass --{name} 1, or more",
        )
    return value


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ArgumentError(
            asked=f"device={name!r}",
            true=f"the study runs on cpu and cuda; CUDA is {'' if torch.cuda.is_available() else 'not '}available here",
            why="there is nothing to run on",
            fix="pass --device cpu, or leave --device out",
        )
    return torch.device(name)
