"""Read the scaler states of torch, DeepSpeed, Megatron-LM and Apex into a Scale; used by interchange.

What has to come out right is the phase: how many clean steps are still missing before the scale grows, and how many
overflows before it backs off.

- torch's tracker, Megatron-LM's ``growth_tracker`` and Apex's ``unskipped`` are one thing: clean steps since the scale
  grew or a gradient overflowed.
- DeepSpeed (with Apex's old fp16_utils and MMCV, its relatives) keeps two step numbers. With ``n = cur_iter -
  last_overflow_iter - 1`` clean steps since the last overflow, the tracker is ``n % scale_window``; where a version
  grows one step late, when ``n`` is itself a multiple of the window, it is ``(n - 1) % scale_window``.
- The count of overflows that are still put up with runs from ``hysteresis`` down to 1 in DeepSpeed and here, and down
  to 0 and below in Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from halfstep.errors import ArgumentError, HalfstepError, StateError
from halfstep.scaling.adaptive import AdaptiveScale
from halfstep.scaling.checks import checked_scale
from halfstep.scaling.scale import MAX_SCALE, MIN_SCALE, DynamicScale, NoScale, Scale, StaticScale

SourceFormat = Literal["halfstep", "torch", "deepspeed", "deepspeed-zero", "megatron", "apex"]
APEX_KEY = r"loss_scaler\d+"
TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass
class Reading:
    """One state on its way in: takes what is there, assumes what is not, and remembers having done so.

    Args:
        source: format of the state.
        state: the state itself.
        settings: what the caller knows about the run and the state does not say.
    """

    source: SourceFormat
    state: Any
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def values(self, inner: str = "") -> Mapping[str, Any]:
        """The scaler's own mapping: the state, or what lies in it under ``inner``; an object by its attributes."""
        found = self.state[inner] if isinstance(self.state, Mapping) and inner in self.state else self.state
        if isinstance(found, Mapping):
            return found
        if not hasattr(found, "__dict__"):
            raise self.refused(f"{inner} is a {type(found).__name__}", "it holds no named values")
        return vars(found)

    def setting(self, name: str, default: Any, stated: Any = None) -> Any:
        """``stated`` if the state says it, else the caller's setting, else ``default`` with a note."""
        self.used.add(name)
        given = self.settings.get(name)
        if given is not None and not isinstance(given, (int, float)):
            raise ArgumentError(
                asked=f"settings={{{name!r}: {given!r}}}",
                true=f"{name} is a number",
                why=f"a {type(given).__name__} cannot be one",
                fix="pass the number that the run was configured with",
            )
        if stated is not None and given is not None and given != stated:
            raise ArgumentError(
                asked=f"settings={{{name!r}: {given!r}}}",
                true=f"the {self.source} state itself says {stated!r}",
                why="the run that saved it used its own value",
                fix=f"leave {name!r} out of settings; change it on the loaded scaler if you mean to",
            )
        if stated is not None or given is not None:
            return given if stated is None else stated
        self.notes.append(
            f"{name}={default!r} was assumed: a {self.source} state does not say it (pass it in settings)"
        )
        return default

    def number(self, values: Mapping[str, Any], key: str) -> float:
        """A number, also out of a tensor of one element."""
        if key not in values:
            raise self.refused(f"its keys are {', '.join(sorted(map(str, values)))}", f"{key!r} is missing")
        value = values[key]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refused(f"{key} is {value!r}", "it is not a number")
        return value

    def count(self, values: Mapping[str, Any], key: str, least: int = 0) -> int:
        """A whole number of steps."""
        value = self.number(values, key)
        if not abs(value) < 2**53 or int(value) != value or value < least:
            raise self.refused(f"{key} is {value!r}", f"it counts steps: a whole number, {least} or more")
        return int(value)

    def scale(self, values: Mapping[str, Any], key: str) -> float:
        """A finite positive number that fp32 can hold, with its reciprocal."""
        try:
            return checked_scale(self.number(values, key), key)
        except ArgumentError as error:
            raise self.refused(error.asked, error.true) from error

    def build(self, make: Callable[[], Scale], counters: Mapping[str, Any]) -> Scale:
        """A scale in the middle of its run; a value that cannot be is refused in the state's name."""
        try:
            built = make()
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
        """The error for a state that no run can have."""
        return StateError(
            asked=f"reading a {self.source} scaler state",
            true=true,
            why=f"{why}; nothing was read",
            fix="load a checkpoint from before the damage, or start with a fresh scale",
        )


