"""The errors of the Stepper's calls, each in four parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfstep.errors import ArgumentError, CallOrderError, StateError, UnsupportedError
from halfstep.policy import Master, Policy


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's' if not noun.endswith('ch') else 'es'}"


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


# -- building a stepper -----------------------------------------------------------------------------------------------


def no_module(model: object) -> ArgumentError:
    """The first argument is not a module."""
    return ArgumentError(
        asked=f"Stepper(model={type(model).__name__})",
        true="the model is a torch.nn.Module: its buffers are guarded and its parameters named",
        why="there is nothing to train",
        fix="pass the module that holds the optimizer's parameters; several go into one nn.ModuleList",
    )


def no_optimizer(optimizer: object) -> ArgumentError:
    """The second argument is not an optimizer, or not a list of them."""
    return ArgumentError(
        asked=f"Stepper(optimizer={optimizer!r})",
        true="it is a torch.optim.Optimizer, or a list of them that step together",
        why="there is nothing to step",
        fix="pass torch.optim.AdamW(model.parameters()), or any other torch optimizer",
    )


def same_parameter_twice(optimizer: torch.optim.Optimizer, num_shared: int) -> ArgumentError:
    """Two optimizers of one stepper hold the same parameter."""
    return ArgumentError(
        asked=f"Stepper with two optimizers, the second one {type(optimizer).__name__}",
        true=f"they share {_count(num_shared, 'parameter')}",
        why="it would be stepped twice with one gradient",
        fix="give each parameter to one optimizer",
    )


def listed_twice(optimizer: torch.optim.Optimizer) -> ArgumentError:
    """One parameter, twice in the groups."""
    return ArgumentError(
        asked=f"Stepper with {type(optimizer).__name__}",
        true="a parameter stands twice in its param_groups; tied weights are one parameter",
        why="it would be counted twice in the norm and stepped twice with one gradient",
        fix="make the optimizer from model.parameters(), which lists each parameter once",
    )


def no_parameters(optimizer: torch.optim.Optimizer) -> ArgumentError:
    """An optimizer that holds nothing."""
    return ArgumentError(
        asked=f"Stepper with {type(optimizer).__name__}",
        true="the optimizer holds no parameters",
        why="there is nothing to step",
        fix="make it from the model's parameters(), or leave it out",
    )


def foreign_parameters(optimizer: torch.optim.Optimizer, num_foreign: int, num_all: int) -> ArgumentError:
    """The optimizer's parameters are not the model's."""
    return ArgumentError(
        asked=f"Stepper with {type(optimizer).__name__}",
        true=f"{num_foreign} of its {_count(num_all, 'parameter')} are not in the model",
        why="their buffers could not be guarded, and their gradients would have no name; often the model was copied or"
        " cast after the optimizer was made",
        fix="make the optimizer from this model's parameters(), or pass nn.ModuleList([model, other]) as the model",
    )


def inner_optimizer(optimizer: torch.optim.Optimizer) -> ArgumentError:
    """The optimizer inside a MasterWeights, which holds masters and not the model's parameters."""
    return ArgumentError(
        asked=f"Stepper with {type(optimizer).__name__}",
        true="it is the inner optimizer of a MasterWeights, and holds fp32 masters of the model's parameters",
        why="the masters would be stepped with no gradient, and the model's weights would stay where they are",
        fix="pass the MasterWeights that is around it",
    )


def foreign_scheduler(scheduler: object) -> ArgumentError:
    """The scheduler moves another optimizer's learning rate."""
    return ArgumentError(
        asked=f"Stepper(scheduler={type(scheduler).__name__})",
        true="it was made for another optimizer than this stepper's",
        why="it would move a learning rate that nobody uses here",
        fix="make the scheduler from the optimizer that the stepper gets",
    )


def no_scheduler(scheduler: object) -> ArgumentError:
    """Not something that can be stepped without arguments."""
    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return ArgumentError(
        asked=f"Stepper(scheduler={type(scheduler).__name__})",
        true="a stepper calls scheduler.step() after each step that was applied",
        why="this one wants a validation metric as well" if is_plateau else "this has no method step",
        fix="step it yourself, with the metric, after validation" if is_plateau else "pass a torch LRScheduler",
    )


