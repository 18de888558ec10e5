"""One optimizer step: halfstep's rules and storages beside torch's recipe, and flashoptim where it is installed.

    python benchmarks/bench_optimizers.py                              # 50 M parameters in 150 tensors, AdamW
    python benchmarks/bench_optimizers.py --tensors 2048x16K           # many small tensors; and 10000x1000
    python benchmarks/bench_optimizers.py --device cuda --params 1e9
    python benchmarks/bench_optimizers.py --first-use                  # and how long the first step of a process takes

This is ``halfstep bench`` with the executors that are made for the device, and with what a library has no place for:

* flashoptim (``pip install flashoptim``, CUDA only) at equal bytes, behind ``clip_grad_norm_``. It looks at no gradient
  before it steps, so it does less than the others;
* whether a step waits for the device: each runs under ``torch.cuda.set_sync_debug_mode("error")``;
* the first step of a process, which compiles or loads compiled code: with an empty cache, and again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from clock import synchronize
from rich.console import Console

from halfstep.bench import files, reports, steps_measure, steps_settings, steps_table
from halfstep.bench.steps_recipes import (
    CLIP_NORM,
    LEARNING_RATE,
    BenchRule,
    HalfstepRecipe,
    Ready,
    Recipe,
    TorchRecipe,
    new_weights,
    set_gradients,
)
from halfstep.bench.steps_storages import DEFAULTS, Storage
from halfstep.bench.steps_tensors import Shape

FLASH_NAMES = {"adamw": "FlashAdamW", "adam": "FlashAdam", "sgd": "FlashSGD", "lion": "FlashLion"}
FLASH_BITS = {"split8+int8": 24, "split+int8": 32}  # of the master: what has as many bytes as ours
FIRST_STORAGE = "split+bf16"


# ---- flashoptim -----------------------------------------------------------------------------------------------------


class FlashReady(Ready):
    """flashoptim keeps its moments in objects that hold tensors."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those inside of the objects too."""
        yield from super().tensors()
        for state in self.optimizer.state.values():
            for value in state.values():
                if not isinstance(value, torch.Tensor):
                    yield from (part for part in vars(value).values() if isinstance(part, torch.Tensor))


@dataclass(frozen=True)
class FlashRecipe:
    """flashoptim's optimizer of a rule on bf16 weights, behind ``clip_grad_norm_``."""

    rule: BenchRule
    kept: Storage
    executor: str = "flashoptim"

    @property
    def storage(self) -> str:
        """Of ours, with as many bytes."""
        return str(self.kept)

    def build(self, shapes: Sequence[Shape], device: torch.device) -> Ready:
        """Make weights, gradients and state."""
        import flashoptim

        weights = new_weights(shapes, device, torch.bfloat16)
        options = {"lr": LEARNING_RATE, **self.rule.options, "master_weight_bits": FLASH_BITS[self.storage]}
        optimizer = getattr(flashoptim, FLASH_NAMES[self.rule.name])(weights, **options)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            optimizer.step()

        return FlashReady(weights, optimizer, set_gradients(weights), step)


def flash_recipes(settings: steps_settings.StepSettings, rule: BenchRule) -> list[Recipe]:
    """At equal bytes; none where flashoptim cannot run."""
    if why_no_flash(settings.device.type):
        return []
    return [FlashRecipe(rule, storage) for storage in settings.storages if str(storage) in FLASH_BITS]


def why_no_flash(device_type: str) -> str:
    """Why flashoptim is not measured; empty if it is."""
    if device_type != "cuda":
        return f"it needs CUDA, and this is {device_type}"
    return "" if importlib.util.find_spec("flashoptim") else "it is not installed (pip install flashoptim)"


# ---- synchronisation ------------------------------------------------------------------------------------------------


