"""What happens to a window: it opens, gathers gradients, is judged, and ends in a step or in none.

The public face, and the order in which calls may come, are the Stepper's (stepper.py); this is the path that every
window takes, without a question on the way. From inspection to the next scale nothing is read on the host, unless the
host is the device or an optimizer has to be told whether to step.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._compat import HostCopy, has_float64, is_host, moved
from halfstep.errors import HalfstepWarning, PrecisionWarning, warn
from halfstep.kernels.gradients import gradient_of
from halfstep.kernels.inspect import Inspection, inspect
from halfstep.scaling import closures
from halfstep.scaling.scale import NoScale, Scale
from halfstep.scaling.take_step import take_step
from halfstep.scaling.unscale import Number, divide_
from halfstep.scaling.window import IdleSteps, parameters_of
from halfstep.training import gradients, refusals
from halfstep.training.accumulate import Window
from halfstep.training.ema import EMA
from halfstep.training.fp32_sums import Fp32Sums
from halfstep.training.guards import BufferGuard
from halfstep.training.judge import Judgement, judge
from halfstep.training.outcome import Outcome
from halfstep.training.settle import Numbers, Settler, WindowRecord
from halfstep.training.setup import Optimizers, bare_halves, flat, half_weights_text
from halfstep.training.stalls import StallMeter, storages_of

_lost: dict[int, Window] = {}  # of engines whose window is open: to be mentioned when the program ends


class Engine:
    """The window of a stepper, and what a window does to weights, buffers, average and scale."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, scale: Scale, ema: EMA | None, settler: Settler):
        self.optimizers, self.scale, self.ema, self.settler = optimizers, scale, ema, settler
        self.guard = BufferGuard(model)
        self.clip_norm: float | None = None
        self.size: int | None = 1  # of the next window
        self.saturated = torch.zeros((), dtype=torch.int64, device="cpu")
        self._idle, self._sums, self.meter = IdleSteps(), Fp32Sums(model), StallMeter()
        self._is_replicated = isinstance(model, nn.parallel.DistributedDataParallel)
        self._parameters: list[Tensor] = []
        self._dtypes = [p.dtype for p in flat(optimizers)[0]]
        self._group_ends: list[int] = []
        self._is_guarding = False
        self._is_stepping = False
        self.begin()
        for optimizer in optimizers:
            watch = _Watch(self)
            handles = (optimizer.register_step_pre_hook(watch), optimizer.register_state_dict_pre_hook(watch.settle))
            for handle in handles:
                weakref.finalize(self, handle.remove)

    # -- a window opens and gathers -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new window, empty."""
        self._sums.stop()  # between windows gradients are the user's own
        self.window = Window(self.size)
        self._is_guarding = False
        _lost.pop(id(self), None)

    def remember_buffers(self) -> None:
        """A forward pass is about to run; the first of a window finds the buffers as they must be left by a skip."""
        if self._is_guarding:
            self.guard.remember_more()
        else:
            self.guard.remember()
            self._is_guarding = True

    def forward_failed(self) -> None:
        """A forward pass has raised; if it was the window's first, its buffers are what they were."""
        if self.window.num_micro_batches == 0 and not self.window.has_forward and not self.window.is_open:
            self.guard.finish(1.0)
            self._is_guarding = False

    def backward(self, loss: Tensor, weight: Number, inputs: Any, retain_graph: bool | None) -> None:
        """Add the gradient of a micro-batch. If that raises, the window is given up."""
        window = self.window
        if window.num_micro_batches == 0:
            self._open(loss.device)
        elif not self._is_replicated:  # in its second forward pass DistributedDataParallel makes gradients anew
            self.check_gradients()
        self._sums.check_reduction(self._parameters)
        self.settler.order.learn(loss)
        share = window.in_units(weight)
        try:
            with gradients.outside_autocast(loss.device), torch.enable_grad():
                torch.autograd.backward(
                    gradients.scaled(loss, share * window.scale), inputs=inputs, retain_graph=retain_graph
                )
        except BaseException:
            self.give_up()
            raise
        self._sums.finish(self._parameters)
        window.add(share, loss)
        window.saw(self._parameters)
        _lost[id(self)] = window

    def _open(self, device: torch.device) -> None:
        """The first loss of a window is here: note the scale, drop gradients that others left."""
        self._parameters, self._group_ends = flat(self.optimizers)
        dtypes = [p.dtype for p in self._parameters]
        if dtypes != self._dtypes:
            before, self._dtypes = self._dtypes, dtypes
            self._mention_casts(before)
        value = self.scale.value(device)
        self.window.scale = self.scale.get() if is_host(device) else value.clone()
        self.window.scale_changes = self.scale.num_changes
        gradients.drop(self._parameters)
        self._sums.watch(self._parameters, is_on=self.window.size != 1)

    def _mention_casts(self, before: list[torch.dtype]) -> None:
        """Parameters have other dtypes than a window ago: say so where 16-bit weights without masters came of it."""
        if len(before) != len(self._dtypes):
            return  # a group was added or removed
        was = {id(p): dtype for p, dtype in zip(self._parameters, before, strict=True)}
        halves = [p for p in bare_halves(self.optimizers) if was[id(p)] != p.dtype]
        if halves:
            names = self.settler.order.names_of(halves[:1], [])
            text = half_weights_text([(names[0], halves[0].dtype), *(("", p.dtype) for p in halves[1:])])
            warn(f"The model was cast after its Stepper was made. {text}", PrecisionWarning)

    def forget_forward(self) -> None:
        """The window is empty: what a forward pass without backward has left is not to be put back any more."""
        self.guard.finish(0.0)
        self.begin()

    def give_up(self) -> None:
        """Drop the window: its gradients, and what its forward passes wrote."""
        self.guard.finish(1.0)
        gradients.drop(self._parameters)
        self.begin()

    # -- a window ends --------------------------------------------------------------------------------------------

    def close(self) -> Outcome:
        """Step with what the window holds, or skip; drop the gradients; begin the next window; then tell."""
        self.settler.settle()  # the step before: only now, so that the device has had this window's work to do
        self.guard.learn()
        self.check_gradients()
        idle = [o for o in self.optimizers if all(gradient_of(p) is None for p in parameters_of(o))]
        num_micro_batches, loss = self.window.num_micro_batches, self.window.loss
        try:
            with gradients.outside_autocast(self._parameters[0].device):
                tell = self._step()
        except BaseException:
            self.guard.finish(1.0)
            raise
        finally:
            self._end()
        outcome = self.settler.no_gradients(num_micro_batches, loss) if tell is None else tell()
        for optimizer in self.optimizers:
            has_gradients = not any(optimizer is one for one in idle)
            self._idle.stepped(optimizer, self.settler.order, has_gradients=has_gradients)
        return outcome

    def _step(self) -> Callable[[], Outcome] | None:
        """Inspect, judge, step, follow up. None if there is no gradient; else what makes the outcome."""
        found = self._inspect()
        if found is None:
            self.guard.finish(0.0)
            return None
        judgement = judge(self.window, found, self.clip_norm)
        if not judgement.forbids_step:
            self._step_optimizers(judgement)
        return self._conclude(found, judgement)

    def _inspect(self) -> Inspection | None:
        """One look at the gradients; None if there is none."""
        found = [gradient_of(p) for p in self._parameters]
        if all(gradient is None for gradient in found):
            return None
        return inspect(found, largest=self.scale.needs_largest)

    def _gradients(self) -> list[Tensor]:
        return [g for g in map(gradient_of, self._parameters) if g is not None]

    def _step_optimizers(self, judgement: Judgement) -> None:
        divisor = judgement.divisor_tensor
        self._is_stepping = True
        stalls = self.meter.begin(self.optimizers)
        for optimizer in self.optimizers:
            for count in take_step(optimizer, divisor, judgement.found_inf_tensor, stalls):
                self.saturated = moved(self.saturated, count.device) + count

    def _conclude(self, found: Inspection, judgement: Judgement) -> Callable[[], Outcome]:
        """The optimizers have stepped, or not: average, buffers and scale follow. Returns what makes the outcome."""
        window, found_inf = self.window, judgement.found_inf
        if self.ema is not None and not judgement.forbids_step:
            self.ema.update(judgement.found_inf_tensor)
        missed = self.guard.finish(found_inf)
        next_scale = self._update_scale(found, judgement)
        self.settler.order.finish()
        storages = storages_of(self.optimizers)
        record = WindowRecord(window.num_micro_batches, self._parameters, self._group_ends, found, missed, storages)
        home = found_inf.device if isinstance(found_inf, Tensor) else torch.device("cpu")
        stalls = self.meter.counts(self.optimizers, home)
        numbers = (
            *(found_inf, window.scale, judgement.plain, judgement.divisor, judgement.norm, next_scale, window.loss),
            *stalls,
        )
        if not isinstance(found_inf, Tensor):
            known = Numbers(*map(float, numbers))
            return lambda: self.settler.known(record, known)
        dtype = torch.float64 if has_float64(found_inf.device) else torch.float32
        parts = [_on_device(n, dtype, found_inf.device) for n in numbers]
        norms = [moved(row, found_inf.device).to(dtype) for row in (found.norms or {}).values()]
        sent = HostCopy(torch.cat([torch.stack(parts), *norms]))
        return lambda: self.settler.sent(record, sent)

    def _update_scale(self, found: Inspection, judgement: Judgement) -> Number:
        scale = self.window.scale
        if isinstance(self.scale, NoScale):
            return scale
        home = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
        now = self.scale.get() if judgement.is_known else self.scale.value(home)
        # Another stepper may have lowered a shared scale meanwhile: an overflow at the old one is no news.
        was_moved = self.scale.num_changes != self.window.scale_changes
        is_stale = judgement.found_inf * (scale > now) if was_moved else 0.0
        if isinstance(is_stale, float) and is_stale:
            return now
        largest = None
        if self.scale.needs_largest:  # the true gradient's, at the present scale
            largest = (found.total_largest(home) * (now / judgement.plain)).float()
        before = self.scale.snapshot() if isinstance(is_stale, Tensor) else None
        self.scale.update_(torch.as_tensor(judgement.found_inf, dtype=torch.float32, device=home), largest)
        self.scale.num_changes += 1
        if before is not None:
            assert isinstance(is_stale, Tensor)
            self.scale.put_back_where_(is_stale, before)
        return self.scale.get() if judgement.is_known else self.scale.value(home)

    def refuse_step_by_hand(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: it must be the engine that does it, while gradients are scaled."""
        if self.window.num_micro_batches > 0 and not self._is_stepping:
            raise refusals.step_by_hand(optimizer)

    def _end(self) -> None:
        self._is_stepping = False
        torch.clear_autocast_cache()  # a loop inside one autocast would go on with 16-bit copies of the old weights
        gradients.drop(self._parameters)
        self.begin()

    # -- gradients for other purposes -----------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Raise CallOrderError if somebody wrote into scaled gradients, or the parameters are others now."""
        now, before = flat(self.optimizers)[0], self._parameters
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            raise refusals.parameters_changed(len(before), len(now))
        changed = [] if self.window.is_unscaled else self.window.changed(now)
        if changed:
            names = self.settler.order.names_of([now[i] for i in changed[:3]], [])
            raise refusals.gradients_changed(names, len(changed))

    def unscale_(self) -> None:
        """Make the window's gradients the true mean, in place."""
        found = self._inspect()
        divisor = judge(self.window, found, None).divisor_tensor if found is not None else None
        if divisor is not None:
            divide_(self._gradients(), divisor)
        self.window.is_unscaled = True

    def take_gradients(self) -> dict[Tensor, Tensor]:
        """The window's true gradients; the window begins again, and remembers whether they were finite."""
        judgement = judge(self.window, inspect([gradient_of(p) for p in self._parameters]), None)
        with torch.no_grad():
            found = ((p, gradient_of(p)) for p in self._parameters)
            taken = {p: gradients.divided(g, judgement.divisor) for p, g in found if g is not None}
        gradients.drop(self._parameters)
        self.window = Window(self.size, first_pass_found_inf=judgement.found_inf)
        return taken

    # -- optimizers that evaluate the loss themselves -------------------------------------------------------------

    def step_with_closure(self, backward: Callable[[], Tensor]) -> Outcome:
        """Step an optimizer that evaluates the loss itself; undone whole if an evaluation is not finite.

        Args:
            backward: runs one micro-batch, forward and backward, and returns its loss.
        """
        self.settler.settle()
        last: list[tuple[Inspection, Judgement]] = []

        self._is_stepping = True

        def evaluate() -> Tensor:
            self.window = Window(1)
            with torch.enable_grad():
                loss = backward()
            found = inspect([gradient_of(p) for p in self._parameters], largest=self.scale.needs_largest)
            judgement = judge(self.window, found, None)
            last[:] = [(found, judgement)]
            if judgement.found_inf:
                raise closures.BadEvaluation
            if judgement.divisor_tensor is not None:
                divide_(self._gradients(), judgement.divisor_tensor)
            return loss.detach()

        try:
            with gradients.outside_autocast(self.device):
                closures.step_or_restore(self.optimizers[0], evaluate, lambda: bool(last[0][1].found_inf))
                tell = self._conclude(*last[0])
        except BaseException:
            self.guard.finish(1.0)
            raise
        finally:
            self._end()
        return tell()

    @property
    def device(self) -> torch.device:
        """That of the first parameter: where forward passes run."""
        parameter: Tensor = next(p for o in self.optimizers for group in o.param_groups for p in group["params"])
        return parameter.device


def mention_lost_windows() -> None:
    """At exit: a forgotten flush() has lost gradients."""
    for window in _lost.values():
        warn(f"The program ends, and {open_window_text(window)}", HalfstepWarning)


def open_window_text(window: Window) -> str:
    """What to say of a window that is open when it should not be."""
    of = f" of {window.size}" if window.size else ""
    remedy = "Call flush() at the end of each epoch: it steps with their true mean."
    if window.is_full:
        remedy = "It is full: call step(), or discard() where they are of no use."
    how_far = f"micro-batches so far: {window.num_micro_batches}{of}"
    return f"a window is open: {how_far}. Their gradients have not been used. {remedy}"


atexit.register(mention_lost_windows)


def _on_device(number: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device=device, dtype=dtype)
    return torch.full((), number, dtype=dtype, device=device)  # a kernel; as_tensor would wait for a copy


class _Watch:
    """Hangs on an optimizer and lets nobody else step it with scaled gradients; keeps no engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    is_halfsteps = True

    def settle(self, _: torch.optim.Optimizer) -> None:
        """The optimizer's state is about to be saved: schedulers move its learning rate first, where that is due."""
        engine = self._engine()
        if engine is not None:
            engine.settler.settle()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.refuse_step_by_hand(optimizer)
