"""A drop-in for torch.amp.GradScaler that cannot corrupt a run, and says what it did.

Same constructor, methods, texts, state keys and private names as torch's class, which it subclasses. What differs:

- The scale has bounds, hysteresis and a tolerance, and can be any :class:`~halfstep.scaling.scale.Scale`.
- The gradients are read once, without being written, where the optimizer unscales in its own kernel (torch's fused
  AdamW, Adam, SGD, Adagrad): nothing is read on the host then. Other optimizers cost one host read a step, as in torch.
- 16-bit parameters step in fp32; a weight beyond the format's range saturates and is counted.
- Every skip has an outcome and a culprit, and the first is never silent.
- Closures work, an optimizer without gradients is reported and not an error, copies can be made at any time.

On an accelerator, what a window did becomes known to the host when the next window is updated, or when it is asked for:
``update`` never waits for the window it closes.
"""

from __future__ import annotations

import copy
import functools
import inspect as python_inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import OptState, moved, refresh_per_optimizer_state
from halfstep.errors import warn
from halfstep.formats import HALF_DTYPES
from halfstep.kernels.found_inf import any_found_inf
from halfstep.kernels.inspect import Inspection, inspect
from halfstep.scaling import closures, refusals
from halfstep.scaling.agree import agreed
from halfstep.scaling.checks import checked_count, checked_scale
from halfstep.scaling.culprit import Culprit, ParameterOrder
from halfstep.scaling.loss import LossSeen, check_loss
from halfstep.scaling.scale import DynamicScale, NoScale, Scale
from halfstep.scaling.settings import scale_from, widened_bounds
from halfstep.scaling.skips import REPEAT_AFTER, OnRepeat, SkipLog, StepOutcome, valid_counts
from halfstep.scaling.take_step import divides_in_kernel, step_in_kernel
from halfstep.scaling.torch_names import TorchNames
from halfstep.scaling.unscale import multiply_, reciprocal, safe_divisor, safe_factor
from halfstep.scaling.widen import Widened, needs_widening, warn_without_masters
from halfstep.scaling.window import Books, parameters_of

# torch's key -> the scale's own name for the same state
_SHARED_KEYS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}