def bad_clip_norm(value: object) -> ArgumentError:
    """Not a norm to clip to."""
    return ArgumentError(
        asked=f"clip_norm={value!r}",
        true="it is the largest L2 norm that the true gradient may have: a finite number above 0, or None",
        why="no gradient could be clipped to it",
        fix="pass clip_norm=1.0, or leave it out",
    )


def same_scheduler_twice(scheduler: object) -> ArgumentError:
    """One scheduler, listed twice."""
    return ArgumentError(
        asked=f"Stepper(scheduler=[...]) with one {type(scheduler).__name__} twice",
        true="each scheduler in the list is stepped once after each applied step",
        why="the learning rate would move twice",
        fix="list it once",
    )


def foreign_ema(ema: object) -> ArgumentError:
    """The EMA follows another model."""
    return ArgumentError(
        asked=f"Stepper(ema={ema!r})",
        true="it averages parameters that are not this model's",
        why="it would be updated with weights that this stepper does not move",
        fix="make it from the model that the stepper gets: halfstep.EMA(model)",
    )


def step_while_swapped(call: str) -> CallOrderError:
    """A call between ``ema.swapped()`` and its end."""
    return CallOrderError(
        asked=f"{call}() inside ema.swapped()",
        true="the model holds the averages now, and its own weights wait to be put back",
        why="the averages would be trained, and then thrown away",
        fix="leave the swapped() block first",
    )


def no_ema(value: object) -> ArgumentError:
    """Not an average."""
    return ArgumentError(
        asked=f"ema={value!r}",
        true="it is a halfstep.EMA, updated after each step that was applied",
        why="this has no update that a skipped step could hold back",
        fix="pass ema=halfstep.EMA(model, decay=0.999)",
    )


def policy_option(option: str, value: str, fix: str) -> UnsupportedError:
    """A part of the policy that a stepper cannot carry out."""
    return UnsupportedError(
        asked=f"Stepper under a policy with {option}={value}",
        true="a stepper wraps the forward pass, and does not call the model",
        why="the option could not take effect",
        fix=fix,
    )


def weights_of_another_dtype(policy: Policy, dtype: torch.dtype, name: str, found: torch.dtype) -> ArgumentError:
    """The policy names a dtype for the weights that they do not have."""
    return ArgumentError(
        asked=f"Stepper under the policy {policy}",
        true=f"it wants {dtype} weights, and {name} is {found}",
        why="a stepper casts no weights: the run would be another one than the policy says",
        fix=_remedy_for_dtype(policy, dtype),
    )


def _remedy_for_dtype(policy: Policy, dtype: torch.dtype) -> str:
    cast = f'halfstep.cast_model(model, "{policy}") before its optimizer is made'
    wrap = f", or halfstep.MasterWeights(optimizer, dtype={dtype})" if policy.master is Master.FP32 else ""
    return f"{cast}{wrap}, or use the policy that fits its weights"


def no_masters(policy: Policy, optimizer: torch.optim.Optimizer, kept: str) -> ArgumentError:
    """A master policy with an optimizer that keeps none, or keeps them otherwise."""
    wanted = policy.master.value
    is_fp32 = policy.master is Master.FP32
    return ArgumentError(
        asked=f"Stepper under the policy {policy} with {type(optimizer).__name__}",
        true=f"it wants {wanted} masters, and this optimizer keeps {'none' if kept == 'none' else f'{kept} ones'}",
        why="updates smaller than half a unit in the last place of a 16-bit weight would be lost"
        if kept == "none"
        else "the run would be another one than the policy says",
        fix="wrap it: halfstep.MasterWeights(optimizer), or use the policy that says so by name, such as bf16-true"
        if is_fp32
        else f'use an optimizer of halfstep.optim: halfstep.optim.AdamW(..., master="{wanted}")',
    )


def other_moments(policy: Policy, optimizer: torch.optim.Optimizer, kept: str) -> ArgumentError:
    """The policy names a storage that the optimizer does not use."""
    return ArgumentError(
        asked=f"Stepper under the policy {policy} with {type(optimizer).__name__}",
        true=f"it wants {policy.moments.value} moments, and this optimizer keeps {kept} ones",
        why="the run would be another one than the policy says",
        fix=f'use an optimizer of halfstep.optim: halfstep.optim.AdamW(..., moments="{policy.moments.value}")',
    )


