"""Scaler states of other libraries: read them into halfstep's form, write halfstep's state in theirs.

A run that moves between libraries must keep its loss scale and its counters, or it spends its first steps finding the
scale again. The formats, from the code that saves them:

==============  =====================================================================================================
torch           ``scale, growth_factor, backoff_factor, growth_interval, _growth_tracker`` (torch/amp/grad_scaler.py)
deepspeed       ``cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window``, and ``cur_hysteresis`` in new
                versions (FP16_Optimizer.state_dict, in runtime/fp16/fused_optimizer.py); MMCV's LossScaler likewise
deepspeed-zero  ``loss_scaler``: the DynamicLossScaler object itself (runtime/fp16/loss_scaler.py), read by attributes
megatron        ``scale, growth_tracker, hysteresis_tracker``, also under ``grad_scaler`` (core/optimizer/grad_scaler.py)
apex            ``loss_scaler0: {loss_scale, unskipped}`` (apex/amp/frontend.py); read only
==============  =====================================================================================================

Method: read into a :class:`~halfstep.scaling.scale.Scale`, write from one. torch's tracker is the number of clean steps
since the scale grew or a gradient overflowed. DeepSpeed keeps two step numbers instead; with ``n = cur_iter -
last_overflow_iter - 1`` clean steps since the last overflow the tracker is ``n % scale_window``, or ``(n - 1) %
scale_window`` where a version grows one step late (``late_growth``). The count of overflows that are still put up with
runs from ``hysteresis`` to 1 in DeepSpeed and here, and from ``hysteresis`` to 0 and below in Megatron-LM.

A state that is not whole, or that no run can reach, is refused. What a format does not say is assumed, and what it
cannot hold is dropped, but neither in silence: :func:`convert` returns notes, and the other two functions issue them as
one :class:`~halfstep.errors.HalfstepWarning`. Weights and optimizer states are not converted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from halfstep.errors import ArgumentError, HalfstepError, StateError
from halfstep.scaling.scale import MAX_SCALE, MIN_SCALE, DynamicScale, Scale, StaticScale, checked_scale

Format = Literal["halfstep", "torch", "deepspeed", "deepspeed-zero", "megatron", "apex"]
Target = Literal["halfstep", "torch", "deepspeed", "deepspeed-zero", "megatron"]

_MARKS: dict[Format, tuple[str, ...]] = {  # in the order in which they are looked for
    "halfstep": ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker", "halfstep"),
    "torch": ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"),
    "megatron": ("scale", "growth_tracker", "hysteresis_tracker"),
    "deepspeed": ("cur_scale", "cur_iter"),
    "deepspeed-zero": ("loss_scaler",),
}
_APEX_KEY = re.compile(r"loss_scaler\d+")


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
    source: Format
    target: Target
    notes: tuple[str, ...]


def read_scaler_state(state: Any, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the scaler state of any known library into the form of ``halfstep.GradScaler.state_dict()``.

    Args:
        state: what the other library saved; see the module's table. The format is found by its keys.
        settings: what the source does not save and its run was configured with: any of ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``min_scale``, ``max_scale``, ``hysteresis``,
            ``consecutive_hysteresis`` and, for DeepSpeed, ``late_growth``.

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


def write_scaler_state(state: Mapping[str, Any], target: Target) -> dict[str, Any]:
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


def convert(state: Any, target: Target = "halfstep", settings: Mapping[str, Any] | None = None) -> Conversion:
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
        >>> convert(torch_state, "megatron").state
        {'scale': tensor([1024.]), 'growth_tracker': 3, 'hysteresis_tracker': 1}
    """
    if target not in _WRITERS:
        raise ArgumentError(
            asked=f"target={target!r}",
            true=f"states can be written for {', '.join(_WRITERS)}",
            why="there is no writer for another form",
            fix="pass one of these names",
        )
    source = detect_format(state)
    reading = _Reading(source, state, dict(settings or {}))
    scale, counts = _READERS[source](reading)
    reading.refuse_unused_settings()
    notes = list(reading.notes)
    written = _WRITERS[target](scale, counts, notes, source)
    return Conversion(written, source, target, tuple(notes))


