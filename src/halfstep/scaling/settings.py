"""From GradScaler's constructor arguments to a scale."""

from __future__ import annotations

from typing import Any

from halfstep.scaling import refusals
from halfstep.scaling.checks import checked_scale
from halfstep.scaling.scale import MAX_SCALE, MIN_SCALE, DynamicScale, Scale

# The settings of the dynamic scale that GradScaler makes, with the constructor's defaults (torch's for the first four).
DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": None,
    "max_scale": None,
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "tolerance": 0.0,
}


def scale_from(settings: dict[str, Any], scale: Scale | None) -> Scale:
    """The scale that was passed, or a dynamic one made of ``settings`` (every name in DEFAULTS); never of both."""
    if scale is None:
        low, high = widened_bounds((MIN_SCALE, MAX_SCALE), checked_scale(settings["init_scale"], "init_scale"))
        bounds = {"min_scale": low, "max_scale": high}
        return DynamicScale(**{**settings, **{n: v for n, v in bounds.items() if settings[n] is None}})
    if not isinstance(scale, Scale):
        raise refusals.not_a_scale(scale)
    given = [name for name, default in DEFAULTS.items() if settings[name] != default]
    if given:
        raise refusals.settings_beside_scale(given)
    return scale


def widened_bounds(bounds: tuple[float, float], value: float) -> tuple[float, float]:
    """Default bounds give way to a scale that the user sets; bounds that the user set do not."""
    return min(bounds[0], value), max(bounds[1], value)