def _read_halfstep(reading: Reading) -> Scale:
    own = reading.state["halfstep"]
    kinds: dict[str, Callable[[], Scale]] = {
        "none": NoScale,
        "static": lambda: StaticScale(1.0),
        "dynamic": DynamicScale,
        "adaptive": AdaptiveScale,
    }
    kind = own.get("kind") if isinstance(own, Mapping) else None
    if kind not in kinds:
        raise reading.refused(f"its kind is {kind!r}", f"there are only {', '.join(kinds)}")
    try:
        scale = kinds[kind]()
        scale.load_state_dict({**own, **_shared(reading.state)})
    except StateError as error:
        raise reading.refused(error.true, error.why) from error
    return scale


def _read_torch(reading: Reading) -> Scale:
    scale = reading.scale(reading.state, "scale")
    settings: dict[str, Any] = {
        "growth_factor": reading.number(reading.state, "growth_factor"),
        "backoff_factor": reading.number(reading.state, "backoff_factor"),
        "growth_interval": reading.count(reading.state, "growth_interval", least=1),
        "min_scale": min(MIN_SCALE, scale),
        "max_scale": max(MAX_SCALE, scale),
    }
    counters = {"growth_tracker": reading.count(reading.state, "_growth_tracker")}
    return reading.build(lambda: DynamicScale(scale, **settings), counters)


def _read_megatron(reading: Reading) -> Scale:
    values = reading.values("grad_scaler")
    scale = reading.scale(values, "scale")
    left = reading.count(values, "hysteresis_tracker", least=-(2**31))
    settings = {
        "growth_factor": reading.setting("growth_factor", 2.0),
        "backoff_factor": reading.setting("backoff_factor", 0.5),
        "growth_interval": reading.setting("growth_interval", 1000),
        "hysteresis": reading.setting("hysteresis", max(2, left)),
        **_bounds(reading, scale, least=1.0),
    }
    _refuse_more_than_all(reading, left, settings["hysteresis"])
    counters = {"growth_tracker": reading.count(values, "growth_tracker"), "hysteresis_tracker": max(left, 1)}
    return reading.build(lambda: DynamicScale(scale, **settings), counters)


def _read_apex(reading: Reading) -> Scale:
    scalers = {key: value for key, value in reading.state.items() if re.fullmatch(APEX_KEY, str(key))}
    first, *others = scalers.values()
    if any(other != first for other in others):
        raise reading.refused(
            f"it holds {len(scalers)} loss scalers that differ",
            "one scaler has one scale: pass the one you mean, as {'loss_scaler0': ...}",
        )
    if not isinstance(first, Mapping):
        raise reading.refused(f"{next(iter(scalers))} is a {type(first).__name__}", "it holds no named values")
    scale = reading.scale(first, "loss_scale")
    settings = {"growth_interval": reading.setting("growth_interval", 2000), **_bounds(reading, scale, least=MIN_SCALE)}
    counters = {"growth_tracker": reading.count(first, "unskipped")}
    return reading.build(lambda: DynamicScale(scale, **settings), counters)


def _read_deepspeed(reading: Reading) -> Scale:
    values = reading.values()
    if not values.get("dynamic_loss_scale", "last_overflow_iter" in values):
        return StaticScale(reading.scale(values, "cur_scale"))
    if "cur_hysteresis" in values:
        left = reading.count(values, "cur_hysteresis", least=1)
        hysteresis = reading.setting("hysteresis", max(2, left))
        put_up_with = {"hysteresis": hysteresis, "consecutive_hysteresis": False}
        if hysteresis > 1:
            put_up_with["consecutive_hysteresis"] = reading.setting("consecutive_hysteresis", False)
    else:  # versions that read the setting and ignore it
        left, put_up_with = 1, {}
    is_mmcv = "mode" in values
    return _read_step_numbers(reading, values, put_up_with, left, late_growth=not is_mmcv)