def detect_format(state: Any) -> Format:
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
        if any(_APEX_KEY.fullmatch(str(key)) for key in state):
            return "apex"
    elif hasattr(state, "cur_scale"):
        return "deepspeed-zero"
    raise _unknown(state)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One state on its way in: takes what is there, assumes what is not, and remembers having done so."""

    source: Format
    state: Any
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def values(self, inner: str = "") -> Mapping[str, Any]:
        """The scaler's own mapping: the state, or what lies in it under ``inner``; an object by its attributes."""
        found = self.state
        if inner and isinstance(found, Mapping) and inner in found:
            found = found[inner]
        if isinstance(found, Mapping):
            return found
        if not hasattr(found, "__dict__"):
            raise self.refused(f"{inner or 'the state'} is a {type(found).__name__}", "it holds no named values")
        return vars(found)

    def setting(self, name: str, default: Any, stated: Any = None) -> Any:
        """``stated`` if the state says it, else the caller's setting, else ``default`` with a note."""
        self.used.add(name)
        given = self.settings.get(name)
        if stated is not None:
            if given is not None and given != stated:
                raise ArgumentError(
                    asked=f"settings={{{name!r}: {given!r}}}",
                    true=f"the {self.source} state itself says {stated!r}",
                    why="the run that saved it used its own value",
                    fix=f"leave {name!r} out of settings, and change it on the loaded scaler if you mean to",
                )
            return stated
        if given is not None:
            return given
        self.notes.append(f"{name} = {default!r} was assumed: a {self.source} state does not say it; pass settings=")
        return default

    def number(self, values: Mapping[str, Any], key: str) -> float:
        """A number, also out of a one-element tensor."""
        if key not in values:
            raise self.refused(f"its keys are {sorted(map(str, values))}", f"{key!r} is missing")
        value = values[key]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refused(f"{key} is {value!r}", "it is not a number")
        return value

    def count(self, values: Mapping[str, Any], key: str, least: int = 0) -> int:
        """A whole number of steps."""
        value = self.number(values, key)
        if value != value or abs(value) >= 2**53 or int(value) != value or value < least:
            raise self.refused(f"{key} is {value!r}", f"it counts steps: a whole number, {least} or more")
        return int(value)

    def scale(self, values: Mapping[str, Any], key: str) -> float:
        """A finite positive number that fp32 can hold, with its reciprocal."""
        try:
            return checked_scale(self.number(values, key), key)
        except ArgumentError as error:
            raise self.refused(error.asked, error.true) from error

    def dynamic(self, scale: float, counters: dict[str, int], **settings: Any) -> DynamicScale:
        """A dynamic scale in the middle of its run; a value that cannot be is refused in the state's name."""
        try:
            built = DynamicScale(init_scale=scale, **settings)
            built.load_state_dict({**built.state_dict(), **counters})
        except HalfstepError as error:
            raise self.refused(error.asked, error.true) from error
        return built

    def refuse_unused_settings(self) -> None:
        """An option that cannot take effect is refused."""
        unused = sorted(self.settings.keys() - self.used)
        if unused:
            raise ArgumentError(
                asked=f"settings with {', '.join(map(repr, unused))}",
                true=f"a {self.source} state leaves open: {', '.join(sorted(self.used)) or 'nothing'}",
                why="the setting would have no effect",
                fix="leave it out",
            )

    def refused(self, true: str, why: str) -> StateError:
        return StateError(
            asked=f"reading a {self.source} scaler state",
            true=true,
            why=f"{why}; nothing was read",
            fix="load a checkpoint from before the damage, or start with a fresh scale",
        )


_Counts = dict[str, Any]
_Read = tuple[Scale, _Counts]


def _bounds(reading: _Reading, scale: float, least: float) -> dict[str, float]:
    """Bounds for a scaler that saves none; widened where the scale already lies outside the usual ones."""
    return {
        "min_scale": reading.setting("min_scale", min(least, scale)),
        "max_scale": reading.setting("max_scale", max(MAX_SCALE, scale)),
    }


def _read_megatron(reading: _Reading) -> _Read:
    values = reading.values("grad_scaler")
    scale = reading.scale(values, "scale")
    left = int(reading.number(values, "hysteresis_tracker"))
    hysteresis = reading.setting("hysteresis", max(2, left))
    if left > hysteresis:
        raise reading.refused(
            f"hysteresis_tracker is {left}, hysteresis {hysteresis}", "the tracker counts down from it"
        )
    counters = {"growth_tracker": reading.count(values, "growth_tracker"), "hysteresis_tracker": max(left, 1)}
    return reading.dynamic(
        scale,
        counters,
        growth_factor=reading.setting("growth_factor", 2.0),
        backoff_factor=reading.setting("backoff_factor", 0.5),
        growth_interval=reading.setting("growth_interval", 1000),
        hysteresis=hysteresis,
        **_bounds(reading, scale, least=1.0),
    ), {}


def _read_apex(reading: _Reading) -> _Read:
    scalers = {key: value for key, value in reading.state.items() if _APEX_KEY.fullmatch(str(key))}
    if len({repr(value) for value in scalers.values()}) > 1:
        raise reading.refused(
            f"it holds {len(scalers)} scalers with different states",
            "one scaler has one scale: pass the one you mean, as {'loss_scaler0': ...}",
        )
    values = next(iter(scalers.values()))
    if not isinstance(values, Mapping):
        raise reading.refused(f"loss_scaler0 is a {type(values).__name__}", "it holds no named values")
    scale = reading.scale(values, "loss_scale")
    return reading.dynamic(
        scale,
        {"growth_tracker": reading.count(values, "unskipped")},
        growth_interval=reading.setting("growth_interval", 2000),
        **_bounds(reading, scale, least=MIN_SCALE),
    ), {}


