"""One optimizer step: halfstep.GradScaler beside torch.amp.GradScaler, then halfstep's optimizers beside torch's.

    python benchmarks/bench_step.py                       # 50 M parameters in 150 tensors, AdamW
    python benchmarks/bench_step.py --device cuda --params 1e9
    python benchmarks/bench_step.py --only scaler         # or: --only optimizers

The optimizers are bench_optimizers.py's, with its defaults; what follows is about the scalers, on torch's
AdamW(fused=True) with fp32 weights.

Every round times each candidate once, in rotating order, on its own copy of the same parameters; the medians of the
rounds are printed as ratios. ``bare`` is the fused step alone, without a scaler. The floor is the time in which the
bytes that must move could be moved, at the bandwidth of an in-place multiplication measured in the same rounds: 32
bytes per parameter (read gradient, weight and two moments, write weight and moments, read the gradient to inspect it).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics

import bench_optimizers
import torch
from clock import timed

import halfstep

FLOOR_BYTES = 32  # per fp32 parameter under AdamW, the read of inspection included
PROBE_BYTES = 8  # per element of an in-place multiplication


def make_parameters(total: int, num_tensors: int, device: str) -> list[torch.nn.Parameter]:
    """About ``total`` elements in tensors of unequal size: half of them matrices, half of them ten times smaller."""
    small = total // (num_tensors // 2 * 11)
    sizes = [small * 10, small] * (num_tensors // 2)
    return [torch.nn.Parameter(torch.randn(size, device=device) * 0.02) for size in sizes]


class Candidate:
    """One way to step; its gradients are set anew, outside the timing, because torch's fused kernel overwrites them."""

    def __init__(self, name: str, parameters: list[torch.nn.Parameter], scaler: torch.amp.GradScaler | None) -> None:
        self.name, self.parameters, self.scaler = name, parameters, scaler
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.loss = torch.ones((), device=parameters[0].device)

    def prepare(self, gradients: list[torch.Tensor]) -> None:
        """Give every parameter a scaled gradient."""
        factor = 1.0
        if self.scaler is not None:
            self.scaler.scale(self.loss)
            factor = self.scaler.get_scale()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            torch.mul(gradient, factor, out=parameter.grad)

    def run(self) -> None:
        """What is timed."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="of the scalers")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the optimizers")
    parser.add_argument("--only", choices=("scaler", "optimizers"))
    options = parser.parse_args()
    if options.only != "optimizers":
        measure_scalers(options)
    if options.only != "scaler":
        measure_optimizers(options)


def measure_optimizers(options: argparse.Namespace) -> None:
    """bench_optimizers.py with what the two have in common."""
    same = ("device", "params", "tensors", "seconds") + (("threads",) if options.device == "cpu" else ())
    parser = argparse.ArgumentParser()
    bench_optimizers.add_options(parser)
    arguments = [word for name in same for word in (f"--{name}", str(getattr(options, name)))]
    bench_optimizers.report(bench_optimizers.settings_from(parser.parse_args(arguments)), None)


def measure_scalers(options: argparse.Namespace) -> None:
    """Every candidate in turn, and print."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    total = int(options.params)
    gradients = [p.detach().clone() for p in make_parameters(total, options.tensors, options.device)]
    scalers = {
        "bare": None,
        "torch": torch.amp.GradScaler(options.device),
        "halfstep": halfstep.GradScaler(options.device),
    }
    candidates = []
    for name, scaler in scalers.items():
        torch.manual_seed(0)
        candidates.append(Candidate(name, make_parameters(total, options.tensors, options.device), scaler))
    probe = torch.randn(total, device=options.device)
    seconds: dict[str, list[float]] = {name: [] for name in (*scalers, "probe")}
    for round_number in range(options.rounds + 2):
        for turn in range(len(candidates)):
            candidate = candidates[(turn + round_number) % len(candidates)]
            candidate.prepare(gradients)
            taken = timed(options.device, candidate.run)
            if round_number >= 2:  # two rounds of warm-up: state is allocated, pages are touched
                seconds[candidate.name].append(taken)
        taken = timed(options.device, lambda: probe.mul_(1.0000001))
        if round_number >= 2:
            seconds["probe"].append(taken)

    report(
        options, sum(g.numel() for g in gradients), {name: statistics.median(s) for name, s in seconds.items()}, seconds
    )


def report(
    options: argparse.Namespace, num_params: int, median: dict[str, float], seconds: dict[str, list[float]]
) -> None:
    """Print ratios, with the spread of the paired ratios between rounds."""
    bandwidth = PROBE_BYTES * options.params / median["probe"]
    floor = FLOOR_BYTES * num_params / bandwidth
    pairs = sorted(ours / theirs for ours, theirs in zip(seconds["halfstep"], seconds["torch"], strict=True))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads,")
    print(f"torch {torch.__version__}, halfstep {halfstep.__version__}, {options.device}, AdamW(fused=True),")
    print(f"{num_params / 1e6:.1f} M parameters in {options.tensors} tensors, {options.rounds} rounds, medians")
    print(f"in-place probe: {bandwidth / 1e9:.1f} GB/s; floor (32 B per parameter): {floor * 1e3:.2f} ms")
    for name in ("bare", "torch", "halfstep"):
        print(
            f"  {name:9s} {median[name] * 1e3:8.2f} ms   {median[name] / floor:5.2f} x floor"
            f"   {median[name] / median['bare']:5.2f} x bare   {median[name] / median['torch']:5.2f} x torch"
        )
    print(f"halfstep / torch, round by round: {pairs[0]:.2f} .. {statistics.median(pairs):.2f} .. {pairs[-1]:.2f}")


if __name__ == "__main__":
    main()
