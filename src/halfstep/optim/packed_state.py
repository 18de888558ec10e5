"""The state of a packed optimizer: saved, checked, loaded whole or not at all, converted between storages.

A saved state is that of ``torch.optim.Optimizer.state_dict``: tensors in their storages, and in each group the names of
the storages. Beside it lie the dtype of a 16-bit weight, and the sum of its bits: in other storages the full value has
to be put together from weight and rest, and the model may not have been loaded yet.

Everything is converted and checked before anything is written. What has the same storage is copied, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionWarning, warn
from halfstep.formats import HALF_DTYPES
from halfstep.kernels import storage
from halfstep.kernels.rounding import rounded
from halfstep.kernels.storage import Master, Moment
from halfstep.optim import keeping
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.keeping import CODES, MASTER, REST, SCALES, STEP
from halfstep.optim.packed_members import has_memory
from halfstep.optim.packed_refusals import bad_state

if TYPE_CHECKING:
    from halfstep.optim.packed import PackedOptimizer
    from halfstep.optim.packed_members import Member

WEIGHT_SUM, WEIGHT_DTYPE = "weight_sum", "weight_dtype"  # the dtype is that of a 0-dim tensor
_WITH_REST = tuple(name for name, kind in keeping.MASTERS.items() if kind in keeping.REST_DTYPES)
_OWN_OPTIONS = ("master", "moments")  # of a group: the storages stay what they are
_NOT_LOADED = ("params", "state_names", *_OWN_OPTIONS)  # state_names: MasterWeights' own


# -- saving -----------------------------------------------------------------------------------------------------------


def with_weight_sums(optimizer: PackedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Note beside the state of each 16-bit weight which weight it belongs to."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for key, p in zip(
        (key for group in state_dict["param_groups"] for key in group["params"]), parameters, strict=True
    ):
        state = state_dict["state"].get(key)
        if state is not None and p.dtype in HALF_DTYPES:
            dtype = torch.zeros((), dtype=p.dtype, device=p.device)
            state_dict["state"][key] = {**state, WEIGHT_SUM: _weight_sum(p), WEIGHT_DTYPE: dtype}
    return state_dict


def _weight_sum(p: Tensor) -> Tensor:
    """A number that other weights hardly have: 0-dim int64."""
    return p.detach().view(torch.int16).sum(dtype=torch.int64)


# -- what somebody may have changed -----------------------------------------------------------------------------------


def check_state(optimizer: PackedOptimizer, member: Member, state: Mapping[str, Any]) -> None:
    """Refuse a parameter or a state that was exchanged for one that does not fit."""
    p, (_, _, shape, strides, dtype) = member.parameter, member.places[0]
    device = member.slot.weight.device
    if (dtype, shape, strides, device) != (p.dtype, p.shape, p.stride(), p.device):
        was = f"{dtype}, {list(shape)} with strides {list(strides)} on {device}"
        now = f"{p.dtype}, {list(p.shape)} with strides {list(p.stride())} on {p.device}"
        raise refusals.changed(optimizer, p, was, now)
    if not has_memory(p):
        raise refusals.freed(optimizer, "the weight", p)
    for name, before in keeping.new_state(torch.empty_like(p, device="meta"), member.keeping).items():
        value = state.get(name)
        if isinstance(value, Tensor) and _layout(value) == _layout(before) and not has_memory(value):
            raise refusals.freed(optimizer, name, p)
        if not isinstance(value, Tensor) or _layout(value) != _layout(before) or value.device != p.device:
            raise refusals.bad_value(optimizer, p, name, value)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


# -- loading ----------------------------------------------------------------------------------------------------------


def checked(state_dict: Any) -> dict[str, Any]:
    """A saved state, as far as it can be seen at once that it is one."""
    if not isinstance(state_dict, Mapping):
        raise bad_state(f"it is of type {type(state_dict).__name__}", "a state is a dict with state and param_groups")
    return dict(state_dict)


def load(optimizer: PackedOptimizer, state_dict: Mapping[str, Any], *, lossy: bool) -> None:
    """Continue from a saved state, or raise StateError and change nothing."""
    groups, keys = _matched(optimizer, state_dict)
    plan = _Plan(optimizer, has_storages=any("master" in group for group in groups), lossy=lossy)
    for group in groups:
        for key in group["params"]:
            plan.add(keys[key], state_dict["state"].get(key), group.get("master"))
    options = [
        {name: copy.deepcopy(value) for name, value in saved.items() if name not in _NOT_LOADED} for saved in groups
    ]
    for own, saved in zip(optimizer.param_groups, options, strict=True):
        saved.update(optimizer.fixed_options)
        optimizer.check_options({**own, **saved})
    # A state that was saved from here, in another order, shares memory with what is written.
    written = {target.untyped_storage()._cdata for target, _ in plan.writes}
    plan.writes = [(to, v.clone() if v.untyped_storage()._cdata in written else v) for to, v in plan.writes]
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
    are_groups = isinstance(saved, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in saved)
    if not are_groups or not isinstance(state_dict["state"], Mapping):
        raise bad_state("its state is no dict, or its param_groups no list of groups with params", "a state has both")
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if sizes != own_sizes:
        raise bad_state(
            f"saved groups hold {sizes} parameters, this optimizer's {own_sizes}",
            "states belong to parameters by their place",
            "build the optimizer with the same groups, then load; groups that were added later have to be added first",
        )
    keys = [key for group in saved for key in group["params"]]
    if len(set(keys)) < len(keys):
        raise bad_state("a parameter is listed twice in its groups", "states belong to parameters by their place")
    return list(saved), dict(zip(keys, (p for group in own for p in group["params"]), strict=True))


class _Plan:
    """What a load is going to write, found out before anything is written."""

    def __init__(self, optimizer: PackedOptimizer, *, has_storages: bool, lossy: bool) -> None:
        self._optimizer, self._has_storages, self._is_lossy = optimizer, has_storages, lossy
        self.writes: list[tuple[Tensor, Tensor]] = []
        self.narrowed: set[str] = set()
        self._names = refusals.names_of(optimizer)
        self._who = ""  # the parameter that is being added, in words

    def add(self, p: Tensor, saved: Any, kept: str | None) -> None:
        """Plan the state of one parameter, whose saved group names this storage of masters."""
        member, own = self._optimizer._members.get(p), self._optimizer.state.get(p)
        self._who = refusals.described(p, self._names.get(p))
        if not isinstance(saved or {}, Mapping):
            raise bad_state(f"the state of {self._who} is of type {type(saved).__name__}", "it is a dict of tensors")
        saved = {name: v for name, v in dict(saved or {}).items() if v is not None}
        if member is None or own is None:
            if saved:
                raise bad_state(
                    f"it has a state for {self._who}, which is frozen",
                    "there is none here that could take it",
                    "unfreeze the same parameters as in the saved run, then load",
                )
            return
        names = member.keeping.names
        of_moments = [name + ending for name in names for ending in ("", CODES, SCALES)]
        known = {STEP, MASTER, REST, WEIGHT_SUM, WEIGHT_DTYPE, "momentum_begun", *of_moments}
        if unknown := sorted(set(saved) - known):
            raise bad_state(
                f"it has {', '.join(unknown)} for {self._who}",
                f"{type(self._optimizer).__name__} keeps {', '.join(names) or 'no moment'}",
            )
        for name in saved.keys() - {STEP, "momentum_begun"}:
            _check_tensor(self._who, name, saved[name])
        self._add_step(own, saved, names)
        for which, name in enumerate(names):
            self._add_moment(p, own, saved, which, name, member.keeping.moment)
        if kept in _WITH_REST and WEIGHT_DTYPE in saved and not {MASTER, REST} & set(saved):
            raise bad_state(f"the rest of {self._who} is missing", "it cannot be made up")
        self._add_master(p, member, own, saved)

    def _add_step(self, own: Mapping[str, Tensor], saved: Mapping[str, Any], names: tuple[str, ...]) -> None:
        has_begun = any(_has_moment(saved, name) for name in names) and bool(saved.get("momentum_begun", 1.0))
        number = saved.get(STEP, float(has_begun))  # torch's SGD keeps none
        is_one = isinstance(number, (int, float)) or (isinstance(number, Tensor) and number.numel() == 1)
        if not is_one or not 0 <= float(number) < math.inf:
            raise bad_state(f"a step counter is {number!r}", "it counts steps")
        step = torch.as_tensor(number, dtype=torch.float32, device="cpu")
        self.writes.append((own[STEP], step.reshape(())))

    def _add_moment(
        self, p: Tensor, own: Mapping[str, Tensor], saved: Mapping[str, Any], which: int, name: str, kind: Moment
    ) -> None:
        parts = keeping.names_of_moment(name, kind)
        if not _has_moment(saved, name):
            if float(saved.get(STEP, 0.0)) > 0:
                raise bad_state(f"{name} of {self._who} is missing", "it cannot be made up")
            self.writes += [(own[part], torch.zeros_like(own[part])) for part in parts]
            return
        values, scales = _saved_moment(self._who, name, saved)
        _check_shape(self._who, p, name, values)
        _check_scales(self._who, p, name, values, scales)
        _check_values(self._who, name, values, which)
        if scales is not None:
            _check_values(self._who, name + SCALES, scales, which)
        if values.dtype == keeping.DTYPES[kind]:
            self.writes += [(own[part], saved[part]) for part in parts]
            return
        if values.dtype in HALF_DTYPES and MASTER not in saved and not self._has_storages:
            self.narrowed.add(name)
        self._convert_moment(own, name, which, kind, self._widened(name, values, scales, which))

    def _widened(self, name: str, values: Tensor, scales: Tensor | None, which: int) -> Tensor:
        if values.dtype in (torch.int8, torch.float32, torch.bfloat16):
            return keeping.moment_value(values, scales, which)
        if values.dtype == torch.float16:
            return values.float()
        raise bad_state(f"{name} of {self._who} is {values.dtype}", "moments are fp32, bf16 or int8")

    def _convert_moment(self, own: Mapping[str, Tensor], name: str, which: int, kind: Moment, value: Tensor) -> None:
        packed = keeping.packed_moment(value, kind, which)
        back = keeping.moment_value(packed[keeping.values_name("", kind)], packed.get(SCALES), which)
        if not self._is_lossy and not torch.equal(back, value):
            raise refusals.lossy(name, self._who, f"moments={kind.name.lower()!r}")
        self.writes += [(own[name + suffix], tensor) for suffix, tensor in packed.items()]

    def _add_master(self, p: Tensor, member: Member, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        name, kind = member.keeping.rest_name, member.keeping.master
        for part, dtypes in ((MASTER, (torch.float32,)), (REST, (torch.int16, torch.int8))):
            if part in saved:
                _check_shape(self._who, p, part, saved[part])
                if saved[part].dtype not in dtypes:
                    raise bad_state(f"{part} is {saved[part].dtype}", f"it is {' or '.join(map(str, dtypes))}")
        if MASTER in saved:
            _check_values(self._who, MASTER, saved[MASTER], 0)
        is_there = name is not None and name in saved and _saved_dtype(p, saved) == p.dtype
        if name is not None and is_there and saved[name].dtype == own[name].dtype:
            self.writes.append((own[name], saved[name]))
            return
        value = self._saved_value(p, saved)
        if value is None:
            # The weights are all that there was. If they were fp32, this optimizer was built from them, and has kept
            # what they lost.
            if WEIGHT_DTYPE in saved and name is not None:
                self.writes.append((own[name], p.detach().float() if name == MASTER else torch.zeros_like(own[name])))
            return
        if p.dtype not in HALF_DTYPES:
            self.writes.append((p.detach(), value))
            return
        weight, rest = torch.empty_like(p, requires_grad=False), None if name is None else torch.empty_like(own[name])
        keeping.split_into(weight, rest, value, kind)
        if not self._is_lossy and not torch.equal(keeping.master_value(weight, rest, kind), value):
            raise refusals.lossy("the full value", self._who, f"master={kind.name.lower()!r}")
        self.writes.append((p.detach(), weight))
        if name is not None and rest is not None:
            self.writes.append((own[name], rest))

    def _saved_value(self, p: Tensor, saved: Mapping[str, Any]) -> Tensor | None:
        """The fp32 value that was saved; None if the weights were all of it."""
        dtype = _saved_dtype(p, saved)
        if MASTER in saved:
            master: Tensor = saved[MASTER].to(p.device)
            if dtype == p.dtype and dtype in HALF_DTYPES and not torch.equal(rounded(master, dtype), p.detach()):
                raise refusals.other_weights(self._who)
            return master
        if REST not in saved:
            return None
        weight = p.detach().to(dtype)  # fp32 weights that were loaded from 16-bit ones are as good
        is_saved = dtype in HALF_DTYPES and torch.equal(weight.float(), p.detach().float())
        if not is_saved or WEIGHT_SUM not in saved or int(saved[WEIGHT_SUM]) != int(_weight_sum(weight)):
            raise refusals.other_weights(self._who)
        kind = Master.SPLIT if saved[REST].dtype == torch.int16 else Master.SPLIT8
        return keeping.master_value(weight, saved[REST].to(p.device), kind)


def _has_moment(saved: Mapping[str, Any], name: str) -> bool:
    return name in saved or name + CODES in saved


def _saved_moment(who: str, name: str, saved: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Values and scales of a moment: int8 under the name of codes, and floating under the moment's own, not both."""
    has_codes = name + CODES in saved
    values = saved[name + CODES] if has_codes else saved[name]
    if has_codes and name in saved:
        raise bad_state(f"{who} has {name} and {name}{CODES}", "one would be dropped")
    if has_codes != (values.dtype == torch.int8):
        found = name + CODES if has_codes else name
        raise bad_state(
            f"{found} of {who} is {values.dtype}",
            f"moments are fp32 or bf16, and int8 under the name {name}{CODES}",
        )
    return values, saved.get(name + SCALES)