def released(optimizer: torch.optim.Optimizer) -> CallOrderError:
    """Two who would use the gradients."""
    return CallOrderError(
        asked=f"Stepper around {type(optimizer).__name__}, whose gradients are released",
        true="release.backward(loss) uses each gradient as soon as it exists",
        why="a stepper looks at all of them before the first is used",
        fix="use one or the other; release.remove() gives the gradients back",
    )


def clips_by_itself(optimizer: torch.optim.Optimizer) -> ArgumentError:
    """Two places that clip."""
    return ArgumentError(
        asked=f"Stepper around {type(optimizer).__name__}(clip_norm=...)",
        true="a stepper has looked at the gradients already, and knows their norm",
        why="the optimizer would read all of them once more, and clip what may be clipped",
        fix="pass clip_norm to the Stepper, and leave it out of the optimizer",
    )


def bad_on_overflow(value: object) -> ArgumentError:
    """Not a reaction to a skipped step."""
    return ArgumentError(
        asked=f"on_overflow={value!r}",
        true='on_overflow is "warn", "ignore", or a callable that takes the outcome of a skipped step',
        why="there is no such reaction",
        fix='pass on_overflow="warn"',
    )


# -- calls out of order -----------------------------------------------------------------------------------------------


def size_inside_window(num_micro_batches: int) -> CallOrderError:
    """The window's size was set while it is open."""
    return CallOrderError(
        asked="accumulate was set inside a window",
        true=f"the window holds {_count(num_micro_batches, 'micro-batch')} already",
        why="its size would change under way",
        fix="set it after a step, or end the window first with flush()",
    )


def inside_forward(call: str) -> CallOrderError:
    """``backward`` or ``step`` in the ``with stepper.forward()`` block."""
    return CallOrderError(
        asked=f"{call}() inside forward()",
        true="the block of stepper.forward() is still open, and autocast with it",
        why="backward runs each operation in the dtype that its forward had; autocast must not choose again",
        fix=f"leave the with block first: {call}() one level further out",
    )


def backward_without_forward() -> CallOrderError:
    """``backward`` of a loss that no ``forward()`` block made."""
    return CallOrderError(
        asked="backward() without forward()",
        true="no block of stepper.forward() has been left since the last backward()",
        why="the loss was not made under the policy, or it is the second loss of one forward pass, which would count as"
        " a micro-batch of its own",
        fix="compute the loss inside `with stepper.forward():`; add several losses of one forward pass up first",
    )


def window_is_full(size: int) -> CallOrderError:
    """``backward`` where ``step`` is due."""
    return CallOrderError(
        asked="backward() in a window that is full",
        true=f"it holds {_count(size, 'micro-batch')}, which is accumulate={size}",
        why="this gradient would be added to a mean that is complete",
        fix="call step() after each backward(), or raise accumulate",
    )


def backward_after_unscale() -> CallOrderError:
    """``backward`` after ``unscale_``."""
    return CallOrderError(
        asked="backward() after unscale_()",
        true="this window's gradients are unscaled already",
        why="a scaled gradient would be added to unscaled ones",
        fix="call unscale_() once, after the window's last backward()",
    )


def unscaled_already(optimizers: Sequence[torch.optim.Optimizer]) -> CallOrderError:
    """A second ``unscale_``."""
    return CallOrderError(
        asked="unscale_() for the second time in one window",
        true=f"the gradients of {', '.join(type(one).__name__ for one in optimizers)} are unscaled already",
        why="dividing by the scale twice makes them too small by that factor",
        fix="call unscale_() once, after the window's last backward(); step() ends the window",
    )


def nothing_to_step(call: str, num_micro_batches: int, size: int | None) -> CallOrderError:
    """``step`` and the like without a ``backward``."""
    holds = "is empty" if num_micro_batches == 0 else f"holds {num_micro_batches} of {size} micro-batches, all counted"
    return CallOrderError(
        asked=f"{call}() without backward()",
        true=f"no backward() since the last step(); the window {holds}",
        why="there is no gradient that it could use",
        fix="call stepper.backward(loss) first; to end a window early call flush()",
    )


def step_by_hand(optimizer: torch.optim.Optimizer) -> CallOrderError:
    """``optimizer.step()`` by somebody else than the stepper, inside a window."""
    return CallOrderError(
        asked=f"{type(optimizer).__name__}.step() inside a window",
        true="its gradients are the stepper's: multiplied by the scale, and not yet looked at",
        why="the update would be too large by that factor, and inf or NaN would reach the weights",
        fix="call stepper.step(), and leave optimizer.step() out of the loop",
    )


