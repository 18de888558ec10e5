"""What a packed optimizer is asked for: storages by name or by policy, a seed, parameters that it can step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import policy as policies
from halfstep._compat import is_dense
from halfstep.formats import HALF_DTYPES
from halfstep.optim import keeping
from halfstep.optim import packed_refusals as refusals
from halfstep.policy import Policy

DTYPES = (torch.float32, *HALF_DTYPES)  # of weights and gradients
_STORAGES: dict[str, Iterable[str]] = {"master": keeping.MASTERS, "moments": keeping.MOMENTS}
_OF_ALL = ("policy", "executor", "clip_norm")  # options that no group has for itself


def storages_of(policy: Any, master: Any, moments: Any) -> tuple[torch.dtype | None, dict[str, str]]:
    """The dtype that fp32 weights are cast to, and the names of the storages."""
    for name, given in (("master", master), ("moments", moments)):
        if given is not None:
            _check_storage(name, given)
    cast_dtype, of_policy = None, {"master": "split", "moments": "fp32"}
    if policy is not None:
        parsed = Policy.parse(policy)
        if parsed.param_dtype not in HALF_DTYPES:
            raise refusals.no_master_policy(parsed)
        cast_dtype = parsed.param_dtype
        is_free = parsed.master is policies.Master.FP32 and master != "none"  # of how the full value is kept
        if master is not None and master != parsed.master.value and not is_free:
            raise refusals.two_storages(parsed, "master", master)
        if moments is not None and parsed.moments not in (policies.Moments.FP32, policies.Moments(moments)):
            raise refusals.two_storages(parsed, "moments", moments)
        # split holds every bit of an fp32 master, in half of its bytes
        is_said = isinstance(policy, str) and "master=fp32" in policy.replace(" ", "").lower()
        kept = "split" if parsed.master is policies.Master.FP32 and not is_said else parsed.master.value
        of_policy = {"master": kept, "moments": parsed.moments.value}
    return cast_dtype, {"master": master or of_policy["master"], "moments": moments or of_policy["moments"]}


def check_options(optimizer: object, group: Mapping[str, Any]) -> None:
    """Refuse a group that names storages that there are not, or what only the whole optimizer can have."""
    for name in _STORAGES:
        _check_storage(name, group[name])
    checked_seed(group["seed"])
    for name in _OF_ALL:
        if name in group:
            raise refusals.option_of_all(optimizer, name)


def checked_clip_norm(clip_norm: Any) -> float | None:
    """The largest norm of a gradient, if it is one; None clips nothing."""
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and 0 < clip_norm < math.inf):
        raise refusals.bad_clip_norm(clip_norm)
    return None if clip_norm is None else float(clip_norm)


def checked_seed(seed: Any) -> int:
    """The seed, if it is one."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise refusals.bad_seed(seed)
    return seed


def check_parameter(p: Tensor, cast_dtype: torch.dtype | None) -> None:
    """Refuse a trainable parameter that no rule can step, or that cannot be cast."""
    if hasattr(p, "device_mesh") or hasattr(p.data, "__tensor_flatten__"):
        raise refusals.dtensor(p)
    if p.dtype not in DTYPES:
        raise refusals.bad_dtype(p)
    if cast_dtype is not None and p.dtype in HALF_DTYPES and p.dtype != cast_dtype:
        raise refusals.another_16_bit_dtype(cast_dtype, p)
    if cast_dtype is not None and p.dtype == torch.float32 and p.grad is not None:
        raise refusals.gradients_present(cast_dtype)
    if not is_dense(p) or p.is_neg():
        raise refusals.not_dense(p)


def _check_storage(name: str, given: Any) -> None:
    if not isinstance(given, str) or given not in _STORAGES[name]:
        raise refusals.unknown_storage(name, given, _STORAGES[name])
