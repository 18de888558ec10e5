"""What the packed optimizers refuse, each in four parts, and what they warn of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ArgumentError, CallOrderError, StateError, UnsupportedError
from halfstep.formats import format_of
from halfstep.kernels.rules import Rule
from halfstep.policy import Policy


def _named(optimizer: object) -> str:
    return type(optimizer).__name__


def called(optimizer: Any, p: Tensor, kind: str = "") -> str:
    """A parameter of the optimizer: by the name that was given with it, if one was."""
    return described(p, names_of(optimizer).get(p), kind)


def names_of(optimizer: Any) -> dict[Tensor, str]:
    """The names of parameters that were given by ``named_parameters()``."""
    groups = optimizer.param_groups
    return {
        p: name for group in groups for p, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }


def described(p: Tensor, name: str | None, kind: str = "") -> str:
    """A parameter in a message, with an adjective or without."""
    words = f"{kind} parameter" if kind else "parameter"
    if name is not None:
        return f"the {words} {name} of shape {list(p.shape)}"
    return f"{'an' if kind == 'fp16' else 'a'} {words} of shape {list(p.shape)}"


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


def misspelled(optimizer: object, key: str, meant: str) -> ArgumentError:
    """A key of a group that is nearly an option."""
    return ArgumentError(
        asked=f"{key!r} in a parameter group of {_named(optimizer)}",
        true=f"there is no such option; the nearest is {meant!r}",
        why="a group may have keys of its own, so this one would be kept, and have no effect",
        fix=f"write {meant!r}; or give a key of your own a name that no option resembles",
    )


def masters_of_fp32(optimizer: object, master: str, *, of_group: bool) -> ArgumentError:
    """Masters where no weight is 16-bit."""
    name = _named(optimizer)
    return ArgumentError(
        asked=f"master={master!r} in a parameter group of {name}" if of_group else f"{name}(master={master!r})",
        true="all of its weights are fp32, and no policy casts them",
        why="fp32 weights are their own masters: nothing would be kept beside them, and no byte saved",
        fix='pass policy="bf16-master" to the optimizer, or leave master out',
    )


def masters_or_none(policy: object, parsed: Policy, master: str) -> ArgumentError:
    """One says that there are masters, the other that there are none."""
    format_name = format_of(parsed.param_dtype)
    if master == "none":
        return ArgumentError(
            asked=f'policy="{policy}" with master={master!r}',
            true=f'policies named "...-master" keep what {format_name} weights cannot hold',
            why="master='none' would drop it, and small updates with it",
            fix=f'pass policy="{format_name}-true" if you want no masters, or leave master out',
        )
    return ArgumentError(
        asked=f'policy="{policy}" with master={master!r}',
        true='policies named "...-true" keep nothing beside the weights',
        why="a master would be something beside them",
        fix=f'pass policy="{format_name}-master" for masters, or leave master out',
    )


def two_storages(policy: object, what: str, value: object) -> ArgumentError:
    """The policy says one thing and the argument another."""
    return ArgumentError(
        asked=f'policy="{policy}" with {what}={value!r}',
        true=f"the policy names another storage for the {what} than the argument does",
        why="only one of them can be used",
        fix=f"say it once: in the policy's text, or as {what}=",
    )


def no_master_policy(policy: object, parsed: Policy) -> ArgumentError:
    """The policy keeps fp32 weights."""
    its = "its" if str(policy).lower() == str(parsed) else f'it means "{parsed}", whose'
    return ArgumentError(
        asked=f'policy="{policy}"',
        true=f"{its} weights are fp32, and an optimizer's policy says to which 16-bit format they are cast",
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


def bad_dtype(optimizer: object, p: Tensor) -> ArgumentError:
    """A trainable parameter that no rule here takes."""
    return ArgumentError(
        asked=f"{called(optimizer, p, 'trainable')}, which is {p.dtype}",
        true="the rules step fp32, bf16 and fp16 weights, in fp32",
        why="its digits, or its imaginary part, would be lost",
        fix="step it with torch's optimizer, beside this one in a Stepper; or set requires_grad to False",
    )


def dtensor(optimizer: object, p: Tensor) -> UnsupportedError:
    """Sharded or packed weights."""
    return UnsupportedError(
        asked=f"{called(optimizer, p, 'trainable')} and of type {type(p.data).__name__}",
        true="it is no plain tensor: FSDP2 and tensor parallelism shard it (DTensor), or a library packs its bits",
        why="states of shards are not made by this version",
        fix="shard fp32 weights with a mixed-precision policy of FSDP2 and torch's optimizer",
    )


def not_dense(optimizer: object, p: Tensor) -> UnsupportedError:
    """Memory with gaps, or elements that share it."""
    return UnsupportedError(
        asked=f"{called(optimizer, p, 'trainable')} and strides {list(p.stride())}",
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


def listed_twice(optimizer: object) -> ArgumentError:
    """The same parameter in two places."""
    return ArgumentError(
        asked=f"{_named(optimizer)} with a parameter that is listed twice",
        true="tied weights are one parameter, and model.parameters() lists it once",
        why="it would be stepped twice with one gradient, and have one state for both",
        fix="list every parameter once",
    )


def option_of_all(optimizer: object, name: str) -> ArgumentError:
    """An option of the constructor in a group."""
    return ArgumentError(
        asked=f"{name} in a parameter group of {_named(optimizer)}",
        true="it is said once, to the constructor, and holds for all groups; a group has master, moments and seed",
        why="in a group it would have no effect",
        fix=f"pass {name} to {_named(optimizer)}, or build another optimizer for these parameters",
    )


def another_16_bit_dtype(optimizer: object, wanted: torch.dtype, p: Tensor) -> ArgumentError:
    """Part of the weights are 16-bit already, in another dtype."""
    return ArgumentError(
        asked=f"a policy that casts weights to {format_of(wanted)}",
        true=f"{called(optimizer, p, 'trainable')} is {format_of(p.dtype)} already",
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


def slow_text(optimizer: object, reason: str) -> str:
    """What a missing package costs."""
    return (
        f"{_named(optimizer)} steps with plain torch operations, many times slower than with compiled loops"
        f" ({reason}). The numbers are the same; executor='torch' says that this is wanted."
    )


# -- stepping ---------------------------------------------------------------------------------------------------------


def scale_of_zero(optimizer: object) -> CallOrderError:
    """torch's GradScaler can get there."""
    return CallOrderError(
        asked=f"{_named(optimizer)}.step() of gradients that were scaled by 0",
        true="grad_scale is 0: torch's GradScaler falls that far when every step overflows",
        why="nothing is left in the gradients that could be unscaled",
        fix="use halfstep.GradScaler, whose scale has a lower bound; and look at what overflows",
    )


