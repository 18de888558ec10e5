"""The optimizer of a regime: the task's own, or what stands in for it where the regime keeps masters.

Purpose: runs of two regimes form a pair, so the arithmetic of the step and the first weights have to be the same.
Method: the task says which of torch's optimizers it wants, with what numbers. A regime with fp32 masters wraps that;
one with masters or moments in fewer bytes has halfstep's optimizer of the same name and numbers. Either way the masters
begin as the fp32 weights that were drawn, to the last bit that their storage holds, and not as what the cast left.

Not here: the cast (trainer.py), the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from halfstep import optim
from halfstep.compare.regimes import Regime, Weights
from halfstep.compare.task import Task
from halfstep.kernels.choose import FEWEST, choose
from halfstep.optim import keeping
from halfstep.optim.masters import MasterWeights
from halfstep.optim.packed import PackedOptimizer

_PACKED: dict[type[torch.optim.Optimizer], Callable[..., PackedOptimizer]] = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.SGD: optim.SGD,
}


def build_optimizer(
    task: Task, regime: Regime, parameters: Iterable[nn.Parameter], *, drawn: Mapping[Tensor, Tensor], seed: int
) -> torch.optim.Optimizer:
    """The optimizer of one run.

    Args:
        task: says which of torch's optimizers, with what numbers.
        regime: says what it keeps.
        parameters: what it steps, cast already where the regime has 16-bit weights.
        drawn: parameter -> its fp32 values before the cast; read where there are masters.
        seed: of what is rounded by chance.

    Returns:
        An optimizer whose masters are ``drawn``.
    """
    theirs = task.build_optimizer(parameters)
    if regime.weights is not Weights.MASTER:
        return theirs
    return _packed(theirs, regime, drawn, seed) if regime.is_packed else _wrapped(theirs, drawn)


def _wrapped(theirs: torch.optim.Optimizer, drawn: Mapping[Tensor, Tensor]) -> MasterWeights:
    wrapped = MasterWeights(theirs)
    for parameter, state in wrapped.state.items():
        if "master" in state:  # weights that stayed in fp32 (batch normalisation) have none
            state["master"].copy_(drawn[parameter])
    return wrapped


@torch.no_grad()
def _packed(
    theirs: torch.optim.Optimizer, regime: Regime, drawn: Mapping[Tensor, Tensor], seed: int
) -> PackedOptimizer:
    groups = [dict(group) for group in theirs.param_groups]  # with every number that the task gave
    master, moments = regime.master.value, regime.moments.value
    device = groups[0]["params"][0].device
    # Compiled loops, for models that are too small for "auto" to load them: a run has hundreds of steps.
    executor = choose(device, FEWEST).name
    ours = _PACKED[type(theirs)](groups, master=master, moments=moments, executor=executor, seed=seed)
    for parameter, state in ours.state.items():
        if parameter.dtype == regime.format.dtype:  # weights that stayed in fp32 are their own masters
            keeping.split_into(parameter, state.get(keeping.REST), drawn[parameter], keeping.MASTERS[master])
    return ours
