"""What `halfstep bench --steps` is to measure, checked before anything is allocated.

Purpose: names become rules, storages, executors, shapes and a device here, once. Not here: measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.bench.checks import MEMORY_SHARE, checked_device, checked_seconds, checked_threads
from halfstep.bench.steps_bytes import PROBE_BYTES, predicted_bytes
from halfstep.bench.steps_recipes import RULES, BenchRule, HalfstepRecipe
from halfstep.bench.steps_storages import DEFAULTS, Storage
from halfstep.bench.steps_tensors import DEFAULT_TENSORS, Shape, read_tensors
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.formats import BF16, FP16, dtype_of, format_of
from halfstep.hardware import Hardware
from halfstep.kernels.choose import NAMES
from halfstep.kernels.choose import choose as choose_executor

DEFAULT_SECONDS = 60.0
EXECUTORS = tuple(name for name in NAMES if name != "auto")
_HALVES = (BF16, FP16)
_MEMORY_SHARES = {"cpu": MEMORY_SHARE}
_MEMORY_SHARE_OF_A_GPU = 0.8  # nothing else runs there


@dataclass(frozen=True)
class StepSettings:
    """What to measure; made by `choose`, which checks every value.

    Args:
        rules: each compared with its own torch recipe.
        storages: of weights and moments.
        executors: the fastest first.
        missing: of executors that nobody asked for and that cannot run: name and reason.
        half_dtype: of 16-bit weights.
        shapes: of the tensors.
        device: where.
        hardware: the facts about it.
        num_threads: of the CPU.
        seconds: time that all of it may take, without what is compiled.
    """

    rules: tuple[BenchRule, ...]
    storages: tuple[Storage, ...]
    executors: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    half_dtype: torch.dtype
    shapes: tuple[Shape, ...]
    device: torch.device
    hardware: Hardware
    num_threads: int
    seconds: float

    @property
    def num_params(self) -> int:
        """Of all tensors together."""
        return sum(rows * columns for rows, columns in self.shapes)

    def recipes(self, rule: BenchRule) -> tuple[HalfstepRecipe, ...]:
        """What is compared with torch's recipe of a rule."""
        return tuple(
            HalfstepRecipe(rule, storage, executor, self.half_dtype)
            for storage in self.storages
            for executor in self.executors
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "params": self.num_params,
            "tensors": len(self.shapes),
            "half_dtype": str(format_of(self.half_dtype)),
            "device": str(self.device),
            "seconds": self.seconds,
            "missing_executors": dict(self.missing),
        }


