"""The state of a MasterWeights: seen through the model's parameters, saved, and loaded whole or not at all.

torch's own loading casts every tensor to the parameter's dtype: second moments of 1e-9 become 0 in fp16. Here nothing
is cast, except that a state which was 16-bit, in a plain optimizer of 16-bit weights, is widened with a warning.

Everything is checked before anything is written. What fits is copied into the tensors that are there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.formats import HALF_DTYPES
from halfstep.optim import initial_state
from halfstep.optim.refusals import bad_state

if TYPE_CHECKING:
    from halfstep.optim.masters import MasterWeights

MASTER = "master"
NAMES = "state_names"  # in each saved group: what its parameters' states held, so that a lost part is noticed


class StateView(MutableMapping[Any, Any]):
    """The inner optimizer's state with the model's parameters as keys, and their masters in it.

    The tensors are the live ones. The dict of a parameter with a master is made anew each time: what is put into it
    does not reach the optimizer, unless it is assigned as a whole, ``state[p] = {...}``.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, groups: list[dict[str, Any]], masters: Mapping[Tensor, nn.Parameter]
    ) -> None:
        self._inner, self._groups, self._masters = inner, groups, masters

    def __getitem__(self, key: Any) -> Any:
        master = self._masters.get(key) if isinstance(key, Tensor) else None
        if master is None:
            return self._inner.state[key]
        return {MASTER: master.detach(), **self._inner.state.get(master, {})}

    def __contains__(self, key: object) -> bool:
        return key in self._inner.state or (isinstance(key, Tensor) and key in self._masters)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state, or the default; unlike ``state[key]`` it makes nothing."""
        return self.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        master = self._masters.get(key) if isinstance(key, Tensor) else None
        if master is None:
            self._inner.state[key] = value
            return
        if MASTER in value:
            _check_master(value[MASTER], master, f"a parameter of shape {list(key.shape)}")
            with torch.no_grad():
                master.copy_(value[MASTER])
        self._inner.state[master] = {name: v for name, v in value.items() if name != MASTER}

    def __delitem__(self, key: Any) -> None:
        del self._inner.state[self._masters.get(key, key) if isinstance(key, Tensor) else key]

    def __iter__(self) -> Iterator[Any]:
        parameters = dict.fromkeys(p for group in self._groups for p in group["params"])
        yield from (p for p in parameters if p in self._masters or p in self._inner.state)
        inner = set(self._masters.values()) | set(parameters)
        yield from [key for key in self._inner.state if not (isinstance(key, Tensor) and key in inner)]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Note in each group what the states of its parameters hold."""
    for group in state_dict["param_groups"]:
        group[NAMES] = sorted({name for key in group["params"] for name in state_dict["state"].get(key, ())})
    return state_dict


def load(optimizer: MasterWeights, state_dict: Mapping[str, Any]) -> set[str]:
    """Continue from a saved state.

    Returns:
        Names of states that were 16-bit, and have been widened.

    Raises:
        StateError: something does not fit; nothing was loaded.
    """
    groups, keys = _matched_groups(optimizer, state_dict)
    plan = _Plan(optimizer, state_dict["state"], keys)
    for saved in groups:
        plan.require_names(saved)
    new_state = plan.new_state()
    hyperparameters = [
        {name: copy.deepcopy(value) for name, value in saved.items() if name not in ("params", NAMES)}
        for saved in groups
    ]
    # Nothing can fail from here on.
    plan.write()
    inner = optimizer.inner
    inner.state.update(new_state)
    for own, theirs, loaded in zip(optimizer.param_groups, inner.param_groups, hyperparameters, strict=True):
        own.update(loaded)
        theirs.update(loaded)
    # Turns what older torch versions saved into today's form.
    inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
    return plan.narrowed


