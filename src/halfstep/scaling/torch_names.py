"""torch.amp.GradScaler's settings and private attributes, as views of the scale.

Accelerate, Composer, Apex and Transformer Engine read and write these names (``_scale`` when they load a checkpoint,
``_growth_tracker`` when they reset it). The state itself lives once, in the :class:`~halfstep.scaling.scale.Scale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import NotScaledError
from halfstep.scaling import refusals
from halfstep.scaling.checks import checked_backoff_factor, checked_growth_factor
from halfstep.scaling.scale import DynamicScale, Scale


class TorchNames:
    """Settings and private names of torch's class; GradScaler inherits them in front of torch's own."""

    _rule: Scale
    _enabled: bool

    @property
    def _scale(self) -> Tensor | None:
        return self._rule.tensor("scale")

    @_scale.setter
    def _scale(self, tensor: Tensor | None) -> None:
        self._rule.put("scale", tensor)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._rule.tensor("growth_tracker")

    @_growth_tracker.setter
    def _growth_tracker(self, tensor: Tensor | None) -> None:
        self._rule.put("growth_tracker", tensor)

    @property
    def _init_scale(self) -> float:
        return self._rule.get()

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        if not self._rule.is_placed:  # as in torch, it counts until the first loss is scaled
            self._rule.set_(value)

    @property
    def _init_growth_tracker(self) -> int:
        return self._get_growth_tracker()

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        """torch sets it to 0 in its constructor, as the rule does."""

    def _get_growth_tracker(self) -> int:
        return int(self._rule.number("growth_tracker", 0))

    @property
    def _growth_factor(self) -> float:
        return float(getattr(self._rule, "growth_factor", 2.0))

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._configure(growth_factor=value)

    @property
    def _backoff_factor(self) -> float:
        return float(getattr(self._rule, "backoff_factor", 0.5))

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._configure(backoff_factor=value)

    @property
    def _growth_interval(self) -> int:
        return int(getattr(self._rule, "growth_interval", 2000))

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        if isinstance(self._rule, DynamicScale):
            self._rule.set_growth_interval(value)

    def get_scale(self) -> float:
        """The scale as a number, 1.0 if the scaler is disabled. Reads the device."""
        return self._rule.get() if self._enabled else 1.0

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the multiplier after a growth interval; above 1."""
        self._refuse_without("growth_factor")
        self._growth_factor = checked_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the multiplier on overflow; between 0 and 1."""
        self._refuse_without("backoff_factor")
        self._backoff_factor = checked_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before growth; at least 1. More clean steps than that count as all but one."""
        self._refuse_without("growth_interval")
        if isinstance(self._rule, DynamicScale):
            self._rule.set_growth_interval(new_interval)

    def _refuse_without(self, setting: str) -> None:
        if self._enabled and not hasattr(self._rule, setting):
            raise refusals.setting_without_effect(setting, self._rule)

    def _configure(self, **settings: Any) -> None:
        for name, value in settings.items():
            if hasattr(self._rule, name):
                setattr(self._rule, name, value)

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._rule.value(dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale = self._scale
        if scale is None:
            raise NotScaledError(
                asked=f"Attempted {funcname} but _scale is None.  This may indicate your script did not use"
                " scaler.scale(loss or outputs) earlier in the iteration.",
                true="no loss has been scaled by this scaler yet",
                why=f"{funcname}() undoes the scaling of the loss; there is none to undo",
                fix="call scaler.scale(loss).backward() first",
            )
        tracker = self._growth_tracker
        return scale, torch.zeros((), dtype=torch.int32, device=scale.device) if tracker is None else tracker
