"""The flag that decides a step, from the flags of several devices or ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep._compat import moved


def any_found_inf(flags: Iterable[Tensor], device: torch.device) -> Tensor | None:
    """1.0 on ``device`` if any flag is set, else 0.0; None if there is no flag.

    Others may have made a count, a mean or a shape of [1] of a flag: whatever is not 0 is set.
    """
    parts = [moved(flag.reshape(()), device) for flag in flags]
    if not parts:
        return None
    together = parts[0] if len(parts) == 1 else torch.stack(parts).abs().amax()
    return together.ne(0.0).float()