def _matched_groups(
    optimizer: MasterWeights, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Any, Tensor]]:
    """The saved groups, and which saved key belongs to which parameter."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise bad_state(
            f"its keys are {', '.join(map(str, state_dict)) or 'none'}", "a state has state and param_groups"
        )
    saved, own = state_dict["param_groups"], optimizer.param_groups
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if sizes != own_sizes:
        raise bad_state(
            f"saved groups hold {sizes} parameters, this optimizer's {own_sizes}",
            "states belong to parameters by their place",
            "build the optimizer with the same groups, then load; groups that were added later have to be added first",
        )
    keys = [key for group in saved for key in group["params"]]
    return list(saved), dict(zip(keys, (p for group in own for p in group["params"]), strict=True))


class _Plan:
    """What a load is going to do, found out before anything is written."""

    def __init__(self, optimizer: MasterWeights, states: Mapping[Any, Any], keys: Mapping[Any, Tensor]) -> None:
        self._optimizer, self._states, self._keys = optimizer, states, keys
        self.narrowed: set[str] = set()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._has_masters = any(isinstance(s, Mapping) and MASTER in s for s in states.values())

    def require_names(self, group: Mapping[str, Any]) -> None:
        """Refuse a state from which a whole kind has been lost on its way."""
        found = {name for key in group["params"] for name in self._states.get(key, ())}
        lost = sorted(set(group.get(NAMES, ())) - found)
        if lost:
            raise bad_state(
                f"{', '.join(lost)} was saved and is not there any more",
                "a checkpoint reader that knew only of what this process had left it out",
                "take one step before reading, so that the optimizer has made its state; or use torch.save",
            )

    def new_state(self) -> dict[Any, Any]:
        """For each key of the inner optimizer's state its new content."""
        new: dict[Any, Any] = {}
        for key, saved in self._states.items():
            if key not in self._keys:
                new[key] = copy.deepcopy(saved)
        for key, p in self._keys.items():
            saved = dict(self._states.get(key, {}))
            self._take_master(p, saved.pop(MASTER, None), is_known=key in self._states)
            stepped = self._optimizer._masters.get(p, p)
            state = self._state_of(p, stepped, saved)
            if state is not None:
                new[stepped] = state
        return new

    def _take_master(self, p: Tensor, saved: Any, *, is_known: bool) -> None:
        master = self._optimizer._masters.get(p)
        where = f"a parameter of shape {list(p.shape)}, {p.dtype}"
        if saved is None:
            if master is not None and self._has_masters and is_known:
                raise bad_state(f"{where}, has no master in it", "others have: a part of the state is missing")
            return
        if master is None:
            raise bad_state(
                f"it has a master for {where}{'' if p.requires_grad else ', which is frozen'}",
                "there is no master here that could take it",
                "cast, or unfreeze, the same parameters as in the saved run, then load",
            )
        _check_master(saved, master, where)
        self._copies.append((master.detach(), saved))

    def _state_of(self, p: Tensor, stepped: Tensor, saved: dict[str, Any]) -> dict[str, Any] | None:
        inner = self._optimizer.inner
        now = dict(inner.state.get(stepped, {}))
        saved = {name: v for name, v in saved.items() if not (v is None and name == "momentum_buffer")}
        if not saved:
            if not now:
                return None
            return _fresh(self._optimizer, p, stepped)
        flag = now.pop(initial_state.BEGUN, None)
        missing = sorted(name for name in now if name not in saved)
        if missing:
            raise bad_state(
                f"{', '.join(missing)} of a parameter of shape {list(p.shape)} is missing", "it cannot be made up"
            )
        if flag is not None and initial_state.BEGUN not in saved:  # a plain SGD's: its momentum has begun
            saved[initial_state.BEGUN] = torch.ones_like(flag)
        now = dict(inner.state.get(stepped, {}))
        return {name: self._value(name, v, now.get(name), p, stepped) for name, v in saved.items()}

    def _value(self, name: str, saved: Any, now: Any, p: Tensor, stepped: Tensor) -> Any:
        if not isinstance(saved, Tensor):
            return copy.deepcopy(saved)
        if isinstance(now, Tensor):
            if saved.shape != now.shape:
                raise bad_state(
                    f"{name} has shape {list(saved.shape)}, and belongs to a parameter of shape {list(p.shape)}",
                    "it is the state of another model, or of the same one in another order",
                )
            if saved.dtype in HALF_DTYPES and now.dtype == torch.float32:
                self.narrowed.add(name)
                saved = saved.float()
            if saved.dtype != now.dtype:
                raise bad_state(f"{name} is {saved.dtype}, and {now.dtype} here", "a state is never narrowed")
            self._copies.append((now, saved))
            return now
        device = saved.device if saved.dim() == 0 and name == "step" else stepped.device
        return saved.detach().to(device, copy=True)

    def write(self) -> None:
        """Copy into the tensors that are there."""
        with torch.no_grad():
            for target, saved in self._copies:
                if not target.is_set_to(saved):
                    target.copy_(saved)


def _check_master(saved: Any, master: Tensor, where: str) -> None:
    if not isinstance(saved, Tensor) or saved.dtype != torch.float32 or saved.shape != master.shape:
        is_tensor = isinstance(saved, Tensor)
        found = f"{saved.dtype} of shape {list(saved.shape)}" if is_tensor else f"a {type(saved).__name__}"
        raise bad_state(f"the master of {where}, is {found}", "a master is fp32 of its shape")


def _fresh(optimizer: MasterWeights, p: Tensor, stepped: Tensor) -> dict[str, Any]:
    """The state of a parameter that the saved run never stepped."""
    inner = optimizer.inner
    before = inner.state.pop(stepped)
    try:
        group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
        initial_state.create(inner, group, stepped)
        return dict(inner.state.get(stepped, {}))
    finally:
        inner.state[stepped] = before
