"""The state of a packed optimizer: saved, checked, loaded whole or not at all, converted between storages.

A saved state is that of ``torch.optim.Optimizer.state_dict``: tensors in their storages, and in each group the names of
the storages. Beside a rest lies the sum of the weights that it belongs to: in other storages the full value has to be
put together from both, and the model may not have been loaded yet.

Everything is converted and checked before anything is written. What has the same storage is copied, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionWarning, warn
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.rounding import rounded
from halfstep.kernels.storage import Master
from halfstep.optim import keeping
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.keeping import MASTER, REST, SCALES, STEP
from halfstep.optim.packed_refusals import bad_state

if TYPE_CHECKING:
    from halfstep.optim.packed import Member, PackedOptimizer

WEIGHT_SUM = "weight_sum"
_OWN_OPTIONS = ("master", "moments")  # of a group: the storages stay what they are


# -- saving -----------------------------------------------------------------------------------------------------------


def with_weight_sums(optimizer: PackedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Note beside each rest which weights it belongs to."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for key, p in zip(
        (key for group in state_dict["param_groups"] for key in group["params"]), parameters, strict=True
    ):
        state = state_dict["state"].get(key)
        if state is not None and REST in state:
            state_dict["state"][key] = {**state, WEIGHT_SUM: _weight_sum(p)}
    return state_dict


def _weight_sum(p: Tensor) -> Tensor:
    """A number that other weights hardly have: 0-dim int64."""
    return p.detach().view(torch.int16).sum(dtype=torch.int64)


# -- what somebody may have changed -----------------------------------------------------------------------------------


def check_state(p: Tensor, member: Member, state: Mapping[str, Any]) -> None:
    """Refuse a parameter or a state that was exchanged for one that does not fit."""
    *_, dtype, shape, strides = member.place
    device = member.slot.weight.device
    if (dtype, shape, strides, device) != (p.dtype, p.shape, p.stride(), p.device):
        was = f"{dtype}, {list(shape)} with strides {list(strides)} on {device}"
        raise refusals.changed(p, was, f"{p.dtype}, {list(p.shape)} with strides {list(p.stride())} on {p.device}")
    for name, before in keeping.new_state(torch.empty_like(p, device="meta"), member.keeping).items():
        value = state.get(name)
        if not isinstance(value, Tensor) or _layout(value) != _layout(before) or value.device != p.device:
            raise refusals.bad_value(p, name, value)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


# -- loading ----------------------------------------------------------------------------------------------------------


def load(optimizer: PackedOptimizer, state_dict: Mapping[str, Any], *, lossy: bool) -> None:
    """Continue from a saved state, or raise StateError and change nothing."""
    groups, keys = _matched(optimizer, state_dict)
    plan = _Plan(optimizer, has_storages=any("master" in group for group in groups), lossy=lossy)
    for key, p in keys.items():
        plan.add(p, state_dict["state"].get(key))
    options = [
        {name: copy.deepcopy(value) for name, value in saved.items() if name not in ("params", *_OWN_OPTIONS)}
        for saved in groups
    ]
    for own, saved in zip(optimizer.param_groups, options, strict=True):
        optimizer.check_group({**own, **saved})
    # Nothing can fail from here on.
    for target, value in plan.writes:
        if not target.is_set_to(value):
            target.copy_(value)
    for own, saved in zip(optimizer.param_groups, options, strict=True):
        own.update(saved)
    if plan.narrowed:
        warn(
            f"The state {', '.join(sorted(plan.narrowed))} was kept in 16 bits by a plain optimizer. What it has lost"
            " (in fp16 second moments below 3e-8 are 0) does not come back: the next steps may be too large. Warm the"
            " learning rate up again.",
            PrecisionWarning,
        )


def _matched(
    optimizer: PackedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Any, Tensor]]:
    """The saved groups, and which saved key belongs to which parameter."""
    if not {"state", "param_groups"} <= set(state_dict):
        found = ", ".join(map(str, state_dict)) or "none"
        raise bad_state(f"its keys are {found}", "a state has state and param_groups")
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
    """What a load is going to write, found out before anything is written."""

    def __init__(self, optimizer: PackedOptimizer, *, has_storages: bool, lossy: bool) -> None:
        self._optimizer, self._has_storages, self._is_lossy = optimizer, has_storages, lossy
        self.writes: list[tuple[Tensor, Tensor]] = []
        self.narrowed: set[str] = set()

    def add(self, p: Tensor, saved: Any) -> None:
        """Plan the state of one parameter."""
        member, own = self._optimizer._members.get(p), self._optimizer.state.get(p)
        saved = {name: v for name, v in dict(saved or {}).items() if v is not None}
        if member is None or own is None:
            if saved:
                raise bad_state(
                    f"it has a state for a parameter of shape {list(p.shape)}, which is frozen",
                    "there is none here that could take it",
                    "unfreeze the same parameters as in the saved run, then load",
                )
            return
        names = member.keeping.names
        known = {STEP, MASTER, REST, WEIGHT_SUM, "momentum_begun", *names, *(name + SCALES for name in names)}
        if unknown := sorted(set(saved) - known):
            raise bad_state(
                f"it has {', '.join(unknown)} for a parameter of shape {list(p.shape)}",
                f"{type(self._optimizer).__name__} keeps {', '.join(names) or 'no moment'}",
            )
        self._add_step(own, saved, names)
        for which, name in enumerate(names):
            self._add_moment(p, own, saved, which, name)
        self._add_master(p, member, own, saved)

    def _add_step(self, own: Mapping[str, Tensor], saved: Mapping[str, Any], names: tuple[str, ...]) -> None:
        has_begun = any(name in saved for name in names) and bool(saved.get("momentum_begun", 1.0))
        step = torch.as_tensor(saved.get(STEP, float(has_begun)), dtype=torch.float32)  # torch's SGD keeps none
        if step.numel() != 1 or not bool(step.isfinite()) or bool(step < 0):
            raise bad_state(f"a step counter is {saved[STEP]}", "it counts steps")
        self.writes.append((own[STEP], step.reshape(())))

    def _add_moment(
        self, p: Tensor, own: Mapping[str, Tensor], saved: Mapping[str, Any], which: int, name: str
    ) -> None:
        if name not in saved:
            if saved.get(STEP) is not None and float(saved[STEP]) > 0:
                raise bad_state(f"{name} of a parameter of shape {list(p.shape)} is missing", "it cannot be made up")
            self.writes += [(own[part], torch.zeros_like(own[part])) for part in (name, name + SCALES) if part in own]
            return
        values, scales = saved[name], saved.get(name + SCALES)
        if not isinstance(values, Tensor) or values.shape != p.shape:
            raise bad_state(
                f"{name} has shape {list(getattr(values, 'shape', []))}, and belongs to one of shape {list(p.shape)}",
                "it is the state of another model, or of the same one in another order",
            )
        if (values.dtype == torch.int8) != (scales is not None):
            raise bad_state(
                f"{name} is {values.dtype}, {'with' if scales is not None else 'without'} scales", "only int8 has them"
            )
        if values.dtype == own[name].dtype:
            self.writes.append((own[name], values))
            if scales is not None:
                if scales.shape != own[name + SCALES].shape:
                    raise bad_state(f"scales of {name} have shape {list(scales.shape)}", "groups lie in rows otherwise")
                self.writes.append((own[name + SCALES], scales))
            return
        if values.dtype in HALF_DTYPES and MASTER not in saved and not self._has_storages:
            self.narrowed.add(name)
        self._convert_moment(p, own, name, which, self._widened(p, name, values, scales, which))

    def _widened(self, p: Tensor, name: str, values: Tensor, scales: Tensor | None, which: int) -> Tensor:
        if values.dtype in (torch.int8, torch.float32, torch.bfloat16):
            return keeping.moment_value(values, scales, which)
        if values.dtype == torch.float16:
            return values.float()
        raise bad_state(
            f"{name} of a parameter of shape {list(p.shape)} is {values.dtype}", "moments are fp32, bf16 or int8"
        )

    def _convert_moment(self, p: Tensor, own: Mapping[str, Tensor], name: str, which: int, value: Tensor) -> None:
        kind = next(kind for kind, dtype in keeping.DTYPES.items() if dtype == own[name].dtype)
        packed = keeping.packed_moment(value, kind, which)
        back = keeping.moment_value(packed[""], packed.get(SCALES), which)
        if not self._is_lossy and not torch.equal(back, value):
            raise refusals.lossy(name, p, f"moments={kind.name.lower()!r}")
        self.writes += [(own[name + suffix], tensor) for suffix, tensor in packed.items()]

    def _add_master(self, p: Tensor, member: Member, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        name, kind = member.keeping.rest_name, member.keeping.master
        for part in (MASTER, REST):
            if part in saved and saved[part].shape != p.shape:
                raise bad_state(
                    f"{part} has shape {list(saved[part].shape)}, its parameter {list(p.shape)}", "they belong together"
                )
        if name is not None and name in saved and saved[name].dtype == own[name].dtype:
            self.writes.append((own[name], saved[name]))
            return
        value = self._saved_value(p, saved)
        if value is None:
            # The weights are all that was saved: a run without masters had no more. torch's had fp32 weights, which
            # this optimizer was built from.
            if self._has_storages and name is not None:
                self.writes.append((own[name], p.detach().float() if name == MASTER else torch.zeros_like(own[name])))
            return
        if p.dtype not in HALF_DTYPES:
            self.writes.append((p.detach(), value))
            return
        weight, rest = torch.empty_like(p, requires_grad=False), None if name is None else torch.empty_like(own[name])
        keeping.split_into(weight, rest, value, kind)
        if not self._is_lossy and not torch.equal(keeping.master_value(weight, rest, kind), value):
            raise refusals.lossy("the full value", p, f"master={kind.name.lower()!r}")
        self.writes.append((p.detach(), weight))
        if name is not None and rest is not None:
            self.writes.append((own[name], rest))

    def _saved_value(self, p: Tensor, saved: Mapping[str, Any]) -> Tensor | None:
        """The fp32 value that was saved; None if the weights were all of it."""
        if MASTER in saved:
            if p.dtype in HALF_DTYPES and not torch.equal(rounded(saved[MASTER], p.dtype), p.detach()):
                raise refusals.other_weights(p)
            master: Tensor = saved[MASTER]
            return master.to(p.device)
        if REST not in saved:
            return None
        if WEIGHT_SUM not in saved or p.dtype not in HALF_DTYPES or int(saved[WEIGHT_SUM]) != int(_weight_sum(p)):
            raise refusals.other_weights(p)
        kind = Master.SPLIT if saved[REST].dtype == torch.int16 else Master.SPLIT8
        return keeping.master_value(p, saved[REST].to(p.device), kind)


# -- the way out ------------------------------------------------------------------------------------------------------


def as_torch(optimizer: PackedOptimizer, torch_class: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """torch's optimizer of the same parameters, made fp32, with the same state."""
    states: dict[Tensor, dict[str, Any]] = {}
    for p, member in list(optimizer._members.items()):
        member, state = optimizer._present(p), optimizer.state[p]
        if p.dtype in HALF_DTYPES:
            p.grad, p.data = None, optimizer.full_weight(p)
        moments = {
            name: keeping.moment_value(state[name], state.get(name + SCALES), which)
            for which, name in enumerate(member.keeping.names)
        }
        if float(state[STEP]) > 0:
            step = {} if torch_class is torch.optim.SGD else {STEP: state[STEP].clone()}
            states[p] = {**step, **moments}
    own = ("params", *_OWN_OPTIONS, "seed")
    groups = [
        {"params": group["params"], **{name: value for name, value in group.items() if name not in own}}
        for group in optimizer.param_groups
    ]
    plain = torch_class(groups)
    plain.state.update(states)
    return plain
