"""Weights out of a run with masters, in full precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.formats import HALF_DTYPES
from halfstep.kernels.rounding import rounded
from halfstep.optim import refusals
from halfstep.optim.masters import MasterWeights
from halfstep.optim.packed import PackedOptimizer

_Holder = MasterWeights | PackedOptimizer  # keeps what 16-bit weights cannot hold


def fp32_state_dict(model: nn.Module, optimizer: _Holder | Sequence[_Holder]) -> dict[str, Any]:
    """The model's ``state_dict`` with the true fp32 value of every weight, for export or to go on elsewhere in fp32.

    Args:
        model: the model, bare or inside DistributedDataParallel; nothing in it changes.
        optimizer: its :class:`MasterWeights`, or an optimizer of ``halfstep.optim``; or a list of them.

    Returns:
        Copies: masters where there are any, every other 16-bit tensor (frozen weights, buffers) widened, which is
        exact, and the rest as it is.

    Raises:
        ArgumentError: the optimizer holds no master of this model.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> exact = model.weight.item()
        >>> optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        >>> model.weight.item() == exact, fp32_state_dict(model, optimizer)["weight"].item() == exact
        (False, True)
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    full: dict[Tensor, Callable[[Tensor], Tensor]] = {}
    for one in optimizers:
        if not isinstance(one, (MasterWeights, PackedOptimizer)):
            raise refusals.not_ours(one)
        one._check_in_use("fp32_state_dict()")
        if isinstance(one, PackedOptimizer):
            full |= {p: one.full_weight for group in one.param_groups for p in group["params"] if one.has_master(p)}
        else:
            one._take_in()  # refuses parameters that were cast since
            full |= {p: functools.partial(_full_weight, master) for p, master in one._masters.items()}
    if not any(p in full for p in model.parameters()):
        raise refusals.not_ours(optimizers[0])
    return {name: _exported(value, full) for name, value in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def _exported(value: Any, full: Mapping[Tensor, Callable[[Tensor], Tensor]]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value in full:
        return full[value](value)
    value = value.detach()
    return value.float() if value.dtype in HALF_DTYPES else value.clone()


def _full_weight(master: Tensor, weight: Tensor) -> Tensor:
    """The master, or what somebody has written into the weight since."""
    is_own = rounded(master.detach(), weight.dtype).view(torch.int16) == weight.detach().view(torch.int16)
    return torch.where(is_own, master.detach(), weight.detach().float())
