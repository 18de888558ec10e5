"""An optimizer whose weights are 16-bit, whose step is fp32, and whose state is packed in few bytes.

The subclasses (optimizers.py) bring a rule and its hyperparameters. Here is what they share:

    cast        with a master policy, fp32 weights become 16-bit, and what they lose is kept
    keep        the whole state exists before the first step (keeping.py)
    look        nobody has looked at the gradients yet? one read: finite? which norm?
    step        one turn of an executor for each device: gradient, master and moments are read once and written once
    count       saturated weights, skipped steps, and on request updates that round to nothing

Nothing of a step is read on the host unless the host is the device.

Whatever somebody else writes into a weight holds (kernels/torch_step.py, ``read_master``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host, moved
from halfstep.errors import HalfstepWarning, PrecisionWarning, SkippedStepWarning, warn
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.choose import NAMES, Executor, choose
from halfstep.kernels.found_inf import any_found_inf
from halfstep.kernels.gradients import drop_sum, gradient_of
from halfstep.kernels.inspect import Inspection, inspect, inspect_whole
from halfstep.kernels.overlap import overlap
from halfstep.kernels.rules import SGD, Rule
from halfstep.kernels.slots import Slot, Turn
from halfstep.kernels.storage import Master
from halfstep.optim import keeping, packed_refusals, packed_state
from halfstep.optim.packed_members import Member, Row, checked_gradient, new_member
from halfstep.optim.packed_numbers import numbers_of
from halfstep.optim.packed_options import (
    check_keys,
    check_master_has_effect,
    check_options,
    check_parameter,
    checked_clip_norm,
    checked_seed,
    storages_of,
)
from halfstep.policy import Policy

_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_: with it a run that moves here keeps its numbers


TorchClass = Callable[..., torch.optim.Optimizer]


class PackedOptimizer(torch.optim.Optimizer):
    """What AdamW, Adam, SGD and Lion share; see there."""

    _step_supports_amp_scaling = True  # torch's GradScaler and ours hand over grad_scale and found_inf
    rule: Rule
    torch_class: TorchClass | None = None
    fixed_options: Mapping[str, Any] = {}  # of every group, whatever a saved state says

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        policy: str | Policy | None = None,
        master: str | None = None,
        moments: str | None = None,
        executor: str = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        self._cast_dtype, storages = storages_of(policy, master, moments)
        self._says_none = policy is not None and storages["master"] == "none"  # parsing it has warned
        if executor not in NAMES:
            choose(torch.device("cpu"), 0, executor)  # says what there is
        self._wanted_executor, self._executors = executor, dict[torch.device, Executor]()
        self._last_slots: dict[torch.device, tuple[list[Slot], dict[str, Any]]] = {}
        self._clip_norm: float | None = None
        self.clip_norm = clip_norm
        self._members: dict[Tensor, Member] = {}
        self._begin_counting()
        self._is_building = True
        super().__init__(params, {**defaults, **storages, "seed": checked_seed(seed)})
        self._is_building = False
        if self._cast_dtype is None:
            parameters = (p for group in self.param_groups for p in group["params"])
            check_master_has_effect(self, master, parameters, of_group=False)
        self._take_in(self.param_groups, may_cast=True)

    def _begin_counting(self) -> None:
        self._is_taken_off = False
        self._has_moved = False
        self._has_warned = False
        self.count_stalled = False
        self._totals: dict[str, Tensor] = {}
        self._stalled: dict[torch.device, Tensor] = {}
        self.is_released = False  # gradients are used by a GradientRelease, as soon as they exist

    # -- parameters -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its own ``master`` and ``moments`` may differ from the others'.

        Args:
            param_group: ``{"params": ..., "lr": ...}``; what is left out has the optimizer's defaults.
        """
        self._check_in_use("add_param_group()")
        own_master = None
        if isinstance(param_group, dict):  # else torch says what it should be
            check_keys(self, param_group, self.defaults)
            is_whole = self.defaults.keys() <= param_group.keys()  # an optimizer's: nobody has asked for all of it
            own_master = None if is_whole else param_group.get("master")  # torch is going to put the defaults in
        super().add_param_group(param_group)
        try:
            if self._cast_dtype is None:
                check_master_has_effect(self, own_master, self.param_groups[-1]["params"], of_group=True)
            if not self._is_building:
                self._take_in(self.param_groups[-1:], may_cast=True)
        except BaseException:
            self.param_groups.pop()
            raise

    def _take_in(self, groups: Iterable[dict[str, Any]], *, may_cast: bool = False) -> None:
        """Make members of trainable parameters that are none yet. All are checked before the first is changed."""
        groups = list(groups)
        for group in groups:
            self.check_options(group)
        self._begin_momentum(groups)
        new = [(group, p) for group in groups for p in group["params"] if p not in self._members and p.requires_grad]
        if not new:
            return
        dtype = self._cast_dtype if may_cast else None
        if self._wanted_executor != "auto":
            for device in {p.device for _, p in new}:
                choose(device, 0, self._wanted_executor)  # says if it cannot run there
        for _, p in new:
            check_parameter(self, p, dtype)
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if len(set(trained)) < len(trained):
            raise packed_refusals.listed_twice(self)
        if overlap(trained):
            raise packed_refusals.overlap(self)
        bare = [p for group, p in new if group["master"] == "none" and (p.dtype in HALF_DTYPES or dtype is not None)]
        if bare and not self._says_none:
            warn(packed_refusals.bare_text(self, len(bare)), PrecisionWarning)
        numbers = {p: number for number, p in enumerate(p for g in self.param_groups for p in g["params"])}
        with torch.inference_mode(False), torch.no_grad():
            for group, p in new:
                self._new_member(group, p, numbers[p], dtype)
        self._executors.clear()

    def _begin_momentum(self, groups: Iterable[dict[str, Any]]) -> None:
        """SGD's momentum may begin at any step: OneCycleLR sets it in groups that were built without."""
        late = [
            (group, p)
            for group in groups
            if self.rule is SGD and group["momentum"]
            for p in group["params"]
            if p in self._members and not self._members[p].keeping.names
        ]
        if any(group["dampening"] for group, _ in late):
            raise packed_refusals.late_dampening(self)
        for _, p in late:
            self._present(self._members[p])  # before the first is changed
        for group, p in late:
            kept = keeping.keeping_of(p, group, self.rule)
            self.state[p] = {**keeping.new_state(p, kept), **self.state[p]}
            self._members[p] = new_member(p, self.state[p], self._members[p].number, kept)

    def _new_member(self, group: dict[str, Any], p: Tensor, number: int, dtype: torch.dtype | None) -> None:
        weight, value = p.detach(), None
        if dtype is not None and p.dtype == torch.float32:
            weight, value = torch.empty_like(weight, dtype=dtype), weight
        kept = keeping.keeping_of(weight, group, self.rule)
        state = keeping.new_state(weight, kept, value)
        if value is not None:
            rest = state[kept.rest_name] if kept.rest_name is not None else None
            keeping.split_into(weight, rest, value, kept.master)
            p.data = weight  # last: where memory does not suffice, the parameter is what it was
        self.state[p] = state
        self._members[p] = new_member(p, state, number, kept)

    def _present(self, member: Member) -> Member:
        """The member, with a slot that is where its tensors are now."""
        p = member.parameter
        state = self.state[p]
        if member.is_present(state):
            return member
        packed_state.check_state(self, member, state)
        self._members[p] = new_member(p, state, member.number, member.keeping)
        self._has_moved = True
        return self._members[p]

    def _check_members(self) -> None:
        """Raise if a parameter or its state is not what it was."""
        for member in [*self._members.values()]:
            self._present(member)
        self._check_overlap()

    def _check_overlap(self) -> None:
        """Raise if weights that were moved share memory now: two threads would write it."""
        if self._has_moved and overlap([*self._members]):
            raise packed_refusals.overlap(self)
        self._has_moved = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; fp32 sums of gradients (``p.fp32_grad``) are dropped too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                drop_sum(p)

    @property
    def clip_norm(self) -> float | None:
        """Largest norm of the true gradient of a step; None clips nothing."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        self._clip_norm = checked_clip_norm(clip_norm)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, or none of them.

        A GradScaler or Stepper has looked at the gradients, and says by what they are divided and whether the step is
        to be taken. Otherwise they are inspected here; if one is inf or NaN nothing is written, and nothing counted.

        Args:
            closure: evaluates the model and returns the loss; called once.

        Returns:
            What ``closure`` returned.
        """
        self._check_in_use("step()")
        if self.is_released:
            raise packed_refusals.released(self, "step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self.begin_counting_stalled()
        self._take_in(self.param_groups)
        rows = self._rows()
        self._check_overlap()
        if not rows:
            return
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        is_bare = not hasattr(self, "found_inf")
        if found_inf is not None:  # others may have made a count or a shape of [1] of it
            found_inf = any_found_inf([found_inf], found_inf.device)
        found = None
        if is_bare or self._clip_norm is not None:
            found = self._inspected(rows)
        if is_bare and found is not None:
            found_inf = any_found_inf(found.found_inf.values(), rows[0].member.parameter.device)
        if found_inf is not None and is_host(found_inf.device) and found_inf.item() != 0:
            if is_bare:
                self._add("skipped", torch.ones((), dtype=torch.int64, device="cpu"))
                self._warn_of_skip(found, rows)
            return
        by_device: dict[torch.device, list[Row]] = {}
        for row in rows:
            by_device.setdefault(row.member.parameter.device, []).append(row)
        for device, on_device in by_device.items():
            flag = None if found_inf is None or is_host(found_inf.device) else moved(found_inf, device)
            self._take_turn(device, on_device, self._factor(divisor, found, device), flag)
        if is_bare and found_inf is not None and not is_host(found_inf.device):
            self._add("skipped", found_inf.to(torch.int64))

    def _inspected(self, rows: list[Row]) -> Inspection:
        gradients = [row.gradient for row in rows]
        is_one_device = len({row.member.slot.weight.device for row in rows}) == 1
        return inspect_whole(gradients) if is_one_device else inspect(gradients)

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        members = self._members
        for index, group in enumerate(self.param_groups):
            asked = group["master"], group["moments"]
            for p in group["params"]:
                member = members.get(p)
                if member is not None and (gradient := gradient_of(p)) is not None:
                    rows.append(self._row(index, asked, member, gradient))
        return rows

    def _row(self, index: int, asked: tuple[str, str], member: Member, gradient: Tensor) -> Row:
        member = self._present(member)
        if member.keeping.asked != asked:
            raise packed_refusals.other_storages(member.keeping.asked, asked)
        return Row(index, member, checked_gradient(self, member, gradient))

    @torch.no_grad()
    def step_alone(self, index: int, p: Tensor, gradient: Tensor, factor: float | Tensor, flag: Tensor | None) -> None:
        """Step one parameter: what a GradientRelease does as soon as a gradient exists.

        Args:
            index: of its group.
            p: a trainable parameter of this optimizer.
            gradient: its own.
            factor: what it is multiplied by.
            flag: 0-dim, on its device; where it is not 0 nothing is written. None if the step is to be taken.
        """
        asked = self.param_groups[index]["master"], self.param_groups[index]["moments"]
        self._take_turn(p.device, [self._row(index, asked, self._members[p], gradient)], factor, flag)

    def begin_counting_stalled(self) -> None:
        """The next turns are one step to the meter."""
        if self.count_stalled:
            self._stalled.clear()

    def _factor(self, divisor: Tensor | None, found: Inspection | None, device: torch.device) -> float | Tensor:
        """What gradients are multiplied by: unscaling and clipping. A number where the host is the device."""
        if is_host(device):
            scale = 1.0 if divisor is None else float(divisor)
            if scale == 0.0:
                raise packed_refusals.scale_of_zero(self)
            if self._clip_norm is None or found is None:
                return 1.0 / scale
            norm = found.total_norm_on_host() / scale
            return min(1.0, self._clip_norm / (norm + _CLIP_EPS)) / scale
        scale_there = torch.ones((), device=device) if divisor is None else moved(divisor, device)
        if self._clip_norm is None or found is None:
            return scale_there.reciprocal()
        norm_there = found.total_norm(device) / scale_there
        return (self._clip_norm / (norm_there + _CLIP_EPS)).clamp(max=1.0) / scale_there

    def _take_turn(self, device: torch.device, rows: list[Row], factor: float | Tensor, flag: Tensor | None) -> None:
        constants, keys = numbers_of(self.rule, self.param_groups, rows, factor)
        if not is_host(device):
            # The host has seen neither scale nor learning rate: as NaN they would be in every weight.
            is_nan = constants.isnan().any()
            flag = is_nan.float() if flag is None else (is_nan | (flag != 0)).float()
        slots, gradients = [row.member.slot for row in rows], [row.gradient for row in rows]
        prepared = self._prepared(device, slots)
        turn = Turn(self.rule, slots, gradients, constants, keys, flag, self.count_stalled, prepared)
        counts = self._executor_of(device).step(turn)
        self._add("saturated", counts.saturated)
        if counts.updated is not None and counts.stalled is not None:
            pair = torch.stack([counts.updated, counts.stalled])
            self._stalled[device] = self._stalled[device] + pair if device in self._stalled else pair

    def _prepared(self, device: torch.device, slots: list[Slot]) -> dict[str, Any]:
        """What its executor knows of a device's slots since the last turn, if they are the same."""
        if len(slots) == 1:  # one after the other, where gradients are released
            return slots[0].prepared
        before, prepared = self._last_slots.get(device, ([], {}))
        if before == slots:  # by identity
            return prepared
        self._last_slots[device] = slots, {}
        return self._last_slots[device][1]

    def _executor_of(self, device: torch.device) -> Executor:
        if device not in self._executors:
            num_elements = sum(p.numel() for p in self._members if p.device == device)
            executor = self._executors[device] = choose(device, num_elements, self._wanted_executor)
            if executor.lacks_package:
                warn(packed_refusals.slow_text(self, executor.reason), HalfstepWarning)
        return self._executors[device]

    def _warn_of_skip(self, found: Inspection | None, rows: list[Row]) -> None:
        if self._has_warned or found is None:
            return
        self._has_warned = True
        place, kind = next(iter(found.faults().items()))
        warn(packed_refusals.skipped_text(self, rows[place].member.parameter, kind), SkippedStepWarning)

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def executors(self) -> Mapping[torch.device, Executor]:
        """For each device what runs its steps; ``.reason`` says why."""
        for p in self._members:
            self._executor_of(p.device)
        return dict(self._executors)

    @property
    def saturated_weights(self) -> int:
        """How often a weight was made the largest number of its dtype so far. Reads the device."""
        return self._total("saturated")

    @property
    def skipped_steps(self) -> int:
        """How many steps this optimizer has skipped by itself: not those that a scaler skips. Reads the device."""
        return self._total("skipped")

    @property
    def stalled(self) -> float:
        """Share of updates that rounded to nothing in the last step with ``count_stalled``; NaN without one.

        An update counts if the rule changed the fp32 value of a weight, and as stalled if what is kept of it is what
        it was before. Reads the device.
        """
        pairs = [pair.tolist() for pair in self._stalled.values()]
        updated, stalled = (sum(pair[which] for pair in pairs) for which in (0, 1))
        return stalled / updated if updated else math.nan

    @property
    def stall_counts(self) -> list[Tensor]:
        """For each device how many weights the last counted step updated, and how many of these stalled: int64 [2]."""
        return list(self._stalled.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the state: masters or rests, moments, scales and step counters."""
        kept = (t for state in self.state.values() for t in state.values() if isinstance(t, Tensor))
        return sum(t.numel() * t.element_size() for t in kept)

    def _add(self, what: str, number: Tensor) -> None:
        before = self._totals.get(what)
        self._totals[what] = number if before is None else moved(before, number.device) + number

    def _total(self, what: str) -> int:
        return int(self._totals[what]) if what in self._totals else 0

    def has_master(self, p: Tensor) -> bool:
        """Whether the full value of a trainable weight is kept, to the storage's precision."""
        member = self._members.get(p)
        return member is not None and (p.dtype not in HALF_DTYPES or member.keeping.master != Master.NONE)

    def full_weight(self, p: Tensor) -> Tensor:
        """The fp32 value of a parameter, with all that is kept of it; a new tensor of its shape."""
        if p not in self._members:
            return p.detach().float().clone()
        member = self._present(self._members[p])
        name = member.keeping.rest_name
        return keeping.master_value(p, None if name is None else self.state[p][name], member.keeping.master)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ArgumentError if a hyperparameter is out of range."""
        raise NotImplementedError

    def check_options(self, group: Mapping[str, Any]) -> None:
        """The same, and if it names storages that there are not, or what only the whole optimizer can have."""
        self.check_group(group)
        check_options(self, group)

    def _check_in_use(self, call: str) -> None:
        if self._is_taken_off:
            raise packed_refusals.taken_off(call)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch: the state of every parameter in its storage, from the first step on."""
        self._check_in_use("state_dict()")
        self._take_in(self.param_groups)
        self._check_members()
        return packed_state.with_weight_sums(self, super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, lossy: bool = False) -> None:
        """Continue from a saved state: of these storages, of others, or of torch's optimizer of the same rule.

        A state of the same storages comes back bit for bit. Others are converted: without loss where these storages
        can hold what was saved, else only on request. All of it is loaded or nothing.

        Args:
            state_dict: from ``state_dict()``, of this class, of torch's, or of a MasterWeights around torch's.
            lossy: round what these storages cannot hold.

        Raises:
            StateError: groups, shapes or names do not fit; a part is missing; storages cannot hold a value; or masters
                are to be converted and the model's weights are not those that were saved beside them.

        Warns:
            PrecisionWarning: a plain optimizer kept the state in 16 bits, so that its lower bits are gone.
        """
        self._check_in_use("load_state_dict()")
        self._take_in(self.param_groups)
        self._check_members()
        loaded = packed_state.checked(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        with torch.no_grad():
            packed_state.load(self, loaded, lossy=lossy)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def to_torch(self) -> torch.optim.Optimizer:
        """The way out: turn the 16-bit weights into fp32 ones, and return torch's optimizer of them, with its state.

        The Parameter objects stay the same. Gradients of 16-bit weights are dropped. Frozen parameters keep their
        dtype. This object cannot be used afterwards.

        Raises:
            UnsupportedError: torch has no such optimizer (Lion).
        """
        self._check_in_use("to_torch()")
        if self.torch_class is None:
            raise packed_refusals.no_torch_class(self)
        self._take_in(self.param_groups)
        self._check_members()
        with torch.no_grad():
            optimizer = packed_state.as_torch(self, self.torch_class)
        self._is_taken_off = True
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_taken_off:
            self._check_members()
        kept = (
            *("defaults", "state", "param_groups", "_cast_dtype"),
            *("_wanted_executor", "_clip_norm", "_is_taken_off", "_says_none", "count_stalled"),
        )
        kinds = {p: (member.number, member.keeping) for p, member in self._members.items()}
        return {**{name: self.__dict__[name] for name in kept}, "kinds": kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        kinds = state.pop("kinds")
        is_taken_off, counts_stalled = state["_is_taken_off"], state["count_stalled"]
        super().__setstate__(state)
        self._executors, self._last_slots, self._is_building = {}, {}, False
        self._begin_counting()
        self._is_taken_off, self.count_stalled = is_taken_off, counts_stalled
        self._members = {}
        if not is_taken_off:
            self._members = {p: new_member(p, self.state[p], *kind) for p, kind in kinds.items()}
