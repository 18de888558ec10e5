"""What a stepper saves: the scale, the counts, the schedulers and the EMA that are attached to it.

Numbers, strings and, in the EMA, tensors: ``torch.load(weights_only=True)`` reads it. The model and its optimizers are
saved beside it, as in any other loop. Loading is all or nothing: what was loaded already is put back when a later part
is refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from halfstep.errors import HalfstepWarning, warn
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.scaling.interchange import detect_format
from halfstep.scaling.scale import NoScale, Scale
from halfstep.scaling.skips import valid_counts
from halfstep.training import refusals
from halfstep.training.ema import EMA
from halfstep.training.settle import Settler

VERSION = 1
_KEYS = ("version", "scale", "counts", "schedulers", "ema")


def collect(scale: Scale, settler: Settler, ema: EMA | None) -> dict[str, Any]:
    """The state, once the last step is settled."""
    return {
        "version": VERSION,
        "scale": scale.state_dict(),
        "counts": settler.log.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in settler.schedulers],
        "ema": None if ema is None else ema.state_dict(),
    }


def restore(state: Mapping[str, Any], scale: Scale, settler: Settler, ema: EMA | None) -> None:
    """Load what :func:`collect` returned, or a GradScaler's state.

    Raises:
        StateError: the state does not fit; nothing was loaded.
    """
    if not isinstance(state, Mapping):
        raise refusals.bad_state("only a dict can hold a state", f"a {type(state).__name__} was passed")
    if not set(_KEYS) <= state.keys():
        _restore_scaler(state, scale, settler)
        return
    counts = _checked(state, settler, ema)
    old_scale, old_ema = scale.state_dict(), copy.deepcopy(ema.state_dict()) if ema is not None else None
    old_schedulers = [copy.deepcopy(scheduler.state_dict()) for scheduler in settler.schedulers]
    try:
        scale.load_state_dict(dict(state["scale"]))
        if ema is not None:
            ema.load_state_dict(state["ema"])
        for scheduler, saved in zip(settler.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))
    except BaseException:
        scale.load_state_dict(old_scale)
        if ema is not None and old_ema is not None:
            ema.load_state_dict(old_ema)
        for scheduler, old in zip(settler.schedulers, old_schedulers, strict=True):
            scheduler.load_state_dict(old)
        raise
    settler.log.load_counts(counts)


def _checked(state: Mapping[str, Any], settler: Settler, ema: EMA | None) -> dict[str, int]:
    """The counts, if the parts are those of this set-up."""
    if state["version"] != VERSION:
        raise refusals.bad_state("this version reads another form", f"the state has version {state['version']!r}")
    kinds: dict[str, Any] = {"scale": Mapping, "counts": Mapping, "schedulers": (list, tuple)}
    for key, kind in kinds.items():
        if not isinstance(state[key], kind):
            raise refusals.bad_state(f"{key} cannot be read from it", f"{key} is a {type(state[key]).__name__}")
    _check_schedulers(state["schedulers"], settler)
    if (state["ema"] is None) != (ema is None):
        has, lacks = ("the state", "this stepper") if ema is None else ("this stepper", "the state")
        raise refusals.bad_state("an average cannot be continued from nothing", f"{has} has an EMA, {lacks} has none")
    try:
        if state["counts"].keys() != settler.log.state_dict().keys():
            raise ValueError(f"the counts are {', '.join(map(str, state['counts'])) or 'missing'}")
        counts = valid_counts(dict(state["counts"]))
        if not counts["skips_in_a_row"] <= counts["skipped_steps"] <= counts["steps"]:
            raise ValueError(f"the counts contradict each other: {counts}")
        return counts
    except (TypeError, ValueError) as error:
        raise refusals.bad_state("a run cannot continue from these counts", str(error)) from error


def _check_schedulers(saved: Any, settler: Settler) -> None:
    own = [scheduler.state_dict() for scheduler in settler.schedulers]
    if len(saved) != len(own):
        raise refusals.bad_state(
            "each learning rate continues from its own scheduler",
            f"schedulers saved: {len(saved)}, attached: {len(own)}",
        )
    for theirs, ours in zip(saved, own, strict=True):
        # torch's schedulers take over whatever they are given, word for word.
        if not isinstance(theirs, Mapping) or ours.keys() != theirs.keys():
            raise refusals.bad_state("a scheduler of this kind cannot continue from it", f"its state is {theirs!r}")
        for key, value in theirs.items():
            _check_entry(key, value, ours[key])


def _check_entry(key: str, value: Any, own: Any) -> None:
    is_count = isinstance(own, int) and not isinstance(own, bool)
    is_odd = is_count and not isinstance(value, int)
    is_odd |= isinstance(own, list) and (not isinstance(value, list) or len(value) != len(own))
    numbers = value if isinstance(value, list) else [value]
    is_odd |= any(isinstance(number, float) and not math.isfinite(number) for number in numbers)
    if is_odd:
        raise refusals.bad_state("no scheduler of this optimizer can have it", f"a scheduler's {key} is {value!r}")


def _restore_scaler(state: Mapping[str, Any], scale: Scale, settler: Settler) -> None:
    keys = ", ".join(map(str, sorted(state, key=str))) or "none"
    if not state or detect_format_or_none(state) not in ("torch", "halfstep"):
        missing = ", ".join(key for key in _KEYS if key not in state)
        raise refusals.bad_state(f"{missing} would have to be made up", f"its keys are {keys}")
    if isinstance(scale, NoScale):
        raise refusals.bad_state(
            "there is no scale to continue", "the state is a loss scaler's, this policy scales not"
        )
    inside, note = _within_bounds(state, scale)
    scaler = GradScaler("cpu", scale=scale)
    scaler.load_state_dict(inside)
    counts = scaler.state_dict()["halfstep"]
    settler.log.load_counts(valid_counts(counts))
    warn(
        f"The state is a loss scaler's: scale and counts are loaded, schedulers and EMA are as before.{note}",
        HalfstepWarning,
    )


def _within_bounds(state: Mapping[str, Any], scale: Scale) -> tuple[dict[str, Any], str]:
    """torch's scale knows no bounds, and may have doubled beyond ours in a quiet phase: it goes on at the bound."""
    low, high = scale.bounds()
    saved = state["scale"]
    is_number = isinstance(saved, (int, float)) and not isinstance(saved, bool) and math.isfinite(saved) and saved > 0
    if not is_number or low <= saved <= high:
        return dict(state), ""
    return {
        **state,
        "scale": min(max(saved, low), high),
    }, f" The scale was {saved:g}; its bounds are {low:g} to {high:g}."


def detect_format_or_none(state: Mapping[str, Any]) -> str | None:
    """The format of a scaler's state; None if it is none."""
    try:
        return detect_format(state)
    except ValueError:
        return None
