"""Cast a model's weights as a policy says, keep in fp32 what must stay, and say what was done.

Method: floating parameters get ``param_dtype``, each Parameter object in place, so that tied weights stay tied and an
optimizer made before goes on holding them. What stays fp32:

- norms with running statistics (BatchNorm): a variance near 1 that moves by a thousandth would stand still in bf16;
  torch's kernels take 16-bit inputs with fp32 weights there, if the statistics are fp32 too;
- floating buffers, unless the policy names a ``buffer_dtype``: tables of positions and frequencies are buffers, and
  bf16 cannot tell position 257 from 256;
- modules whose dotted name matches a pattern of ``keep_fp32``. They also *run* in fp32, under autocast too, and hand
  on the dtype that they were given (the weights', if they were given no floating tensor).

Integers, bools and complex tensors are never cast. Inputs of the model are cast on the way in, unless the policy says
otherwise or their argument is named in ``keep_fp32_inputs``.

Not here: masters (halfstep.MasterWeights); Stepper casts nothing.
"""

from __future__ import annotations

import inspect as python_inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.errors import ArgumentError, PrecisionWarning, warn
from halfstep.formats import HALF_DTYPES, format_of
from halfstep.policy import Policy, cast_floating

LARGEST_LOSS = 1e-3  # of an input's spread, root mean square, that a cast may cost without a warning


@dataclass(frozen=True)
class Cast:
    """What happened to one tensor or module of a model.

    Args:
        name: dotted name.
        kind: ``"parameter"``, ``"buffer"`` or ``"module"``.
        before: dtype it had; None for a module.
        after: dtype it has, or that a module runs in.
        reason: why it was cast, or why it was kept.
    """

    name: str
    kind: str
    before: torch.dtype | None
    after: torch.dtype
    reason: str

    @property
    def is_changed(self) -> bool:
        """Whether the dtype is another one now."""
        return self.before is not None and self.before != self.after

    def __str__(self) -> str:
        change = f"{self.before} -> {self.after}" if self.is_changed else f"{self.after}"
        return f"{self.kind} {self.name}: {change.replace('torch.', '')} ({self.reason})"


def cast_model(
    model: nn.Module,
    policy: Policy | str,
    *,
    keep_fp32: Sequence[str] = (),
    keep_fp32_inputs: Sequence[str] = (),
) -> tuple[Cast, ...]:
    """Cast a model in place, before its optimizer's masters or DistributedDataParallel are made.

    Args:
        model: the module to cast.
        policy: whose ``param_dtype``, ``buffer_dtype`` and ``cast_forward_inputs`` are followed.
        keep_fp32: patterns (``fnmatch``) of dotted module names that stay in fp32 and run in it, such as ``"lm_head"``
            or ``"*.router"``.
        keep_fp32_inputs: names of arguments of the model's ``forward`` that are not cast, such as ``"timestep"``.

    Returns:
        A record for every floating parameter and buffer and every module that runs in fp32, in the model's order.

    Raises:
        ArgumentError: a pattern or name matches nothing; a tied weight is kept in one place and cast in another; the
            model is wrapped in DistributedDataParallel already.

    Warns:
        PrecisionWarning: at the first call of the model, if casting an input loses more than a thousandth of its
            spread: timesteps, coordinates and the like. Reads the device, that once. And here, if the policy computes
            in 16 bits but keeps fp32 weights, and nothing was cast or kept: such policies act through autocast.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> for cast in cast_model(model, "bf16-master")[:3]:
        ...     print(cast)
        parameter 0.weight: float32 -> bfloat16 (the policy's weights)
        parameter 0.bias: float32 -> bfloat16 (the policy's weights)
        parameter 1.weight: float32 (a norm with running statistics)
    """
    parsed = Policy.parse(policy)
    _check(model, keep_fp32_inputs)
    kept = _kept_modules(model, keep_fp32)
    reasons = _reasons(model, kept)
    records = [*_cast_parameters(model, parsed, reasons), *_cast_buffers(model, parsed, reasons)]
    if parsed.is_mixed and not kept and not any(record.is_changed for record in records):
        _warn_that_nothing_was_cast(parsed)
    casts_back = parsed.param_dtype != torch.float32
    for name, module in kept.items():
        _run_in_fp32(module, parsed.param_dtype if casts_back else None)
        records.append(Cast(name or "the model", "module", None, torch.float32, "runs in fp32, named in keep_fp32"))
    if parsed.cast_forward_inputs and casts_back:
        model.register_forward_pre_hook(_InputCast(parsed.param_dtype, tuple(keep_fp32_inputs)), with_kwargs=True)
    return tuple(records)


