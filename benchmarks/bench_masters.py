"""One optimizer step with masters: halfstep's MasterWeights beside the bare fused step of fp32 weights, in turn.

    python benchmarks/bench_masters.py                       # 50 M parameters in 150 tensors, AdamW(fused=True), bf16
    python benchmarks/bench_masters.py --dtype fp16 --scaled # the division of a loss scaler in it
    python benchmarks/bench_masters.py --device cuda --params 1e9

Every round times both once, in changing order, and an in-place multiplication as a probe of the memory; medians of the
rounds are printed, and the spread of the paired ratios. The bare step moves 28 bytes per parameter: reads gradient,
weight and two moments, writes the last three. With masters 28 move as well, if what a part of the step widens stays in
the cache until it is used: 2 less for the 16-bit gradient, 2 more for the 16-bit weight.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics

import torch
from clock import timed
from torch import nn

import halfstep
from halfstep.optim import step_parts
from halfstep.optim.masters import MasterWeights

FLOOR_BYTES = 28  # per parameter, with or without masters
PROBE_BYTES = 8  # per element of an in-place multiplication


def make_parameters(total: int, num_tensors: int, device: str) -> list[nn.Parameter]:
    """About ``total`` elements in tensors of unequal size: half of them matrices, half of them ten times smaller."""
    torch.manual_seed(0)
    small = total // (num_tensors // 2 * 11)
    sizes = [small * 10, small] * (num_tensors // 2)
    return [nn.Parameter(torch.randn(size, device=device) * 0.02) for size in sizes]


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What both sides run."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Candidates:
    """Two sets of the same weights: fp32 with a bare optimizer, 16-bit with masters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.bare_parameters = make_parameters(int(options.params), options.tensors, options.device)
        self.parameters = make_parameters(int(options.params), options.tensors, options.device)
        self.bare = fused_adamw(self.bare_parameters)
        self.masters = MasterWeights(fused_adamw(self.parameters), options.dtype)
        for bare, weight in zip(self.bare_parameters, self.parameters, strict=True):
            bare.grad = torch.randn_like(bare) * 1e-3
            weight.grad = bare.grad.to(weight.dtype)
        if options.scaled:
            zero, scale = torch.zeros((), device=options.device), torch.full((), 2.0**14, device=options.device)
            for optimizer in (self.bare, self.masters):
                optimizer.grad_scale, optimizer.found_inf = scale, zero  # type: ignore[union-attr]

    def run(self, name: str) -> None:
        """What is timed."""
        (self.bare if name == "bare" else self.masters).step()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--scaled", action="store_true", help="with grad_scale and found_inf, as under a GradScaler")
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", type=float, default=step_parts.PART_ON_HOST, help="elements stepped together, CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    step_parts.PART_ON_HOST = int(options.part)

    candidates = Candidates(options)
    probe = torch.randn(int(options.params), device=options.device)
    seconds: dict[str, list[float]] = {"bare": [], "masters": [], "probe": []}
    for round_number in range(options.rounds + 2):
        for name in ("bare", "masters") if round_number % 2 else ("masters", "bare"):
            taken = timed(options.device, lambda name=name: candidates.run(name))  # type: ignore[misc]
            if round_number >= 2:  # two rounds of warm-up: state is allocated, pages are touched
                seconds[name].append(taken)
        taken = timed(options.device, lambda: probe.mul_(1.0000001))
        if round_number >= 2:
            seconds["probe"].append(taken)
    report(options, sum(p.numel() for p in candidates.parameters), seconds)


def report(options: argparse.Namespace, num_params: int, seconds: dict[str, list[float]]) -> None:
    """Print medians and ratios, with the spread of the paired ratios between rounds."""
    median = {name: statistics.median(s) for name, s in seconds.items()}
    bandwidth = PROBE_BYTES * options.params / median["probe"]
    floor = FLOOR_BYTES * num_params / bandwidth
    pairs = sorted(ours / theirs for ours, theirs in zip(seconds["masters"], seconds["bare"], strict=True))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads,")
    print(f"torch {torch.__version__}, halfstep {halfstep.__version__}, {options.device}, AdamW(fused=True),")
    print(
        f"{num_params / 1e6:.1f} M parameters in {options.tensors} tensors, {options.dtype}, {options.rounds} rounds,"
    )
    print(f"in-place probe: {bandwidth / 1e9:.1f} GB/s; floor ({FLOOR_BYTES} B per parameter): {floor * 1e3:.2f} ms")
    for name in ("bare", "masters"):
        print(
            f"  {name:8s} {median[name] * 1e3:8.2f} ms   {median[name] / floor:5.2f} x floor"
            f"   {median[name] / median['bare']:5.2f} x bare"
        )
    print(f"masters / bare, round by round: {pairs[0]:.2f} .. {statistics.median(pairs):.2f} .. {pairs[-1]:.2f}")


if __name__ == "__main__":
    main()