def late_dampening(optimizer: object) -> UnsupportedError:
    """A first momentum after the first step."""
    return UnsupportedError(
        asked=f"{_named(optimizer)}.step() with momentum that begins late, and dampening",
        true="the first gradient enters the momentum whole, and dampening acts from the second on",
        why="which gradient is the first cannot be told once steps have been taken without momentum",
        fix="leave dampening out, or begin with momentum",
    )


def freed(optimizer: object, what: str, p: Tensor) -> CallOrderError:
    """A storage that was resized."""
    return CallOrderError(
        asked=f"a step of {called(optimizer, p)}",
        true=f"the memory of {what} was freed, or cut",
        why="there are no numbers to read, and none could be written",
        fix="leave storages as they are until the step is taken; offload by assigning new tensors, not by resize_()",
    )


def bad_gradient(optimizer: object, p: Tensor, gradient: Tensor) -> UnsupportedError:
    """A sparse gradient, or one of another dtype."""
    if gradient.layout != torch.strided:
        return UnsupportedError(
            asked=f"{_named(optimizer)}.step() with a sparse gradient, of {called(optimizer, p)}",
            true="the rules step every element: their moments decay where the gradient is zero",
            why="as a dense gradient it would take the memory that sparse=True was to save",
            fix="use halfstep.MasterWeights(torch.optim.SparseAdam(...)) for it, or nn.Embedding(sparse=False)",
        )
    return UnsupportedError(
        asked=f"{_named(optimizer)}.step() with a gradient of {gradient.dtype}, of {called(optimizer, p)}",
        true="gradients are fp32, bf16 or fp16",
        why="another dtype has digits that the rule would drop, or lacks an imaginary part",
        fix="cast the gradient before the step",
    )


def gradient_of_another(optimizer: object, p: Tensor, gradient: Tensor) -> CallOrderError:
    """A sum of gradients that was made for something else."""
    return CallOrderError(
        asked=f"a step of {called(optimizer, p)} on {p.device}",
        true=f"its gradient has shape {list(gradient.shape)} and is on {gradient.device}",
        why="it is the gradient of something else",
        fix="set gradients to None when parameters change: optimizer.zero_grad()",
    )


