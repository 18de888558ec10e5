"""One window in the right order: forward, backward, accumulate, inspect, clip, step, scale, settle.

``Stepper`` goes around the user's own loop, and refuses calls out of order. What happens when the window is full
(engine.py):

    inspect     one read of the gradients: are they finite, what is their norm
    step        every gradient divided once, by max(scale * weight, norm / clip_norm), inside the optimizer's kernel
                where it has one; nothing is written where a gradient is inf or NaN
    put back    buffers that the forward passes of a skipped window changed; the EMA moves with applied steps only
    scale       the next window's, on the device
    settle      counts, warnings, scheduler: on the CPU now, elsewhere just before the next step is enqueued

Nothing of the present window is read on the host, as long as the optimizer skips in its own kernel (torch's fused
ones). Any other optimizer has to be told, at the price of one wait a step.

A stepper is one window and takes one decision, for all its optimizers. Models that alternate (a GAN) have a stepper
each; these may share a scale, since each window remembers the scale it began with.

Not here: casting weights, the loop, the data, reduction across ranks (DistributedDataParallel reduces in backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep._compat import moved
from halfstep.errors import HalfstepWarning, warn
from halfstep.kernels.gradients import gradient_of
from halfstep.policy import Policy
from halfstep.scaling.checks import checked_count
from halfstep.scaling.culprit import Culprit, ParameterOrder
from halfstep.scaling.loss import check_loss
from halfstep.scaling.refusals import fp16_gradients
from halfstep.scaling.scale import BoundedScale, Scale
from halfstep.scaling.skips import REPEAT_AFTER, OnRepeat, SkipLog
from halfstep.scaling.window import parameters_of
from halfstep.training import gradients, refusals, retry, setup, state
from halfstep.training.accumulate import Window, checked_weight
from halfstep.training.ema import EMA
from halfstep.training.engine import Engine, open_window_text
from halfstep.training.outcome import Facts, Outcome
from halfstep.training.settle import Settler

OnOverflow = Literal["warn", "ignore"] | Callable[[Outcome], object]


class Stepper:
    """Forward, backward and step in the right order, with any torch optimizer, around your own loop.

    Args:
        model: the module whose buffers are guarded; holds every parameter of the optimizers.
        optimizer: a torch optimizer, or a list of them that step together, with one norm and one decision.
        policy: a :class:`~halfstep.Policy` or its name; ``"auto"`` asks the hardware, and never changes weights.
        clip_norm: largest L2 norm of the true gradient of a step; None clips nothing.
        accumulate: micro-batches of one step; None: a window ends when ``flush()`` is called.
        scheduler: a torch scheduler of one of the optimizers, or a list of them, stepped after each applied step.
        ema: a :class:`~halfstep.EMA`, updated after each applied step.
        scale: a :class:`~halfstep.DynamicScale`, :class:`~halfstep.StaticScale`, :class:`~halfstep.AdaptiveScale` or
            :class:`~halfstep.NoScale`; by default what the policy asks for. Several steppers may share one.
        on_overflow: ``"warn"`` (at the first skipped step, then at each power of ten), ``"ignore"``, or a callable that
            takes the outcome of each skipped step.
        on_repeat: what happens after ``repeat_after`` skipped steps in a row, when the loss or forward pass itself
            must be at fault: ``"warn"``, ``"raise"``, ``"ignore"``, or a callable ``(culprit, step)``.
        repeat_after: number of skipped steps in a row that makes a repeat.
        stall_every: of every how many windows the updates that round to nothing are counted, for ``outcome.stalled``: a
            second read of 16-bit weights, and a warning if a quarter is lost. None counts nothing.

    Raises:
        ArgumentError: parameters, scheduler, weights' dtype or a number do not fit.
        UnsupportedError: this version or machine cannot carry the policy out.

    Warns:
        PrecisionWarning: 16-bit weights that nothing keeps in full, or fp16 without scaling.

    Source: Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.2.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        >>> stepper = Stepper(model, optimizer, policy="fp32", clip_norm=1.0, accumulate=2)
        >>> for _ in range(2):
        ...     with stepper.forward():
        ...         loss = model(torch.ones(3, 4)).square().mean()
        ...     stepper.backward(loss)
        ...     outcome = stepper.step()
        >>> outcome.kind, outcome.num_micro_batches
        ('applied', 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        policy: str | torch.dtype | Policy = "auto",
        clip_norm: float | None = None,
        accumulate: int | None = 1,
        scheduler: Any = None,
        ema: EMA | None = None,
        scale: Scale | None = None,
        on_overflow: OnOverflow = "warn",
        on_repeat: OnRepeat = "warn",
        repeat_after: int = REPEAT_AFTER,
        stall_every: int | None = None,
    ) -> None:
        optimizers = setup.checked_optimizers(model, optimizer)
        self._model = model
        self._policy = setup.checked_policy(policy, optimizers, model)
        average = setup.checked_ema(ema, model)
        used_scale = setup.scale_for(self._policy, scale)
        setup.warn_of_losses(policy, self._policy, used_scale, optimizers, model)
        warns, on_skip = setup.checked_on_overflow(on_overflow)
        log = SkipLog(on_repeat, checked_count(repeat_after, "repeat_after"), warns=warns)
        schedulers = setup.checked_schedulers(scheduler, optimizers)
        self._settler = Settler(log, ParameterOrder(model), schedulers, on_skip)
        self._engine = Engine(model, optimizers, used_scale, average, self._settler)
        self._engine.meter.every = None if stall_every is None else checked_count(stall_every, "stall_every")
        self.clip_norm, self.accumulate = clip_norm, accumulate
        self._needs_closure = setup.needs_closure(self.optimizers[0])
        self._forward_depth = 0
        self._num_perturbed = 0  # blocks of perturbed() that are open
        self._has_mentioned_window = self._is_evaluating = False

    # -- one micro-batch ------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds the forward pass and the loss of a micro-batch: autocast, and buffers are remembered.

        Several blocks may lead to one ``backward``. Under ``torch.no_grad()`` it is autocast alone, for evaluation.

        Raises:
            UnsupportedError: the machine does not have the device that the weights are on.
        """
        if not torch.is_grad_enabled():
            self._mention_open_window()
            with self._autocast():
                yield
            return
        if self.ema is not None and self.ema.is_swapped:
            raise refusals.step_while_swapped("forward")
        self._engine.remember_buffers()
        self._forward_depth += 1
        try:
            with self._autocast():
                yield
        except BaseException:
            self._engine.forward_failed()
            raise
        finally:
            self._forward_depth -= 1
        self._window.has_forward = True

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        inputs: Any = None,
        retain_graph: bool | None = None,
    ) -> None:
        """Add a micro-batch's gradient to the window.

        Args:
            loss: the mean loss of the micro-batch, one element, as the ``forward()`` block left it, not scaled.
            weight: what the micro-batch counts in the window's mean: a number above 0, such as its number of tokens;
                None is 1. A tensor of one element on an accelerator is checked there, and a bad one skips the step.
                Ranks of DistributedDataParallel must pass the same one, for it averages their gradients unweighted.
            inputs: tensors that alone are to receive gradients; None: every leaf behind the loss. Leaves that are in
                none of the optimizers get scaled gradients, which nobody frees.
            retain_graph: as in torch: whether another loss of the same forward pass will need its graph.

        Raises:
            CallOrderError: no ``forward()`` before, inside ``forward()``, the window is full or unscaled.
            ArgumentError: the loss is not one number with a graph, or the weight cannot be one.

        If backward itself raises (out of memory, for one), the window is given up: its gradients are dropped, its
        buffers put back.
        """
        self._check_backward(loss)
        inputs = None if inputs is None else gradients.checked_inputs(inputs, "backward")
        self._engine.backward(loss, checked_weight(weight), inputs, retain_graph)

    def step(self) -> Outcome:
        """End the micro-batch, and the window when it is full: clip, step, choose the next scale, drop the gradients.

        Returns:
            What happened; it waits for nothing until it is asked.

        Raises:
            CallOrderError: no ``backward()`` since the last step, or somebody wrote into scaled gradients.
            NonFiniteError: with ``on_repeat="raise"``, after ``repeat_after`` skipped steps in a row.
        """
        self._check_step("step")
        window = self._window
        if not window.awaits_step:
            raise refusals.nothing_to_step("step", window.num_micro_batches, self.accumulate)
        if window.is_full:
            return self._engine.close()
        window.awaits_step = False
        return self._accumulating()

    def flush(self) -> Outcome | None:
        """Step with what the window holds, by its true mean; settle. To be called at the end of each epoch.

        Returns:
            What happened; None if the window was empty.
        """
        self._check_step("flush")
        window = self._window
        outcome = self._engine.close() if window.num_micro_batches > 0 else None
        if outcome is not None and window.retries:
            outcome = self._retried(window, outcome)
        if outcome is None and self._window.is_open:
            raise refusals.nothing_to_step("flush", 0, self.accumulate)
        self._settler.settle()
        return outcome

    def discard(self) -> None:
        """Drop the present window: its gradients, and what its forward passes wrote into buffers. The way out where a
        micro-batch cannot be used, and after an error that leaves a window behind.
        """
        if self._forward_depth > 0:
            raise refusals.inside_forward("discard")
        self._refuse_while_weights_are_others("discard")
        self._engine.give_up()

    def run(self, closure: Callable[..., Any], *args: Any, retries: int = 0) -> Outcome:
        """Forward, backward and step of one micro-batch; after an overflow run the window again with the lower scale.

        Args:
            closure: returns the loss, or ``(loss, weight)``. It is called with ``args`` inside ``forward()``.
            args: passed to it. With ``accumulate`` above 1 and retries, the batch has to travel this way.
            retries: how often a skipped window may be run again, from the same random state. Each time waits for the
                device. A loss that is not finite itself is not run again: no scale changes it. Every attempt that was
                skipped counts in ``skipped_steps``.

        Returns:
            The outcome of the last attempt; its ``loss`` is the mean of what the closures returned.

        Raises:
            ArgumentError: the closure returns no loss, or sees later batches when it is run again.
            CallOrderError: earlier micro-batches of the window cannot be run again.
        """
        if not callable(closure):
            raise refusals.no_closure(closure)
        self._refuse_while_weights_are_others("run")
        if self._window.is_full:
            raise refusals.window_is_full(self._window.num_micro_batches)
        if self._needs_closure:
            if retries != 0:
                raise refusals.retries_with_closure_optimizer(self.optimizers[0], retries)
            return self._step_with_closure(retry.MicroBatch(closure, args))
        micro_batch = retry.MicroBatch(closure, args)
        if not retry.checked_retries(retries):
            self._run_backward(micro_batch)
            return self.step()
        if self.accumulate != 1 and not micro_batch.is_bound():
            raise refusals.closure_sees_later_batch(self.accumulate)
        window = self._window
        if len(window.replay) != window.num_micro_batches:
            raise refusals.retries_in_part_of_window()
        micro_batch.remember_random_state(self._engine.device)
        self._run_backward(micro_batch)
        window.replay.append(micro_batch)
        window.retries = max(window.retries, retries)
        outcome = self.step()
        return self._retried(window, outcome) if window.is_full else outcome

    def _run_backward(self, micro_batch: retry.MicroBatch) -> Tensor:
        with self.forward():
            result = micro_batch.closure(*micro_batch.args)
        loss, weight = retry.loss_and_weight(result)
        micro_batch.loss = loss.detach()
        self.backward(loss, weight)
        return loss

    def _step_with_closure(self, micro_batch: retry.MicroBatch) -> Outcome:
        self._is_evaluating = True
        try:
            return self._engine.step_with_closure(lambda: self._run_backward(micro_batch))
        finally:
            self._is_evaluating = False

    def _retried(self, window: Window, outcome: Outcome) -> Outcome:
        """Run a closed window's micro-batches again while it is skipped and that can help."""
        replay, scales = window.replay, []
        while len(replay) == window.num_micro_batches and outcome.is_skipped:
            scales.append(outcome.scale)
            if len(scales) > window.retries or not self._can_lower_scale() or not retry.are_finite(replay):
                if self._settler.log.warns:
                    retry.report_lost(replay, scales, outcome.culprit)
                break
            try:
                for micro_batch in replay:
                    micro_batch.restore_random_state()
                    self._run_backward(micro_batch)
            except BaseException:
                self._engine.give_up()
                raise
            outcome = self._engine.close()
        return outcome

    def _can_lower_scale(self) -> bool:
        return isinstance(self.scale, BoundedScale) and self.scale.get() > self.scale.min_scale

    @property
    def _window(self) -> Window:
        return self._engine.window

    # -- gradients for other purposes -----------------------------------------------------------------------------

    def unscale_(self) -> None:
        """Make the window's gradients the true mean, in place, to look at or to change them before ``step()``.

        ``step()`` inspects and clips what it then finds. Sums of 16-bit gradients over several micro-batches are in
        ``p.fp32_grad``, where torch's clipping functions do not look: a warning says so.

        Raises:
            CallOrderError: there is no gradient, or they are unscaled already.
            UnsupportedError: a gradient is fp16, where small ones would become zero; ``clip_norm`` clips them.
        """
        self._check_step("unscale_")
        if self._window.is_unscaled:
            raise refusals.unscaled_already(self.optimizers)
        if self._window.num_micro_batches == 0:
            raise refusals.nothing_to_step("unscale_", 0, self.accumulate)
        self._engine.check_gradients()
        for optimizer in self.optimizers:
            found = [gradient_of(p) for p in parameters_of(optimizer)]
            if any(gradient is not None and gradient.dtype == torch.float16 for gradient in found):
                raise fp16_gradients(optimizer)
        self._engine.unscale_()
        if any(getattr(p, "fp32_grad", None) is not None for o in self.optimizers for p in parameters_of(o)):
            warn(
                "unscale_(): the window's sums of 16-bit gradients are in p.fp32_grad, and p.grad is None:"
                " torch.nn.utils.clip_grad_norm_ and the like see nothing there. To clip, use Stepper(clip_norm=...).",
                HalfstepWarning,
            )

    def take_gradients(self) -> dict[Tensor, Tensor]:
        """End the first of two passes (SAM): hand over the window's true gradients, and begin the window again.

        Returns:
            For each parameter with a gradient, the mean of the window so far, unscaled, fp32 or wider. Where one is
            inf or NaN, the step that the second pass ends with is skipped, whatever that one finds.

        Raises:
            CallOrderError: there is no gradient, or somebody wrote into scaled ones.
        """
        self._check_step("take_gradients")
        if self._window.num_micro_batches == 0:
            raise refusals.nothing_to_step("take_gradients", 0, self.accumulate)
        self._engine.check_gradients()
        return self._engine.take_gradients()

    @contextmanager
    def perturbed(self, shifts: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Shift weights for the second of two passes (SAM), and put them back, bit for bit, when the block is left.

        Args:
            shifts: for each parameter what is added to it, of its shape. Costs the bytes of these parameters meanwhile.

        Raises:
            ArgumentError: a key is no parameter of the optimizers, or a shift has another shape; nothing is changed.
        """
        self._num_perturbed += 1
        try:
            with gradients.shifted(setup.flat(self.optimizers)[0], shifts):
                yield
        finally:
            self._num_perturbed -= 1

    def grad(self, outputs: Tensor, inputs: Any, *, create_graph: bool = True) -> Any:
        """True gradients that a loss can be made of (gradient penalties): ``torch.autograd.grad``, scaled and unscaled.

        Args:
            outputs: one element, from inside a ``forward()`` block.
            inputs: a tensor or a sequence of tensors.
            create_graph: whether the gradients can be differentiated themselves.

        Returns:
            The gradient of ``outputs`` for each of ``inputs``, fp32 or wider, in the same structure. An overflow at
            the present scale comes back as inf; the loss made of it then skips the step and lowers the scale.

        Raises:
            ArgumentError: ``outputs`` is not one number with a graph.
        """
        check_loss(outputs, "grad")
        wanted = gradients.checked_inputs(inputs, "grad")
        scale = self.scale.value(outputs.device)
        with torch.autocast(outputs.device.type, enabled=False):
            loss = gradients.scaled(outputs, scale)
            scaled = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
            if any(g is None for g in scaled):
                raise refusals.bad_inputs("grad", inputs)
            unscaled = tuple(gradients.widened(g) / moved(scale, g.device) for g in scaled)
        return unscaled[0] if isinstance(inputs, Tensor) else unscaled

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self._model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that step together."""
        return self._engine.optimizers

    @property
    def policy(self) -> Policy:
        """Which dtype each part of the run uses, and why (``.reason``)."""
        return self._policy

    @property
    def scale(self) -> Scale:
        """The factor on the loss; ``scale.get()`` is its present value, ``scale.set_(...)`` moves it."""
        return self._engine.scale

    @property
    def ema(self) -> EMA | None:
        """The average that is updated after each applied step."""
        return self._engine.ema

    @property
    def accumulate(self) -> int | None:
        """Micro-batches of one step; can be set between windows."""
        return self._engine.size

    @accumulate.setter
    def accumulate(self, accumulate: int | None) -> None:
        size = setup.checked_size(accumulate, self.optimizers)
        if self._window.is_open:
            raise refusals.size_inside_window(self._window.num_micro_batches)
        self._engine.size = self._window.size = size

    @property
    def clip_norm(self) -> float | None:
        """Largest norm of a step's true gradient; None clips nothing. Can be set at any time, for the next step."""
        return self._engine.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        self._engine.clip_norm = setup.checked_clip_norm(clip_norm, self.optimizers)

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the present window holds."""
        return self._window.num_micro_batches

    @property
    def steps(self) -> int:
        """How many windows were closed so far, skipped ones included. Settles."""
        self._settler.settle()
        return self._settler.log.steps

    @property
    def skipped_steps(self) -> int:
        """How many of them were skipped. Settles."""
        self._settler.settle()
        return self._settler.log.skipped_steps

    @property
    def culprit(self) -> Culprit | None:
        """Who was at fault in the last skipped step; None if there was none. Settles."""
        self._settler.settle()
        return self._settler.log.culprit

    @property
    def saturated_weights(self) -> int:
        """How many 16-bit weights were clamped to their format's largest value so far. Reads the device."""
        return int(self._engine.saturated.item()) + sum(getattr(o, "saturated_weights", 0) for o in self.optimizers)

    @property
    def guarded_bytes(self) -> int:
        """Bytes that copies of buffers take now, inside a window."""
        return self._engine.guard.num_bytes

    def settle(self) -> None:
        """Wait for the step that is on its way; its scheduler, warnings and callbacks act now."""
        self._settler.settle()

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Scale, counters, schedulers and EMA. Settles. Save the model and the optimizers beside it, as ever.

        Raises:
            CallOrderError: a window is open; its gradients are in no state. After an epoch, call ``flush()``.
        """
        if self._window.is_open:
            raise refusals.state_inside_window("state_dict", self._window.num_micro_batches)
        self._settler.settle()
        return state.collect(self.scale, self._settler, self.ema)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, or from that of a GradScaler, torch's or halfstep's; all of it or nothing.

        Raises:
            StateError: something is missing, or holds values that no run can have.
            CallOrderError: a window is open.

        Warns:
            HalfstepWarning: the state is a scaler's, and says nothing of schedulers and EMA.
        """
        if self._window.is_open:
            raise refusals.state_inside_window("load_state_dict", self._window.num_micro_batches)
        self._settler.settle()
        self._engine.forget_forward()  # the model may have been loaded too: its buffers are right as they are
        state.restore(state_dict, self.scale, self._settler, self.ema)

    def __reduce__(self) -> tuple[object, ...]:
        raise refusals.copied()

    def __repr__(self) -> str:
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"Stepper({type(self.model).__name__}, {optimizers}, policy={str(self.policy)!r}, scale={self.scale!r})"

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_backward(self, loss: Tensor) -> None:
        if self._forward_depth > 0:
            raise refusals.inside_forward("backward")
        if self._window.is_full:
            raise refusals.window_is_full(self._window.num_micro_batches)
        if self._window.is_unscaled:
            raise refusals.backward_after_unscale()
        if not self._window.has_forward:
            raise refusals.backward_without_forward()
        if self._needs_closure and not self._is_evaluating:
            raise refusals.closure_optimizer(self.optimizers[0], "backward")
        if self.ema is not None and self.ema.is_swapped:
            raise refusals.step_while_swapped("backward")
        check_loss(loss)

    def _check_step(self, call: str) -> None:
        if self._forward_depth > 0:
            raise refusals.inside_forward(call)
        if self._needs_closure:
            raise refusals.closure_optimizer(self.optimizers[0], call)
        # In the middle of the second of two passes, step() may count a micro-batch.
        if call != "step" or self._window.is_full:
            self._refuse_while_weights_are_others(call)

    def _refuse_while_weights_are_others(self, call: str) -> None:
        if self._num_perturbed > 0:
            raise refusals.step_while_perturbed(call)
        if self.ema is not None and self.ema.is_swapped:
            raise refusals.step_while_swapped(call)

    def _mention_open_window(self) -> None:
        if self._window.num_micro_batches > 0 and not self._has_mentioned_window:
            self._has_mentioned_window = True
            warn(f"An evaluation begins, and {open_window_text(self._window)}", HalfstepWarning)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype, device_type = self.policy.autocast_dtype, self._engine.device.type
        if dtype is None and not torch.is_autocast_enabled(device_type):
            return nullcontext()
        return torch.autocast(device_type, enabled=dtype is not None, dtype=dtype)

    def _accumulating(self) -> Outcome:
        step, window = self._settler.next_step, self._window
        number, scale, loss = window.num_micro_batches, window.scale, window.loss
        return Outcome(settle=lambda: Facts("accumulating", step, number, scale=float(scale), loss=float(loss)))
