"""What a Stepper is built from, checked before it changes anything."""

from __future__ import annotations

import inspect as python_inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from halfstep.errors import PrecisionWarning, warn
from halfstep.formats import HALF_DTYPES, format_of
from halfstep.hardware import probe
from halfstep.optim import masters
from halfstep.optim.masters import MasterWeights
from halfstep.optim.packed import PackedOptimizer
from halfstep.policy import Master, Moments, Policy, Scaling
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.checks import checked_count
from halfstep.scaling.refusals import not_a_scale
from halfstep.scaling.scale import DynamicScale, NoScale, Scale
from halfstep.scaling.window import parameters_of
from halfstep.training import refusals
from halfstep.training.ema import EMA

Optimizers = tuple[torch.optim.Optimizer, ...]


def checked_optimizers(model: nn.Module, optimizer: Any) -> Optimizers:
    """One optimizer or several, as a tuple: their parameters are the model's, none twice."""
    if not isinstance(model, nn.Module):
        raise refusals.no_module(model)
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise refusals.no_optimizer(optimizer)
    own, seen = {id(p) for p in model.parameters()}, set[int]()
    for one in optimizers:
        parameters = {id(p) for p in parameters_of(one)}
        if not parameters:
            raise refusals.no_parameters(one)
        if any(hasattr(p, "device_mesh") or getattr(p, "_is_flat_param", False) for p in parameters_of(one)):
            raise refusals.distributed_clipping()
        if parameters - own:
            if one in masters._wrapped:
                raise refusals.inner_optimizer(one)
            raise refusals.foreign_parameters(one, len(parameters - own), len(parameters))
        if len(parameters) < len(parameters_of(one)):
            raise refusals.listed_twice(one)
        if parameters & seen:
            raise refusals.same_parameter_twice(one, len(parameters & seen))
        seen |= parameters
        if isinstance(one, PackedOptimizer) and one.clip_norm is not None:
            raise refusals.clips_by_itself(one)
        if isinstance(one, PackedOptimizer) and one.is_released:
            raise refusals.released(one)
        if needs_closure(one):
            _check_closure_optimizer(one, len(optimizers))
    return optimizers


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step evaluates the loss itself, as LBFGS does."""
    optimizer = getattr(optimizer, "inner", optimizer) if isinstance(optimizer, MasterWeights) else optimizer
    # The class's own step: schedulers and profilers wrap the bound one, keeping no signature.
    closure = python_inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is python_inspect.Parameter.empty


def _check_closure_optimizer(optimizer: torch.optim.Optimizer, num_optimizers: int) -> None:
    if num_optimizers > 1:
        why = "every evaluation moves its own parameters only, and the others would see half of it"
        raise refusals.closure_optimizer_with(optimizer, "another optimizer", why)
    if any(p.dtype in HALF_DTYPES for p in parameters_of(optimizer)):
        why = "16-bit weights are widened to fp32 while their optimizer steps, and the closure would run with those"
        raise refusals.closure_optimizer_with(optimizer, "16-bit weights", why)


def checked_schedulers(scheduler: Any, optimizers: Optimizers) -> tuple[Any, ...]:
    """None, one or several schedulers, as a tuple: steppable without arguments, of these optimizers."""
    schedulers = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,) * (scheduler is not None)
    for one in schedulers:
        is_plateau = isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)
        is_other = isinstance(one, (type, torch.optim.Optimizer)) or not hasattr(one, "state_dict")
        if is_plateau or is_other or not _is_steppable(one):
            raise refusals.no_scheduler(one)
        owner = getattr(one, "optimizer", None)
        if owner is not None and not any(owner is optimizer for optimizer in optimizers):
            raise refusals.foreign_scheduler(one)
        if sum(one is other for other in schedulers) > 1:
            raise refusals.same_scheduler_twice(one)
    return schedulers


def _is_steppable(scheduler: Any) -> bool:
    """Whether ``scheduler.step()`` can be called without arguments."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    parameters = python_inspect.signature(step).parameters.values()
    named = (python_inspect.Parameter.POSITIONAL_OR_KEYWORD, python_inspect.Parameter.KEYWORD_ONLY)
    return not any(p.default is python_inspect.Parameter.empty and p.kind in named for p in parameters)