def gradients_changed(names: Sequence[str], num_changed: int) -> CallOrderError:
    """Somebody wrote into gradients that are still scaled."""
    others = f" and {num_changed - len(names)} more" if num_changed > len(names) else ""
    return CallOrderError(
        asked="gradients that changed after backward()",
        true=f"those of {', '.join(names)}{others} were written or replaced since stepper.backward() left them",
        why="they are still multiplied by the scale: clipped or compared now they are off by that factor",
        fix="pass clip_norm to the Stepper; or call stepper.unscale_() before touching them; leave zero_grad() out;"
        " if another loss ran backward through them, pass inputs= there; the norm is outcome.grad_norm; discard() drops"
        " this window",
    )


def parameters_changed(num_before: int, num_now: int) -> CallOrderError:
    """``add_param_group`` inside a window."""
    return CallOrderError(
        asked="a step with other parameters than the window began with",
        true=f"it began with {num_before}, the optimizers hold {num_now} now",
        why="the new ones have not seen every micro-batch of this window",
        fix="add or remove parameters after a step, when the window is empty; discard() drops this one",
    )


def step_while_perturbed(call: str) -> CallOrderError:
    """``step`` inside ``perturbed``."""
    return CallOrderError(
        asked=f"{call}() inside perturbed()",
        true="the weights are shifted, and are put back when the block is left",
        why="the step would be undone with the shift",
        fix="leave the with block, then call step()",
    )


def state_inside_window(call: str, num_micro_batches: int) -> CallOrderError:
    """Saving or loading while gradients wait."""
    return CallOrderError(
        asked=f"{call}() inside a window",
        true=f"the window holds {_count(num_micro_batches, 'micro-batch')} whose gradients are in no state",
        why="a run that continues from there would lose them without a word",
        fix="save after a step; at the end of an epoch call flush() first; discard() drops the window",
    )


# -- losses, weights, closures ----------------------------------------------------------------------------------------


def bad_weight(weight: object) -> ArgumentError:
    """A micro-batch cannot weigh that much."""
    return ArgumentError(
        asked=f"backward(loss, weight={weight!r})",
        true="the weight of a micro-batch is a finite number above 0, such as its number of tokens, or a tensor of one"
        " element that holds one",
        why="the weighted mean of the window would be undefined, or turn descent into ascent",
        fix="leave out a micro-batch that has nothing to learn from",
    )


def closure_returned(result: object) -> ArgumentError:
    """A closure that returns no loss."""
    return ArgumentError(
        asked="run(closure)",
        true=f"the closure returned {type(result).__name__}"
        f"{f' of length {len(result)}' if isinstance(result, tuple) else ''}",
        why="backward starts from a loss",
        fix="return the loss tensor, or (loss, weight)",
    )


def retries_on_several_ranks(num_ranks: int) -> UnsupportedError:
    """A retry that each rank would decide on by itself."""
    return UnsupportedError(
        asked="run(retries=...) in a distributed run",
        true=f"there are {num_ranks} ranks, and each one sees its own losses only",
        why="one rank might run its window again while another goes on, and their reductions would be paired wrongly",
        fix="leave retries out; all ranks skip the step together",
    )


def no_closure(closure: object) -> ArgumentError:
    """``run`` of something that cannot be called."""
    return ArgumentError(
        asked=f"run({closure!r})",
        true=f"a closure is called, and {type(closure).__name__} cannot be",
        why="there is no forward pass to run",
        fix="pass a function that returns the loss: stepper.run(lambda: loss_of(model(x), y))",
    )


def bad_inputs(call: str, inputs: object) -> ArgumentError:
    """Gradients are wanted for something that cannot have one."""
    return ArgumentError(
        asked=f"{call}(inputs={type(inputs).__name__})",
        true="inputs are a tensor or several, which require a gradient and took part in the loss",
        why="no gradient could reach them",
        fix="pass parameters, or a tensor made with requires_grad_()",
    )


def bad_retries(retries: object) -> ArgumentError:
    """Not a number of retries."""
    return ArgumentError(
        asked=f"run(retries={retries!r})",
        true="it is a whole number, 0 or more",
        why="nothing could be run that often",
        fix="pass retries=1",
    )