def _warn_that_nothing_was_cast(policy: Policy) -> None:
    if policy.compute_dtype in HALF_DTYPES:
        warn(
            f"The policy {policy} keeps fp32 weights, and nothing was cast: its products are cast by autocast, in"
            f' stepper.forward(). Did you mean "{format_of(policy.compute_dtype)}-master"?',
            PrecisionWarning,
        )


# -- what stays -------------------------------------------------------------------------------------------------------


def _check(model: nn.Module, input_names: Sequence[str]) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            asked=f"cast_model() of a {type(model).__name__}",
            true="a model is a torch.nn.Module",
            why="there are no named parameters to cast",
            fix="pass the module itself",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ArgumentError(
            asked="cast_model() of a DistributedDataParallel",
            true="its reducer holds buckets in the parameters' present dtype, and hooks on their graph nodes",
            why="ranks would stop averaging what they train",
            fix="cast the model first, then wrap it",
        )
    known = python_inspect.signature(model.forward).parameters
    takes_any = any(p.kind is python_inspect.Parameter.VAR_KEYWORD for p in known.values())
    unknown = [name for name in input_names if name not in known and not takes_any]
    if unknown:
        raise ArgumentError(
            asked=f"keep_fp32_inputs={list(input_names)!r}",
            true=f"forward() of {type(model).__name__} takes {', '.join(known) or 'nothing'}",
            why=f"there is no argument {', '.join(unknown)}",
            fix="name arguments as forward() does",
        )