def checked_size(accumulate: Any, optimizers: Optimizers) -> int | None:
    """Micro-batches of a window; None: it ends when it is flushed."""
    if accumulate != 1 and needs_closure(optimizers[0]):
        why = "each of its evaluations is a window of its own"
        raise refusals.closure_optimizer_with(optimizers[0], "accumulate", why)
    return None if accumulate is None else checked_count(accumulate, "accumulate")


def checked_clip_norm(clip_norm: Any, optimizers: Optimizers) -> float | None:
    """The largest norm of the true gradient, or None."""
    if clip_norm is None:
        return None
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if not is_number or not 0 < clip_norm <= sys.float_info.max:
        raise refusals.bad_clip_norm(clip_norm)
    for optimizer in optimizers:
        if needs_closure(optimizer):
            why = "a line search compares losses along the true gradient"
            raise refusals.closure_optimizer_with(optimizer, "clip_norm", why)
    return float(clip_norm)


def checked_ema(ema: Any, model: nn.Module) -> EMA | None:
    """An EMA of this model or None."""
    if ema is None:
        return None
    if not isinstance(ema, EMA):
        raise refusals.no_ema(ema)
    if not ema.follows(model):
        raise refusals.foreign_ema(ema)
    return ema


def checked_on_overflow(on_overflow: Any) -> tuple[bool, Callable[[Any], object] | None]:
    """Whether skips are warned about, and who is told of each."""
    if callable(on_overflow):
        return False, on_overflow
    if on_overflow not in ("warn", "ignore"):
        raise refusals.bad_on_overflow(on_overflow)
    return on_overflow == "warn", None


def checked_policy(policy: Any, optimizers: Optimizers, model: nn.Module) -> Policy:
    """The policy, if a stepper can carry it out with these weights."""
    device_type = parameters_of(optimizers[0])[0].device.type
    # On the CPU 16-bit arithmetic is for trying things out: a policy chosen by name needs no warning that it is slow.
    asks_hardware = policy == "auto" or device_type != "cpu"
    parsed = Policy.parse(policy, hardware=probe(device_type) if asks_hardware else None)
    parsed.require_runnable(with_stepper=True)
    if parsed.output_dtype is not None:
        fix = "leave it out, and call policy.cast_output(model(x)) in the block of forward()"
        raise refusals.policy_option("output_dtype", str(parsed.output_dtype), fix)
    if not parsed.cast_forward_inputs:
        fix = "leave it out: a stepper casts no inputs anyway"
        raise refusals.policy_option("cast_forward_inputs", "False", fix)
    names = {id(p): name for name, p in model.named_parameters()}
    if parsed.param_dtype in HALF_DTYPES:
        _require_cast(parsed, optimizers, names)
    _require_storages(parsed, optimizers)
    return parsed


def _require_cast(policy: Policy, optimizers: Optimizers, names: dict[int, str]) -> None:
    """Some weights must have the policy's dtype, and none another 16-bit one; norms may have stayed in fp32."""
    parameters = [p for optimizer in optimizers for p in parameters_of(optimizer) if p.is_floating_point()]
    halves = [p for p in parameters if p.dtype in HALF_DTYPES]
    wrong = [p for p in halves or parameters if p.dtype != policy.param_dtype]
    if wrong:
        raise refusals.weights_of_another_dtype(policy, policy.param_dtype, names[id(wrong[0])], wrong[0].dtype)


def _require_storages(policy: Policy, optimizers: Optimizers) -> None:
    """What the policy says is kept must be kept; an fp32 master in any storage that stands for one."""
    for optimizer in optimizers:
        if isinstance(optimizer, PackedOptimizer):
            kept = {(group["master"], group["moments"]) for group in optimizer.param_groups}
        elif isinstance(optimizer, MasterWeights):
            kept = {("fp32", "fp32")}
        else:
            kept = {("none", "fp32")}
        for master, moments in kept:
            is_right = master == policy.master.value or (policy.master is Master.FP32 and master != "none")
            if policy.master is not Master.NONE and not is_right:
                raise refusals.no_masters(policy, optimizer, master)
            if policy.moments is not Moments.FP32 and moments != policy.moments.value:
                raise refusals.other_moments(policy, optimizer, moments)


