"""Time of a training step in emulated fp16, next to fp32 and to torch's own fp16 on the same CPU.

Three versions of each model take turns, step by step, in one process and one thread, so that whatever else the machine
does strikes all of them; medians are compared. Forward, backward and Adam are timed together.

    python benchmarks/bench_emulation.py [--steps 200] [--native-steps 5] [--format fp16]

Targets: at most 2.5 times fp32 on the autoencoder, where the tensors are small and Python's part in every operation
shows, and at most 1.3 times on a transformer layer of width 512.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.emulation import emulate
from halfstep.formats import dtype_of

AUTOENCODER_WIDTHS = (64, 256, 128, 64, 32, 8, 32, 64, 128, 256, 64)
AUTOENCODER_BATCH = 128
LAYER_WIDTH, LAYER_HEADS, LAYER_HIDDEN = 512, 8, 2048
LAYER_BATCH, LAYER_LENGTH = 8, 128
TARGETS = {"autoencoder": 2.5, "transformer layer": 1.3}

Step = Callable[[], None]


def autoencoder() -> tuple[nn.Module, torch.Tensor]:
    """The deep sigmoid autoencoder of the digits task, with images drawn at random."""
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(AUTOENCODER_WIDTHS):
        layers += [nn.Linear(num_in, num_out), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1]), torch.rand(AUTOENCODER_BATCH, AUTOENCODER_WIDTHS[0])


def transformer_layer() -> tuple[nn.Module, torch.Tensor]:
    """One encoder layer in training mode, so that it takes the path of separate products and flash attention."""
    layer = nn.TransformerEncoderLayer(LAYER_WIDTH, LAYER_HEADS, LAYER_HIDDEN, dropout=0.0, batch_first=True)
    return layer, torch.randn(LAYER_BATCH, LAYER_LENGTH, LAYER_WIDTH)


MODELS = {"autoencoder": autoencoder, "transformer layer": transformer_layer}


def training_step(name: str, dtype: torch.dtype | None, emulation: contextlib.AbstractContextManager[object]) -> Step:
    """A step of a model of its own: forward under autocast unless dtype is None, backward, Adam."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                y = model(x)
            loss = F.mse_loss(y.float(), x)
            (loss * 1024).backward()
        optimizer.step()

    return step


def interleaved_medians(steps: dict[str, Step], counts: dict[str, int]) -> dict[str, float]:
    """Median seconds per step; each version takes its turn until its count is used up, after one untimed step."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(max(counts.values())):
        for name, step in steps.items():
            if turn < counts[name]:
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def report(name: str, format: str, num_steps: int, num_native_steps: int) -> None:
    """Measure one model and print its row."""
    dtype = dtype_of(format)
    nothing = contextlib.nullcontext()
    steps = {"fp32": training_step(name, None, nothing), "emulated": training_step(name, dtype, emulate(format))}
    counts = {"fp32": num_steps, "emulated": num_steps}
    if num_native_steps:
        steps["native"], counts["native"] = training_step(name, dtype, nothing), num_native_steps
    median = interleaved_medians(steps, counts)
    ratio = median["emulated"] / median["fp32"]
    verdict = "met" if ratio <= TARGETS[name] else "MISSED"
    milliseconds = {version: f"{seconds * 1e3:9.2f} ms" for version, seconds in median.items()}
    print(f"{name:18} fp32 {milliseconds['fp32']}   emulated {format} {milliseconds['emulated']}", end="")
    print(f" = {ratio:.2f} x fp32 (target {TARGETS[name]}: {verdict})", end="")
    if "native" in median:
        times = median["native"] / median["emulated"]
        print(f"   native {format} {milliseconds['native']} = {times:.1f} x emulated", end="")
    print(flush=True)


def main() -> None:
    """Parse the arguments and print the machine and a row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of the autoencoder; a tenth for the layer")
    parser.add_argument("--native-steps", type=int, default=5, help="of torch's own 16-bit products; 0 leaves them out")
    parser.add_argument("--format", choices=("fp16", "bf16"), default="fp16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread")
    report("autoencoder", arguments.format, arguments.steps, arguments.native_steps)
    # A native step of the layer takes a quarter of a minute here: one says enough.
    num_native = min(arguments.native_steps, 1)
    report("transformer layer", arguments.format, max(arguments.steps // 10, 3), num_native)


if __name__ == "__main__":
    main()
