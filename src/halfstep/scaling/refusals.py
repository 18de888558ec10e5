"""The errors of GradScaler's calls, each in four parts; where torch has a text for the same fault, it comes first."""

from __future__ import annotations

import torch

from halfstep._compat import OptState
from halfstep.errors import ArgumentError, CallOrderError, NotScaledError, StateError, UnsupportedError


def _called(optimizer: torch.optim.Optimizer) -> str:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} (parameters: {sum(sizes)}, groups: {len(sizes)})"


class Fp16GradientError(UnsupportedError, ValueError):
    """fp16 gradients cannot be unscaled in place; torch raises ``ValueError`` here, so this is one too."""


def unscaled_already(optimizer: torch.optim.Optimizer, stage: OptState) -> CallOrderError:
    """A second ``unscale_`` in one window, or one after the step."""
    if stage is OptState.STEPPED:
        return CallOrderError(
            asked="unscale_() is being called after step().",
            true=f"{_called(optimizer)} was stepped in this window, with unscaled gradients",
            why="its gradients would be divided by the scale twice",
            fix="call unscale_() before step(), or update() in between",
        )
    return CallOrderError(
        asked="unscale_() has already been called on this optimizer since the last update().",
        true=f"the gradients of {_called(optimizer)} are unscaled already",
        why="dividing by the scale twice makes them too small by that factor",
        fix="when accumulating, unscale and clip once, after the window's last backward(); then step() and update()",
    )


def stepped_already(optimizer: torch.optim.Optimizer) -> CallOrderError:
    """A second step in one window."""
    return CallOrderError(
        asked="step() has already been called since the last update().",
        true=f"{_called(optimizer)} was stepped in this window",
        why="a second step would use the same gradients again, divided by the scale twice",
        fix="call scaler.update() once after every optimizer's step, then backward() for the next window",
    )


def nothing_checked() -> NotScaledError:
    """``update`` in a window in which no optimizer was looked at."""
    return NotScaledError(
        asked="No inf checks were recorded prior to update.",
        true="update() was called, and no optimizer was stepped or unscaled since the last update()",
        why="the next scale follows from what the gradients held, and none were looked at",
        fix="call scaler.step(optimizer) before scaler.update(), once per window",
    )


def fp16_gradients(optimizer: torch.optim.Optimizer, clipper: str = "halfstep.Stepper") -> Fp16GradientError:
    """``unscale_`` would flush small fp16 gradients to zero."""
    return Fp16GradientError(
        asked="Attempting to unscale FP16 gradients.",
        true=f"{_called(optimizer)} has fp16 gradients, whose smallest value is 5.96e-8",
        why="unscaled in place, a gradient of 1e-8 becomes 0: what the scaling saved would be lost",
        fix=f"leave unscale_() out: step() unscales in fp32; to clip, use {clipper}(clip_norm=...)",
    )


