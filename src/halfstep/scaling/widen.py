"""Step 16-bit parameters in fp32: widen them for the step, round once on the way back.

torch's optimizers keep their state in the parameter's dtype. In fp16 that means an eps of 1e-8 that is zero, a second
moment that vanishes, and a division by zero that writes inf into the weights. Inside :func:`widened` the optimizer
sees fp32 parameters and fp32 gradients, so its state is fp32 too. Afterwards the weights are rounded to nearest, once,
beyond the format's largest value to that value, and the saturated ones are counted.

The 16-bit weights still lose updates smaller than half their ulp: this makes the step safe, it is no substitute for
masters. It needs 8 bytes per 16-bit parameter while the step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.formats import format_of, saturating_cast

HALF_DTYPES = (torch.float16, torch.bfloat16)


def needs_widening(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer should run in fp32 although it has 16-bit parameters with gradients.

    Optimizers outside torch that announce support for loss scaling bring their own treatment of 16-bit weights.
    """
    is_foreign = not type(optimizer).__module__.startswith("torch.optim")
    if is_foreign and getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return any(p.dtype in HALF_DTYPES and p.grad is not None for p in _parameters(optimizer))


@contextmanager
def widened(optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Let ``optimizer`` step its 16-bit parameters as fp32 ones; yields a list that receives, on exit, one 0-dim int64
    tensor for each parameter: the number of weights that saturated.

    Whatever happens inside, the parameters come back with their own storage, dtype and gradient.
    """
    saturated: list[Tensor] = []
    taken: list[tuple[Tensor, Tensor, Tensor]] = []
    finished = False
    try:
        for p in _parameters(optimizer):
            if p.dtype in HALF_DTYPES and p.grad is not None:
                taken.append((p, p.data, p.grad))
                gradient = _widen_gradient(p.grad)
                p.grad = None
                p.data = p.data.float()
                p.grad = gradient
                _widen_state(optimizer, p)
        yield saturated
        finished = True
    finally:
        with torch.no_grad():
            for p, narrow, gradient in taken:
                wide = p.data
                p.grad = None
                p.data = narrow
                p.grad = gradient
                if finished:
                    saturated.append((wide.abs() > format_of(narrow.dtype).largest).sum())
                    p.copy_(saturating_cast(wide, narrow.dtype))  # through p, so that autograd sees the write


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _widen_gradient(gradient: Tensor) -> Tensor:
    # Sparse: widen before duplicates are added, so that two fp16 values of 40000 make 80000 and not inf.
    return gradient.float().coalesce() if gradient.is_sparse else gradient.float()


def _widen_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """State loaded by torch was rounded to the parameter's dtype; an fp32 step needs it in fp32."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            state[name] = value.float()
