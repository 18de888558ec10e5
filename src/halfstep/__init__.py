"""halfstep: half-precision forward and backward, a full-precision step, and a plain answer to "what broke?"."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from halfstep import nn as nn
    from halfstep import ops as ops
    from halfstep import optim as optim
    from halfstep.casting import cast_model as cast_model
    from halfstep.emulation import emulate as emulate
    from halfstep.errors import HalfstepError as HalfstepError
    from halfstep.formats import FloatFormat as FloatFormat
    from halfstep.hardware import choose_dtype as choose_dtype
    from halfstep.hardware import probe as probe
    from halfstep.nn import stabilize as stabilize
    from halfstep.optim.export import fp32_state_dict as fp32_state_dict
    from halfstep.optim.masters import MasterWeights as MasterWeights
    from halfstep.policy import Policy as Policy
    from halfstep.scaling.adaptive import AdaptiveScale as AdaptiveScale
    from halfstep.scaling.grad_scaler import GradScaler as GradScaler
    from halfstep.scaling.scale import DynamicScale as DynamicScale
    from halfstep.scaling.scale import NoScale as NoScale
    from halfstep.scaling.scale import StaticScale as StaticScale
    from halfstep.tensor_cores import pad_to_multiple as pad_to_multiple
    from halfstep.tensor_cores import tensor_core_advice as tensor_core_advice
    from halfstep.tensor_cores import unpad as unpad
    from halfstep.tf32 import enable_tf32 as enable_tf32
    from halfstep.training.ema import EMA as EMA
    from halfstep.training.outcome import Outcome as Outcome
    from halfstep.training.stepper import Stepper as Stepper

# Public name -> module that defines it. Loaded on first use, so that `import halfstep` costs next to nothing.
_PUBLIC = {
    "AdaptiveScale": "halfstep.scaling.adaptive",
    "DynamicScale": "halfstep.scaling.scale",
    "EMA": "halfstep.training.ema",
    "FloatFormat": "halfstep.formats",
    "GradScaler": "halfstep.scaling.grad_scaler",
    "HalfstepError": "halfstep.errors",
    "MasterWeights": "halfstep.optim.masters",
    "NoScale": "halfstep.scaling.scale",
    "Outcome": "halfstep.training.outcome",
    "Policy": "halfstep.policy",
    "StaticScale": "halfstep.scaling.scale",
    "Stepper": "halfstep.training.stepper",
    "cast_model": "halfstep.casting",
    "choose_dtype": "halfstep.hardware",
    "emulate": "halfstep.emulation",
    "enable_tf32": "halfstep.tf32",
    "fp32_state_dict": "halfstep.optim.export",
    "nn": "halfstep",
    "ops": "halfstep",
    "optim": "halfstep",
    "pad_to_multiple": "halfstep.tensor_cores",
    "probe": "halfstep.hardware",
    "stabilize": "halfstep.nn",
    "tensor_core_advice": "halfstep.tensor_cores",
    "unpad": "halfstep.tensor_cores",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    if _PUBLIC[name] == __name__:  # a module of functions, as torch.nn is one
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