def closure_with_16_bit(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    """A closure runs the model while its parameters are widened."""
    return UnsupportedError(
        asked=f"step() of {_called(optimizer)} with a closure",
        true="it has 16-bit parameters, which are widened to fp32 while their optimizer steps",
        why="the closure would run the model with fp32 weights on 16-bit inputs",
        fix="keep fp32 weights and use autocast inside the closure",
    )


def new_scale_is_no_scalar(new_scale: torch.Tensor) -> ArgumentError:
    """``update(new_scale=tensor)`` with a tensor that is not one plain number."""
    return ArgumentError(
        asked="new_scale should be a float or a 1-element tensor with requires_grad=False."
        f" Got {new_scale.numel()} elements, requires_grad={new_scale.requires_grad}",
        true="there is one scale, and it is no parameter",
        why="it cannot be set from this tensor",
        fix="pass a number such as 2.0**14",
    )


def never_stepped(optimizer: torch.optim.Optimizer) -> CallOrderError:
    """Asked for the outcome of a step that was not taken."""
    return CallOrderError(
        asked=f"the outcome of {_called(optimizer)}",
        true="this scaler has not stepped that optimizer",
        why="there is no step to report on",
        fix="ask after scaler.step(optimizer), with the very object that was stepped",
    )


def settings_beside_scale(names: list[str]) -> ArgumentError:
    """Settings of a dynamic scale together with a scale object."""
    return ArgumentError(
        asked=f"scale= together with {', '.join(names)}",
        true="a Scale object brings its own settings",
        why="the others could not take effect",
        fix="put them into the scale: GradScaler(device, scale=DynamicScale(...))",
    )


def outputs_are_no_tensors(outputs: object) -> ArgumentError:
    """``scale`` of something that holds no tensors."""
    return ArgumentError(
        asked=f"outputs must be a Tensor or an iterable of Tensors. Got {type(outputs).__name__}",
        true="scale() multiplies tensors",
        why="there is nothing that backward could start from",
        fix="pass the loss tensor, without .item()",
    )


def not_a_scale(scale: object) -> ArgumentError:
    """``scale=`` with a number or anything else that is no Scale."""
    return ArgumentError(
        asked=f"scale={scale!r}",
        true="scale is a halfstep Scale object: NoScale, StaticScale, DynamicScale or AdaptiveScale",
        why="a number does not say how the scale moves",
        fix="pass init_scale=... for a dynamic scale, or scale=StaticScale(...)",
    )


class EmptyStateError(StateError, RuntimeError):
    """An empty scaler state; torch raises ``RuntimeError`` here, so this is one too."""


def empty_state() -> EmptyStateError:
    """A disabled scaler saves an empty state."""
    return EmptyStateError(
        asked="The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.",
        true="this scaler is enabled",
        why="there is no scale to continue from",
        fix="start with a fresh scaler, or load a state of an enabled one",
    )


def incomplete_state(missing: list[str], present: list[str]) -> StateError:
    """A scaler state without one of torch's five entries."""
    return StateError(
        asked=f"load_state_dict() of a state with entries {present}",
        true=f"{missing} are missing",
        why="the run would continue with other values than it was saved with; nothing was loaded",
        fix="for states of DeepSpeed, Megatron-LM or Apex use halfstep.scaling.interchange.read_scaler_state",
    )


def bad_state(state: dict[str, object], error: Exception) -> StateError:
    """A scaler state with values that no run can have."""
    return StateError(
        asked=f"load_state_dict({state!r})",
        true=str(error).split("\n", 1)[0],
        why="a run cannot continue from this value; nothing was loaded",
        fix="load a checkpoint from before the damage, or start with a fresh scaler",
    )


def shared_parameters(optimizer: torch.optim.Optimizer, other: object, num_shared: int) -> ArgumentError:
    """Two optimizers that hold the same parameter meet in one window."""
    return ArgumentError(
        asked=f"step() of {type(optimizer).__name__} after {type(other).__name__} in one window",
        true=f"{num_shared} parameters with gradients belong to both optimizers",
        why="their gradients would be unscaled twice, and stepped twice with one backward pass",
        fix="give each parameter to one optimizer, or call update() and backward() between the two steps",
    )


def setting_without_effect(setting: str, scale: object) -> ArgumentError:
    """A setting of a dynamic scale on a scale that has none such."""
    return ArgumentError(
        asked=f"set_{setting}()",
        true=f"the scale is {scale!r}, which has no {setting}",
        why="the setting could not take effect",
        fix="use a DynamicScale, or leave the call out",
    )


def parameters_changed(optimizer: torch.optim.Optimizer, num_before: int) -> CallOrderError:
    """``add_param_group`` between ``unscale_`` and ``step``."""
    return CallOrderError(
        asked=f"step() of {_called(optimizer)}",
        true=f"it held {num_before} parameters when its gradients were unscaled in this window",
        why="the gradients of the others are neither unscaled nor checked",
        fix="add parameters after update(), before the next backward()",
    )


def update_inside_closure() -> CallOrderError:
    """``update`` while an optimizer evaluates a closure."""
    return CallOrderError(
        asked="update() inside a closure",
        true="the optimizer is still stepping",
        why="the scale would change between its evaluations, and their check would be lost",
        fix="call scaler.update() after scaler.step(optimizer, closure)",
    )


def no_state(state: object) -> StateError:
    """A scaler state that is no dict."""
    return StateError(
        asked=f"load_state_dict() of a {type(state).__name__}",
        true="a scaler state is a dict",
        why="there is nothing in it to continue from",
        fix="pass what scaler.state_dict() returned",
    )
