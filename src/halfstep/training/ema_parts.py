"""What the EMA is made of: places in a model, the arithmetic of averaging, and checks of what is passed in.

Nothing here keeps state; see ema.py for what it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._compat import is_host, local_part
from halfstep.errors import ArgumentError, StateError, UnsupportedError
from halfstep.formats import saturating_cast

# Elements that are widened at a time, so that averaging a 16-bit model never needs a wide copy of all of it: 4 MiB of
# fp32 on a CPU (fits its caches), 64 MiB on an accelerator (its launches cost as much as this much memory traffic).
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**24

# What torch.compile, activation checkpointing and FSDP1 put between a module and its name.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(eq=False)
class Slot:
    """A place in a model; the tensor in it may be replaced by another (moved, cast, sharded) at any time."""

    module: nn.Module
    table: str  # "_parameters" or "_buffers"
    key: str

    @property
    def entries(self) -> dict[str, Tensor | None]:
        """The table of the module that holds the tensor."""
        entries: dict[str, Tensor | None] = self.module.__dict__[self.table]
        return entries

    @property
    def tensor(self) -> Tensor | None:
        """What is there now."""
        return self.entries.get(self.key)

    @property
    def is_saved(self) -> bool:
        """Whether torch's own state_dict() would hold it."""
        return self.key not in self.module._non_persistent_buffers_set


@dataclass(eq=False)
class Own:
    """A tensor of the model, and a copy of what it held before the averages came."""

    slot: Slot
    tensor: Tensor
    value: Tensor

    def put_back(self) -> None:
        """Give the place its own tensor, and the tensor its own bits."""
        self.slot.entries[self.slot.key] = self.tensor  # a buffer may have been registered anew
        if self.tensor.dtype == self.value.dtype and self.tensor.device == self.value.device:
            local_part(self.tensor).copy_(local_part(self.value))
        else:  # .half() or .cuda() on a module gives its parameters other memory
            self.tensor.data = self.value


# -- places in a model -------------------------------------------------------------------------------------------------


def slots(model: nn.Module, table: str) -> Iterator[tuple[str, Slot]]:
    """Names, as the bare model has them, and places of all parameters or buffers; of tied ones the first."""
    modules, plain, seen = dict(model.named_modules()), {"": ""}, set()
    for path, module in modules.items():
        if path:
            parent, _, child = path.rpartition(".")
            is_data_parallel = isinstance(modules[parent], nn.DataParallel | nn.parallel.DistributedDataParallel)
            is_wrapper = child in _WRAPPERS or (child == "module" and is_data_parallel)
            plain[path] = plain[parent] if is_wrapper else f"{plain[parent]}.{child}".lstrip(".")
        for key, tensor in getattr(module, table).items():
            if tensor is not None and id(tensor) not in seen and not (table == "_buffers" and is_expanded(tensor)):
                seen.add(id(tensor))
                yield f"{plain[path]}.{key}".lstrip("."), Slot(module, table, key)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory: nothing can write to it in place, so it is a constant."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def fsdp_modules(model: nn.Module) -> list[Any]:
    """FSDP2's modules, known by a method: importing FSDP2 costs more than the rest of halfstep."""
    return [module for module in model.modules() if hasattr(type(module), "set_reshard_after_forward")]


def reshard(modules: Iterable[Any]) -> None:
    """Let FSDP2 drop the whole weights that an evaluation gathered, or it would go on using them after a swap."""
    for module in modules:
        module.reshard()


