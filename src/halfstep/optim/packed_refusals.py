"""What the packed optimizers refuse, each in four parts, and what they warn of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ArgumentError, CallOrderError, StateError, UnsupportedError
from halfstep.formats import format_of


def _named(optimizer: object) -> str:
    return type(optimizer).__name__


# -- building ---------------------------------------------------------------------------------------------------------


def bad_number(optimizer: object, name: str, value: object, true: str) -> ArgumentError:
    """A hyperparameter out of range."""
    return ArgumentError(
        asked=f"{_named(optimizer)}({name}={value!r})",
        true=true,
        why="the rule is defined for no other value",
        fix=f"pass another {name}, or leave it out",
    )


def amsgrad(optimizer: object) -> UnsupportedError:
    """A third moment."""
    return UnsupportedError(
        asked=f"{_named(optimizer)}(amsgrad=True)",
        true="it keeps a third moment, which none of the rules here has",
        why="the step would be another one than was asked for",
        fix="use halfstep.MasterWeights(torch.optim.AdamW(..., amsgrad=True)), or leave amsgrad out",
    )


def differentiable(optimizer: object) -> UnsupportedError:
    """No graph through rounding."""
    return UnsupportedError(
        asked=f"{_named(optimizer)}(differentiable=True)",
        true="the step is one compiled pass that rounds",
        why="rounding has no derivative, so no gradient could flow through the step",
        fix="use torch's optimizer with fp32 weights",
    )


def unknown_storage(what: str, value: object, known: Iterable[str]) -> ArgumentError:
    """No such storage."""
    return ArgumentError(
        asked=f"{what}={value!r}",
        true=f"{what} is one of {', '.join(known)}",
        why="a storage is chosen by its name",
        fix=f"pass one of these names, or leave {what} out",
    )


def two_storages(policy: object, what: str, value: object) -> ArgumentError:
    """The policy says one thing and the argument another."""
    return ArgumentError(
        asked=f'policy="{policy}" with {what}={value!r}',
        true=f"the policy names another storage for the {what} than the argument does",
        why="only one of them can be used",
        fix=f"say it once: in the policy's text, or as {what}=",
    )


def no_master_policy(policy: object) -> ArgumentError:
    """The policy keeps fp32 weights."""
    return ArgumentError(
        asked=f'policy="{policy}"',
        true="its weights are fp32, and an optimizer's policy says to which 16-bit format they are cast",
        why="there is nothing to cast",
        fix='leave policy out for fp32 weights, or pass "bf16-master" or "fp16-master"',
    )


def bad_clip_norm(value: object) -> ArgumentError:
    """A clipping bound that is none."""
    return ArgumentError(
        asked=f"clip_norm={value!r}",
        true="gradients are clipped to a norm that is positive and finite",
        why="any other bound would make them zero, or leave them as they are",
        fix="pass a number such as 1.0, or None to clip nothing",
    )


def bad_seed(value: object) -> ArgumentError:
    """A seed that is none."""
    return ArgumentError(
        asked=f"seed={value!r}",
        true="a seed is a whole number from 0 to 2**63 - 1",
        why="the bits by which values are rounded by chance are a function of it",
        fix="pass an int, or leave it out",
    )


def bad_dtype(p: Tensor) -> ArgumentError:
    """A trainable parameter that no rule here takes."""
    return ArgumentError(
        asked=f"a trainable parameter of {p.dtype}, shape {list(p.shape)}",
        true="the rules step fp32, bf16 and fp16 weights, in fp32",
        why="its digits, or its imaginary part, would be lost",
        fix="step it with torch's optimizer, beside this one in a Stepper; or set requires_grad to False",
    )


def dtensor(p: Tensor) -> UnsupportedError:
    """Sharded or packed weights."""
    return UnsupportedError(
        asked=f"a trainable parameter of type {type(p.data).__name__}",
        true="it is no plain tensor: FSDP2 and tensor parallelism shard it (DTensor), or a library packs its bits",
        why="states of shards are not made by this version",
        fix="shard fp32 weights with a mixed-precision policy of FSDP2 and torch's optimizer",
    )


def not_dense(p: Tensor) -> UnsupportedError:
    """Memory with gaps, or elements that share it."""
    return UnsupportedError(
        asked=f"a trainable parameter of shape {list(p.shape)} and strides {list(p.stride())}",
        true="its elements do not fill one piece of memory, each once",
        why="executors run over memory from end to end",
        fix="make it so: parameter.data = parameter.data.contiguous(), before the optimizer is built",
    )


def overlap(optimizer: object) -> UnsupportedError:
    """Two parameters in the same memory."""
    return UnsupportedError(
        asked=f"{_named(optimizer)} with parameters that overlap in memory",
        true="two of them share bytes",
        why="each would be stepped by itself, and the last one written would undo the other's step",
        fix="tie weights by using one Parameter object twice, not by sharing .data",
    )


def another_16_bit_dtype(wanted: torch.dtype, p: Tensor) -> ArgumentError:
    """Part of the weights are 16-bit already, in another dtype."""
    return ArgumentError(
        asked=f"a policy that casts weights to {format_of(wanted)}",
        true=f"a trainable parameter of shape {list(p.shape)} is {format_of(p.dtype)} already",
        why="casting it would round for a second time",
        fix="leave policy out, and cast the model as you want it before",
    )


def gradients_present(dtype: torch.dtype) -> CallOrderError:
    """A weight with a gradient cannot be cast."""
    return CallOrderError(
        asked=f"a policy that casts weights to {format_of(dtype)}, between backward() and step()",
        true="a weight that is to be cast has a gradient",
        why="the gradient would have another dtype than its weight",
        fix="set gradients to None before the optimizer is built: model.zero_grad()",
    )


def bare_text(optimizer: object, number: int) -> str:
    """What weights without masters lose."""
    return (
        f"{_named(optimizer)}(master='none'): {number} parameters are 16-bit, and nothing keeps their full value. An"
        " update below half a unit in the last place (bf16: 0.2 % to 0.4 % of its weight, fp16: 0.02 % to 0.05 %)"
        " rounds to nothing; at small learning rates that is most of them. master='stochastic' takes no byte more,"
        " master='split8' one; count_stalled = True counts what is lost."
    )


# -- stepping ---------------------------------------------------------------------------------------------------------


def bad_gradient(optimizer: object, p: Tensor, gradient: Tensor) -> UnsupportedError:
    """A sparse gradient, or one of another dtype."""
    if gradient.layout != torch.strided:
        return UnsupportedError(
            asked=f"{_named(optimizer)}.step() with a sparse gradient, of a parameter of shape {list(p.shape)}",
            true="the rules step every element: their moments decay where the gradient is zero",
            why="as a dense gradient it would take the memory that sparse=True was to save",
            fix="use halfstep.MasterWeights(torch.optim.SparseAdam(...)) for it, or nn.Embedding(sparse=False)",
        )
    return UnsupportedError(
        asked=f"{_named(optimizer)}.step() with a gradient of {gradient.dtype}",
        true="gradients are fp32, bf16 or fp16",
        why="another dtype has digits that the rule would drop, or lacks an imaginary part",
        fix="cast the gradient before the step",
    )


def changed(p: Tensor, was: str, now: str) -> CallOrderError:
    """model.half(), model.cuda() or model.to(memory_format=...) came too late."""
    return CallOrderError(
        asked=f"a step of a parameter of shape {list(p.shape)} that is {now} now",
        true=f"it was {was} when the optimizer made its state",
        why="its rest and moments no longer fit",
        fix="cast, move and lay out the model first, then build the optimizer",
    )


def skipped_text(optimizer: object, p: Tensor, kind: str) -> str:
    """The first step that is not taken."""
    return (
        f"{_named(optimizer)} skipped a step: the gradient of a parameter of shape {list(p.shape)} is {kind}. Nothing"
        " was written. This is said once; optimizer.skipped_steps counts them, and halfstep.Stepper names the culprit."
    )


def taken_off(call: str) -> CallOrderError:
    """After to_torch()."""
    return CallOrderError(
        asked=f"{call} after to_torch()",
        true="the weights are fp32 again, and torch's optimizer steps them",
        why="there is no packed state any more",
        fix="use the optimizer that to_torch() returned",
    )


def no_torch_class(optimizer: object) -> UnsupportedError:
    """torch has no Lion."""
    return UnsupportedError(
        asked=f"{_named(optimizer)}.to_torch()",
        true=f"torch has no {_named(optimizer)}",
        why="there is no optimizer that could take the state",
        fix="take the weights out with halfstep.fp32_state_dict(model, optimizer)",
    )


# -- state ------------------------------------------------------------------------------------------------------------


def bad_state(true: str, why: str, fix: str = "load the state of the same rule and model") -> StateError:
    """A state that does not fit; nothing of it was loaded."""
    return StateError(asked="load_state_dict()", true=true, why=f"{why}; nothing was loaded", fix=fix)


def lossy(what: str, p: Tensor, kind: str) -> StateError:
    """A conversion that would round."""
    return bad_state(
        f"{what} of a parameter of shape {list(p.shape)} has bits that {kind} cannot hold",
        "a load drops nothing in silence",
        "pass lossy=True to round it, or build the optimizer with the storages of the saved run",
    )


def other_weights(p: Tensor) -> StateError:
    """A rest beside weights that it does not belong to."""
    return bad_state(
        f"the weights of a parameter of shape {list(p.shape)} are not those that were saved beside this state",
        "its full value is weight and rest together, and the storages differ, so that it has to be put together now",
        "load the model's weights first, then the optimizer; or build the optimizer with the saved storages",
    )


def bad_value(p: Tensor, name: str, value: Any) -> StateError:
    """Somebody put something else into the state."""
    found = f"{value.dtype}, {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return StateError(
        asked="a step after the state was changed by hand",
        true=f"{name} of a parameter of shape {list(p.shape)}, {p.dtype}, is {found} now",
        why="the storage needs the dtype, shape, strides and device that it was made with",
        fix="write into the tensors that are there, or use load_state_dict()",
    )
