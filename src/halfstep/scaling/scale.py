"""The factor on the loss: none, static, dynamic or adaptive, one fp32 tensor that is updated on the device.

Small gradients vanish below fp16's smallest subnormal, 2**-24. Multiplying the loss by a scale moves every gradient up
by the same factor; dividing before the step moves it back (Micikevicius et al., *Mixed Precision Training*, ICLR 2018,
section 3.2). What differs between the classes here is how the next scale follows from what the last step found:

- :class:`NoScale` stays 1 and only reports; for fp32 and bf16.
- :class:`StaticScale` stays where it was set.
- :class:`DynamicScale` doubles after ``growth_interval`` clean steps and halves on overflow (future work in
  section 3.2; the rule is Apex's), with hysteresis (DeepSpeed, Megatron-LM) and a tolerated overflow rate (fairseq).
- AdaptiveScale, in adaptive.py, aims the largest gradient below fp16's largest value, from statistics.

A scale is finite, positive and between its bounds at all times; invalid state is refused as a whole. Nothing here reads
the device: ``update_`` enqueues a few kernels on 0-dim tensors. Scales that these classes choose are powers of two, so
that scaling and unscaling change no bit of a gradient, as long as the first scale and the bounds are powers of two.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep._compat import moved, update_scale_
from halfstep.errors import ArgumentError, HalfstepError, StateError
from halfstep.formats import FP32
from halfstep.scaling.checks import (
    SMALLEST_SCALE,
    checked_backoff_factor,
    checked_count,
    checked_growth_factor,
    checked_scale,
    checked_tolerance,
    outside,
)

MIN_SCALE = 2.0**-14  # from 2**16, thirty halvings: no forward pass is rescued by going lower
MAX_SCALE = 2.0**24  # moves fp16's smallest subnormal, 2**-24, to 1: gradients below 2**-48 move no fp32 weight
INIT_SCALE = 2.0**14  # the largest power of two for which an fp16 loss gradient of 1, doubled once by a sum, still fits


@dataclass(eq=False)
class Scale:
    """The factor on the loss and the rule that updates it; use one of the subclasses.

    State lives on the host until :meth:`value` first asks for it on a device, and from then on in 0-dim tensors there.
    """

    kind: ClassVar[str] = ""
    needs_largest: ClassVar[bool] = False  # whether update_ wants the largest gradient magnitude

    # Written by __post_init__ and load_state_dict only: numbers while unplaced, 0-dim tensors afterwards.
    _numbers: dict[str, float | int] = field(init=False, repr=False, default_factory=dict)
    _tensors: dict[str, Tensor] | None = field(init=False, repr=False, default=None)
    num_changes: int = field(init=False, repr=False, default=0)  # known to the host; several users notice each other

    def __post_init__(self) -> None:
        self._check()
        self._numbers = self._fresh()

    # -- what a subclass says about itself ------------------------------------------------------------------------

    def _fresh(self) -> dict[str, float | int]:
        """State before the first step; a float becomes an fp32 tensor, an int an int32 tensor."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise if the configuration cannot work."""

    def _check_counters(self, numbers: dict[str, float | int]) -> None:
        """Raise ValueError if saved counters contradict each other."""

    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value this scale may take."""
        raise NotImplementedError

    def update_(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Choose the scale of the next window from what this window found; no value is read on the host.

        Args:
            found_inf: 0-dim fp32, 1.0 if a gradient of the window was inf or NaN, else 0.0; on the scale's device.
            largest: 0-dim fp32, the largest magnitude of a *scaled* gradient; read by scales with ``needs_largest``.
        """
        raise NotImplementedError

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the present state, for :meth:`put_back_where_`."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def put_back_where_(self, condition: Tensor, before: dict[str, Tensor]) -> None:
        """Return to an earlier state where ``condition`` (0-dim) is not 0; no value is read on the host."""
        for name, tensor in self._state().items():
            tensor.copy_(torch.where(condition != 0, before[name], tensor))

    # -- reading and setting --------------------------------------------------------------------------------------

    def value(self, device: torch.device) -> Tensor:
        """The scale as a 0-dim fp32 tensor on ``device``; the first call decides where the state lives."""
        return moved(self._placed(device)["scale"], device)

    def get(self) -> float:
        """The scale as a number. Reads the device."""
        return float(self._read("scale"))

    def set_(self, new_scale: float) -> None:
        """Replace the scale, keeping counters.

        Raises:
            ArgumentError: ``new_scale`` is not a finite positive number within the bounds.
        """
        value = checked_scale(new_scale, "new_scale")
        low, high = self.bounds()
        if not low <= value <= high:
            raise outside("new_scale", value, low, high)
        self._write({"scale": value})

    @property
    def is_placed(self) -> bool:
        """Whether the state already lives on a device."""
        return self._tensors is not None

    def fresh_counters(self) -> dict[str, float | int]:
        """Every state but the scale, as before the first step."""
        return {name: number for name, number in self._fresh().items() if name != "scale"}

    def tensor(self, name: str) -> Tensor | None:
        """The 0-dim tensor of one state (``"scale"``, ``"growth_tracker"``), or None before the first :meth:`value`."""
        return None if self._tensors is None else self._tensors.get(name)

    def number(self, name: str, default: float) -> float | int:
        """One state as a number, ``default`` where this kind of scale has no such state. Reads the device."""
        return self._read(name) if name in self._numbers else default

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Replace the tensor of one state, as libraries do that write torch's private names; None changes nothing.

        Raises:
            ArgumentError: a scale that is not finite and positive. Reads the device.
        """
        if tensor is not None and name in self._numbers:
            if name == "scale":
                checked_scale(tensor.item(), "_scale")
            self._placed(tensor.device)[name] = tensor.reshape(())

    def _placed(self, device: torch.device) -> dict[str, Tensor]:
        if self._tensors is None:
            self._tensors = {
                name: torch.full((), number, dtype=_dtype_of(number), device=device)
                for name, number in self._numbers.items()
            }
        return self._tensors

    def _state(self) -> dict[str, Tensor]:
        assert self._tensors is not None, "value() places the scale before update_() can run"
        return self._tensors

    def _read(self, name: str) -> float | int:
        return self._numbers[name] if self._tensors is None else self._tensors[name].item()

    def _write(self, numbers: dict[str, float | int]) -> None:
        self.num_changes += 1
        self._numbers.update(numbers)
        if self._tensors is not None:
            for name, number in numbers.items():
                self._tensors[name].fill_(number)

    # -- saving and loading ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Kind, configuration and counters as plain numbers, generated from the fields. Reads the device."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {"kind": self.kind, **config, **{name: self._read(name) for name in self._numbers}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved configuration and its counters, all or nothing.

        Raises:
            StateError: the state is of another kind, incomplete, or holds values that no run can have.
        """
        wanted = self.state_dict().keys()
        if state.get("kind") != self.kind or not wanted <= state.keys():
            raise StateError(
                asked=f"load_state_dict() of a {state.get('kind')!r} scale with keys {sorted(state)}",
                true=f"this is a {self.kind!r} scale with keys {sorted(wanted)}",
                why="a scale continues only from a state of its own kind, and from all of it",
                fix=f"build the scale that was saved ({state.get('kind')!r}), or start this one afresh",
            )
        try:
            other = type(self)(**{f.name: state[f.name] for f in dataclasses.fields(self) if f.init})
            numbers = {name: _like(start, state[name], name) for name, start in other._numbers.items()}
            other.set_(numbers.pop("scale"))
            other._check_counters(numbers)
        except (HalfstepError, TypeError, ValueError, OverflowError) as error:
            raise StateError(
                asked=f"load_state_dict({state!r})",
                true=str(error).split("\n", 1)[0],
                why="a run cannot continue from this value; nothing was loaded",
                fix="load a checkpoint from before the damage, or start with a fresh scale",
            ) from error
        for f in dataclasses.fields(self):
            if f.init:
                setattr(self, f.name, getattr(other, f.name))
        self._write({"scale": other.get(), **numbers})

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold numbers, no tensors: a copy shares no memory and can wake up on another device."""
        state = self.__dict__.copy()
        state["_numbers"] = {name: self._read(name) for name in self._numbers}
        state["_tensors"] = None
        return state


@dataclass(eq=False)
class NoScale(Scale):
    """A scale of exactly 1: nothing is scaled, but every step is still checked for inf and NaN.

    Example:
        >>> NoScale().get()
        1.0
    """

    kind: ClassVar[str] = "none"

    def _fresh(self) -> dict[str, float | int]:
        return {"scale": 1.0}

    def bounds(self) -> tuple[float, float]:
        """Exactly 1."""
        return 1.0, 1.0

    def update_(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Nothing to do."""


