"""What a packed optimizer is asked for: storages by name or by policy, a seed, parameters that it can step."""

from __future__ import annotations

import difflib
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
# A misspelled option is about as long as the option and nearly the same. Keys that people add to groups on purpose are
# not: lr_scale and weight_decay_mult are longer; lr0, and OneCycleLR's max_momentum, have a likeness of just 0.8.
_LIKENESS, _LETTERS = 0.81, 2


def storages_of(policy: Any, master: Any, moments: Any) -> tuple[torch.dtype | None, dict[str, str]]:
    """The dtype that fp32 weights are cast to, and the names of the storages."""
    for name, given in (("master", master), ("moments", moments)):
        if given is not None:
            _check_storage(name, given)
    cast_dtype, of_policy = None, {"master": "split", "moments": "fp32"}
    if policy is not None:
        parsed = Policy.parse(policy)
        if parsed.param_dtype not in HALF_DTYPES:
            raise refusals.no_master_policy(policy, parsed)
        cast_dtype = parsed.param_dtype
        if master is not None and (master == "none") != (parsed.master is policies.Master.NONE):
            raise refusals.masters_or_none(policy, parsed, master)
        is_free = parsed.master is policies.Master.FP32  # of how the full value is kept
        if master is not None and master != parsed.master.value and not is_free:
            raise refusals.two_storages(policy, "master", master)
        if moments is not None and parsed.moments not in (policies.Moments.FP32, policies.Moments(moments)):
            raise refusals.two_storages(policy, "moments", moments)
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


def check_keys(optimizer: object, group: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a group with a key that looks like a misspelled option; keys of the user's own pass.

    Args:
        optimizer: for the message.
        group: as the user wrote it.
        known: the options that a group can have.
    """
    options = [*known, *_OF_ALL]
    for key in group:
        if not isinstance(key, str) or key in options:
            continue
        as_long = [option for option in options if abs(len(option) - len(key)) <= _LETTERS]
        if meant := difflib.get_close_matches(key.lower(), as_long, n=1, cutoff=_LIKENESS):
            raise refusals.misspelled(optimizer, key, meant[0])


def check_master_has_effect(optimizer: object, master: Any, parameters: Iterable[Tensor], *, of_group: bool) -> None:
    """Refuse masters that were asked for where all weights are fp32, and stay it.

    Args:
        optimizer: for the message.
        master: what was asked for.
        parameters: for which; frozen ones too, which may be trained later.
        of_group: whether a group asked for it, and not the constructor.
    """
    if not isinstance(master, str) or master not in keeping.MASTERS or master == "none":
        return  # not asked for, or refused elsewhere
    if {p.dtype for p in parameters} == {torch.float32}:
        raise refusals.masters_of_fp32(optimizer, master, of_group=of_group)


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


def check_parameter(optimizer: object, p: Tensor, cast_dtype: torch.dtype | None) -> None:
    """Refuse a trainable parameter that no rule can step, or that cannot be cast."""
    if hasattr(p, "device_mesh") or hasattr(p.data, "__tensor_flatten__"):
        raise refusals.dtensor(optimizer, p)
    if p.dtype not in DTYPES:
        raise refusals.bad_dtype(optimizer, p)
    if cast_dtype is not None and p.dtype in HALF_DTYPES and p.dtype != cast_dtype:
        raise refusals.another_16_bit_dtype(optimizer, cast_dtype, p)
    if cast_dtype is not None and p.dtype == torch.float32 and p.grad is not None:
        raise refusals.gradients_present(cast_dtype)
    if not is_dense(p) or p.is_neg():
        raise refusals.not_dense(optimizer, p)


def _check_storage(name: str, given: Any) -> None:
    if not isinstance(given, str) or given not in _STORAGES[name]:
        raise refusals.unknown_storage(name, given, _STORAGES[name])
