"""One optimizer's step with scaled gradients: each divided by one number on its way, or no step at all.

Optimizers that announce support for loss scaling (torch's fused AdamW, Adam, SGD, Adagrad) divide in their own kernel
and write nothing where found_inf is set: nothing is read on the host. For any other one the host must know found_inf;
then the gradients are divided in place. 16-bit parameters step in fp32 either way (widen.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import has_foreign_step_hooks
from halfstep.formats import FP32
from halfstep.kernels.gradients import gradient_of
from halfstep.scaling import fused_sgd
from halfstep.scaling.unscale import divide_
from halfstep.scaling.widen import TORCH_FUSED, Widened, announces_support, needs_widening
from halfstep.scaling.window import parameters_of


def divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides gradients and skips steps by itself, told by ``grad_scale`` and ``found_inf``."""
    # torch's load_state_dict may switch fused off in the groups, and leaves the flag standing on the instance.
    is_torchs = isinstance(optimizer, TORCH_FUSED) and "_step_supports_amp_scaling" in vars(optimizer)
    is_off = is_torchs and not all(group["fused"] for group in optimizer.param_groups)
    return announces_support(optimizer) and not is_off


def step_in_kernel(
    optimizer: torch.optim.Optimizer,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Step an optimizer whose kernel divides by ``grad_scale`` and skips by ``found_inf``.

    Args:
        optimizer: see :func:`divides_in_kernel`. A ``grad_scale`` that it carries already is a factor of the divisor.
        divisor: 0-dim fp32; None if the gradients are what they should be.
        found_inf: 0-dim fp32, 0.0 or 1.0; None if the step is to be taken.
        args: passed to ``optimizer.step``.
        kwargs: the same.

    Returns:
        What ``optimizer.step`` returned.
    """
    if found_inf is not None and fused_sgd.is_special(optimizer) and found_inf.item() != 0:
        return None
    users = getattr(optimizer, "grad_scale", None)
    if users is not None:
        divisor = users if divisor is None else divisor * users
    fused_sgd.seed_momentum(optimizer, divisor)
    try:
        optimizer.grad_scale, optimizer.found_inf = divisor, found_inf  # type: ignore[attr-defined]
        return optimizer.step(*args, **(kwargs or {}))
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def take_step(
    optimizer: torch.optim.Optimizer,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    stalls: list[Tensor] | None = None,
) -> list[Tensor]:
    """Step any optimizer with its gradients divided, or change nothing where ``found_inf`` is set.

    Args:
        optimizer: any torch optimizer whose ``step`` needs no closure.
        divisor: 0-dim, fp32 or fp64 (kernels take fp32); None if the gradients are what they should be.
        found_inf: 0-dim fp32, 0.0 or 1.0; None if the step is to be taken.
        stalls: see :class:`~halfstep.scaling.widen.Widened`.

    Returns:
        For each 16-bit parameter the number of weights that were clamped to their format's largest value.
    """
    if not needs_widening(optimizer):
        _divided_step(optimizer, divisor, found_inf)
        return []
    with Widened(optimizer, stalls) as wide:
        wide.found_inf = found_inf
        _divided_step(optimizer, divisor, found_inf)
    return wide.num_saturated


def _divided_step(optimizer: torch.optim.Optimizer, divisor: Tensor | None, found_inf: Tensor | None) -> None:
    if divides_in_kernel(optimizer):
        if divisor is not None and has_foreign_step_hooks(optimizer):  # they expect to see true gradients
            divide_(_gradients_of(optimizer), divisor)
            divisor = None
        narrow = None if divisor is None else divisor.clamp(max=FP32.largest).float()
        step_in_kernel(optimizer, narrow, found_inf)
        return
    if found_inf is not None and found_inf.item() != 0:
        return
    if divisor is not None:
        divide_(_gradients_of(optimizer), divisor)
    optimizer.step()


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Sums in fp32 where there are any: what the optimizer will step with."""
    return [gradient for p in parameters_of(optimizer) if (gradient := gradient_of(p)) is not None]
