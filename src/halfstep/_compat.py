"""torch-private names and version differences: here, and nowhere else.

Each entry says what it is for and when it can go.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

# cond, while_loop, flex_attention and the like, as a dispatch mode meets them.
from torch._ops import HigherOrderOperator as HigherOrderOperator

# The stages of an optimizer between two update() calls; private in torch, yet read by Accelerate, Composer and Apex.
from torch.amp.grad_scaler import OptState as OptState
from torch.amp.grad_scaler import _refresh_per_optimizer_state as refresh_per_optimizer_state

__all__ = [
    "HigherOrderOperator",
    "HostCopy",
    "OptState",
    "autocast_depth",
    "cpu_capabilities",
    "has_float64",
    "has_foreign_step_hooks",
    "is_composite",
    "is_dense",
    "is_host",
    "local_part",
    "moved",
    "refresh_per_optimizer_state",
    "rounded_sqrt",
    "update_scale_",
]


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself.

    Asked by name, because importing torch.distributed.tensor costs more than the rest of halfstep.
    """
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_host(device: torch.device) -> bool:
    """Whether tensors of this device can be read without waiting for anything."""
    return device.type == "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on another device, without waiting where that is safe.

    A copy to the host that does not wait returns memory that is not filled yet, and the host reads at once.
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=not is_host(device))


def has_float64(device: torch.device) -> bool:
    """Whether the device can hold fp64 tensors (Apple's cannot)."""
    return device.type != "mps"


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))  # the first is faster


def rounded_sqrt(values: Tensor) -> Tensor:
    """The fp32 number nearest to the square root.

    torch's own is MKL's on the CPU, which is one unit in the last place off for 16 % of numbers (torch 2.13, AVX2). A
    root taken in fp64 rounds to the right fp32 number.
    """
    return values.double().sqrt().float() if is_host(values.device) else values.sqrt()


class HostCopy:
    """A few device numbers on their way to the host; :meth:`read` waits for them alone, not for later work."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
        if numbers.device.type == "cpu" or not torch.accelerator.is_available():
            self._numbers = numbers
            return
        # Only a copy into pinned memory runs without holding up the host.
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.Event(numbers.device)
        # Named, because an event records on the current device's stream, which need not be this one's.
        self._event.record(torch.accelerator.current_stream(numbers.device))

    def read(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._numbers.tolist()]


def has_foreign_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether others than halfstep (``is_halfsteps``) look at an optimizer's gradients just before it steps."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    everywhere = getattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", {})
    return any(not getattr(hook, "is_halfsteps", False) for hook in (*own.values(), *everywhere.values()))


def update_scale_(scale: Tensor, tracker: Tensor, found_inf: Tensor, factors: tuple[float, float, int]) -> None:
    """Grow, back off or count, in one kernel on the scale's device (what torch.amp.GradScaler.update calls)."""
    torch._amp_update_scale_(scale, tracker, found_inf, *factors)


def is_composite(op: object) -> bool:
    """Whether torch computes an operation by calling others, so that its ``decompose`` takes it apart."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in ("prim", "prims"):  # unknown to the dispatcher
        return False
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def autocast_depth() -> int:
    """How many ``torch.autocast`` contexts are open; torch hides the state itself inside a dispatch mode."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def cpu_capabilities() -> dict[str, bool | int | str]:
    """What torch knows of this CPU's instruction sets; empty where this torch does not say (added in early 2026)."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())
