"""torch's fused SGD leaves its momentum uninitialised when its first step is skipped; seed it beforehand.

torch.optim.SGD(fused=True) allocates ``momentum_buffer`` with ``empty_like`` and lets the kernel fill it. A kernel that
sees ``found_inf`` writes nothing, so the next step multiplies whatever the memory held (torch 2.13,
torch/optim/sgd.py, ``_fused_sgd``). A zero buffer gives the same first step, ``0 * momentum + gradient``, as long as
dampening is 0; with dampening the first step is special, and the caller has to learn on the host whether it is taken.
"""

from __future__ import annotations

import torch


def seed_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Give every parameter that is about to take its first fused SGD step a zero momentum.

    Returns:
        False if a first step has dampening, so that a zero buffer would change it: decide on the host then.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if not group["fused"] or group["momentum"] == 0:
            continue
        first = [
            p
            for p in group["params"]
            if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        ]
        if first and group["dampening"] != 0:
            return False
        for p in first:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return True