class GradScaler(TorchNames, torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, skip steps that would write inf or NaN; torch's API, and safe.

    Args:
        device: device type of the losses, as in torch.
        init_scale: first scale; finite and positive. torch's 2**16 does not fit into fp16 itself, so a loss whose
            gradient is 1 in fp16 skips its first steps; 2.0**14 avoids that.
        growth_factor: multiplier after ``growth_interval`` clean steps; above 1.
        backoff_factor: multiplier on overflow; between 0 and 1.
        growth_interval: clean steps in a row before growth.
        enabled: False makes every method pass through, as in torch: nothing is scaled, and nothing checked.
        min_scale: lower bound of the scale; default 2**-14, or ``init_scale`` if that is lower.
        max_scale: upper bound of the scale; default 2**24, or ``init_scale`` if that is higher.
        hysteresis: overflows that it takes to back off.
        consecutive_hysteresis: count only overflows in a row.
        tolerance: share of overflowing steps that is accepted without backing off, in [0, 1).
        scale: a :class:`NoScale`, :class:`StaticScale`, :class:`DynamicScale` or :class:`AdaptiveScale` in place of all
            the settings above.
        model: names its parameters in reports; nothing else.
        on_repeat: what happens after ``repeat_after`` skipped windows in a row, when the loss or forward pass itself
            must be at fault: ``"warn"``, ``"raise"``, ``"ignore"``, or a callable ``(culprit, step)``.
        repeat_after: number of skipped windows in a row that makes a repeat.

    Raises:
        ArgumentError: a setting is out of range, or cannot take effect beside ``scale``.

    Source: Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.2.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=2.0**14)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.was_step_applied(optimizer), weight.tolist()
        (True, [0.8999999761581421, 0.8999999761581421])
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        tolerance: float = 0.0,
        scale: Scale | None = None,
        model: torch.nn.Module | None = None,
        on_repeat: OnRepeat = "warn",
        repeat_after: int = REPEAT_AFTER,
    ) -> None:
        settings = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "hysteresis": hysteresis,
            "consecutive_hysteresis": consecutive_hysteresis,
            "tolerance": tolerance,
        }
        self._rule = scale_from(settings, scale) if enabled else NoScale()
        self._has_free_bounds = scale is None and min_scale is None and max_scale is None
        # torch's constructor writes these through TorchNames into the rule: hand it the rule's own values.
        super().__init__(
            device, self._rule.get(), self._growth_factor, self._backoff_factor, self._growth_interval, enabled
        )
        log = SkipLog(on_repeat, checked_count(repeat_after, "repeat_after"))
        self._begin(Books(log, ParameterOrder(model)))

    def _begin(self, books: Books) -> None:
        self._books = books
        self._per_optimizer_states = defaultdict(refresh_per_optimizer_state)
        self._seen = LossSeen()
        self._saturated = torch.zeros((), dtype=torch.int64, device="cpu")
        self._is_evaluating = False

    # -- the loss -------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each loss in an iterable, by the scale.

        Args:
            outputs: a tensor of any shape, or an iterable of such. A 16-bit loss of one element comes back in fp32,
                since an fp16 loss of 3 times a scale of 2**16 would be inf.

        Returns:
            The scaled outputs in the same structure; ``outputs`` itself if the scaler is disabled.

        Raises:
            ValueError: an output is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._books.order.learn(outputs)
            wide = outputs.float() if outputs.dtype in HALF_DTYPES and outputs.numel() == 1 else outputs
            scaled = wide * self._rule.value(outputs.device)
            self._seen.loss(scaled)
            return scaled
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            mapped = map(self.scale, outputs)
            return type(outputs)(mapped) if isinstance(outputs, (list, tuple)) else mapped
        raise refusals.outputs_are_no_tensors(outputs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``scale(loss).backward(**kwargs)``, with what is wrong with the loss said clearly and before anything runs.

        Args:
            loss: one element, with a graph.
            kwargs: passed to ``Tensor.backward`` (``retain_graph``, ``create_graph``, ``inputs``).

        Raises:
            ArgumentError: the loss is not a tensor of one element, or has no graph.
        """
        check_loss(loss)
        self.scale(loss).backward(**kwargs)

    # -- the gradients --------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, for clipping or looking at them. Optional.

        They are inspected now and not again: as in torch, what is written into them afterwards is stepped with.

        Args:
            optimizer: its fp32, fp64, bf16 and complex gradients, dense or sparse, are unscaled and inspected.

        Raises:
            CallOrderError: called twice in one window, or after ``step``.
            ArgumentError: a gradient is fp16: 1e-3 at scale 2**16 would become 1.5e-8, which fp16 holds as 0.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise refusals.unscaled_already(optimizer, state["stage"])
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, reciprocal(scale), found_inf, False)
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if not allow_fp16 and any(g.dtype in (torch.float16, torch.complex32) for g in gradients):
            if hasattr(optimizer, "clip_norm"):  # those of halfstep.optim clip by themselves, by the true gradient
                raise refusals.fp16_gradients(optimizer, type(optimizer).__name__)
            raise refusals.fp16_gradients(optimizer)
        inv_scale, found_inf = inv_scale.reshape(()), found_inf.reshape(())  # callers of this private name pass [1] too
        self._books.take_over_gradients(optimizer)
        found = self._inspect(optimizer)
        if gradients:
            multiply_(gradients, safe_factor(found, inv_scale))
        return {d: torch.maximum(flag, moved(found_inf, d)) for d, flag in found.found_inf.items()}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        found_inf = dict(self._inspect(optimizer).found_inf)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_inf
        return found_inf

    def _inspect(self, optimizer: torch.optim.Optimizer) -> Inspection:
        # The optimizer's own list: while it steps in fp32, others stand in it for its 16-bit parameters.
        gradients = [p.grad for p in parameters_of(optimizer)]
        found = agreed(inspect(gradients, norm=False, largest=True), gradients)
        self._books.record(optimizer).note(found)
        return found

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with unscaled gradients, or skip it if one of them is inf or NaN.

        Args:
            optimizer: any torch optimizer. Without gradients it is stepped as it is, which changes nothing.
            args: passed to ``optimizer.step``; a closure, also as ``closure=``, is evaluated with checked, unscaled
                gradients, and given its loss unscaled if it returns what ``scale`` returned.
            kwargs: passed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned; None for a skipped step.

        Raises:
            CallOrderError: a second step in one window, or no backward pass since the loss was scaled.
            ArgumentError: the optimizer shares a parameter with another one stepped in this window.
            UnsupportedError: a closure together with 16-bit parameters.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure, args = closures.split_closure(args, kwargs)
        if closure is None:  # a closure scales its loss when it is evaluated
            self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise refusals.stepped_already(optimizer)
        record = self._books.record(optimizer)
        if closure is None and not record.has_gradients():
            self._seen.check(optimizer)
            result = optimizer.step(*args, **kwargs)
        else:
            result = self._checked_step(optimizer, state, closure, args, kwargs)
        state["stage"] = OptState.STEPPED
        self._books.stepped(optimizer, record)
        return result

    def _checked_step(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], closure: Any, args: Any, kwargs: Any
    ) -> Any:
        if closure is not None:
            return self._step_with_closure(optimizer, state, closure, args, kwargs)
        if not needs_widening(optimizer):
            return self._plain_step(optimizer, state, args, kwargs)
        record, stage = self._books.record(optimizer), state["stage"]
        warn_without_masters(optimizer)  # before anything has moved: a warning may be an error
        with Widened(optimizer) as wide:
            try:
                result = self._plain_step(optimizer, state, args, kwargs)
            except BaseException:
                # The parameters get their own gradients back, which are as scaled as they were.
                state["stage"], record.is_unscaled = stage, stage is OptState.UNSCALED
                raise
            finally:
                wide.found_inf = record.found_inf
        for count in wide.num_saturated:
            self._saturated = moved(self._saturated, count.device) + count
        return result

    def _plain_step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        if divides_in_kernel(optimizer):
            if _wants_grad_scaler(type(optimizer).step):
                warn(
                    f"{type(optimizer).__name__}.step() takes grad_scaler, which torch is going to stop passing; it"
                    " should read the tensors self.grad_scale and self.found_inf instead.",
                    FutureWarning,
                )
                return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            return self._step_in_kernel(optimizer, state, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        self._decide(optimizer, state)
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _decide(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Tensor | None:
        scale, _ = self._check_scale_growth_tracker("step")
        return self._books.record(optimizer).decide(state["found_inf_per_device"], scale.device)

    def _step_in_kernel(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The optimizer's kernel unscales while it steps, and writes nothing where found_inf is set."""
        scale, _ = self._check_scale_growth_tracker("step")
        is_unscaled = state["stage"] is OptState.UNSCALED
        if not is_unscaled:
            self._books.take_over_gradients(optimizer)  # torch's fused kernels write unscaled gradients back
            self._check_inf_per_device(optimizer)
        found, found_inf = self._books.record(optimizer).found, self._decide(optimizer, state)
        if found_inf is None:  # gradients, but not one element in them
            return optimizer.step(*args, **kwargs)
        divisor = None
        if not is_unscaled:
            divisor = scale if found is None else safe_divisor(found, scale)
        return step_in_kernel(optimizer, divisor, found_inf, args, kwargs)

    def _step_with_closure(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], closure: closures.Closure, args: Any, kwargs: Any
    ) -> Any:
        record = self._books.record(optimizer)
        if any(p.dtype in HALF_DTYPES for p in record.parameters):
            raise refusals.closure_with_16_bit(optimizer)

        def evaluate() -> Any:
            state["stage"], self._is_evaluating = OptState.READY, True
            try:
                with torch.enable_grad(), self._seen.collect() as scaled_losses:
                    loss = closure()
            finally:
                self._is_evaluating = False
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            self._decide(optimizer, state)
            if is_bad():
                raise closures.BadEvaluation
            is_scaled = any(loss is scaled for scaled in scaled_losses)
            return loss.detach() / self._rule.value(loss.device) if is_scaled else loss

        def is_bad() -> bool:
            return record.found_inf is not None and record.outcome(self._books.order).kind == "skipped"

        return closures.step_or_restore(optimizer, evaluate, is_bad, args, kwargs)

    # -- the next window ------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the window: choose the next scale, count and report skips. Call it once, after every optimizer's step.

        Args:
            new_scale: a scale to use instead of the rule's; a number, or a tensor of one element (read on the host).

        Raises:
            NotScaledError: nothing was scaled, or no optimizer was stepped or unscaled since the last update.
            ArgumentError: ``new_scale`` is not finite and positive, or outside bounds that were set.
            NonFiniteError: with ``on_repeat="raise"``, after ``repeat_after`` skipped windows in a row.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if self._is_evaluating:
            raise refusals.update_inside_closure()
        old_scale = scale.clone()
        if new_scale is not None:
            self._set_scale(self._checked_new_scale(new_scale))
        else:
            self._update_by_rule(scale.device)
        self._per_optimizer_states = defaultdict(refresh_per_optimizer_state)
        self._seen.clear()
        self._books.close(old_scale, self._rule.value(scale.device))

    def _update_by_rule(self, device: torch.device) -> None:
        states = self._per_optimizer_states.values()
        found_inf = any_found_inf((f for s in states for f in s["found_inf_per_device"].values()), device)
        if found_inf is not None:
            self._rule.update_(found_inf, self._largest(device))
        elif not any(record.is_stepped for record in self._books.records()):
            raise refusals.nothing_checked()

    def _largest(self, device: torch.device) -> Tensor | None:
        if not self._rule.needs_largest:
            return None
        found = [record.found for record in self._books.records() if record.found is not None]
        # Nothing inspected (a subclass unscales by itself): 0 says nothing about the level.
        return torch.stack([f.total_largest(device) for f in found] or [torch.zeros((), device=device)]).amax()

    def _checked_new_scale(self, new_scale: float | Tensor) -> float:
        if isinstance(new_scale, Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
            raise refusals.new_scale_is_no_scalar(new_scale)
        return checked_scale(new_scale, "new_scale")

    def _set_scale(self, value: float) -> None:
        if self._has_free_bounds and isinstance(self._rule, DynamicScale):
            self._rule.min_scale, self._rule.max_scale = widened_bounds(self._rule.bounds(), value)
        self._rule.set_(value)

    # -- what happened --------------------------------------------------------------------------------------------

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """What the last ``step(optimizer)`` did, and who was at fault if it was skipped. Reads the device.

        Raises:
            CallOrderError: this scaler has not stepped the optimizer yet.
        """
        return self._books.outcome(optimizer)

    def was_step_applied(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last ``step(optimizer)`` changed its weights: step a scheduler or an EMA only then. Reads the
        device; False as well for an optimizer without gradients.
        """
        return self.outcome(optimizer).kind == "applied"

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far, saved and loaded with the state. Reads the device."""
        self._books.settle()
        return self._books.log.skipped_steps

    @property
    def culprit(self) -> Culprit | None:
        """Who was at fault in the last skipped step; None if there was none. Reads the device."""
        return self._books.culprit()

    @property
    def saturated_weights(self) -> int:
        """How many 16-bit weights were clamped to their format's largest value so far. Reads the device."""
        return int(self._saturated.item())

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Use the model's names in reports; needed again after copying or unpickling a scaler."""
        self._books.order.name(model)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and ``"halfstep"`` with everything else a run needs to continue. Reads the device.

        Returns:
            Plain numbers and strings. torch.amp.GradScaler loads it as it is. Empty if the scaler is disabled.
        """
        if not self._enabled:
            return {}
        self._books.settle()
        shared = {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }
        own = {name: value for name, value in self._rule.state_dict().items() if name not in _SHARED_KEYS.values()}
        return {**shared, "halfstep": {**own, **self._books.log.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: halfstep's, or torch's own five entries. All of it or nothing.

        Args:
            state_dict: see :mod:`halfstep.scaling.interchange` for states of other libraries.

        Raises:
            StateError: an entry is missing, not finite, not positive, or of another kind of scale.
            RuntimeError: the state is empty, as a disabled scaler saves it.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, dict):
            raise refusals.no_state(state_dict)
        if len(state_dict) == 0:
            raise refusals.empty_state()
        missing = sorted(_SHARED_KEYS.keys() - state_dict.keys())
        if missing:
            raise refusals.incomplete_state(missing, sorted(state_dict))
        try:
            saved = dict(state_dict.get("halfstep", {}))
            counts = valid_counts(saved)
            rule_state = self._rule_state(state_dict, saved)
        except (TypeError, ValueError, OverflowError) as error:
            raise refusals.bad_state(state_dict, error) from error
        self._rule.load_state_dict(rule_state)
        self._books.forget_pending()
        self._books.log.load_counts(counts)

    def _rule_state(self, state_dict: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The scale's own state, from torch's entries, what halfstep saved, and fresh counters for the rest."""
        ours = self._rule.state_dict() | self._rule.fresh_counters() | saved
        ours |= {mine: state_dict[theirs] for theirs, mine in _SHARED_KEYS.items() if mine in ours}
        scale = checked_scale(ours["scale"], "scale")
        if self._has_free_bounds and "min_scale" in ours and "min_scale" not in saved:
            ours["min_scale"], ours["max_scale"] = widened_bounds((ours["min_scale"], ours["max_scale"]), scale)
        return ours

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep scale, counters and settings; not the present window, nor references to parameters."""
        self._books.settle()
        dropped = ("_per_optimizer_states", "_books", "_seen", "_saturated")
        kept = {name: value for name, value in self.__dict__.items() if name not in dropped}
        return {**kept, "_rule": copy.deepcopy(self._rule), "log": copy.copy(self._books.log)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(Books(self.__dict__.pop("log"), ParameterOrder()))

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        return f"GradScaler({self._device!r}, {self._rule!r}, skipped_steps={self._books.log.skipped_steps})"


@functools.cache
def _wants_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether an optimizer class follows the older contract, in which ``step`` receives the scaler itself."""
    return "grad_scaler" in python_inspect.signature(step).parameters