def waits_for_device(recipe: Recipe, settings: steps_settings.StepSettings) -> str:
    """What torch says where a step waits for the device; empty if it does not."""
    ready = recipe.build(settings.shapes[:2], settings.device)
    for _ in range(2):  # compiles, and makes lazy state
        ready.prepare()
        ready.step()
    ready.prepare()
    synchronize(str(settings.device))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ready.step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def report_waits(settings: steps_settings.StepSettings) -> list[str]:
    """One line for each executor and what is compared with it."""
    if settings.device.type != "cuda":
        return [f"waiting for the device: not checked, torch can say so on CUDA only, and this is {settings.device}"]
    lines = []
    for rule in settings.rules:
        for recipe in (TorchRecipe(rule), *settings.recipes(rule), *flash_recipes(settings, rule)):
            found = waits_for_device(recipe, settings)
            said = f"waits for the device: {found}" if found else "does not wait for the device"
            lines.append(f"{rule.name}, {recipe.storage} ({recipe.executor}): {said}")
    return lines


# ---- the first step -------------------------------------------------------------------------------------------------


def first_step(settings: steps_settings.StepSettings) -> float:
    """Seconds from an imported torch to the end of the first step of this process."""
    recipe = HalfstepRecipe(settings.rules[0], Storage.parse(FIRST_STORAGE), settings.executors[0])
    shapes = settings.shapes[:2]
    start = time.perf_counter()
    ready = recipe.build(shapes, settings.device)
    ready.prepare()
    ready.step()
    synchronize(str(settings.device))
    return time.perf_counter() - start


def report_first_use(arguments: Sequence[str]) -> list[str]:
    """In new processes: with an empty cache of compiled code, then with the cache that the first one left."""
    command = [sys.executable, __file__, *arguments, "--only-first-step"]
    with tempfile.TemporaryDirectory() as folder:
        caches = dict.fromkeys(("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        seconds = [
            float(subprocess.run(command, env={**os.environ, **caches}, check=True, capture_output=True).stdout)
            for _ in range(3)
        ]
    later = ", ".join(f"{one:.2f}" for one in seconds[1:])
    return [f"first step ({FIRST_STORAGE}), nothing compiled yet: {seconds[0]:.2f} s; later processes: {later} s"]


# ---- the program ----------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the settings are made of."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--params", type=float, help="default: 50e6, where --tensors is a number")
    parser.add_argument("--tensors", default="150")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rule", action="append", help="default: adamw; may be repeated")
    parser.add_argument("--storage", action="append", help=f"default: {' '.join(DEFAULTS)}; may be repeated")
    parser.add_argument("--executor", action="append", help="default: the compiled one; may be repeated")
    parser.add_argument("--out", type=Path, help="folder for steps.json and steps.png")


def settings_from(options: argparse.Namespace) -> steps_settings.StepSettings:
    """Checked settings."""
    is_cpu = options.device == "cpu"
    return steps_settings.choose(
        options.rule or ["adamw"],
        options.storage or (),
        executors=options.executor or ["numba" if is_cpu else "triton"],
        tensors=options.tensors,
        num_params=options.params or (None if "x" in options.tensors else 50e6),
        device=options.device,
        num_threads=(options.threads or os.cpu_count()) if is_cpu else None,
        seconds=options.seconds,
    )


def report(settings: steps_settings.StepSettings, out: Path | None) -> None:
    """Measure and print."""
    if out is not None:
        files.check_folder(out, reports.STEPS)
    measurement = steps_measure.measure(settings, others=functools.partial(flash_recipes, settings))
    console = Console(width=100, highlight=False)
    console.print(*steps_table.tables(measurement), sep="\n")
    if reason := why_no_flash(settings.device.type):
        console.print(f"flashoptim: not measured, {reason}")
    for line in report_waits(settings):
        console.print(line)
    if out is not None:
        files.write(reports.of_steps(measurement, shlex.join(["python", *sys.argv])), out)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--first-use", action="store_true", help="also time the first step of new processes")
    parser.add_argument("--only-first-step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = settings_from(options)
    if options.only_first_step:
        print(first_step(settings))
        return
    report(settings, options.out)
    if options.first_use:
        print(*report_first_use([argument for argument in sys.argv[1:] if argument != "--first-use"]), sep="\n")


if __name__ == "__main__":
    main()
