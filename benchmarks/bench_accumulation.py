"""What it costs to sum 16-bit gradients in fp32, as each comes into being, beside the traffic that nobody can avoid.

    python benchmarks/bench_accumulation.py                       # 50 M parameters in 150 tensors, bf16
    python benchmarks/bench_accumulation.py --without-numba       # with torch's own kernels alone
    python benchmarks/bench_accumulation.py --tensors 1           # one tensor of 50 M elements
    python benchmarks/bench_accumulation.py --device cuda --params 1e9

The floor is 10 bytes per parameter: read a 16-bit gradient, read and write its fp32 sum, at the speed of an in-place
multiplication of fp32 numbers (8 bytes per element) that is timed in the same round on as many threads. Two ways to
look at it:

    cold      the hook itself, called for one parameter after another, with every gradient in memory
    backward  a backward pass whose every gradient is a fresh copy, less the same pass with gradients that are dropped:
              what the hook adds there, where the gradient that it reads has just been written

and beside them the backward pass in which torch sums in 16 bits. Everything is timed once a round, in changing order.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
from clock import timed
from torch import Tensor, nn

import halfstep
from halfstep.formats import format_of
from halfstep.kernels import choose
from halfstep.training.fp32_sums import Fp32Sums

FLOOR_BYTES = 10  # per parameter
PROBE_BYTES = 8  # per element of an in-place multiplication
WARM_UP = 2  # rounds: sums are allocated, pages are touched, loops are compiled


class _Gradient(torch.autograd.Function):
    """A loss of one parameter whose gradient is a copy of a given one."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Zero, with a way back."""
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        """The gradient, freshly written."""
        return ctx.gradient.clone(), None


class Candidates:
    """The same gradients for three sets of parameters: summed in fp32 by hooks, in 16 bits by torch, or dropped."""

    def __init__(self, options: argparse.Namespace) -> None:
        dtype = format_of(options.dtype).dtype
        sizes = make_sizes(int(options.params), options.tensors)
        self.gradients = [(torch.randn(n, device=options.device) * 1e-3).to(dtype) for n in sizes]
        self.fp32, self.half, self.dropped = (
            nn.ParameterList([nn.Parameter(torch.zeros_like(g)) for g in self.gradients]) for _ in range(3)
        )
        self.sums = Fp32Sums(self.fp32)
        self.sums.watch(list(self.fp32), is_on=True)
        for parameter in self.dropped:
            parameter.register_post_accumulate_grad_hook(drop)
        self.runs: dict[str, Callable[[], object]] = {
            "hook, cold": self.call_hooks,
            "backward, fp32 sums": lambda: self.backward(self.fp32),
            "backward, 16-bit sums": lambda: self.backward(self.half),
            "backward, dropped": lambda: self.backward(self.dropped),
        }

    def prepare(self, name: str) -> None:
        """What is not timed."""
        if name == "hook, cold":
            for parameter, gradient in zip(self.fp32, self.gradients, strict=True):
                parameter.grad = gradient

    def call_hooks(self) -> None:
        """What autograd does in a backward pass, without the pass."""
        for parameter in self.fp32:
            self.sums.add(parameter)

    def backward(self, parameters: nn.ParameterList) -> None:
        """One micro-batch."""
        losses = [_Gradient.apply(p, g) for p, g in zip(parameters, self.gradients, strict=True)]
        torch.autograd.backward(losses)


def drop(parameter: Tensor) -> None:
    """Free a gradient that nobody wants."""
    parameter.grad = None


def make_sizes(total: int, num_tensors: int) -> list[int]:
    """About ``total`` elements in tensors of unequal size: half of them matrices, half of them ten times smaller."""
    if num_tensors == 1:
        return [total]
    small = total // (num_tensors // 2 * 11)
    return [small * 10, small] * (num_tensors // 2)


def measure(options: argparse.Namespace, candidates: Candidates) -> dict[str, list[float]]:
    """Seconds of each round."""
    probe = torch.randn(int(options.params), device=options.device)
    runs = {**candidates.runs, "probe": lambda: probe.mul_(1.0000001)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(options.rounds + WARM_UP):
        for name in list(runs)[:: 1 if round_number % 2 else -1]:
            candidates.prepare(name)
            taken = timed(options.device, runs[name])
            if round_number >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-numba", action="store_true", help="as if numba were not installed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.without_numba:
        choose._has_numba = lambda: False
    candidates = Candidates(options)
    report(options, sum(g.numel() for g in candidates.gradients), measure(options, candidates))


def report(options: argparse.Namespace, num_params: int, seconds: dict[str, list[float]]) -> None:
    """Print medians, and for each ratio to the floor of its own round the smallest, the median and the largest."""
    share = FLOOR_BYTES * num_params / (PROBE_BYTES * options.params)
    floors = [share * probe for probe in seconds["probe"]]
    added = [a - b for a, b in zip(seconds["backward, fp32 sums"], seconds["backward, dropped"], strict=True)]
    executor = choose.choose(torch.device(options.device), num_params)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads,")
    print(f"torch {torch.__version__}, halfstep {halfstep.__version__}, {options.device}, {executor.reason},")
    print(f"{num_params / 1e6:.1f} M {options.dtype} gradients, {options.tensors} tensors, {options.rounds} rounds,")
    bandwidth = PROBE_BYTES * options.params / statistics.median(seconds["probe"])
    print(f"in-place probe: {bandwidth / 1e9:.1f} GB/s; floor: {statistics.median(floors) * 1e3:.2f} ms; x floor:")
    for name, taken in (("hook, cold", seconds["hook, cold"]), ("hook, in backward", added)):
        print_row(name, taken, floors)
    print("x the pass whose gradients are dropped:")
    for name in ("backward, 16-bit sums", "backward, fp32 sums"):
        print_row(name, seconds[name], seconds["backward, dropped"])


def print_row(name: str, taken: list[float], others: list[float]) -> None:
    """A median, and the spread of the ratios between what was timed in the same round."""
    ratios = sorted(a / b for a, b in zip(taken, others, strict=True))
    spread = f"{ratios[0]:.2f} .. {statistics.median(ratios):.2f} .. {ratios[-1]:.2f}"
    print(f"  {name:22s} {statistics.median(taken) * 1e3:8.2f} ms   {spread}")


if __name__ == "__main__":
    main()
