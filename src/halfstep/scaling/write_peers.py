"""Write a Scale as the scaler state of torch, DeepSpeed or Megatron-LM; used by interchange.

Each writer returns the state and one sentence for each group of values that its format has no place for. The phase is
kept exactly: see ``read_peers.py`` for the arithmetic, which is inverted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from halfstep.errors import StateError
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.scaling.read_peers import TORCH_KEYS, SourceFormat
from halfstep.scaling.scale import MAX_SCALE, MIN_SCALE, DynamicScale, NoScale, Scale, StaticScale

TargetFormat = Literal["halfstep", "torch", "deepspeed", "deepspeed-zero", "megatron"]
Written = tuple[dict[str, Any], list[str]]


def _write_halfstep(scale: Scale, state: Mapping[str, Any], source: SourceFormat) -> Written:
    if source == "torch":  # knows no bounds: the scaler that loads it keeps its own
        return _five_keys(scale), []
    written = GradScaler("cpu", scale=scale).state_dict()
    if source == "halfstep":
        written["halfstep"] |= {key: state["halfstep"][key] for key in written["halfstep"] if key in state["halfstep"]}
    return written, []


def _write_torch(scale: Scale, state: Mapping[str, Any], source: SourceFormat) -> Written:
    dynamic, notes = _as_dynamic(scale, "torch")
    names = ("min_scale", "max_scale", "hysteresis", "consecutive_hysteresis", "tolerance")
    return _five_keys(dynamic), notes + _dropped("torch", dynamic, names, state, source)


def _write_deepspeed(scale: Scale, state: Mapping[str, Any], source: SourceFormat) -> Written:
    if isinstance(scale, (StaticScale, NoScale)):
        written = {"dynamic_loss_scale": False, "cur_scale": scale.get(), "cur_iter": 0}
        return written, _dropped("deepspeed", scale, (), state, source)
    dynamic, notes = _as_dynamic(scale, "deepspeed")
    names = ("min_scale", "max_scale", "hysteresis", "consecutive_hysteresis", "tolerance", "backoff_factor")
    # One clean step more than the tracker says, because FP16_Optimizer grows one step late.
    steps = _step_numbers(dynamic, num_clean=_counter(dynamic, "growth_tracker") + 1)
    written = {"dynamic_loss_scale": True, **steps, "cur_hysteresis": _counter(dynamic, "hysteresis_tracker")}
    return written, notes + _dropped("deepspeed", dynamic, names, state, source)


def _write_deepspeed_zero(scale: Scale, state: Mapping[str, Any], source: SourceFormat) -> Written:
    if isinstance(scale, (StaticScale, NoScale)):
        written: dict[str, Any] = {"loss_scaler": {"cur_scale": scale.get(), "dynamic": False}}
        return {**written, "dynamic_loss_scale": False}, _dropped("deepspeed-zero", scale, (), state, source)
    dynamic, notes = _as_dynamic(scale, "deepspeed-zero")
    attributes = {
        **_step_numbers(dynamic, num_clean=_counter(dynamic, "growth_tracker")),
        "min_scale": dynamic.min_scale,
        "delayed_shift": dynamic.hysteresis,
        "cur_hysteresis": _counter(dynamic, "hysteresis_tracker"),
        "consecutive_hysteresis": dynamic.consecutive_hysteresis,
        "dynamic": True,
    }
    dropped = _dropped("deepspeed-zero", dynamic, ("max_scale", "tolerance", "backoff_factor"), state, source)
    return {"loss_scaler": attributes, "dynamic_loss_scale": True}, notes + dropped


def _write_megatron(scale: Scale, state: Mapping[str, Any], source: SourceFormat) -> Written:
    if isinstance(scale, (StaticScale, NoScale)):
        raise StateError(
            asked=f"a {scale.kind} scale of {scale.get():g} as a Megatron-LM state",
            true="Megatron-LM's ConstantGradScaler saves nothing; its scale is an argument of the run",
            why="there is no state to write",
            fix=f"start Megatron-LM with --loss-scale {scale.get():g}",
        )
    dynamic, notes = _as_dynamic(scale, "megatron")
    notes.append(
        f"Megatron-LM takes these from its arguments: --loss-scale-window {dynamic.growth_interval} --hysteresis"
        f" {dynamic.hysteresis} --min-loss-scale {dynamic.min_scale!r}"
    )
    names = ("max_scale", "consecutive_hysteresis", "tolerance", "growth_factor", "backoff_factor")
    written = {
        "scale": torch.tensor([dynamic.get()]),  # one element, as Megatron-LM keeps it
        "growth_tracker": _counter(dynamic, "growth_tracker"),
        "hysteresis_tracker": _counter(dynamic, "hysteresis_tracker"),
    }
    return written, notes + _dropped("megatron", dynamic, names, state, source)


def _as_dynamic(scale: Scale, target: TargetFormat) -> tuple[DynamicScale, list[str]]:
    if isinstance(scale, DynamicScale):
        return scale, []
    value = scale.get()
    dynamic = DynamicScale(value, min_scale=min(MIN_SCALE, value), max_scale=max(MAX_SCALE, value))
    return dynamic, [f"the {scale.kind} scale becomes a dynamic one that starts at {value:g}: {target} has no other"]


def _five_keys(scale: Scale) -> dict[str, Any]:
    state = scale.state_dict()
    return {key: state[key.removeprefix("_")] for key in TORCH_KEYS}


def _step_numbers(dynamic: DynamicScale, *, num_clean: int) -> dict[str, Any]:
    """DeepSpeed's numbers for a run that had ``num_clean`` clean steps and no overflow before them."""
    return {
        "cur_scale": dynamic.get(),
        "cur_iter": num_clean,
        "last_overflow_iter": -1,
        "scale_factor": dynamic.growth_factor,
        "scale_window": dynamic.growth_interval,
    }


def _counter(dynamic: DynamicScale, name: str) -> int:
    return int(dynamic.number(name, 0))


def _dropped(
    target: TargetFormat, scale: Scale, names: tuple[str, ...], state: Mapping[str, Any], source: SourceFormat
) -> list[str]:
    """What ``target`` has no place for, where that changes how the run goes on.

    Bounds of a torch state are left out: they are ours, not the state's.
    """
    growth_factor = getattr(scale, "growth_factor", 2.0)
    harmless = {
        "hysteresis": 1,
        "consecutive_hysteresis": False,
        "tolerance": 0.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5 if target == "megatron" else 1 / growth_factor,
    }
    lost = {name: getattr(scale, name) for name in names if getattr(scale, name) != harmless.get(name)}
    if source == "torch":
        lost = {name: value for name, value in lost.items() if name not in ("min_scale", "max_scale")}
    if source == "halfstep" and state["halfstep"].get("skipped_steps"):
        lost["skipped_steps"] = state["halfstep"]["skipped_steps"]
    listed = ", ".join(f"{name}={value!r}" for name, value in lost.items())
    return [f"dropped, because a {target} state has no place for it: {listed}"] if lost else []


WRITERS: dict[TargetFormat, Callable[[Scale, Mapping[str, Any], SourceFormat], Written]] = {
    "halfstep": _write_halfstep,
    "torch": _write_torch,
    "deepspeed": _write_deepspeed,
    "deepspeed-zero": _write_deepspeed_zero,
    "megatron": _write_megatron,
}
