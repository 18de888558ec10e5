"""What a study is to run, checked before anything does.

Purpose: names become tasks and regimes here, once; the rest never sees a string that could be wrong. Method: `choose`
refuses every value that cannot work, in four parts. Not here: running (run.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from halfstep.compare.mistakes import Mistake
from halfstep.compare.regimes import REGIMES, Regime
from halfstep.compare.task import Task
from halfstep.compare.tasks import TASKS
from halfstep.errors import ArgumentError

REFERENCE = REGIMES["fp32"]
MAX_JOBS = 8  # by default; each process holds its own torch, 0.3 GB


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
        are_regimes_named: whether the user chose the regimes; else each task shows its own.
    """

    tasks: tuple[Task, ...]
    regimes: tuple[Regime, ...]
    num_seeds: int
    is_quick: bool
    num_jobs: int
    device: torch.device
    are_regimes_named: bool = False

    def regimes_of(self, task: Task) -> tuple[Regime, ...]:
        """The regimes that a task is trained in."""
        if self.are_regimes_named:
            return self.regimes
        return tuple(r for r in self.regimes if r == REFERENCE or _shows(task, r, is_quick=self.is_quick))


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
        tasks: names; empty means those of the full study, or of its quick form.
        regimes: names; empty means all (in quick form, those meant for it). fp32 is added where it is missing.
        num_seeds: 1 for a look, 3 for the full study.
        is_quick: a lecture demonstration: fewer tasks, regimes and epochs.
        num_jobs: processes; None means one per core, at most 8, on the CPU, and one on an accelerator.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``, which takes CUDA where there is some.

    Returns:
        Settings for `compare`.

    Raises:
        ArgumentError: a name is unknown, a number too small, or a regime's loop cannot run on a task.

    Example:
        >>> settings = choose(["linear"], ["bf16"], num_jobs=1)
        >>> [regime.name for regime in settings.regimes]
        ['fp32', 'bf16']
    """
    place = _device(device)
    chosen_tasks = _pick(TASKS, tasks, "task") or [task for task in TASKS.values() if task.is_shown(is_quick=is_quick)]
    chosen_regimes = _pick(REGIMES, regimes, "regime") or [
        regime for regime in REGIMES.values() if any(_shows(task, regime, is_quick=is_quick) for task in chosen_tasks)
    ]
    for task in chosen_tasks if regimes else ():
        _check_loops(task, chosen_regimes)
    if REFERENCE not in chosen_regimes:
        chosen_regimes.insert(0, REFERENCE)
    if num_jobs is None:
        num_jobs = min(num_cores(), MAX_JOBS) if place.type == "cpu" else 1
    return Settings(
        tasks=tuple(chosen_tasks),
        regimes=tuple(chosen_regimes),
        num_seeds=_at_least_one(num_seeds, "seeds"),
        is_quick=is_quick,
        num_jobs=_at_least_one(num_jobs, "jobs"),
        device=place,
        are_regimes_named=bool(regimes),
    )


def _shows(task: Task, regime: Regime, *, is_quick: bool) -> bool:
    """Whether a task shows a regime without being asked for it by name."""
    is_own = regime.name in task.regimes if task.regimes else regime.in_full or regime.name in task.more_regimes
    return is_own and (regime.in_quick or not is_quick)


def _check_loops(task: Task, regimes: Sequence[Regime]) -> None:
    """Refuse a mistake that a task leaves no room for: its loop would be a right one under a wrong name. And a release
    of gradients that are to be summed first.
    """
    for regime in regimes:
        if not (lack := _lack(task, regime)):
            continue
        able = [other.name for other in TASKS.values() if regime.name in other.regimes and not _lack(other, regime)]
        what = "the mistake cannot be made there, so the row would show a right loop under a wrong name"
        raise ArgumentError(
            asked=f"the regime {regime.name!r} on the task {task.name!r}",
            true=f"{task.name} {lack}",
            why="a gradient that is used and freed at once cannot be summed" if regime.is_released else what,
            fix=f"choose a task that shows it: --task {' or --task '.join(able)}",
        )


def _lack(task: Task, regime: Regime) -> str:
    """What stands in the way of a regime's loop on a task; empty if nothing."""
    mistake = regime.mistake
    if regime.is_released and task.num_micro_batches > 1:
        return f"has {task.num_micro_batches} micro-batches in each window"
    if mistake is Mistake.CLIP_SCALED and task.clip_norm is None:
        return "clips no gradients"
    if mistake is Mistake.SCHEDULE_SKIPPED and task.build_scheduler is None:
        return "keeps its learning rate"
    if mistake is Mistake.HALF_SUMS and task.num_micro_batches == 1:
        return "has one micro-batch in each window, so nothing is summed"
    if mistake is Mistake.UPDATE_BETWEEN:
        with torch.random.fork_rng(devices=[]):
            num_tensors = len(list(task.build_model().parameters()))
        return "" if num_tensors > 1 else "has one parameter, which two optimizers cannot share"
    return ""


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


def num_cores() -> int:
    """Cores that this process may use, where the system tells; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
