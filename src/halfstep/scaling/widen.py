"""Step 16-bit parameters in fp32: widen them for the step, round once on the way back.

torch's optimizers keep their state in the parameter's dtype. In fp16 that means an eps of 1e-8 that is zero, a second
moment that vanishes, and a division by zero that writes inf into the weights. Inside :class:`Widened` the optimizer
sees fp32 parameters and fp32 gradients, so its state is fp32 too. Afterwards the weights are rounded to nearest, once,
beyond the format's largest value to that value, and the saturated ones are counted.

The 16-bit weights still lose updates smaller than half their ulp: this makes the step safe, it is no substitute for
masters. It needs 8 bytes per 16-bit parameter while the step runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.errors import PrecisionWarning, UnsupportedError, warn
from halfstep.formats import format_of, saturating_cast

HALF_DTYPES = (torch.float16, torch.bfloat16)


def needs_widening(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer should run in fp32 although it has 16-bit parameters with gradients.

    Optimizers outside torch that announce support for loss scaling bring their own treatment of 16-bit weights.
    """
    is_foreign = not type(optimizer).__module__.startswith("torch.optim")
    if is_foreign and getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return any(True for _ in _half_parameters(optimizer))


@dataclass(eq=False)
class _Taken:
    """One parameter while it is widened."""

    parameter: Tensor
    narrow: Tensor  # its own storage
    gradient: Tensor  # its own gradient
    wide: Tensor | None = None

    def give_back(self) -> None:
        """Put storage, dtype and gradient back. May run twice: an interrupt can strike between any two lines."""
        p = self.parameter
        if p.dtype not in HALF_DTYPES:
            self.wide = p.data
            p.grad = None
            p.data = self.narrow
        p.grad = self.gradient


@dataclass(eq=False)
class Widened:
    """Let an optimizer step its 16-bit parameters as fp32 ones, inside ``with``.

    Args:
        optimizer: the optimizer that is about to step.

    Set ``found_inf`` inside, once it is known; where it is 1.0 no weight is written. Whatever happens inside, the
    parameters come back with their own storage, dtype and gradient, and with what the optimizer did to them.

    Raises:
        UnsupportedError: two 16-bit parameters overlap in memory: each would be widened by itself, and the last one
            written back would undo the other's step.
    """

    optimizer: torch.optim.Optimizer
    found_inf: Tensor | None = None
    num_saturated: list[Tensor] = field(default_factory=list)  # 0-dim int64, one for each parameter
    _taken: list[_Taken] = field(default_factory=list)

    def __enter__(self) -> Widened:
        parameters = list(_half_parameters(self.optimizer))
        _refuse_overlap(parameters)
        narrowed_state: list[str] = []
        try:
            for p in parameters:
                assert p.grad is not None
                gradient = _widened_gradient(p.grad)
                self._taken.append(_Taken(p, p.data, p.grad))
                p.grad = None
                p.data = p.data.float()
                p.grad = gradient
                narrowed_state += _widen_state(self.optimizer, p)
        except BaseException:
            self._give_back()
            raise
        if narrowed_state:
            _warn_of_narrowed_state(self.optimizer, sorted(set(narrowed_state)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back()
        if self.found_inf is not None and is_host(self.found_inf.device) and self.found_inf.item() != 0:
            return  # known without waiting: not even the version counter moves
        with torch.no_grad():
            for taken in self._taken:
                self._write_back(taken)

    def _write_back(self, taken: _Taken) -> None:
        wide, narrow = taken.wide, taken.narrow
        assert wide is not None
        rounded = saturating_cast(wide, narrow.dtype)
        saturated = wide.abs() > format_of(narrow.dtype).largest
        if self.found_inf is not None:
            is_bad = self.found_inf.to(narrow.device, non_blocking=True) != 0
            rounded, saturated = torch.where(is_bad, narrow, rounded), saturated & ~is_bad
        self.num_saturated.append(saturated.sum())
        taken.parameter.copy_(rounded)  # through the parameter, so that autograd sees the write

    def _give_back(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                for taken in self._taken:
                    taken.give_back()
                break
            except KeyboardInterrupt as error:  # finish first: half the parameters in fp32 is no state to stop in
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _half_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.dtype in HALF_DTYPES and p.grad is not None)


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


def _refuse_overlap(parameters: list[Tensor]) -> None:
    """Views of one flat buffer are fine as long as no byte belongs to two of them."""
    spans: list[tuple[int, int]] = []
    for p in parameters:
        if p.layout != torch.strided or type(p.data) is not Tensor or p.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()))
    spans.sort()
    if any(end > next_start for (_, end), (next_start, _) in itertools.pairwise(spans)):
        raise UnsupportedError(
            asked="step() of 16-bit parameters",
            true="two of them overlap in memory",
            why="each is widened to fp32 by itself, and the last one written back would undo the other's step",
            fix="tie weights by using one Parameter object twice, not by sharing .data",
        )
