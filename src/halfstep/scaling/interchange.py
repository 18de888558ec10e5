"""Scaler states of other libraries: read them into halfstep's form, write halfstep's state in theirs.

A run that moves between libraries must keep its loss scale and its counters, or it spends its first steps finding the
scale again. The formats, from the code that saves them:

==============  ================================================================================================
torch           ``scale, growth_factor, backoff_factor, growth_interval, _growth_tracker`` (torch/amp/grad_scaler.py)
deepspeed       ``cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window``, and ``cur_hysteresis`` in
                new versions (FP16_Optimizer in runtime/fp16/fused_optimizer.py); MMCV's LossScaler likewise
deepspeed-zero  ``loss_scaler``: the DynamicLossScaler object itself (runtime/fp16/loss_scaler.py), by attributes
megatron        ``scale, growth_tracker, hysteresis_tracker``, or under ``grad_scaler``
                (core/optimizer/grad_scaler.py)
apex            ``loss_scaler0: {loss_scale, unskipped}`` (apex/amp/frontend.py); read only
==============  ================================================================================================

Method: read into a :class:`~halfstep.scaling.scale.Scale` (``read_peers.py``), write from one (``write_peers.py``).
What a format does not say is assumed, what it cannot hold is dropped, but neither in silence: :func:`convert` returns
notes, and the other two functions issue them as one :class:`~halfstep.errors.HalfstepWarning`. A state that is not
whole, or that no run can reach, is refused whole. Weights and optimizer states are not converted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.errors import ArgumentError, HalfstepWarning, StateError, warn
from halfstep.scaling.read_peers import APEX_KEY, READERS, Reading, SourceFormat
from halfstep.scaling.write_peers import WRITERS, TargetFormat

_MARKS: dict[SourceFormat, tuple[str, ...]] = {  # in the order in which they are looked for
    "halfstep": ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker", "halfstep"),
    "torch": ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"),
    "megatron": ("scale", "growth_tracker", "hysteresis_tracker"),
    "deepspeed": ("cur_scale", "cur_iter"),
    "deepspeed-zero": ("loss_scaler",),
}


@dataclass(frozen=True)
class Conversion:
    """A scaler state in another library's form, and what to know about the move.

    Args:
        state: the state, ready for the target's ``load_state_dict``.
        source: the format that was read.
        target: the format that was written.
        notes: what was assumed because the source does not say it, and what was dropped because the target cannot hold
            it; one sentence each. Empty if the state went over whole.
    """

    state: dict[str, Any]
    source: SourceFormat
    target: TargetFormat
    notes: tuple[str, ...]


def read_scaler_state(state: Any, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the scaler state of any known library into the form of ``halfstep.GradScaler.state_dict()``.

    Args:
        state: what the other library saved; see the module's table. The format is found by its keys.
        settings: what the source does not save and its run was configured with: any of ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``min_scale``, ``max_scale``, ``hysteresis``,
            ``consecutive_hysteresis`` and, for DeepSpeed, ``late_growth``: whether the version grows after
            ``scale_window + 1`` clean steps when an overflow came before. FP16_Optimizer does, and so does the ZeRO
            scaler in its newest versions, which its state does not tell; MMCV does not.

    Returns:
        torch's five keys and ``"halfstep"``. A plain torch state comes back with its five keys only: torch knows no
        bounds, so the scaler that loads it keeps its own.

    Raises:
        StateError: the format is unknown, keys are missing, or a value is one that no run can have.
        ArgumentError: a setting is unknown, not used by this format, or contradicts the state.

    Example:
        >>> import warnings; warnings.simplefilter("ignore", HalfstepWarning)
        >>> megatron = {"scale": 4096.0, "growth_tracker": 7, "hysteresis_tracker": 1}
        >>> state = read_scaler_state(megatron, {"growth_interval": 500})
        >>> state["scale"], state["growth_interval"], state["_growth_tracker"]
        (4096.0, 500, 7)
    """
    return _told(convert(state, "halfstep", settings))