@dataclass(eq=False)
class StaticScale(Scale):
    """A scale that never moves; a step whose gradients overflow is still skipped.

    Args:
        init_scale: the scale; finite and positive. Micikevicius et al. used 8 to 32768, by experiment.

    Example:
        >>> StaticScale(1024).get()
        1024.0
    """

    kind: ClassVar[str] = "static"
    init_scale: float

    def _check(self) -> None:
        self.init_scale = checked_scale(self.init_scale, "init_scale")

    def _fresh(self) -> dict[str, float | int]:
        return {"scale": self.init_scale}

    def bounds(self) -> tuple[float, float]:
        """Any scale that has a reciprocal: a static scale moves only when the user sets it."""
        return SMALLEST_SCALE, FP32.largest

    def update_(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Nothing to do."""


@dataclass(eq=False)
class BoundedScale(Scale):
    """A scale that moves between two bounds; use one of the subclasses."""

    init_scale: float = INIT_SCALE
    min_scale: float = field(default=MIN_SCALE, kw_only=True)
    max_scale: float = field(default=MAX_SCALE, kw_only=True)

    def _check(self) -> None:
        self.init_scale = checked_scale(self.init_scale, "init_scale")
        self.min_scale = checked_scale(self.min_scale, "min_scale")
        self.max_scale = checked_scale(self.max_scale, "max_scale")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise outside("init_scale", self.init_scale, self.min_scale, self.max_scale)

    def bounds(self) -> tuple[float, float]:
        """``(min_scale, max_scale)``."""
        return self.min_scale, self.max_scale


@dataclass(eq=False)
class DynamicScale(BoundedScale):
    """Double after ``growth_interval`` clean steps, halve on overflow, stay within bounds.

    Args:
        init_scale: first scale. 2**14 is safe for an fp16 loss; torch's 2**16 is itself beyond fp16's largest value.
        growth_factor: multiplier after ``growth_interval`` clean steps in a row; above 1.
        backoff_factor: multiplier on overflow; between 0 and 1.
        growth_interval: clean steps in a row before growth; at least 1.
        min_scale: the scale never backs off below this.
        max_scale: the scale never grows above this.
        hysteresis: overflows that it takes to back off; 1 backs off at once. The count is refilled after a full growth
            interval (DeepSpeed, Megatron-LM), and once used up every overflow backs off until then.
        consecutive_hysteresis: refill the count at every clean step, so that only overflows in a row back off.
        tolerance: back off only if overflows make up at least this share of the steps since the scale last moved, in
            [0, 1); 0 backs off always (fairseq).

    Any overflow restarts the count of clean steps, whether or not the scale backs off.

    Raises:
        ArgumentError: a value is out of its range.

    Example:
        >>> scale = DynamicScale(growth_interval=1)
        >>> _ = scale.value(torch.device("cpu"))
        >>> scale.update_(found_inf=torch.tensor(0.0)); scale.get() == 2**15
        True
        >>> scale.update_(found_inf=torch.tensor(1.0)); scale.get() == 2**14
        True
    """

    kind: ClassVar[str] = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = field(default=1, kw_only=True)
    consecutive_hysteresis: bool = field(default=False, kw_only=True)
    tolerance: float = field(default=0.0, kw_only=True)

    def _check(self) -> None:
        super()._check()
        self.growth_factor = checked_growth_factor(self.growth_factor)
        self.backoff_factor = checked_backoff_factor(self.backoff_factor)
        self.growth_interval = checked_count(self.growth_interval, "growth_interval")
        self.hysteresis = checked_count(self.hysteresis, "hysteresis")
        self.tolerance = checked_tolerance(self.tolerance)
        if not isinstance(self.consecutive_hysteresis, bool):
            raise ArgumentError(
                asked=f"consecutive_hysteresis={self.consecutive_hysteresis!r}",
                true="it is True or False",
                why="a text or number would count as True, whatever it says",
                fix="pass True or False",
            )
        if self.consecutive_hysteresis and self.hysteresis == 1:
            raise ArgumentError(
                asked="consecutive_hysteresis=True with hysteresis=1",
                true="a hysteresis of 1 backs off at the first overflow",
                why="there is no count that could be refilled, so the option cannot take effect",
                fix="pass hysteresis=2 or more, or leave consecutive_hysteresis out",
            )

    def _fresh(self) -> dict[str, float | int]:
        return {
            "scale": self.init_scale,
            "growth_tracker": 0,
            "hysteresis_tracker": self.hysteresis,
            "steps_since_rescale": 0,
            "overflows_since_rescale": 0,
        }

    def _check_counters(self, numbers: dict[str, float | int]) -> None:
        if numbers["hysteresis_tracker"] > self.hysteresis:
            raise ValueError(f"hysteresis_tracker is {numbers['hysteresis_tracker']}, above hysteresis")
        if numbers["overflows_since_rescale"] > numbers["steps_since_rescale"]:
            raise ValueError("overflows_since_rescale is above steps_since_rescale")
        # The kernel grows when the count *equals* the interval: a count at or beyond it would never grow again.
        numbers["growth_tracker"] = min(numbers["growth_tracker"], self.growth_interval - 1)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before growth; a count already at or beyond it grows at the next clean step."""
        self.growth_interval = checked_count(new_interval, "growth_interval")
        self._numbers["growth_tracker"] = min(self._numbers["growth_tracker"], self.growth_interval - 1)
        if self._tensors is not None:
            self._tensors["growth_tracker"].clamp_(max=self.growth_interval - 1)

    def update_(self, found_inf: Tensor, largest: Tensor | None = None) -> None:  # noqa: ARG002
        """Back off, grow or count; see :meth:`Scale.update_`."""
        state = self._state()
        scale, tracker = state["scale"], state["growth_tracker"]
        backs_off = found_inf
        if self.hysteresis > 1:
            backs_off = self._spend_hysteresis_(state["hysteresis_tracker"], backs_off)
        if self.tolerance > 0:
            backs_off = self._over_tolerance_(state, found_inf, backs_off)
        if backs_off is not found_inf:
            # An overflow that is put up with must neither count as a clean step nor grow: -1 becomes 0 below.
            put_up_with = (found_inf - backs_off).to(torch.int32)
            tracker.mul_(1 - put_up_with).sub_(put_up_with)
        update_scale_(scale, tracker, backs_off, (self.growth_factor, self.backoff_factor, self.growth_interval))
        scale.clamp_(self.min_scale, self.max_scale)
        if backs_off is not found_inf:
            self._restart_counts_(state, found_inf, backs_off)

    def _spend_hysteresis_(self, left: Tensor, found_inf: Tensor) -> Tensor:
        """1.0 where the count was used up before this overflow; counts down to 1."""
        backs_off = found_inf * (left <= 1)
        left.sub_(found_inf.to(torch.int32)).clamp_(min=1)
        return backs_off

    def _over_tolerance_(self, state: dict[str, Tensor], found_inf: Tensor, backs_off: Tensor) -> Tensor:
        steps, overflows = state["steps_since_rescale"], state["overflows_since_rescale"]
        steps.add_(1)
        overflows.add_(found_inf.to(torch.int32))
        return backs_off * (overflows >= self.tolerance * steps)

    def _restart_counts_(self, state: dict[str, Tensor], found_inf: Tensor, backs_off: Tensor) -> None:
        clean = found_inf == 0
        grew = clean & (state["growth_tracker"] == 0)
        left = state["hysteresis_tracker"]
        left.masked_fill_(clean if self.consecutive_hysteresis else grew, self.hysteresis)
        moved = grew | (backs_off > 0)
        state["steps_since_rescale"].masked_fill_(moved, 0)
        state["overflows_since_rescale"].masked_fill_(moved, 0)


def _dtype_of(number: float) -> torch.dtype:
    return torch.int32 if isinstance(number, int) else torch.float32


def _like(start: float, value: object, name: str) -> float | int:
    """``value`` in the type of ``start``; counters are not negative, statistics are finite."""
    if isinstance(start, int):
        number = int(value)  # type: ignore[call-overload]
        if number != value or not 0 <= number < 2**31:
            raise ValueError(f"{name} is {value!r}, not a count")
        return int(number)
    statistic = float(value)  # type: ignore[arg-type]
    # Logarithms of fp64 numbers lie within 2**11, and their squares within 2**22.
    is_possible = name == "scale" or abs(statistic) <= 2.0**22
    if not is_possible or (statistic < 0 and name != "mean"):
        raise ValueError(f"{name} is {value!r}, which no run can reach")
    return statistic