def not_a_number(rule: Rule) -> ArgumentError:
    """A learning rate as a tensor, or a scale, that is NaN."""
    return ArgumentError(
        asked=f"a step of {rule.name} with a learning rate, an option or a scale that is NaN",
        true="every weight is multiplied by them",
        why="every weight would be NaN",
        fix="print optimizer.param_groups, and look for what computes the NaN",
    )


def other_storages(was: tuple[str, str], now: tuple[str, str]) -> CallOrderError:
    """A group's storages were changed by hand."""
    return CallOrderError(
        asked=f"a step with master={now[0]!r}, moments={now[1]!r} in a group",
        true=f"its state was made with master={was[0]!r}, moments={was[1]!r}",
        why="a state is made once: the change would have no effect",
        fix="build an optimizer with the new storages, and load this one's state_dict() into it",
    )


def bad_step_counter(steps: list[float]) -> StateError:
    """Somebody wrote into a step counter."""
    return StateError(
        asked="a step",
        true=f"a step counter is {next(step for step in steps if not 1.0 <= step < math.inf) - 1.0:g}",
        why="it counts the steps that were taken, and the rule's constants depend on it",
        fix="write a number from 0 on into optimizer.state[p]['step'], or use load_state_dict()",
    )


def changed(optimizer: object, p: Tensor, was: str, now: str) -> CallOrderError:
    """model.half(), model.cuda() or model.to(memory_format=...) came too late."""
    return CallOrderError(
        asked=f"a step of {called(optimizer, p)} that is {now} now",
        true=f"it was {was} when the optimizer made its state",
        why="its rest and moments no longer fit",
        fix="cast, move and lay out the model first, then build the optimizer",
    )


def skipped_text(optimizer: object, p: Tensor, kind: str) -> str:
    """The first step that is not taken."""
    return (
        f"{_named(optimizer)} skipped a step: the gradient of {called(optimizer, p)} is {kind}. Nothing"
        " was written. This is said once; optimizer.skipped_steps counts them, and halfstep.Stepper names the culprit."
    )


def released(optimizer: object, call: str) -> CallOrderError:
    """Two who would use the gradients."""
    return CallOrderError(
        asked=f"{call} of {_named(optimizer)}, whose gradients are released",
        true="release.backward(loss) has used each gradient as soon as it existed, and freed it",
        why="there is nothing left to step with",
        fix="leave it out; release.remove() brings the ordinary step back",
    )


def not_packed(optimizer: object) -> UnsupportedError:
    """Its step goes over all parameters."""
    return UnsupportedError(
        asked=f"release_gradients(model, {_named(optimizer)})",
        true="its step goes over all of its parameters at once",
        why="a released gradient is used before the others exist",
        fix="use an optimizer of halfstep.optim",
    )


def release_of_replicas(model: object) -> UnsupportedError:
    """DDP and FSDP average gradients after the hook."""
    return UnsupportedError(
        asked=f"release_gradients({_named(model)}, ...)",
        true="it averages gradients over ranks when they are complete",
        why="a released gradient would be used before the other ranks' parts have arrived",
        fix="release gradients in one process, or keep them and step as ever",
    )


def release_of_fp16(p: Tensor, name: str | None) -> UnsupportedError:
    """fp16 needs loss scaling, and loss scaling needs to see all gradients."""
    return UnsupportedError(
        asked=f"release_gradients() with {described(p, name, 'fp16')}",
        true="fp16 gradients need loss scaling, and a scale is lowered after a look at all of them",
        why="the first ones have been used and are gone when the last one overflows",
        fix="use bf16 weights, which need no scaling",
    )


def trained_elsewhere(optimizer: object, names: Sequence[str]) -> ArgumentError:
    """Gradients that nobody would free."""
    return ArgumentError(
        asked=f"release_gradients(model, {_named(optimizer)})",
        true=f"{names[0]} and {len(names) - 1} more trained parameters of the model are not in this optimizer"
        if len(names) > 1
        else f"the trained parameter {names[0]} of the model is not in this optimizer",
        why="their gradients would stay, and add up from step to step",
        fix="give one optimizer all of them, in groups; or freeze the others",
    )


