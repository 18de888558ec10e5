"""Step 16-bit parameters in fp32: widen them for the step, round once on the way back.

torch's optimizers keep their state in the parameter's dtype. In fp16 that means an eps of 1e-8 that is zero, a second
moment that vanishes, and a division by zero that writes inf into the weights. Inside :class:`Widened` the optimizer
sees fp32 parameters and fp32 gradients, so its state is fp32 too. Afterwards the weights are rounded to nearest, once,
beyond the format's largest value to that value, and the saturated ones are counted.

The 16-bit weights still lose updates smaller than half their ulp: this makes the step safe, it is no substitute for
masters. It needs 8 bytes per 16-bit parameter while the step runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host, moved
from halfstep.errors import PrecisionWarning, UnsupportedError, warn
from halfstep.formats import HALF_DTYPES, format_of, saturating_cast
from halfstep.kernels.gradients import gradient_of
from halfstep.kernels.overlap import overlap

TORCH_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def announces_support(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer says that it unscales and skips by itself."""
    # Not getattr: a wrapper may answer for an inner optimizer, which would never see what is set on the wrapper.
    own = vars(optimizer).get("_step_supports_amp_scaling")
    return bool(getattr(type(optimizer), "_step_supports_amp_scaling", False) if own is None else own)


def needs_widening(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer should run in fp32 although it has 16-bit parameters with gradients.

    Other optimizers than torch's that announce support for loss scaling bring their own treatment of 16-bit weights.
    """
    if announces_support(optimizer) and not isinstance(optimizer, TORCH_FUSED):
        return False
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.dtype in HALF_DTYPES and gradient_of(p) is not None for p in parameters)


@dataclass(eq=False)
class _Stand:
    """An fp32 parameter that stands in an optimizer's group for a 16-bit one.

    The 16-bit parameter itself is not touched: giving it another dtype, even for a moment, would make torch forget the
    node on which DistributedDataParallel hangs its hooks.
    """

    group: dict[str, Any]
    place: int
    narrow: Tensor
    wide: torch.nn.Parameter
    version: int  # of the narrow one

    def enter(self, state: dict[Tensor, Any]) -> None:
        if self.narrow in state:
            state[self.wide] = state[self.narrow]  # the same dict: what the step changes is the parameter's own
        self.group["params"][self.place] = self.wide

    def leave(self, state: dict[Tensor, Any]) -> None:
        """May run twice: an interrupt can strike between any two lines."""
        self.group["params"][self.place] = self.narrow
        if self.wide in state:
            state[self.narrow] = state[self.wide]
            del state[self.wide]


@dataclass(eq=False)
class Widened:
    """Let an optimizer step its 16-bit parameters as fp32 ones, inside ``with``.

    Args:
        optimizer: the optimizer that is about to step.
        stalls: gets, for each 16-bit parameter, how many of its weights the step changed in fp32, and how many of these
            round to what they were: int64 ``[2]``. None counts nothing.

    Set ``found_inf`` inside, once it is known; where it is 1.0 no weight is written. Whatever happens inside, the
    optimizer gets its parameters back, with what it did to them; their gradients stay as they were, scaled.

    Raises:
        UnsupportedError: two 16-bit parameters overlap in memory: each would be widened by itself, and the last one
            written back would undo the other's step.
    """

    optimizer: torch.optim.Optimizer
    stalls: list[Tensor] | None = None
    found_inf: Tensor | None = None
    num_saturated: list[Tensor] = field(default_factory=list)  # 0-dim int64, one for each parameter
    _stands: list[_Stand] = field(default_factory=list)

    def __enter__(self) -> Widened:
        halves = [
            (group, place, p)
            for group in self.optimizer.param_groups
            for place, p in enumerate(group["params"])
            if p.dtype in HALF_DTYPES and gradient_of(p) is not None
        ]
        _refuse_overlap([p for _, _, p in halves])
        narrowed: set[str] = set()
        try:
            for group, place, p in halves:
                stand = _Stand(group, place, p, torch.nn.Parameter(p.detach().float()), int(p._version))
                gradient = gradient_of(p)
                assert gradient is not None
                stand.wide.grad = _widened_gradient(gradient)
                self._stands.append(stand)
                narrowed |= set(_widen_state(self.optimizer, p))
                stand.enter(self.optimizer.state)
            if narrowed:
                _warn_of_narrowed_state(self.optimizer, sorted(narrowed))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        if self.found_inf is not None and is_host(self.found_inf.device) and self.found_inf.item() != 0:
            return  # known without waiting: not even the version counter moves
        if kind is None and any(stand.narrow._version != stand.version for stand in self._stands):
            raise _stepped_past(self.optimizer)
        with torch.no_grad():
            for stand in self._stands:
                self._write_back(stand)

    def _write_back(self, stand: _Stand) -> None:
        wide, narrow = stand.wide.detach(), stand.narrow
        rounded = saturating_cast(wide, narrow.dtype)
        saturated = wide.abs() > format_of(narrow.dtype).largest
        if self.found_inf is not None:
            is_bad = moved(self.found_inf, narrow.device) != 0
            rounded, saturated = torch.where(is_bad, narrow, rounded), saturated & ~is_bad
        self.num_saturated.append(saturated.sum())
        if self.stalls is not None:
            is_updated = wide != narrow.float()
            if self.found_inf is not None:
                is_updated &= ~is_bad
            self.stalls.append(torch.stack([is_updated.sum(), (is_updated & (rounded == narrow)).sum()]))
        narrow.copy_(rounded)

    def _leave(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                for stand in self._stands:
                    stand.leave(self.optimizer.state)
                break
            except KeyboardInterrupt as error:  # finish first: half of the parameters replaced is no state to stop in
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _widened_gradient(gradient: Tensor) -> Tensor:
    # Sparse: widen before duplicates are added, so that two fp16 values of 40000 make 80000 and not inf.
    return gradient.float().coalesce() if gradient.is_sparse else gradient.float()


def _widen_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[str]:
    """Make 16-bit state fp32; returns the names of the states that must have been fp32 before a load."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    narrow = [name for name, v in state.items() if isinstance(v, Tensor) and v.dtype in HALF_DTYPES]
    for name in narrow:
        state[name] = state[name].float()
    return [name for name in narrow if name != "sum"]  # Adagrad makes its sum, of zeros, in its constructor


def _warn_of_narrowed_state(optimizer: torch.optim.Optimizer, names: list[str]) -> None:
    warn(
        f"The state {', '.join(names)} of {type(optimizer).__name__} is 16-bit: torch's load_state_dict rounds it to"
        " the parameters' dtype, and in fp16 a second moment below 6e-8 becomes 0. The next steps may be far too large."
        " Keep fp32 weights under autocast, or warm the optimizer up again with a small learning rate.",
        PrecisionWarning,
    )


_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def warn_without_masters(optimizer: torch.optim.Optimizer) -> None:
    """Say once what 16-bit weights lose, to whoever has not chosen it by a policy's name."""
    if optimizer in _warned:
        return
    _warned.add(optimizer)
    warn(
        f"{type(optimizer).__name__} steps 16-bit weights without masters. The step is taken in fp32 and rounded back,"
        " so updates smaller than half a unit in the last place of a weight are lost. Keep the rest in fp32 masters:"
        f" halfstep.MasterWeights({type(optimizer).__name__}(...)).",
        PrecisionWarning,
    )


def _stepped_past(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    return UnsupportedError(
        asked=f"step() of {type(optimizer).__name__} with 16-bit parameters",
        true="it wrote into them itself, although fp32 stand-ins were in its param_groups: it keeps an inner optimizer,"
        " or a list of its own",
        why="their gradients are scaled, and the step in fp32 that was prepared did not take place",
        fix="keep fp32 weights under autocast with this optimizer; the weights have moved: load a checkpoint",
    )


def _refuse_overlap(parameters: list[Tensor]) -> None:
    if overlap(parameters):
        raise UnsupportedError(
            asked="step() of 16-bit parameters",
            true="two of them overlap in memory",
            why="each is widened to fp32 by itself, and the last one written back would undo the other's step",
            fix="tie weights by using one Parameter object twice, not by sharing .data",
        )