def _read_deepspeed(reading: _Reading) -> _Read:
    values = reading.values()
    if not values.get("dynamic_loss_scale", "last_overflow_iter" in values):
        return _read_static(reading, values)
    has_hysteresis = "cur_hysteresis" in values
    left = reading.count(values, "cur_hysteresis", least=1) if has_hysteresis else 1
    hysteresis = reading.setting("hysteresis", max(2, left)) if has_hysteresis else 1
    consecutive = reading.setting("consecutive_hysteresis", False) if hysteresis > 1 else False
    is_mmcv = "mode" in values
    return _read_step_numbers(reading, values, (hysteresis, left, consecutive), late_growth=not is_mmcv)


def _read_deepspeed_zero(reading: _Reading) -> _Read:
    values = reading.values("loss_scaler")
    if not values.get("dynamic", "last_overflow_iter" in values):
        return _read_static(reading, values)
    hysteresis = reading.count(values, "delayed_shift", least=1) if "delayed_shift" in values else 1
    left = reading.count(values, "cur_hysteresis", least=1) if "cur_hysteresis" in values else hysteresis
    consecutive = bool(values.get("consecutive_hysteresis", False)) and hysteresis > 1
    if values.get("raise_error_at_min_scale"):
        reading.notes.append("DeepSpeed ends the run at min_scale; halfstep stays there and reports skip after skip")
    return _read_step_numbers(reading, values, (hysteresis, left, consecutive), late_growth=False)


def _read_static(reading: _Reading, values: Mapping[str, Any]) -> _Read:
    return StaticScale(reading.scale(values, "cur_scale")), {}


def _read_step_numbers(
    reading: _Reading, values: Mapping[str, Any], put_up_with: tuple[int, int, bool], *, late_growth: bool
) -> _Read:
    """The scaler that DeepSpeed, Apex's fp16_utils and MMCV inherited from one another."""
    scale = reading.scale(values, "cur_scale")
    window = reading.count(values, "scale_window", least=1)
    factor = reading.number(values, "scale_factor")
    hysteresis, left, consecutive = put_up_with
    if left > hysteresis:
        raise reading.refused(
            f"cur_hysteresis is {left}, hysteresis {hysteresis}", "the first counts down from the other"
        )
    if not factor > 1.0:
        raise reading.refused(f"scale_factor is {factor!r}", "the scale is multiplied and divided by it: above 1")
    late_growth = reading.settings.get("late_growth", late_growth)
    reading.used.add("late_growth")
    stated = reading.scale(values, "min_scale") if "min_scale" in values else None
    return reading.dynamic(
        scale,
        {"growth_tracker": _tracker(reading, values, window, late_growth), "hysteresis_tracker": left},
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_scale=reading.setting("min_scale", min(1.0, scale), stated),
        max_scale=reading.setting("max_scale", max(MAX_SCALE, scale)),
    ), {}


def _tracker(reading: _Reading, values: Mapping[str, Any], window: int, late_growth: bool) -> int:
    num_clean = reading.count(values, "cur_iter") - reading.count(values, "last_overflow_iter", least=-1) - 1
    if num_clean < 0:
        raise reading.refused(
            f"cur_iter is {values['cur_iter']}, last_overflow_iter {values['last_overflow_iter']}",
            "an overflow cannot lie in the future",
        )
    if not late_growth:
        return num_clean % window
    reading.notes.append(
        f"this DeepSpeed scaler grows after {window} + 1 clean steps when an overflow came before; halfstep after {window}"
    )
    # No clean step yet would be a tracker of -1; 0 grows one step early, as every later overflow will.
    return (num_clean - 1) % window if num_clean > 0 else 0


# -- writing ----------------------------------------------------------------------------------------------------------


def _write_torch(scale: Scale, counts: _Counts, notes: list[str], source: Format) -> dict[str, Any]:
    dynamic = _as_dynamic(scale, notes, "torch")
    if source != "torch":
        _drop(notes, "torch", dynamic, counts, "min_scale", "max_scale", "hysteresis", "tolerance")
    return _five_keys(dynamic)


def _write_deepspeed(scale: Scale, counts: _Counts, notes: list[str], source: Format) -> dict[str, Any]:
    if isinstance(scale, StaticScale | NoScale):
        _drop(notes, "deepspeed", None, counts)
        return {"dynamic_loss_scale": False, "cur_scale": scale.get(), "cur_iter": 0}
    dynamic = _as_dynamic(scale, notes, "deepspeed")
    _drop(notes, "deepspeed", dynamic, counts, "min_scale", "max_scale", "tolerance", "hysteresis", "backoff_factor")
    # One step more than the tracker, because FP16_Optimizer grows one step late.
    numbers = _step_numbers(dynamic, num_clean=_counter(dynamic, "growth_tracker") + 1)
    return {"dynamic_loss_scale": True, **numbers, "cur_hysteresis": _counter(dynamic, "hysteresis_tracker")}
