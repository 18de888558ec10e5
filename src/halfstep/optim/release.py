"""Gradient release: each gradient is used and freed as soon as it exists, so that only one is alive at a time.

Backward reaches the last layer first. Its weight is stepped, and its gradient freed, before the first layer's gradient
exists. That order decides what can hold and what cannot:

    holds       one gradient's bytes instead of the model's; a fault of the forward pass (a loss that is inf or NaN)
                leaves every bit of every weight
    does not    loss scaling, since a scale is judged by all gradients: bf16 and fp32 only; clipping by this step's
                norm; windows of several micro-batches; ranks that average gradients; a gradient that is not finite
                where the loss was: its parameter is skipped, others have moved, and the outcome is ``partial``

Source: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited Resources* (LOMO), ACL 2024,
section 3.1; torch's tutorial on optimizer steps in backward; FlashOptim, arXiv 2602.23349, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep._compat import HostCopy, has_float64, is_host, moved
from halfstep.errors import SkippedStepWarning, warn
from halfstep.kernels.inspect import inspect
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.packed import PackedOptimizer
from halfstep.optim.packed_options import checked_clip_norm

_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_


class ReleaseOutcome:
    """What one ``backward()`` did to the weights. Any answer waits for the device, the first time.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> from halfstep.optim import SGD
        >>> with release_gradients(model, SGD(model.parameters(), lr=0.1)) as release:
        ...     release.backward(model(torch.ones(1, 2)).sum()).kind
        'applied'
    """

    def __init__(self, names: list[str], numbers: Tensor) -> None:
        self._names, self._sent = names, HostCopy(numbers)

    @cached_property
    def _numbers(self) -> list[float]:
        return self._sent.read()

    @property
    def loss(self) -> float:
        """The loss."""
        return self._numbers[0]

    @property
    def culprits(self) -> tuple[str, ...]:
        """Parameters whose gradient was not finite, although the loss was; the one nearest the loss first."""
        if not math.isfinite(self.loss):
            return ()
        return tuple(name for name, norm in zip(self._names, self._numbers[1:], strict=True) if not math.isfinite(norm))

    @property
    def kind(self) -> Literal["applied", "partial", "skipped"]:
        """``"skipped"``: the loss was not finite, nothing was written; ``"partial"``: some parameters were skipped."""
        if not math.isfinite(self.loss):
            return "skipped"
        return "partial" if self.culprits else "applied"

    @property
    def is_applied(self) -> bool:
        """Whether every parameter with a gradient was stepped."""
        return self.kind == "applied"

    @property
    def grad_norm(self) -> float:
        """L2 norm of all gradients together, before clipping; not finite if one of them is."""
        return math.hypot(*self._numbers[1:])

    def __repr__(self) -> str:
        if self.kind == "skipped":
            return f"skipped: the loss is {self.loss:g}"
        if self.kind == "partial":
            others = f" and {len(self.culprits) - 1} more" if len(self.culprits) > 1 else ""
            return f"partial: the gradient of {self.culprits[0]}{others} is inf or NaN; the other parameters have moved"
        return f"applied: gradient norm {self.grad_norm:.4g}"


class GradientRelease:
    """What :func:`release_gradients` returns: ``backward`` in place of the loss's, until ``remove`` or a block ends."""

    def __init__(self, model: nn.Module, optimizer: PackedOptimizer, clip_norm: float | None, clip_by: str) -> None:
        self._optimizer, self._clip_norm, self._clip_by = optimizer, clip_norm, clip_by
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._groups: dict[Tensor, int] = {}
        self._handles: dict[Tensor, Any] = {}
        self._flags: dict[torch.device, Tensor] | None = None  # whether the loss is bad; None between backward passes
        self._norms: dict[Tensor, Tensor] = {}
        self._previous: Tensor | None = None  # norm of the last step that was one; 0-dim, NaN before the first
        self._has_warned = self._is_removed = False
        self._hang_hooks()
        optimizer.is_released = True

    def _hang_hooks(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                self._groups[p] = index
                if p.requires_grad and p not in self._handles:
                    if p.dtype == torch.float16:
                        raise refusals.release_of_fp16(p, self._names.get(p))
                    self._handles[p] = p.register_post_accumulate_grad_hook(self._use)

    def backward(self, loss: Tensor) -> ReleaseOutcome:
        """Go back from a loss, and step every parameter when its gradient is complete.

        Args:
            loss: one floating number with a graph.

        Returns:
            What was done. On a device nothing has been read yet.

        Raises:
            ArgumentError: it is no loss.
            CallOrderError: gradients are there that nobody has used.
        """
        if self._is_removed:
            raise refusals.release_removed()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point() or not loss.requires_grad:
            raise refusals.bad_loss(loss)
        if any(p.grad is not None for p in self._groups):
            raise refusals.gradients_left(self._optimizer)
        self._optimizer._take_in(self._optimizer.param_groups)
        self._optimizer._check_members()  # what can be seen now need not stop the backward pass half way
        self._hang_hooks()  # on groups that were added, on parameters that were unfrozen
        self._optimizer.begin_counting_stalled()
        is_bad = (~loss.detach().isfinite()).float().reshape(())
        self._flags, self._norms = {loss.device: is_bad}, {}
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._flags = None
            torch.clear_autocast_cache()  # a loop inside one autocast would go on with copies of the old weights
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # what torch's schedulers look for
        return self._outcome(loss.detach().reshape(()))

    @torch.no_grad()
    def _use(self, p: Tensor) -> None:
        """A gradient is complete: step, and free it."""
        if self._flags is None:
            raise refusals.foreign_backward(p, self._names.get(p))
        if p in self._norms:
            raise refusals.used_twice(p, self._names.get(p))
        gradient, p.grad = p.grad, None
        if gradient is None or not gradient.numel():
            return
        norm = inspect([gradient]).total_norm(p.device)  # in fp64, where the device has it
        if p.device not in self._flags:
            self._flags[p.device] = moved(next(iter(self._flags.values())), p.device)
        flag = torch.maximum(self._flags[p.device], (~norm.isfinite()).to(torch.float32))
        self._norms[p] = norm
        if is_host(p.device) and flag.item() != 0:
            return
        factor = self._factor(norm)
        on_device = None if is_host(p.device) else flag
        self._optimizer.step_alone(
            self._groups[p], p, gradient, float(factor) if is_host(p.device) else factor, on_device
        )

    def _factor(self, norm: Tensor) -> Tensor:
        if self._clip_norm is None:
            return torch.ones_like(norm)
        by = norm
        if self._previous is not None and self._clip_by == "previous":
            previous = moved(self._previous, norm.device).to(norm.dtype)
            by = torch.where(previous.isfinite(), previous, norm)
        return (self._clip_norm / (by + _CLIP_EPS)).clamp(max=1.0)

    def _outcome(self, loss: Tensor) -> ReleaseOutcome:
        home = loss.device
        dtype = torch.float64 if has_float64(home) else torch.float32
        numbers = torch.stack([loss.to(dtype), *(moved(norm, home).to(dtype) for norm in self._norms.values())])
        total = torch.linalg.vector_norm(numbers[1:])
        before = torch.full_like(total, math.nan) if self._previous is None else moved(self._previous, home)
        self._previous = torch.where(total.isfinite() & loss.isfinite(), total, before.to(dtype))
        unknown = "a parameter outside the model"
        outcome = ReleaseOutcome([self._names.get(p, unknown) for p in self._norms], numbers)
        if is_host(home) and not outcome.is_applied and not self._has_warned:
            self._has_warned = True
            warn(f"Released gradients, {outcome}. This is said once.", SkippedStepWarning)
        return outcome

    def state_dict(self) -> dict[str, float]:
        """The norm that the next step is clipped by; save it beside the optimizer's state. Reads the device."""
        return {"previous_norm": math.nan if self._previous is None else float(self._previous)}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Raises:
            StateError: it holds no norm.
        """
        norm = state_dict.get("previous_norm") if isinstance(state_dict, Mapping) else None
        if not isinstance(norm, (int, float)) or norm < 0 or norm == math.inf:
            raise refusals.bad_state(f"previous_norm is {norm!r}", "it is the norm of a step, or NaN before the first")
        self._previous = torch.tensor(float(norm), dtype=torch.float64, device="cpu")

    def remove(self) -> None:
        """Back to gradients that stay until ``optimizer.step()``."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        if not self._is_removed:
            self._is_removed, self._optimizer.is_released = True, False

    def __reduce__(self) -> tuple[object, ...]:
        raise refusals.release_copied()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def release_gradients(
    model: nn.Module,
    optimizer: PackedOptimizer,
    *,
    clip_norm: float | None = None,
    clip_by: Literal["parameter", "previous"] = "previous",
) -> GradientRelease:
    """Use and free each gradient as soon as it exists: no more than one is alive.

    Args:
        model: gives names; in one process, not wrapped in DistributedDataParallel or FSDP.
        optimizer: of ``halfstep.optim``, of bf16 and fp32 parameters.
        clip_norm: bound on a norm; None clips nothing.
        clip_by: ``"previous"``: every gradient is multiplied by what would have clipped the step before to
            ``clip_norm`` (the first step: as the other); ``"parameter"``: each parameter's gradient is clipped to
            ``clip_norm`` by its own norm.

    Returns:
        A :class:`GradientRelease`: call ``release.backward(loss)`` in place of ``loss.backward()``, and leave
        ``optimizer.step()`` out. Schedulers are stepped as ever.

    A loss that is inf or NaN leaves every bit. A gradient that is inf or NaN although the loss was not leaves its own
    parameter; others may have moved already, and ``outcome.kind`` is ``"partial"``. An error in the middle of the
    backward pass leaves the weights of the layers that it had reached stepped. Hooks on ``optimizer.step`` do not run.
    With ``clip_by="previous"`` save ``release.state_dict()`` beside the optimizer's.

    Raises:
        UnsupportedError: another optimizer, fp16, or a model whose gradients are averaged over ranks.
        ArgumentError: the optimizer has a ``clip_norm`` of its own, or not all of the model's trained parameters; or a
            value is out of range.
        CallOrderError: its gradients are released already.

    Example:
        >>> from halfstep.optim import AdamW
        >>> model = nn.Linear(4, 1)
        >>> optimizer = AdamW(model.parameters(), policy="bf16-master", master="split8", moments="int8")
        >>> release = release_gradients(model, optimizer, clip_norm=1.0)
        >>> outcome = release.backward(model(torch.ones(2, 4).bfloat16()).sum())
        >>> outcome.kind, model.weight.grad
        ('applied', None)
    """
    if not isinstance(optimizer, PackedOptimizer):
        raise refusals.not_packed(optimizer)
    parts = [model, *model.modules()] if isinstance(model, nn.Module) else []
    if any(type(part).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") for part in parts):
        raise refusals.release_of_replicas(model)
    if optimizer.is_released:
        raise refusals.release_twice(optimizer)
    if optimizer.clip_norm is not None:
        raise refusals.optimizer_clips(optimizer)
    clip_norm = checked_clip_norm(clip_norm)
    if clip_by not in ("parameter", "previous"):
        raise refusals.bad_clip_by(clip_by)
    known = {p for group in optimizer.param_groups for p in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if others:
        raise refusals.trained_elsewhere(optimizer, others)
    names = {p: name for name, p in model.named_parameters()}
    fp16 = [p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.float16]
    if fp16:
        raise refusals.release_of_fp16(fp16[0], names.get(fp16[0]))
    return GradientRelease(model, optimizer, clip_norm, clip_by)