def choose(
    rules: Sequence[str] = (),
    storages: Sequence[str] = (),
    *,
    executors: Sequence[str] = (),
    tensors: str | None = None,
    num_params: float | None = None,
    half_dtype: str = "bf16",
    device: str | None = None,
    num_threads: int | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> StepSettings:
    """Check what was asked for.

    Args:
        rules: among adamw, adam, sgd and lion; empty means all.
        storages: as in ``split8+int8``; empty means the rows of the table of bytes per parameter.
        executors: among torch, numba and triton; empty means all that run there.
        tensors: ``"150"``, or number and size as in ``"2048x16K"``; None means 150.
        num_params: of all tensors together, where their size is not given; None means 10 million.
        half_dtype: bf16 or fp16.
        device: ``"cpu"``, ``"cuda:1"``, ...; None is the current accelerator, or the CPU if there is none.
        num_threads: of the CPU; None is what torch uses now.
        seconds: time that all of it may take; what has to be compiled first comes on top.

    Returns:
        Settings for `measure`.

    Raises:
        ArgumentError: a value cannot work, or what is compared does not fit into memory.
        UnsupportedError: the device is not there, or an executor cannot run on it.

    Example:
        >>> settings = choose(["sgd"], ["split+bf16"], executors=["torch"], device="cpu", tensors="1x512")
        >>> settings.num_params, [str(recipe.storage) for recipe in settings.recipes(settings.rules[0])]
        (512, ['split+bf16'])
    """
    place, hardware = checked_device(device)
    shapes = read_tensors(DEFAULT_TENSORS if tensors is None else tensors, num_params)
    found, missing = _executors(executors, place)
    settings = StepSettings(
        rules=tuple(dict.fromkeys(map(_rule, rules or RULES))),
        storages=tuple(dict.fromkeys(map(Storage.parse, storages or DEFAULTS))),
        executors=found,
        missing=missing,
        half_dtype=_half_dtype(half_dtype),
        shapes=shapes,
        device=place,
        hardware=hardware,
        num_threads=checked_threads(num_threads, place),
        seconds=checked_seconds(seconds, DEFAULT_SECONDS),
    )
    _check_memory(settings)
    return settings


def _rule(name: str) -> BenchRule:
    if name.lower() not in RULES:
        raise ArgumentError(
            asked=f"the rule {name!r}",
            true=f"bench steps {', '.join(RULES)}",
            why="these are the rules of halfstep.optim",
            fix="choose one of these, or leave --rule out to measure all",
        )
    return RULES[name.lower()]


def _executors(names: Sequence[str], device: torch.device) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those that run on a device, compiled ones first; and of those that were not asked for and do not, why."""
    if "auto" in names:
        raise ArgumentError(
            asked="the executor 'auto'",
            true=f"the executors are {', '.join(EXECUTORS)}",
            why="a number stands for one of them",
            fix="leave --executor out: all that run here are measured",
        )
    if names:
        return tuple(choose_executor(device, 0, name).name for name in dict.fromkeys(names)), ()
    reasons = {name: _reason_against(name, device) for name in reversed(EXECUTORS)}
    missing = tuple((name, reason) for name, reason in reasons.items() if reason)
    return tuple(name for name, reason in reasons.items() if not reason), missing


def _reason_against(name: str, device: torch.device) -> str:
    try:
        choose_executor(device, 0, name)
    except UnsupportedError as error:
        return error.true
    return ""


def _half_dtype(name: str) -> torch.dtype:
    try:
        fmt = format_of(name)
    except ArgumentError:
        fmt = None
    if fmt not in _HALVES or fmt is None:
        raise ArgumentError(
            asked=f"the dtype {name!r}",
            true="16-bit weights are bf16 or fp16",
            why="fp32 weights are a storage of their own: --storage fp32",
            fix="pass --dtype bf16 or --dtype fp16",
        )
    return dtype_of(fmt)


def _check_memory(settings: StepSettings) -> None:
    """All recipes of a rule are timed in turn, so their tensors are there at the same time."""
    memory = settings.hardware.memory_bytes
    needed = max(_bytes_together(settings, rule) for rule in settings.rules)
    share = _MEMORY_SHARES.get(settings.device.type, _MEMORY_SHARE_OF_A_GPU)
    if memory is not None and needed > memory * share:
        raise ArgumentError(
            asked=f"{settings.num_params / 1e6:.3g} M parameters in {len(settings.storages)} storages on "
            f"{len(settings.executors)} executors",
            true=f"they take {needed / 2**30:.3g} GiB together; the device has {memory / 2**30:.3g} GiB, of which "
            f"bench takes at most {share:.0%}",
            why="what is compared is timed in turn, in one process",
            fix="pass fewer --storage or --executor, or --params up to "
            f"{settings.num_params * memory * share / needed:.2g}",
        )


def _bytes_together(settings: StepSettings, rule: BenchRule) -> int:
    """Of a rule's recipes, torch's and the probe included."""
    ours = sum(predicted_bytes(rule, one.kept, settings.shapes, one.half_dtype) for one in settings.recipes(rule))
    torchs = predicted_bytes(RULES[rule.torch_name.lower()], Storage("fp32"), settings.shapes, settings.half_dtype)
    return ours + torchs + PROBE_BYTES // 2 * settings.num_params