def zipped(mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of local parts by name, where both are there."""
    pairs = ((ours, theirs[name]) for name, ours in mine.items())
    return [(local_part(a), local_part(b)) for a, b in pairs if a is not None and b is not None]


def paired(kept: dict[str, Tensor], slots: Mapping[str, Slot]) -> list[tuple[Tensor, Tensor]]:
    """What is kept, with the tensor in the model's place now; kept tensors follow it to its device and its width."""
    pairs = []
    for name, mine in kept.items():
        theirs = slots[name].tensor
        if theirs is None or theirs.shape != mine.shape:
            raise UnsupportedError(
                asked=f"the average of {name!r}, shape {list(mine.shape)}",
                true="it is gone from the model" if theirs is None else f"its shape is now {list(theirs.shape)}",
                why="an average belongs to the parameters and buffers that the model had when the EMA was built",
                fix="build a new EMA after changing the model's structure",
            )
        dtype = mine.dtype if mine.dtype is theirs.dtype else wider(mine.dtype, theirs.dtype)
        if mine.dtype is not dtype or mine.device != theirs.device:
            mine = kept[name] = mine.to(theirs.device, dtype)
        pair = (local_part(mine), local_part(theirs))
        if pair[0].shape != pair[1].shape:
            check_sharding(name, theirs, mine)
        pairs.append(pair)
    return pairs


# -- arithmetic --------------------------------------------------------------------------------------------------------


def wider(kept: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that holds both; torch has no promotion for 1-byte floats, which are never wider than what is kept."""
    return kept if other.itemsize == 1 else torch.promote_types(kept, other)


def groups(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Averages and values, a list each per device and dtypes, as the foreach functions want them."""
    groups: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in pairs:
        averages, values = groups.setdefault((average.device, average.dtype, value.dtype), ([], []))
        averages.append(average)
        values.append(value)
    yield from groups.values()


def lerp_(averages: list[Tensor], values: list[Tensor], weight: float, skip: Tensor | None) -> None:
    """``averages += weight * (values - averages)``, except where ``skip`` is set: there not a bit changes.

    Not ``decay * average + weight * value``: at a weight that stands still, lerp stands still exactly.
    """
    is_same_dtype = averages[0].dtype == values[0].dtype
    if skip is None and is_same_dtype:
        torch._foreach_lerp_(averages, values, weight)
        return
    for olds, news in chunks(averages, values):
        wide = news
        if not is_same_dtype:
            wide = [torch.empty_like(old) for old in olds]
            torch._foreach_copy_(wide, news)
        if skip is None:
            torch._foreach_lerp_(olds, wide, weight)
            continue
        for old, new in zip(olds, torch._foreach_lerp(olds, wide, weight), strict=True):
            torch.where(skip, old, new, out=old)  # a weight of zero would turn -0.0 into 0.0


def chunks(averages: list[Tensor], values: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Lists of at most a chunk of elements; large tensors are cut where both lie in order, else they come alone."""
    chunk = _HOST_CHUNK if is_host(averages[0].device) else _DEVICE_CHUNK
    olds: list[Tensor] = []
    news: list[Tensor] = []
    total = 0
    for average, value in zip(averages, values, strict=True):
        pieces: Iterable[tuple[Tensor, Tensor]] = [(average, value)]
        if average.numel() > chunk and average.is_contiguous() and value.is_contiguous():
            pieces = zip(torch.split(average.view(-1), chunk), torch.split(value.view(-1), chunk), strict=True)
        for old, new in pieces:
            if olds and total + old.numel() > chunk:
                yield olds, news
                olds, news, total = [], [], 0
            olds.append(old)
            news.append(new)
            total += old.numel()
    if olds:
        yield olds, news


def copy_(copy: Tensor, buffer: Tensor, skip: Tensor | None) -> None:
    """Copy a buffer, except where ``skip`` is set."""
    if skip is None:
        copy.copy_(buffer)
    else:
        torch.where(skip, copy, buffer.to(copy.dtype), out=copy)


@torch.no_grad()
def write(parameters: list[tuple[Tensor, Tensor]], buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Put averages and copies into a model."""
    for copy, buffer in buffers:  # first: a buffer that shares memory with a parameter shows the average
        buffer.copy_(copy)
    for average, parameter in parameters:
        parameter.copy_(cast(average, parameter.dtype))
    # Inside torch.autocast the casts of the old weights would be used on.
    torch.clear_autocast_cache()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in another dtype; beyond that dtype's largest value, that value."""
    if x.dtype == dtype or not (dtype.is_floating_point or dtype.is_complex):
        return x.to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(cast(torch.view_as_real(x), dtype.to_real()))
    if dtype in (torch.float16, torch.bfloat16):
        return saturating_cast(x, dtype)
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) if largest < torch.finfo(x.dtype).max else x).to(dtype)


# -- checks ------------------------------------------------------------------------------------------------------------


def is_decay(value: object) -> bool:
    """Whether a value can be a decay."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def check_model(model: object, asked: str) -> None:
    """Raise ArgumentError unless this is a module whose parameters have values."""
    if not isinstance(model, nn.Module):
        raise no_model(f"{asked} a model of type {type(model).__name__}", "it is no torch.nn.Module")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise no_model(
                f"{asked} a model whose parameter {name!r} has no values yet", "it is lazy or on the meta device"
            )


def no_model(asked: str, true: str) -> ArgumentError:
    """The error for what cannot be averaged."""
    return ArgumentError(
        asked=asked,
        true=true,
        why="an EMA averages the values of a model's trainable parameters",
        fix="pass the torch.nn.Module that is trained, once its parameters have values",
    )


def checked_found_inf(found_inf: object) -> Tensor | None:
    """Whether to skip, as a 0-dim bool tensor where found_inf is."""
    if found_inf is None:
        return None
    if not isinstance(found_inf, Tensor) or found_inf.numel() != 1:
        shape = f" of shape {list(found_inf.shape)}" if isinstance(found_inf, Tensor) else ""
        raise ArgumentError(
            asked=f"update(found_inf) with a {type(found_inf).__name__}{shape}",
            true="found_inf is a tensor of one element: 1 if the step was skipped, else 0",
            why="one decision holds for all averages, and it may stay on the device",
            fix="pass the found_inf tensor that the optimizer saw, or None after an applied step",
        )
    return found_inf.detach().reshape(()) != 0


def differences(theirs: Mapping[str, Tensor | None], mine: Mapping[str, Tensor | None], optional: Iterable[str]) -> str:
    """Where names, shapes or kinds of dtype differ, in words; empty if nowhere."""
    found = [f"{name!r} is missing" for name in mine if name not in theirs and name not in optional]
    for name, other in theirs.items():
        ours = mine.get(name)
        if ours is None or other is None:
            found.append(f"{name!r} is unexpected")
        elif ours.shape != other.shape:
            found.append(f"{name!r} has shape {list(other.shape)}, not {list(ours.shape)}")
        elif kind(ours.dtype) != kind(other.dtype):
            found.append(f"{name!r} is {other.dtype}, not {ours.dtype}")
        else:
            check_sharding(name, other, ours)
    rest = len(found) - 5
    return "; ".join(found[:5]) + (f"; and {rest} more" if rest > 0 else "")


def kind(dtype: torch.dtype) -> object:
    """What must not change between a state and what it is loaded into: complex, floating, or the very dtype."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else dtype


def check_sharding(name: str, other: Tensor, ours: Tensor) -> None:
    """Raise UnsupportedError unless both are whole, or sharded alike."""
    placed = [getattr(t, "placements", "whole") for t in (other, ours)]
    if placed[0] != placed[1]:
        raise UnsupportedError(
            asked=f"{name!r} between a {type(other).__name__} and a {type(ours).__name__}",
            true=f"one is placed as {placed[0]}, the other as {placed[1]}",
            why="averages are copied part by part on each rank, and not gathered or cut behind your back",
            fix="shard both alike, or use full_tensor() or torch.distributed.checkpoint in between",
        )


def state_error(asked: str, true: str) -> StateError:
    """The error for a state that cannot be continued from."""
    return StateError(
        asked=f"load_state_dict(): {asked}",
        true=true,
        why="the average could not go on from there as the saved run would have; nothing was loaded",
        fix="pass what state_dict() of an EMA of the same model returned",
    )


def in_our_words(
    state: Mapping[str, Any], parameters: Iterable[str], buffers: Iterable[str], decay: float
) -> Mapping[str, Any]:
    """The state of torch's AveragedModel as an EMA's; any other as it is."""
    if not isinstance(state, Mapping) or "n_averaged" not in state or "averages" in state:
        return state
    found = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
    return {
        "decay": decay,
        "num_updates": int(state["n_averaged"]),
        "averages": {name: found[name] for name in parameters if name in found},
        "buffers": {name: found[name] for name in buffers if name in found},
    }


def check_state(state: object) -> None:
    """Raise StateError unless the state has the entries of an EMA, each of its type."""
    keys = ["averages", "buffers", "decay", "num_updates"]
    if not isinstance(state, Mapping) or sorted(map(str, state)) != keys:
        said = f"entries {sorted(map(str, state))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise state_error(said, f"an EMA's state has the entries {keys}")
    if not is_decay(state["decay"]):
        raise state_error(f"decay={state['decay']!r}", "decay is a number from 0 to below 1")
    updates = state["num_updates"]
    if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
        raise state_error(f"num_updates={updates!r}", "num_updates is a whole number, 0 or more")
    for key in keys[:2]:
        entries = state[key]
        if not isinstance(entries, Mapping) or not all(isinstance(t, Tensor) for t in entries.values()):
            raise state_error(f"{key} of type {type(entries).__name__}", f"{key} maps names to tensors")


def loaded(
    saved: Mapping[str, Tensor], mine: Mapping[str, Tensor | None], what: str, optional: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Copies of the saved tensors on our devices, as wide as they were saved and as wide as ours; or an error."""
    if found := differences(saved, mine, optional):
        raise state_error(f"{what} that do not fit", found)
    with torch.inference_mode(False):
        return {
            name: saved[name].detach().to(ours.device, wider(ours.dtype, saved[name].dtype), copy=True)
            for name, ours in mine.items()
            if ours is not None and name in saved
        }
