"""Optimizers for 16-bit weights: what 16 bits cannot hold is kept here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.optim.optimizers import SGD as SGD
    from halfstep.optim.optimizers import Adam as Adam
    from halfstep.optim.optimizers import AdamW as AdamW
    from halfstep.optim.optimizers import Lion as Lion
    from halfstep.optim.release import release_gradients as release_gradients

_PUBLIC = dict.fromkeys(("Adam", "AdamW", "Lion", "SGD"), "halfstep.optim.optimizers")
_PUBLIC["release_gradients"] = "halfstep.optim.release"

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'halfstep.optim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
