"""What MasterWeights refuses, each in four parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ArgumentError, CallOrderError, StateError, UnsupportedError


def _named(optimizer: object) -> str:
    return type(optimizer).__name__


# -- wrapping ---------------------------------------------------------------------------------------------------------


def no_optimizer(optimizer: object) -> ArgumentError:
    """The first argument is not an optimizer."""
    return ArgumentError(
        asked=f"MasterWeights({_named(optimizer)})",
        true="it goes around a torch.optim.Optimizer",
        why="there is no step that masters could take",
        fix="pass an optimizer: MasterWeights(torch.optim.AdamW(model.parameters()))",
    )


def wrapped_twice(optimizer: object) -> ArgumentError:
    """There are masters for these weights already."""
    return ArgumentError(
        asked=f"MasterWeights around {_named(optimizer)}",
        true="another MasterWeights holds the masters of its weights",
        why="each would write the weights from its own masters, and undo the other's step",
        fix="use the first one; optimizer.to_torch() takes it off again",
    )


def has_masters_of_its_own(optimizer: object) -> ArgumentError:
    """MasterWeights around an optimizer of halfstep.optim."""
    return ArgumentError(
        asked=f"MasterWeights({_named(optimizer)})",
        true="it steps 16-bit weights in fp32 by itself, and keeps what they lose",
        why="there would be two full values of every weight, and the packed one would be given up",
        fix='use it as it is; master="fp32" keeps ordinary fp32 masters',
    )


def scheduler_made_before(optimizer: object) -> ArgumentError:
    """A scheduler writes where nobody will read."""
    return ArgumentError(
        asked=f"MasterWeights around {_named(optimizer)}",
        true="a learning rate scheduler was made for it before",
        why="it would go on writing learning rates into the inner optimizer, which takes them from MasterWeights",
        fix="wrap first, then make the scheduler from the MasterWeights",
    )


def scheduler_of_inner(optimizer: object) -> CallOrderError:
    """A scheduler was made from the inner optimizer."""
    return CallOrderError(
        asked="step() of a MasterWeights",
        true=f"a learning rate scheduler was made from the {_named(optimizer)} inside it",
        why="learning rates are MasterWeights': what the scheduler writes is written over",
        fix="make the scheduler from the MasterWeights",
    )


def groups_of_inner(num_own: int, num_inner: int) -> CallOrderError:
    """A group was added to the inner optimizer."""
    return CallOrderError(
        asked="a step of MasterWeights",
        true=f"it has {num_own} parameter groups, and the optimizer inside it {num_inner}",
        why="a group that was added there has no masters",
        fix="add the group to the MasterWeights: optimizer.add_param_group(...)",
    )


def inner_stepped(optimizer: object) -> CallOrderError:
    """The inner optimizer is stepped by itself."""
    return CallOrderError(
        asked=f"step() of a {_named(optimizer)} that was given to MasterWeights",
        true="its parameters are fp32 masters, and MasterWeights rounds them into the model's weights",
        why="stepped by itself it would have no gradients, and no weight would move",
        fix=f"keep what MasterWeights returns and step that: optimizer = MasterWeights({_named(optimizer)}(...))",
    )


def differentiable(optimizer: object) -> UnsupportedError:
    """No graph through rounding."""
    return UnsupportedError(
        asked=f"MasterWeights around {_named(optimizer)}(differentiable=True)",
        true="16-bit weights are rounded from their masters",
        why="rounding has no derivative, so no gradient could flow through the step",
        fix="leave differentiable out, or keep fp32 weights",
    )


def not_16_bit(dtype: object) -> ArgumentError:
    """The weights cannot be cast to this."""
    return ArgumentError(
        asked=f"MasterWeights(dtype={dtype})",
        true="weights are stored in fp16 or bf16, and their masters in fp32",
        why="no other dtype can be rounded to here",
        fix="pass torch.bfloat16 or torch.float16, or leave dtype out for weights that are 16-bit already",
    )


def another_16_bit_dtype(wanted: torch.dtype, found: torch.dtype, shape: Sequence[int]) -> ArgumentError:
    """Part of the weights are 16-bit already, in another dtype."""
    return ArgumentError(
        asked=f"MasterWeights(dtype={wanted})",
        true=f"a trainable parameter of shape {list(shape)} is {found} already",
        why="casting it would round for a second time",
        fix="leave dtype out, and cast the model as you want it before",
    )


def gradients_present(dtype: torch.dtype) -> CallOrderError:
    """A weight with a gradient cannot be cast."""
    return CallOrderError(
        asked=f"MasterWeights(dtype={dtype}) between backward() and step()",
        true="a weight that is to be cast has a gradient",
        why="the gradient would have another dtype than its weight",
        fix="call optimizer.zero_grad() before wrapping",
    )


def no_master_for(parameter: Tensor) -> ArgumentError:
    """A trainable parameter that is neither 16-bit floating nor at least fp32."""
    return ArgumentError(
        asked=f"MasterWeights with a trainable parameter of {parameter.dtype}, shape {list(parameter.shape)}",
        true="masters are fp32, for fp16 and bf16 weights; fp32, fp64, complex64 and complex128 need none",
        why="an fp32 master cannot hold it and round to it",
        fix="store it in one of these dtypes, or as two real tensors, or set requires_grad to False",
    )


def dtensor(parameter: Tensor) -> UnsupportedError:
    """Sharded weights."""
    return UnsupportedError(
        asked=f"MasterWeights with a parameter of type {type(parameter.data).__name__}",
        true="it is no plain tensor: FSDP2 and tensor parallelism shard it (DTensor), or a library packs its bits",
        why="masters of shards are not made by this version",
        fix="shard fp32 weights with a mixed-precision policy of FSDP2, which keeps them as masters itself",
    )


def overlap() -> UnsupportedError:
    """Two parameters in the same memory."""
    return UnsupportedError(
        asked="MasterWeights with parameters that overlap in memory",
        true="two of them share bytes",
        why="each would have a master of its own, and the last one written would undo the other's step",
        fix="tie weights by using one Parameter object twice, not by sharing .data",
    )


# -- stepping ---------------------------------------------------------------------------------------------------------


def changed_after_wrapping(parameter: Tensor, was: str, now: str) -> CallOrderError:
    """model.half(), model.float() or model.cuda() came too late."""
    return CallOrderError(
        asked=f"a step of a parameter of shape {list(parameter.shape)} that is {now} now",
        true=f"it was {was} when MasterWeights took it in",
        why="its master and moments no longer fit",
        fix="cast and move the model first, then make the optimizer and wrap it",
    )


def needs_closure(optimizer: object) -> CallOrderError:
    """LBFGS without a closure."""
    return CallOrderError(
        asked="step() without a closure",
        true=f"{_named(optimizer)} evaluates the loss itself",
        why="one gradient is not enough for it",
        fix="call step(closure), where closure() clears the gradients, computes the loss, calls backward, returns it",
    )


def taken_off(call: str) -> CallOrderError:
    """After to_torch()."""
    return CallOrderError(
        asked=f"{call} after to_torch()",
        true="the weights are fp32 again, and the plain optimizer steps them",
        why="there are no masters any more",
        fix="use the optimizer that to_torch() returned, or wrap it again",
    )


# -- state ------------------------------------------------------------------------------------------------------------


def bad_state(
    true: str, why: str, fix: str = "load the state of an optimizer of the same kind and model"
) -> StateError:
    """A state that does not fit; nothing of it was loaded."""
    return StateError(asked="MasterWeights.load_state_dict()", true=true, why=f"{why}; nothing was loaded", fix=fix)


def not_ours(optimizer: Any) -> ArgumentError:
    """fp32_state_dict without masters."""
    return ArgumentError(
        asked=f"fp32_state_dict(model, {_named(optimizer)})",
        true="it holds no masters of this model's weights",
        why="there is no more precision to export than the model has",
        fix="pass the model and its MasterWeights; without one, model.float().state_dict() is all there is",
    )
