"""One full step with clipping and a finite check: halfstep.Stepper beside torch's recipe, in one process, in turn.

    python benchmarks/bench_stepper.py                # 50 M parameters in 150 tensors, and a model of about 1 ms
    python benchmarks/bench_stepper.py --device cuda --params 1e9

Large: every round times each candidate once, in rotating order, on its own copy of the same parameters and AdamW
(fused=True). Gradients come from a backward pass outside the timing; ``zero_grad`` counts for everybody. ``bare`` is
the fused step alone: no scale, no check, no clipping. ``torch`` is GradScaler's unscale_, clip_grad_norm_, step,
update. The Stepper runs with a scale of 2**14 and the norm at about ten times ``clip_norm`` (clipped), far below it
(unclipped), and without a scale far below it (unscaled, as in bf16).

Small: forward, backward and step of a small model, whole; the difference to a bare loop is the overhead per step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_step import make_parameters, synchronize
from torch import Tensor, nn

import halfstep

SCALE = 2.0**14


class Give(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Returns 1."""
        ctx.gradients = gradients
        return torch.ones((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        """The given gradients, scaled as the loss was."""
        return (None, *(gradient * scale for gradient in ctx.gradients))


def quiet(function: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


class Large:
    """One candidate of the large comparison: ``prepare`` makes gradients, ``run`` is timed."""

    def __init__(self, kind: str, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        self.kind, self.parameters, self.gradients = kind, parameters, gradients
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm())
        self.clip_norm = norm / 10 if kind.endswith("clipped") or kind == "torch" else norm * 10
        if kind.endswith("unclipped"):
            self.clip_norm = norm * 10
        self.scaler = torch.amp.GradScaler(parameters[0].device.type, init_scale=SCALE)
        scale = halfstep.NoScale() if kind.endswith("unscaled") else halfstep.DynamicScale(SCALE)
        self.stepper = halfstep.Stepper(
            nn.ParameterList(parameters), self.optimizer, policy="fp32", clip_norm=self.clip_norm, scale=scale
        )

    def prepare(self) -> None:
        """A backward pass."""
        if self.kind.startswith("Stepper"):
            with self.stepper.forward():
                loss = Give.apply(self.gradients, *self.parameters)
            self.stepper.backward(loss)
            return
        loss = Give.apply(self.gradients, *self.parameters)
        (self.scaler.scale(loss) if self.kind == "torch" else loss).backward()

    def run(self) -> None:
        """What is timed."""
        if self.kind.startswith("Stepper"):
            self.stepper.step()
            return
        if self.kind == "torch":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


def compare_large(options: argparse.Namespace) -> None:
    """Time full steps of many parameters."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    total, device = int(options.params), options.device
    gradients = [p.detach().clone() * 1e-3 for p in make_parameters(total, options.tensors, device)]
    kinds = ["bare", "torch", "Stepper, clipped", "Stepper, unclipped", "Stepper, unscaled"]
    candidates = [Large(kind, make_parameters(total, options.tensors, device), gradients) for kind in kinds]
    seconds: dict[str, list[float]] = {kind: [] for kind in [*kinds, "read"]}
    for number in range(options.rounds + 2):
        for turn in range(len(candidates)):
            candidate = candidates[(turn + number) % len(candidates)]
            candidate.prepare()
            taken = quiet(candidate.run, device)
            if number >= 2:  # two rounds of warm-up: state is allocated, pages are touched
                seconds[candidate.kind].append(taken)
        if number >= 2:
            seconds["read"].append(quiet(lambda: [torch.dot(g, g) for g in gradients], device))
    bare = statistics.median(seconds["bare"])
    num_params = sum(g.numel() for g in gradients)
    print(f"{num_params / 1e6:.1f} M parameters in {options.tensors} tensors, AdamW(fused=True),")
    print(f"{options.threads} threads, {options.rounds} rounds, medians; `read` is dot(g, g) of each gradient")
    for kind, values in seconds.items():
        pairs = sorted(a / b for a, b in zip(values, seconds["bare"], strict=True))
        print(
            f"  {kind:20s} {statistics.median(values) * 1e3:8.2f} ms   {statistics.median(values) / bare:5.2f} x bare"
            f"   round by round {pairs[0]:.2f} .. {statistics.median(pairs):.2f} .. {pairs[-1]:.2f}"
        )


def small_loops(device: str, width: int) -> dict[str, Callable[[], None]]:
    """Whole training steps of a small model, one for each candidate."""
    x, y = torch.randn(64, width, device=device), torch.randint(0, 10, (64,), device=device)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        body = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*body, nn.Linear(width, 10)).to(device)
        return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def loss_of(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    bare_model, bare_optimizer = fresh()
    torch_model, torch_optimizer = fresh()
    step_model, step_optimizer = fresh()
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    stepper = halfstep.Stepper(
        step_model, step_optimizer, policy="fp32", clip_norm=1.0, scale=halfstep.DynamicScale(SCALE)
    )

    def bare() -> None:
        loss_of(bare_model).backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()

    def recipe() -> None:
        scaler.scale(loss_of(torch_model)).backward()
        scaler.unscale_(torch_optimizer)
        nn.utils.clip_grad_norm_(torch_model.parameters(), 1.0)
        scaler.step(torch_optimizer)
        scaler.update()
        torch_optimizer.zero_grad()

    def ours() -> None:
        with stepper.forward():
            loss = loss_of(step_model)
        stepper.backward(loss)
        stepper.step()

    return {"bare": bare, "torch": recipe, "Stepper": ours}


def compare_small(options: argparse.Namespace) -> None:
    """Time whole steps of a small model."""
    torch.set_num_threads(1)
    loops = small_loops(options.device, options.width)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(options.rounds * 40):
        for name, loop in loops.items():
            taken = quiet(loop, options.device)
            if number >= 20:
                seconds[name].append(taken)
    print(f"small model ({options.width} wide, 6 tensors, batch 64), forward, backward and step, 1 thread:")
    for name, values in seconds.items():
        over = statistics.median([a - b for a, b in zip(values, seconds["bare"], strict=True)])
        print(f"  {name:20s} {statistics.median(values) * 1e6:8.0f} us   {over * 1e6:+6.0f} us over bare")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=256, help="of the small model")
    parser.add_argument("--only", choices=("large", "small"))
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__},")
    print(f"halfstep {halfstep.__version__}, {options.device}")
    if options.only != "small":
        compare_large(options)
    if options.only != "large":
        compare_small(options)


if __name__ == "__main__":
    main()
