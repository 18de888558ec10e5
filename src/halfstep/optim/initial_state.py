"""An optimizer's state before its first step, made early, so that a checkpoint knows of it.

torch's optimizers create their state in the first step. torch.distributed.checkpoint reads only what the running
process has, and so silently omits the rest of a checkpoint. Here the state exists as soon as a parameter does.

Method: torch's optimizers create it in a method of their own, ``_init_group``, which looks at parameters and gradients
and writes nothing else; it is called with a zero gradient. Three of them need a word more:

- SGD takes its first gradient as the momentum. A momentum of -0.0 leads to the same bits, ``-0.0 * momentum + g = g``;
  with dampening the first step is taken without it, and ``momentum_begun`` in the state remembers whether it was.
- ASGD and Rprop begin with the learning rate of their first step: until then their state is made anew.

Optimizers from elsewhere create their state when they like.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.formats import HALF_DTYPES

BEGUN = "momentum_begun"
_Group = dict[str, Any]

# One parameter's step depends on no other's, and groups are only read: a step may be taken in parts.
PER_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)


def create(optimizer: torch.optim.Optimizer, group: _Group, parameter: Tensor) -> None:
    """Give a parameter the state that the optimizer would give it in a first step, unless it has one.

    Args:
        optimizer: one of torch's, or of a class derived from one; nothing happens to any other.
        group: the hyperparameters.
        parameter: what the optimizer steps; its gradient stays as it is.
    """
    if not optimizer.state.get(parameter):
        _initialise(optimizer, group, parameter)
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
        state = optimizer.state[parameter]
        has_momentum = state.get("momentum_buffer") is not None
        if not has_momentum:
            state["momentum_buffer"] = torch.full_like(parameter, -0.0)
        if group["dampening"] != 0 and BEGUN not in state:
            state[BEGUN] = torch.tensor(float(has_momentum), device="cpu")


def _initialise(optimizer: torch.optim.Optimizer, group: _Group, parameter: Tensor) -> None:
    # _init_group is private in torch; every optimizer of torch.optim that keeps state per dense gradient has one.
    initialise = getattr(type(optimizer), "_init_group", None)
    if initialise is None or not initialise.__module__.startswith("torch.optim."):
        return
    _, _, *collectors = [
        p for p in inspect.signature(initialise).parameters.values() if p.default is inspect.Parameter.empty
    ]
    gradient = parameter.grad
    parameter.grad = torch.zeros_like(parameter)
    try:
        initialise(optimizer, {**group, "params": [parameter]}, *([] for _ in collectors))
    finally:
        parameter.grad = gradient


def widen(optimizer: torch.optim.Optimizer, parameter: Tensor, master: Tensor) -> list[str]:
    """Hand a 16-bit parameter's state over to its master, in fp32.

    Returns:
        Names of the states that were 16-bit although steps had been taken: their bits are gone.
    """
    state = optimizer.state.pop(parameter, None)
    if not state or _is_before_first_step(state):
        return []  # Adagrad fills its sum, in 16 bits, in its constructor: it is made anew
    narrow = [name for name, value in state.items() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES]
    optimizer.state[master] = {name: v.float() if name in narrow else v for name, v in state.items()}
    return narrow


def _is_before_first_step(state: dict[str, Any]) -> bool:
    step = state.get("step")
    return step is not None and (not isinstance(step, Tensor) or is_host(step.device)) and float(step) == 0


def forget_early_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Just before a step: let ASGD and Rprop begin with the present learning rate."""
    if not isinstance(optimizer, (torch.optim.ASGD, torch.optim.Rprop)):
        return
    for parameter in parameters:
        if _is_before_first_step(optimizer.state.get(parameter, {})):
            del optimizer.state[parameter]


def ignores_dampening_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's first step differs from all later ones."""
    return isinstance(optimizer, torch.optim.SGD) and any(group["dampening"] for group in optimizer.param_groups)


def begins(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether the parameter's next step is its first under SGD with dampening, which that step ignores."""
    flag = optimizer.state.get(parameter, {}).get(BEGUN)
    return flag is not None and flag.item() == 0


def has_begun(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """A step of these parameters was taken."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for parameter in parameters:
        flag = optimizer.state.get(parameter, {}).get(BEGUN)
        if flag is not None:
            flag.fill_(1.0)


def as_torch_has_it(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state without what only this module understands."""
    if isinstance(optimizer, (torch.optim.ASGD, torch.optim.Rprop)) and _is_before_first_step(state):
        return {}
    flag = state.get(BEGUN)
    if flag is None:
        return state
    dropped = (BEGUN,) if flag.item() != 0 else (BEGUN, "momentum_buffer")
    return {name: value for name, value in state.items() if name not in dropped}