def scale_for(policy: Policy, given: Any) -> Scale:
    """The scale that was passed, else the one that the policy asks for."""
    if given is not None and not isinstance(given, Scale):
        raise not_a_scale(given)
    return given if isinstance(given, Scale) else _scale_of(policy)


def warn_of_losses(asked: Any, policy: Policy, scale: Scale, optimizers: Optimizers, model: nn.Module) -> None:
    """Say what fp32 weights or a scale would keep: small updates of bare 16-bit weights, small fp16 gradients.

    Args:
        asked: the policy as it was passed: parsing a name has warned of missing masters already.
        policy: the same, parsed.
        scale: the one in use.
        optimizers: whose trainable parameters are looked at; frozen ones (the base under adapters) lose nothing.
        model: gives their names.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for o in optimizers for p in parameters_of(o) if p.requires_grad]
    fp16 = [names[id(p)] for p in trained if p.dtype == torch.float16]
    # StaticScale(1.0) was asked for by its number: that is meant.
    lost = _lost_gradients(policy, fp16) if isinstance(scale, NoScale) else ""
    is_said = policy.param_dtype in HALF_DTYPES and not isinstance(asked, Policy)
    halves = [] if is_said or policy.master is Master.FP32 else bare_halves(optimizers)
    if halves:
        lost = f"{half_weights_text([(names[id(p)], p.dtype) for p in halves])}{lost and f' And {lost}'}"
    if lost:
        warn(lost, PrecisionWarning)


def bare_halves(optimizers: Optimizers) -> list[torch.Tensor]:
    """The trainable 16-bit parameters that no masters stand behind."""
    # Packed optimizers have warned by themselves, if they keep nothing.
    bare = [p for o in optimizers if not isinstance(o, (MasterWeights, PackedOptimizer)) for p in parameters_of(o)]
    return [p for p in bare if p.dtype in HALF_DTYPES and p.requires_grad]


def half_weights_text(halves: list[tuple[str, torch.dtype]]) -> str:
    """What bare 16-bit weights, given by name and dtype, lose."""
    name, dtype = halves[0]
    fmt = format_of(dtype)
    return (
        f"{len(halves)} of the parameters are 16-bit, the first one {name} in {fmt}, and nothing keeps their full"
        f" value: an update smaller than {fmt.epsilon / 4:.2g} to {fmt.epsilon / 2:.2g} of its weight rounds to"
        f" nothing. Keep fp32 weights under a mixed policy, or wrap the optimizer, halfstep.MasterWeights(optimizer),"
        f' under policy="{fmt}-master".'
    )


def _lost_gradients(policy: Policy, fp16: list[str]) -> str:
    """What fp16 loses without loss scaling; "" where there is no fp16."""
    zeros = "gradients below 3e-8 become zero in fp16, and nobody is told."
    if policy.compute_dtype == torch.float16:
        return f"{policy} without loss scaling: {zeros} Leave scale out for a dynamic one, or use bf16."
    if fp16:
        remedy = 'Use policy="fp16-master" with halfstep.MasterWeights, or bf16 weights.'
        return f"{policy} without loss scaling, and {fp16[0]} is fp16: {zeros} {remedy}"
    return ""


def _scale_of(policy: Policy) -> Scale:
    if policy.scaling is Scaling.STATIC:
        raise refusals.policy_option("scaling", "static", "pass scale=halfstep.StaticScale(1024), or another number")
    if policy.scaling is Scaling.ADAPTIVE:
        return AdaptiveScale()
    return DynamicScale() if policy.scaling is Scaling.DYNAMIC else NoScale()


def flat(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[int]]:
    """All parameters in order, and where each group ends."""
    parameters: list[torch.Tensor] = []
    ends: list[int] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
            ends.append(len(parameters))
    return parameters, ends