def write_scaler_state(state: Mapping[str, Any], target: TargetFormat) -> dict[str, Any]:
    """Write a scaler state, halfstep's or any other known one, in the form that ``target`` loads.

    Args:
        state: usually ``halfstep.GradScaler.state_dict()``.
        target: ``"torch"``, ``"deepspeed"`` (FP16_Optimizer), ``"deepspeed-zero"`` or ``"megatron"``.

    Returns:
        The scaler's part of the target's checkpoint. For ``"deepspeed-zero"``, which saves a live object, the
        attributes of that object: ``vars(optimizer.loss_scaler).update(written["loss_scaler"])``.

    Raises:
        StateError: the state is invalid, or the target has no form for it at all.
        ArgumentError: the target is unknown.
    """
    return _told(convert(state, target))


def convert(state: Any, target: TargetFormat = "halfstep", settings: Mapping[str, Any] | None = None) -> Conversion:
    """The work of :func:`read_scaler_state` and :func:`write_scaler_state`, with the notes returned instead of issued.

    Args:
        state: a scaler state of any known format.
        target: the format to write.
        settings: see :func:`read_scaler_state`.

    Returns:
        A :class:`Conversion`.

    Raises:
        StateError: see :func:`read_scaler_state` and :func:`write_scaler_state`.
        ArgumentError: likewise.

    Example:
        >>> torch_state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        ...                "_growth_tracker": 3}
        >>> convert(torch_state, "deepspeed").state["cur_scale"]
        1024.0
    """
    if target not in WRITERS:
        raise ArgumentError(
            asked=f"target={target!r}",
            true=f"states can be written for {', '.join(WRITERS)}",
            why="there is no writer for another form",
            fix="pass one of these names",
        )
    source = detect_format(state)
    reading = Reading(source, state, dict(settings or {}))
    scale = READERS[source](reading)
    reading.refuse_unused_settings()
    written, dropped = WRITERS[target](scale, state, source)
    return Conversion(written, source, target, (*reading.notes, *dropped))


def detect_format(state: Any) -> SourceFormat:
    """The format of a scaler state, by its keys.

    Raises:
        StateError: no known format has these keys; the text names the nearest one and what it lacks.

    Example:
        >>> detect_format({"cur_scale": 65536.0, "cur_iter": 10, "last_overflow_iter": 3})
        'deepspeed'
    """
    if isinstance(state, Mapping):
        for name, marks in _MARKS.items():
            if all(mark in state for mark in marks):
                return name
        if isinstance(state.get("grad_scaler"), Mapping):
            return "megatron"
        if any(re.fullmatch(APEX_KEY, str(key)) for key in state):
            return "apex"
    elif hasattr(state, "cur_scale"):
        return "deepspeed-zero"
    raise _unknown(state)


def _told(conversion: Conversion) -> dict[str, Any]:
    if conversion.notes:
        listed = "".join(f"\n  - {note}" for note in conversion.notes)
        text = f"A {conversion.source} scaler state was written as {conversion.target}; to know:{listed}"
        warn(text, HalfstepWarning)
    return conversion.state


def _unknown(state: Any) -> StateError:
    return StateError(
        asked=f"the format of a {type(state).__name__} as a scaler state",
        true=_what_is_there(state),
        why=f"none of {', '.join(READERS)} saves that; nothing was read",
        fix="pass the scaler's own part of the checkpoint, whole",
    )


def _what_is_there(state: Any) -> str:
    if not isinstance(state, Mapping):
        return "it is neither a dict nor DeepSpeed's loss scaler"
    if not state:
        return "it is empty: a disabled torch GradScaler and Megatron-LM's ConstantGradScaler save no scale"
    keys = sorted(map(str, state))
    shown = f"its keys are {', '.join(keys[:8])}{' and more' if len(keys) > 8 else ''}"
    nearest = max(_MARKS, key=lambda name: sum(mark in state for mark in _MARKS[name]) / len(_MARKS[name]))
    lacks = [mark for mark in _MARKS[nearest] if mark not in state]
    return shown if len(lacks) == len(_MARKS[nearest]) else f"{shown}; nearest is {nearest}, without {', '.join(lacks)}"
