"""torch's fused SGD leaves its momentum uninitialised when its first step is skipped; seed it beforehand.

torch.optim.SGD(fused=True) allocates ``momentum_buffer`` with ``empty_like`` and lets the kernel fill it. A kernel that
sees ``found_inf`` writes nothing, so the next step multiplies whatever the memory held; and where only some parameters
of a group have momentum yet, the kernel receives a list with holes and fails (torch 2.13, torch/optim/sgd.py).

A zero buffer gives the same first step, ``0 * momentum + gradient``, as long as dampening is 0. With dampening the
first step is special: whether it is taken has to be learned on the host. If it is, torch's kernel does the rest for a
whole group; a parameter that joins later is given the buffer from which the kernel's formula leads to its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def is_special(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some parameter is about to take a first fused SGD step with dampening: find out first if it is taken."""
    return any(group["dampening"] != 0 for group, _, _ in _first_steps(optimizer))


def seed_momentum(optimizer: torch.optim.Optimizer, divisor: Tensor | None) -> None:
    """Give every parameter that is about to take its first fused SGD step the momentum that leads to it.

    Args:
        optimizer: any optimizer; only a fused SGD with momentum is touched.
        divisor: what the kernel will divide gradients by; None if they are unscaled.
    """
    for group, first, is_whole_group in _first_steps(optimizer):
        if group["dampening"] == 0:
            for p in first:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif not is_whole_group:
            for p in first:
                assert p.grad is not None
                gradient = p.grad if divisor is None else p.grad / divisor.to(p.device)
                gradient = (-gradient if group["maximize"] else gradient) + group["weight_decay"] * p.detach()
                optimizer.state[p]["momentum_buffer"] = gradient * (group["dampening"] / group["momentum"])


def _first_steps(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], list[Tensor], bool]]:
    """Each group, its parameters without momentum, and whether those are all that have a gradient."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or group["momentum"] == 0:
            continue
        with_gradient = [p for p in group["params"] if p.grad is not None]
        first = [p for p in with_gradient if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if first:
            yield group, first, len(first) == len(with_gradient)