def _saved_dtype(p: Tensor, saved: Mapping[str, Any]) -> torch.dtype:
    """That of the weight which a state was saved beside."""
    return saved[WEIGHT_DTYPE].dtype if WEIGHT_DTYPE in saved else p.dtype


def _check_tensor(who: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise bad_state(
            f"{name} of {who} is {type(value).__name__}",
            "it is a dense tensor, with values",
        )
    if not has_memory(value):
        raise bad_state(f"the memory of {name} of {who} was freed", "it has no values")
    is_right = {WEIGHT_SUM: value.dtype == torch.int64, WEIGHT_DTYPE: value.dtype in HALF_DTYPES}.get(name)
    if is_right is not None and (value.numel() != 1 or not is_right):
        raise bad_state(f"{name} is {value.dtype} of shape {list(value.shape)}", "it says which weight it belongs to")


def _check_shape(who: str, p: Tensor, name: str, values: Tensor) -> None:
    if values.shape != p.shape:
        raise bad_state(
            f"{name} has shape {list(values.shape)}, and belongs to {who}",
            "it is the state of another model, or of the same one in another order",
        )


def _check_scales(who: str, p: Tensor, name: str, values: Tensor, scales: Tensor | None) -> None:
    if (values.dtype == torch.int8) != (scales is not None):
        with_or_without = "with" if scales is not None else "without"
        raise bad_state(f"{name} is {values.dtype}, {with_or_without} scales", "only int8 has them")
    if scales is None:
        return
    kept = keeping.Keeping(Master.NONE, Moment.INT8, (name,), ("", "")) if p.dim() > 1 and p.numel() else None
    wanted = None if kept is None else keeping.new_state(torch.empty_like(p, device="meta"), kept)[name + SCALES]
    if wanted is None or (wanted.shape, wanted.dtype) != (scales.shape, scales.dtype):
        raise bad_state(
            f"scales of {name} are {scales.dtype} of shape {list(scales.shape)}",
            f"{who} has another number of groups, or none",
        )


def _check_values(who: str, name: str, values: Tensor, which: int) -> None:
    """Nothing that these optimizers have written is inf or NaN, and no second moment is negative."""
    if name.endswith(SCALES) and bool(((values.to(torch.int32) & 0xFFFF) > storage.LARGEST_SCALE).any()):
        raise bad_state(f"{name} of {who} has a scale of inf or NaN", "it was damaged")
    if not values.is_floating_point() or not values.numel():
        return
    lowest, highest = (float(value) for value in torch.aminmax(values.detach()))
    if not -math.inf < lowest <= highest < math.inf or (which == 1 and lowest < 0):
        raise bad_state(
            f"{name} of {who} has values from {lowest:g} to {highest:g}",
            "a step with inf, NaN or a negative second moment would spread it over the weights",
            "load a state from before the run diverged",
        )


# -- the way out ------------------------------------------------------------------------------------------------------


def as_torch(optimizer: PackedOptimizer, torch_class: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """torch's optimizer of the same parameters, made fp32, with the same state."""
    states: dict[Tensor, dict[str, Any]] = {}
    for p, member in list(optimizer._members.items()):
        member, state = optimizer._present(optimizer._members[p]), optimizer.state[p]
        if p.dtype in HALF_DTYPES:
            p.grad, p.data = None, optimizer.full_weight(p)
        moments = {
            name: keeping.moment_value(
                state[keeping.values_name(name, member.keeping.moment)], state.get(name + SCALES), which
            )
            for which, name in enumerate(member.keeping.names)
        }
        kept = moments if torch_class is torch.optim.SGD else {STEP: state[STEP].clone(), **moments}
        if float(state[STEP]) > 0 and kept:  # torch makes a state with the first step
            states[p] = kept
    own = ("params", *_OWN_OPTIONS, "seed")
    groups = [
        {"params": group["params"], **{name: value for name, value in group.items() if name not in own}}
        for group in optimizer.param_groups
    ]
    plain = torch_class(groups)
    plain.state.update(states)
    for group in plain.param_groups:
        for p in group["params"]:
            if STEP in plain.state.get(p, {}) and not (group.get("capturable") or group.get("fused")):
                plain.state[p][STEP] = plain.state[p][STEP].cpu()  # torch reads it on the host, in every step
    return plain
