"""Run a window's micro-batches again, as they were run the first time.

The lectures call it "redo the forward pass": after an overflow the same data is used with the lowered scale, so that
nothing is lost. A micro-batch comes out the same, but for the scale, because the random state of its first run is put
back (dropout draws the same masks), and the stepper puts back the buffers.

torch's generators are restored, the CPU's and the device's; not Python's ``random``, nor NumPy's: draw data outside the
closure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SkippedStepWarning, warn
from halfstep.scaling.culprit import Culprit
from halfstep.training import refusals

Closure = Callable[..., Any]


@dataclass(eq=False)
class MicroBatch:
    """A closure, its arguments, and the random state that it began with."""

    closure: Closure
    args: tuple[Any, ...]
    random_state: list[tuple[Callable[[Tensor], object], Tensor]] = field(default_factory=list)
    loss: Tensor | None = None  # of its last run, without a graph

    def remember_random_state(self, device: torch.device) -> None:
        """To be called just before the first run."""
        self.random_state = [(torch.set_rng_state, torch.get_rng_state())]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            where = {} if device.type == "mps" else {"device": device}  # Apple's is the only one of its kind
            restore = functools.partial(module.set_rng_state, **where)
            self.random_state.append((restore, module.get_rng_state(**where)))

    def restore_random_state(self) -> None:
        """To be called just before another run."""
        for restore, state in self.random_state:
            restore(state)

    def is_bound(self) -> bool:
        """Whether the batch travels with the closure, so that later turns of the loop cannot change it."""
        return bool(self.args) or isinstance(self.closure, functools.partial)


def checked_retries(retries: object) -> int:
    """A number of retries."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise refusals.bad_retries(retries)
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_ranks = torch.distributed.get_world_size() if is_distributed else 1
    if retries and num_ranks > 1:
        raise refusals.retries_on_several_ranks(num_ranks)
    return retries


def loss_and_weight(result: Any) -> tuple[Tensor, Any]:
    """What a closure returned: a loss, or a loss and its weight."""
    if isinstance(result, tuple) and len(result) == 2:
        loss, weight = result
    else:
        loss, weight = result, None
    if not isinstance(loss, Tensor):
        raise refusals.closure_returned(result)
    return loss, weight


def are_finite(micro_batches: list[MicroBatch]) -> bool:
    """Whether every loss of the last run was finite. Reads the device."""
    return all(one.loss is not None and math.isfinite(one.loss.item()) for one in micro_batches)


def report_lost(micro_batches: list[MicroBatch], scales: list[float], culprit: Culprit | None) -> None:
    """Warn that a window is lost although it was run again, and say whose fault it is. Reads the device."""
    losses = [math.nan if one.loss is None else float(one.loss.item()) for one in micro_batches]
    bad = [(i, loss) for i, loss in enumerate(losses) if not math.isfinite(loss)]
    times = (
        f"{len(scales)} time{'s' if len(scales) > 1 else ''}, at scale {', '.join(f'{scale:g}' for scale in scales)}"
    )
    if bad:
        position, loss = bad[0]
        which = f" of micro-batch {position + 1}" if len(losses) > 1 else ""
        cause = f"the loss itself{which} is {loss}: the forward pass is at fault, and no scale can mend it"
    elif culprit is not None and culprit.kind == "nan":
        # inf - inf on the way is NaN too, so that only a scale at which nothing can overflow would prove it.
        cause = (
            "the loss is finite, its gradient was NaN each time: unless more retries at smaller scales help, the"
            " backward pass makes the NaN itself (0/0, sqrt at 0, inf - inf)"
        )
    else:
        cause = "the loss is finite, the gradients overflow: allow more retries, or begin with a smaller scale"
    guilty = "" if culprit is None else f" The gradient of {culprit}."
    warn(f"A window was run {times}, and lost: {cause}.{guilty}", SkippedStepWarning)