def closure_sees_later_batch(size: int | None) -> ArgumentError:
    """A closure over loop variables cannot be run again later."""
    return ArgumentError(
        asked=f"run(closure, retries=...) with accumulate={size}",
        true="a retry runs all closures of the window again, when the loop's variables hold the last batch",
        why="the last micro-batch would be learned several times, the others not at all",
        fix="pass the batch along: stepper.run(loss_of, x, y, retries=1)",
    )


def retries_in_part_of_window() -> CallOrderError:
    """A retry cannot repeat micro-batches that were not run by ``run(..., retries)``."""
    return CallOrderError(
        asked="run(..., retries=...) in a window that was begun without",
        true="earlier micro-batches of this window cannot be run again",
        why="a retry must repeat the whole window",
        fix="use run() with retries for every micro-batch of the window, or for none",
    )


def closure_optimizer(optimizer: torch.optim.Optimizer, call: str) -> CallOrderError:
    """LBFGS and its like evaluate the loss themselves."""
    return CallOrderError(
        asked=f"{call}() with {type(optimizer).__name__}",
        true="its step evaluates the loss several times and needs a closure",
        why="one gradient is not enough for it",
        fix="call stepper.run(closure) with a closure that returns the loss",
    )


def retries_with_closure_optimizer(optimizer: torch.optim.Optimizer, retries: object) -> UnsupportedError:
    """``run(retries)`` with LBFGS."""
    return UnsupportedError(
        asked=f"run(closure, retries={retries!r}) with {type(optimizer).__name__}",
        true="its step evaluates the loss several times, and is undone whole when an evaluation is not finite",
        why="there is no window of micro-batches that could be run again",
        fix="leave retries out, and call run() again: the scale is lower then",
    )


def closure_optimizer_with(optimizer: torch.optim.Optimizer, option: str, why: str) -> UnsupportedError:
    """An option that cannot go together with an optimizer that evaluates the loss itself."""
    return UnsupportedError(
        asked=f"Stepper with {type(optimizer).__name__} and {option}",
        true="its step evaluates the loss several times and needs a closure",
        why=why,
        fix=f"leave {option} out, or use an optimizer that steps with one gradient",
    )


def foreign_shift(shift: object, parameter: object, *, is_known: bool) -> ArgumentError:
    """``perturbed`` was given a shift that fits no parameter."""
    whose = _kind(parameter) if is_known else f"{_kind(parameter)} that is no parameter of the optimizers"
    return ArgumentError(
        asked="perturbed(shifts)",
        true=f"a shift, {_kind(shift)}, is for {whose}",
        why="it could not be added to a weight and taken back",
        fix="build the shifts from take_gradients(), which has the parameters as keys",
    )


def no_sync_with_16_bit() -> UnsupportedError:
    """DistributedDataParallel's no_sync() in a window whose sums are fp32."""
    return UnsupportedError(
        asked="backward() inside no_sync() with 16-bit weights, in a window of several micro-batches",
        true="gradients of 16-bit weights are moved into fp32 sums, and DistributedDataParallel reduces .grad alone",
        why="what one micro-batch leaves unreduced would stay on its rank, and the ranks' weights would drift apart",
        fix="leave no_sync() out, so that every micro-batch is reduced; or keep fp32 weights under a mixed policy",
    )


def distributed_clipping() -> UnsupportedError:
    """Gradients in shards have no norm that one rank knows."""
    return UnsupportedError(
        asked="Stepper with DTensor parameters, or the flat ones of FullyShardedDataParallel",
        true="each rank holds a shard of every gradient",
        why="the norm of a gradient is that of all shards together, which this version does not reduce",
        fix="use halfstep.GradScaler with torch's clip_grad_norm_, which does",
    )


# -- state ------------------------------------------------------------------------------------------------------------


def bad_state(why: str, true: str) -> StateError:
    """A state that cannot be continued from."""
    return StateError(
        asked="Stepper.load_state_dict()",
        true=true,
        why=f"{why}; nothing was loaded",
        fix="load what Stepper.state_dict() of the same set-up saved",
    )


def copied() -> UnsupportedError:
    """``copy.deepcopy`` or ``pickle`` of a stepper."""
    return UnsupportedError(
        asked="a copy of a Stepper",
        true="it holds a model, optimizers and schedulers that belong to each other",
        why="the copy would step one model with another one's optimizer",
        fix="save state_dict(), and load it into a Stepper around the other model",
    )
