"""What follows from one look at a window's gradients: may the step be taken, and what is divided by.

Method: :func:`~halfstep.scaling.unscale.clipping_divisor`, in Python numbers where the host is the device, in 0-dim
tensors elsewhere; nothing is read on the host there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.found_inf import any_found_inf
from halfstep.kernels.inspect import Inspection
from halfstep.scaling.unscale import Number, clipping_divisor
from halfstep.training.accumulate import Window


class Judgement(NamedTuple):
    """What follows from looking at a window's gradients; floats where the host is the device, else 0-dim tensors.

    Args:
        found_inf: 1.0 if the step must not be taken, else 0.0.
        plain: what makes the true gradient of the scaled one: scale times sum of weights.
        norm: L2 norm of the scaled gradient.
        divisor: what the step divides by: ``plain``, or more, to clip.
        has_fp64: whether a gradient is fp64, so that a divisor in fp32 would cost it digits.
    """

    found_inf: Number
    plain: Number
    norm: Number
    divisor: Number
    has_fp64: bool

    @property
    def is_known(self) -> bool:
        """Whether the host knows all this without waiting."""
        return isinstance(self.found_inf, float)

    @property
    def divisor_tensor(self) -> Tensor | None:
        """The divisor, 0-dim, fp32 unless a gradient is wider; None where it is known to be 1."""
        dtype = torch.float64 if self.has_fp64 else torch.float32
        largest = torch.finfo(dtype).max  # beyond it a gradient would be divided by inf
        if isinstance(self.divisor, Tensor):
            return self.divisor.clamp(max=largest).to(dtype)
        if self.divisor == 1.0:
            return None
        return torch.scalar_tensor(min(self.divisor, largest), dtype=dtype, device="cpu")

    @property
    def found_inf_tensor(self) -> Tensor | None:
        """The flag as optimizers take it; None where it is known that the step may be taken."""
        return self.found_inf if isinstance(self.found_inf, Tensor) else None

    @property
    def forbids_step(self) -> bool:
        """Whether the host knows already that the step must not be taken."""
        return isinstance(self.found_inf, float) and self.found_inf != 0


def judge(window: Window, found: Inspection, clip_norm: float | None) -> Judgement:
    """Judge a window by what inspection found in its summed gradients (norms asked for)."""
    plain: Number = 1.0 if window.is_unscaled else window.divisor
    has_fp64 = any(map(any, found.are_fp64.values()))
    norm: Number
    if isinstance(window.scale, float):
        norm = found.total_norm_on_host()
        below_fp64: Number = found.total_norm_on_host(below_fp64=True) if has_fp64 else norm
        plain = float(plain)
        flags = [*found.found_inf.values(), *window.flags()]
        found_inf: Number = float(any(float(flag) != 0 for flag in flags))
    else:
        home = window.scale.device
        norm = found.total_norm(home)
        below_fp64 = found.total_norm(home, below_fp64=True) if has_fp64 else norm
        plain = plain if isinstance(plain, Tensor) else torch.full((), plain, device=home)
        others = [torch.as_tensor(flag, device=home) for flag in window.flags()]
        flag = any_found_inf([*found.found_inf.values(), *others], home)
        found_inf = torch.zeros((), device=home) if flag is None else flag
    return Judgement(found_inf, plain, norm, clipping_divisor(plain, norm, below_fp64, clip_norm), has_fp64)