def release_removed() -> CallOrderError:
    """Its hooks are gone."""
    return CallOrderError(
        asked="release.backward(loss) after release.remove()",
        true="its hooks were taken off the parameters",
        why="no parameter would be stepped",
        fix="call release_gradients(model, optimizer) again",
    )


def release_copied() -> UnsupportedError:
    """A copy has no hooks."""
    return UnsupportedError(
        asked="a copy of what release_gradients() returned",
        true="its hooks hang on the parameters of the model that it was made for",
        why="the copy would step nothing",
        fix="copy model and optimizer, and call release_gradients() for the copies",
    )


def release_twice(optimizer: object) -> CallOrderError:
    """Gradients can be used once."""
    return CallOrderError(
        asked=f"release_gradients(model, {_named(optimizer)})",
        true="its gradients are released already",
        why="each gradient can be used once",
        fix="keep what release_gradients returned, or call its remove() first",
    )


def optimizer_clips(optimizer: object) -> ArgumentError:
    """The norm of all gradients is never known in time."""
    return ArgumentError(
        asked=f"release_gradients(model, {_named(optimizer)}(clip_norm=...))",
        true="the norm of all gradients is known when the first ones have been used",
        why="the optimizer could not clip by it",
        fix='pass release_gradients(..., clip_norm=1.0, clip_by="parameter") or "previous", and leave it out there',
    )


def bad_clip_by(value: object) -> ArgumentError:
    """By which norm a released gradient is clipped."""
    return ArgumentError(
        asked=f"clip_by={value!r}",
        true='a released gradient is clipped by its own norm ("parameter") or by that of the step before ("previous")',
        why="the norm of this step is not known in time",
        fix='pass "parameter" or "previous"',
    )


def gradients_left(optimizer: object) -> CallOrderError:
    """A window of several micro-batches."""
    return CallOrderError(
        asked="release.backward(loss) while parameters have gradients",
        true=f"parameters of {_named(optimizer)} hold gradients that nobody has used",
        why="released gradients cannot be summed over micro-batches: each is used at once",
        fix="call optimizer.zero_grad() first; windows of several micro-batches need an ordinary step",
    )


def foreign_backward(p: Tensor, name: str | None) -> CallOrderError:
    """loss.backward() instead of release.backward(loss)."""
    return CallOrderError(
        asked=f"backward() of a loss with {described(p, name, 'released')}",
        true="its gradient is complete, and nobody has said whether the loss is finite",
        why="it would be used without a look at the loss, or stay in memory",
        fix="call release.backward(loss), or release.remove() to go back to ordinary steps",
    )


def used_twice(p: Tensor, name: str | None) -> UnsupportedError:
    """Reentrant checkpointing brings a gradient in parts."""
    return UnsupportedError(
        asked=f"release.backward(loss) with {described(p, name)}",
        true="its gradient came in two parts: reentrant checkpointing, or a loss inside a loss",
        why="the first part has been used for a step of its own",
        fix="use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); the weights have moved by half a step",
    )


def bad_loss(loss: object) -> ArgumentError:
    """Nothing to go back from."""
    found = f"shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    return ArgumentError(
        asked=f"release.backward() of {found}",
        true="a loss is one floating number with a graph",
        why="there is nothing to take gradients of",
        fix="pass the mean or the sum of the losses",
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


def lossy(what: str, who: str, kind: str) -> StateError:
    """A conversion that would round."""
    return bad_state(
        f"{what} of {who} has bits that {kind} cannot hold",
        "a load drops nothing in silence",
        "pass lossy=True to round it, or build the optimizer with the storages of the saved run",
    )


def other_weights(who: str) -> StateError:
    """A rest beside weights that it does not belong to."""
    return bad_state(
        f"the weights of {who} are not those that were saved beside this state",
        "its full value is weight and rest together, and the storages differ, so that it has to be put together now",
        "load the model's weights first, then the optimizer; or build the optimizer with the saved storages",
    )


def bad_value(optimizer: object, p: Tensor, name: str, value: Any) -> StateError:
    """Somebody put something else into the state."""
    found = f"{value.dtype}, {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return StateError(
        asked="a step after the state was changed by hand",
        true=f"{name} of {called(optimizer, p)}, {p.dtype}, is {found} now",
        why="the storage needs the dtype, shape, strides and device that it was made with",
        fix="write into the tensors that are there, or build the optimizer anew and use load_state_dict()",
    )