def _read_deepspeed_zero(reading: Reading) -> Scale:
    values = reading.values("loss_scaler")
    if not values.get("dynamic", "last_overflow_iter" in values):
        return StaticScale(reading.scale(values, "cur_scale"))
    hysteresis = reading.count(values, "delayed_shift", least=1) if "delayed_shift" in values else 1
    left = reading.count(values, "cur_hysteresis", least=1) if "cur_hysteresis" in values else hysteresis
    consecutive = bool(values.get("consecutive_hysteresis", False)) and hysteresis > 1
    if values.get("raise_error_at_min_scale"):
        reading.notes.append("DeepSpeed ends the run at min_scale; halfstep stays there and reports skip after skip")
    put_up_with = {"hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
    return _read_step_numbers(reading, values, put_up_with, left, late_growth=False)


def _read_step_numbers(
    reading: Reading, values: Mapping[str, Any], put_up_with: dict[str, Any], left: int, *, late_growth: bool
) -> Scale:
    scale = reading.scale(values, "cur_scale")
    window = reading.count(values, "scale_window", least=1)
    factor = reading.number(values, "scale_factor")
    if not factor > 1.0:
        raise reading.refused(f"scale_factor is {factor!r}", "the scale is multiplied and divided by it: above 1")
    _refuse_more_than_all(reading, left, put_up_with.get("hysteresis", 1))
    reading.used.add("late_growth")
    tracker = _tracker(reading, values, window, late_growth=reading.settings.get("late_growth", late_growth))
    stated = reading.scale(values, "min_scale") if "min_scale" in values else None
    settings = {
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "min_scale": reading.setting("min_scale", min(1.0, scale), stated),
        "max_scale": reading.setting("max_scale", max(MAX_SCALE, scale)),
        **put_up_with,
    }
    return reading.build(
        lambda: DynamicScale(scale, **settings), {"growth_tracker": tracker, "hysteresis_tracker": left}
    )


def _tracker(reading: Reading, values: Mapping[str, Any], window: int, *, late_growth: bool) -> int:
    num_steps = reading.count(values, "cur_iter")
    last_overflow = reading.count(values, "last_overflow_iter", least=-1)
    num_clean = num_steps - last_overflow - 1
    if num_clean < 0:
        raise reading.refused(
            f"cur_iter is {num_steps}, last_overflow_iter {last_overflow}", "an overflow cannot lie in the future"
        )
    if not late_growth:
        return num_clean % window
    reading.notes.append(
        f"this DeepSpeed scaler grows {window} + 1 clean steps after an overflow, halfstep's {window}:"
        " one step sooner, after each overflow"
    )
    # Without a clean step yet the tracker would be -1; from 0 the scale grows one step early, as the note says.
    return (num_clean - 1) % window if num_clean > 0 else 0


def _refuse_more_than_all(reading: Reading, left: int, hysteresis: int) -> None:
    if left > hysteresis:
        raise reading.refused(
            f"{left} overflows are still put up with, of hysteresis={hysteresis}", "the count runs down from hysteresis"
        )


def _bounds(reading: Reading, scale: float, *, least: float) -> dict[str, float]:
    """Bounds for a scaler that saves none; widened where the scale already lies outside the usual ones."""
    return {
        "min_scale": reading.setting("min_scale", min(least, scale)),
        "max_scale": reading.setting("max_scale", max(MAX_SCALE, scale)),
    }


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """torch's entries by the names that a Scale gives them."""
    return {key.removeprefix("_"): state[key] for key in TORCH_KEYS}


READERS: dict[SourceFormat, Callable[[Reading], Scale]] = {
    "halfstep": _read_halfstep,
    "torch": _read_torch,
    "deepspeed": _read_deepspeed,
    "deepspeed-zero": _read_deepspeed_zero,
    "megatron": _read_megatron,
    "apex": _read_apex,
}