def _kept_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> module, for the outermost modules that match."""
    kept: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = {name: module for name, module in model.named_modules() if fnmatchcase(name, pattern)}
        if not found:
            raise ArgumentError(
                asked=f"keep_fp32={pattern!r}",
                true=f"modules are named {', '.join(name for name, _ in list(model.named_modules())[1:6])} and so on",
                why="the pattern matches none of them, so nothing would be kept",
                fix="match dotted module names, as named_modules() gives them",
            )
        kept |= found
    return {n: m for n, m in kept.items() if not any(n.startswith(f"{other}.") for other in kept if other != n)}


def _reasons(model: nn.Module, kept: dict[str, nn.Module]) -> dict[int, str]:
    """id of a tensor -> why it stays as it is."""
    reasons: dict[int, str] = {}
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            tensors = [*module._parameters.values(), *module._buffers.values()]
            reasons |= {id(t): "a norm with running statistics" for t in tensors if t is not None}
    for name, module in kept.items():
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        _refuse_ties(model, name, own, kept)
        reasons |= dict.fromkeys(own, "named in keep_fp32")
    return reasons


def _refuse_ties(model: nn.Module, asked: str, own: set[int], kept: Iterable[str]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_kept = any(one == "" or name.startswith(f"{one}.") for one in kept)
        if id(parameter) in own and not is_kept:
            raise ArgumentError(
                asked=f"keep_fp32={asked!r}",
                true=f"its weight is tied to {name}",
                why="one tensor cannot be fp32 in one place and 16-bit in the other",
                fix=f"keep {name.rpartition('.')[0]!r} in fp32 as well, or untie the weights",
            )


# -- casting ----------------------------------------------------------------------------------------------------------


def _cast_parameters(model: nn.Module, policy: Policy, reasons: dict[int, str]) -> Iterator[Cast]:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        before, reason = parameter.dtype, reasons.get(id(parameter))
        after = torch.float32 if reason else policy.param_dtype
        if before != after:
            parameter.data = parameter.data.to(after)  # the same Parameter: ties and optimizers go on holding it
            parameter.grad = None if parameter.grad is None else parameter.grad.to(after)
        yield Cast(name, "parameter", before, after, reason or "the policy's weights")


def _cast_buffers(model: nn.Module, policy: Policy, reasons: dict[int, str]) -> Iterator[Cast]:
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            continue
        before, reason = buffer.dtype, reasons.get(id(buffer))
        # A kept module's weights are fp32 now: BatchNorm refuses 16-bit statistics beside those.
        after = torch.float32 if reason else policy.buffer_dtype or before
        if before != after:
            buffer.data = buffer.data.to(after)
        default = "a buffer, which keeps its dtype" if policy.buffer_dtype is None else "the policy's buffers"
        yield Cast(name, "buffer", before, after, reason or default)


# -- modules and inputs in fp32 ---------------------------------------------------------------------------------------


class _Fp32Scope:
    """A pair of hooks: inputs to fp32 and autocast off on the way in; as it was on the way out."""

    def __init__(self, half_dtype: torch.dtype | None) -> None:
        self._half_dtype = half_dtype  # of what the module hands on to; None: autocast casts that by itself
        self._open: list[tuple[torch.autocast, torch.dtype | None]] = []  # a module may call itself

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        device = next((p.device.type for p in module.parameters()), "cpu")
        given = next((t.dtype for t in _tensors((args, kwargs)) if t.is_floating_point()), None)
        scope = torch.autocast(device, enabled=False)
        scope.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((scope, given))
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        scope, given = self._open.pop()
        scope.__exit__(None, None, None)
        return output if self._half_dtype is None else cast_floating(output, given or self._half_dtype)


def _run_in_fp32(module: nn.Module, half_dtype: torch.dtype | None) -> tuple[RemovableHandle, RemovableHandle]:
    scope = _Fp32Scope(half_dtype)
    return (
        module.register_forward_pre_hook(scope.enter, with_kwargs=True),
        module.register_forward_hook(scope.leave, with_kwargs=True, always_call=True),
    )


class _InputCast:
    """A hook on the model: floating inputs to the weights' dtype, but for those that are named."""

    def __init__(self, dtype: torch.dtype, kept: tuple[str, ...]) -> None:
        self._dtype, self._kept, self._seen = dtype, kept, set[str]()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        names = [*python_inspect.signature(module.forward).parameters][: len(args)]
        names += [f"argument {i}" for i in range(len(names), len(args))]
        return (
            tuple(self._cast(name, value) for name, value in zip(names, args, strict=True)),
            {name: self._cast(name, value) for name, value in kwargs.items()},
        )

    def _cast(self, name: str, value: Any) -> Any:
        if name in self._kept:
            return value
        if name not in self._seen:
            self._seen.add(name)
            for tensor in _tensors(value):
                _warn_of_loss(name, tensor, self._dtype)
        return cast_floating(value, self._dtype)


def _warn_of_loss(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.element_size() <= 2:
        return
    wide = tensor.detach().double() if tensor.device.type != "mps" else tensor.detach().float()
    moved = wide - tensor.detach().to(dtype).to(wide.dtype)
    error, spread = moved.square().mean().sqrt().item(), (wide.amax() - wide.amin()).item()
    if not math.isfinite(spread):
        return
    if not math.isfinite(error):
        what = f"makes infinities of values that {format_of(dtype)} cannot hold"
    elif error > LARGEST_LOSS * spread:
        share = f"{error / spread:.1%} of its spread" if spread else "all of its values are one"
        what = f"moves it by {error:.3g} (root mean square), {share}"
    elif error and bool((wide == wide.round()).all()):  # timesteps and positions; images have no such values
        what = f"moves whole numbers by up to {moved.abs().amax().item():g}"
    else:
        return
    warn(
        f"Casting the input {name!r} to {format_of(dtype)} {what}. A timestep, coordinate or position should stay fp32:"
        f' keep_fp32_inputs=["{name}"].',
        PrecisionWarning,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
