"""Masters for any optimizer: 16-bit weights for the arithmetic, fp32 ones for the step.

The inner optimizer's groups hold fp32 masters where the model has trainable 16-bit weights, and the parameters
themselves everywhere else. The wrapper's own groups hold the model's parameters and every hyperparameter. One step:

    copy        hyperparameters to the inner optimizer (schedulers write the wrapper's groups)
    adopt       weights that somebody wrote since the last step become their masters
    widen       the 16-bit gradient to fp32, and divide it there: one rounding, so fp16 gradients of 1e-3 survive a
                division by 2**16
    step        the inner optimizer, on masters: its moments are fp32
    round       masters into the 16-bit weights, saturating (rounding.py)

torch's optimizers, whose parameters do not depend on each other, take the last three a few tensors at a time: the
widened gradients need one small buffer, and stay in the cache until they are used.

Not here: sharded parameters; sums of gradients in fp32 over several micro-batches.

Source: Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.1.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._compat import is_host, moved
from halfstep.errors import PrecisionWarning, warn
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.gradients import drop_sum, gradient_of
from halfstep.optim import checks, initial_state, master_state, refusals
from halfstep.optim.packed import PackedOptimizer
from halfstep.optim.step_parts import Member, Part, parts_of, plain_step, write

_wrapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class MasterWeights(torch.optim.Optimizer):
    """Give any torch optimizer fp32 masters for its trainable 16-bit weights.

    Args:
        optimizer: an optimizer of the model's parameters, made before any scheduler. Its fp32 and fp64 parameters go
            through untouched, frozen ones get no master; one that is unfrozen later gets it at its next step. What it
            has learned so far is kept.
        dtype: ``torch.bfloat16``, ``torch.float16`` or their names: cast the trainable fp32 weights in place, on the
            same Parameter objects, and keep every bit of them in the masters. Hooks that were registered on parameters
            keep working; those of DistributedDataParallel would be lost, so wrap before it does. None: the weights stay
            as they are.

    It is a ``torch.optim.Optimizer``: schedulers, hooks, ``add_param_group`` and closures work as ever; make schedulers
    from it, not from the inner optimizer. It reads ``grad_scale`` and ``found_inf`` as torch's fused optimizers do, so
    any GradScaler leaves dividing and skipping to it. Costs 4 bytes per 16-bit weight, and fp32 moments.

    A weight that is written between two steps (``model.load_state_dict``, clamping under ``no_grad``) becomes its
    master at the next one. Writes that torch does not count (through ``.data``, NumPy, custom kernels) are seen before
    the first step; later, call :meth:`adopt_weights` after them.

    Raises:
        ArgumentError: it is wrapped already or has a scheduler, or a dtype is none that a master can stand for.
        UnsupportedError: sharded parameters, parameters that overlap in memory, ``differentiable=True``.

    Source: Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.1.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3), dtype=torch.bfloat16)
        >>> for _ in range(8):
        ...     optimizer.zero_grad()
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> weight.dtype, weight.item(), round(optimizer.state[weight]["master"].item(), 4)
        (torch.bfloat16, 0.9921875, 0.992)
    """

    _step_supports_amp_scaling = True  # torch's GradScaler and ours hand over grad_scale and found_inf

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: str | torch.dtype | None = None) -> None:
        checks.check_optimizer(optimizer, is_wrapped=isinstance(optimizer, MasterWeights) or optimizer in _wrapped)
        if isinstance(optimizer, PackedOptimizer):
            raise refusals.has_masters_of_its_own(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        cast_dtype = checks.checked_dtype(dtype, parameters)
        checks.check_parameters(parameters, cast_dtype)
        self.inner = optimizer
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._members: dict[Tensor, Member] = {}  # every trainable parameter
        self._begin()
        self._is_fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self._is_wrapping = True
        super().__init__(groups, optimizer.defaults)
        self._is_wrapping = False
        self._take_in(cast_dtype)
        self._guard()

    def _guard(self) -> None:
        _wrapped.add(self.inner)
        self._guards = self.inner.register_step_pre_hook(_OnlyByWrapper(self))

    def _begin(self) -> None:
        self._counts: dict[str, list[Tensor]] = {"saturated": [], "adopted": []}
        self._is_taken_off = self._is_wrapping = self._is_stepping_inner = False

    # -- parameters -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch: its trainable 16-bit parameters get masters, of its own hyperparameters.

        Args:
            param_group: ``{"params": ..., "lr": ...}``; what is left out has the optimizer's defaults.
        """
        if self._is_wrapping:  # torch's constructor adds the groups that the inner optimizer has already
            super().add_param_group(param_group)
            return
        self._check_in_use("add_param_group()")
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        num_before = len(self.inner.param_groups)
        try:
            checks.check_parameters([p for group in self.param_groups for p in group["params"]], None)
            self.inner.add_param_group({**added, "params": list(added["params"])})
        except BaseException:
            self.param_groups.pop()
            del self.inner.param_groups[num_before:]
            raise
        self._take_in()

    def _take_in(self, cast_dtype: torch.dtype | None = None) -> list[tuple[int, Member]]:
        """The trainable parameters and their groups; those that are new, or were frozen until now, are made members."""
        found, narrowed = [], set[str]()
        if len(self.param_groups) != len(self.inner.param_groups):
            raise refusals.groups_of_inner(len(self.param_groups), len(self.inner.param_groups))
        for index, (group, inner_group) in enumerate(zip(self.param_groups, self.inner.param_groups, strict=True)):
            for place, p in enumerate(group["params"]):
                member = self._members.get(p)
                if member is None:
                    if not p.requires_grad:
                        continue
                    member = self._new_member(p, cast_dtype)
                    if member.master is not None:
                        narrowed |= set(initial_state.widen(self.inner, p, member.master))
                    initial_state.create(self.inner, group, member.stepped)
                checks.check_unchanged(p, member.dtype, member.device)
                if member.master is not None:
                    checks.check_shape(p, member.master)
                    inner_group["params"][place] = member.master
                found.append((index, member))
        if narrowed:
            warn(checks.narrowed_text(self.inner, narrowed), PrecisionWarning)
        return found

    def _new_member(self, p: Tensor, cast_dtype: torch.dtype | None) -> Member:
        checks.check_parameters([p], None)
        member: Member
        if p.dtype in HALF_DTYPES:
            member = Member(p, nn.Parameter(p.detach().float()))
        elif cast_dtype is not None and p.dtype == torch.float32:
            master = nn.Parameter(p.data)  # takes the memory over
            p.data = torch.empty_like(p.data, dtype=cast_dtype)
            member = Member(p, master)
            with torch.no_grad():
                self._count_all("saturated", write([(member, master, None)]))
        else:
            member = Member(p, None)
        self._members[p] = member
        if member.master is not None:
            self._masters[p] = member.master
        return member

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The one place that knows where the gradient of a 16-bit parameter is: any floating dtype, scaled or not."""
        return gradient_of(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; fp32 sums of gradients (``p.fp32_grad``) are dropped too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                drop_sum(p)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters, and round them into the weights.

        Args:
            closure: evaluates the model, as it is, with its 16-bit weights, and returns the loss. Optimizers that call
                it several times (LBFGS) find new weights in the model each time.

        Returns:
            What ``closure`` returned; else what the inner optimizer returned.

        Raises:
            CallOrderError: a parameter has changed its dtype or device since it was wrapped, or a closure is missing.
        """
        self._check_in_use("step()")
        if getattr(self.inner.step, "_wrapped_by_lr_sched", False):
            raise refusals.scheduler_of_inner(self.inner)
        if closure is None and _needs_closure(self.inner):
            raise refusals.needs_closure(self.inner)
        loss = None
        if closure is not None:
            if not self._steps_in_parts():
                return self._step_with_closure(closure)
            with torch.enable_grad():
                loss = closure()
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with torch.no_grad():
            if self._is_known_to_skip(found_inf):
                return loss
            members = self._take_in()
            self._pass_hyperparameters_down()
            result, in_parts = None, self._steps_in_parts()
            for part in parts_of(self._with_gradients(members), in_one=not in_parts):
                result = self._step_part(part, divisor, found_inf, in_parts=in_parts)
            self._take_hyperparameters_back()
        return result if closure is None else loss

    def _steps_in_parts(self) -> bool:
        """Whether the inner optimizer can be called for a few parameters at a time, without anyone noticing."""
        before = [h for h in self.inner._optimizer_step_pre_hooks.values() if not isinstance(h, _OnlyByWrapper)]
        hooks = (*before, *self.inner._optimizer_step_post_hooks)
        return type(self.inner) in initial_state.PER_PARAMETER and not hooks and "step" not in self.inner.__dict__

    def _skips_in_kernel(self) -> bool:
        """Whether the inner optimizer divides gradients and skips by itself."""
        # A loaded state may switch fused off in the groups, and torch leaves the announcement standing.
        return self._is_fused and all(group.get("fused", True) for group in self.param_groups)

    def _is_known_to_skip(self, found_inf: Tensor | None) -> bool:
        """Whether the host is to decide, and the step must not be taken."""
        if found_inf is None:
            return False
        if self._skips_in_kernel() and not is_host(found_inf.device) and not self._begins_dampened():
            return False  # the kernel skips
        return bool(found_inf.item() != 0)

    def _begins_dampened(self) -> bool:
        if not initial_state.ignores_dampening_once(self.inner):
            return False
        return any(initial_state.begins(self.inner, member.stepped) for member in self._members.values())

    def _with_gradients(self, members: list[tuple[int, Member]]) -> list[tuple[int, Member, Tensor]]:
        found = []
        for index, member in members:
            p = member.parameter
            gradient = p.grad if member.master is None else self._gradient_of(p)
            if gradient is not None:
                found.append((index, member, gradient))
        return found

    def _step_part(self, part: Part, divisor: Tensor | None, found_inf: Tensor | None, *, in_parts: bool) -> Any:
        self._adopt([member for _, member, _ in part.members])
        part.widen_gradients(None if self._skips_in_kernel() else divisor)
        try:
            if self._skips_in_kernel():
                self.inner.grad_scale, self.inner.found_inf = divisor, _flag(found_inf)  # type: ignore[attr-defined]
            self._is_stepping_inner = True
            result = plain_step(self.inner, part.groups(self.inner)) if in_parts else self.inner.step()
        finally:
            self._is_stepping_inner = False
            part.drop_widened_gradients()
            if self._skips_in_kernel():
                del self.inner.grad_scale, self.inner.found_inf  # type: ignore[attr-defined]
        for num_saturated in part.write_weights():
            # Where the kernel has skipped, these are the weights that were there, and were counted before.
            skipped = 0 if found_inf is None else moved(found_inf, num_saturated.device) != 0
            self._count("saturated", num_saturated * (skipped == 0))
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """For an inner optimizer that evaluates the closure itself, as often as it likes."""
        with torch.no_grad():
            members = self._take_in()
            self._adopt(member for _, member in members)
            self._pass_hyperparameters_down()

        def evaluate() -> Any:
            write_weights()
            with torch.enable_grad():
                loss = closure()
            Part(self._with_gradients(members)).widen_gradients()
            return loss

        @torch.no_grad()
        def write_weights() -> None:
            self._count_all("saturated", write([(member, member.stepped, None) for member in halves]))

        halves = [member for _, member in members if member.master is not None]
        try:
            self._is_stepping_inner = True
            result = self.inner.step(evaluate)
        finally:
            self._is_stepping_inner = False
            for member in halves:
                member.stepped.grad = None
            write_weights()
        self._take_hyperparameters_back()
        return result

    def _pass_hyperparameters_down(self) -> None:
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})

    def _take_hyperparameters_back(self) -> None:
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in inner_group.items() if name != "params"})

    # -- weights that somebody else writes ------------------------------------------------------------------------

    def adopt_weights(self) -> None:
        """Compare every 16-bit weight with its master now, and make those that differ the master.

        Needed only after writes that torch does not count: through ``.data``, NumPy or a custom kernel.
        """
        self._check_in_use("adopt_weights()")
        self._take_in()
        self._forget_writing()
        with torch.no_grad():
            self._adopt(self._members.values())

    def _adopt(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.master is not None:
                self._count("adopted", member.adopt())

    def _forget_writing(self) -> None:
        for member in self._members.values():
            member.alias = None

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def saturated_weights(self) -> int:
        """How often a weight was clamped to its format's largest value so far. Reads the device."""
        return self._total("saturated")

    @property
    def adopted_weights(self) -> int:
        """How many weights were taken over from the model, because somebody had written them. Reads the device."""
        return self._total("adopted")

    def _count(self, what: str, number: Tensor | None) -> None:
        if number is None:
            return
        counts = self._counts[what]
        for place, count in enumerate(counts):
            if count.device == number.device:
                counts[place] = count + number
                return
        counts.append(number)

    def _count_all(self, what: str, numbers: Iterable[Tensor]) -> None:
        for number in numbers:
            self._count(what, number)

    def _total(self, what: str) -> int:
        return sum(int(count.item()) for count in self._counts[what])

    def __repr__(self) -> str:
        num_masters = sum(master.numel() for master in self._masters.values())
        return f"MasterWeights({self.inner!r}, masters of {num_masters} weights)"

    def _check_in_use(self, call: str) -> None:
        if self._is_taken_off:
            raise refusals.taken_off(call)

    # -- state ----------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> master_state.StateView:
        """For each of the model's parameters the inner optimizer's state, and ``"master"`` where it has one."""
        return master_state.StateView(self.inner, self.param_groups, self._masters)

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor sets an empty one; there is nothing to keep."""

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``"master"`` beside each 16-bit parameter's moments, all of it from the first step on.

        A plain torch optimizer loads it too (its moments then take the dtype of its parameters).
        """
        self._check_in_use("state_dict()")
        self._take_in()
        return master_state.with_names(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state: our own, or that of a plain optimizer of fp32 weights. All of it or nothing.

        Nothing is narrowed: every tensor comes back in its dtype, with its bits. A state without masters (from before
        the switch to 16-bit weights) leaves the masters as they are: load the fp32 weights first, then wrap, then load.

        The model's weights are in its own state, as ever. Load both, in any order: where they disagree, the model wins.

        Raises:
            StateError: groups, shapes or dtypes do not fit, or a part is missing.

        Warns:
            PrecisionWarning: the state was kept in 16 bits, so that its lower bits are gone.
        """
        self._check_in_use("load_state_dict()")
        self._take_in()
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        narrowed = master_state.load(self, loaded)
        self._forget_writing()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if narrowed:
            warn(checks.narrowed_text(self.inner, narrowed), PrecisionWarning)

    def to_torch(self) -> torch.optim.Optimizer:
        """The way out: turn the 16-bit weights into fp32 ones, exactly, and return the plain optimizer of them.

        The Parameter objects stay the same. Gradients are dropped. Frozen parameters keep their dtype, since they have
        no more bits than that: ``model.float()`` makes them fp32 too. This object cannot be used afterwards.
        """
        self.adopt_weights()
        self._pass_hyperparameters_down()
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group["params"][:] = group["params"]
        for p, member in self._members.items():
            state = self.inner.state.pop(member.stepped, {})
            if member.master is not None:
                p.grad = None
                p.data = member.master.data
            state = initial_state.as_torch_has_it(self.inner, state)
            if state:
                self.inner.state[p] = state
        _wrapped.discard(self.inner)
        self._guards.remove()
        self._is_taken_off = True
        return self.inner

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "param_groups", "inner", "_masters", "_members", "_is_fused", "_is_taken_off", "_counts")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counts, is_taken_off = state["_counts"], state["_is_taken_off"]
        super().__setstate__(state)
        self._begin()
        self._counts, self._is_taken_off = counts, is_taken_off
        if self._is_fused:  # torch's optimizers forget it when they are copied
            self.inner._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if not is_taken_off:
            self._guard()


class _OnlyByWrapper:
    """Hangs on the inner optimizer: stepped by anybody else, it would move masters that no weight follows."""

    is_halfsteps = True

    def __init__(self, wrapper: MasterWeights) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        wrapper = self._wrapper()
        if wrapper is None or not wrapper._is_stepping_inner:
            raise refusals.inner_stepped(optimizer)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _flag(found_inf: Tensor | None) -> Tensor | None:
    # torch's kernels skip at exactly 1.0, and torch's GradScaler adds the flags of several devices up.
    return None if found_inf is None else found_inf.clamp(max=1.0)
