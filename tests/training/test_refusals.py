"""Every refusal of the Stepper: reached through its public calls, its text, and that it leaves the run as it was.

Each bad call is made in the middle of a good run of three windows of two micro-batches, at the moment that makes it
bad. The run goes on, and must end with the same bits as one without the bad call.
"""

import copy
import dataclasses
import inspect
import itertools
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ArgumentError, CallOrderError, HalfstepError, StateError, UnsupportedError
from halfstep.optim import AdamW, release_gradients
from halfstep.training import refusals

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
SGD, LBFGS, schedulers = torch.optim.SGD, torch.optim.LBFGS, torch.optim.lr_scheduler
X = torch.linspace(-1, 1, 15).reshape(5, 3)
REFUSALS = {
    name: value
    for name, value in vars(refusals).items()
    if inspect.isfunction(value) and value.__module__ == refusals.__name__ and not name.startswith("_")
}

# -- a good run -------------------------------------------------------------------------------------------------------


def make_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = schedulers.ExponentialLR(optimizer, 0.9)
    scale, ema = halfstep.DynamicScale(64.0, growth_interval=2), halfstep.EMA(model, decay=0.5)
    options = {"policy": "fp32", "clip_norm": 1.0, "accumulate": 2}
    stepper = halfstep.Stepper(model, optimizer, scheduler=schedule, scale=scale, ema=ema, **options)
    return SimpleNamespace(model=model, optimizer=optimizer, stepper=stepper, loss=None)


def play(at=None, bad=None, has_short_window=False):
    """The run; ``bad(run)`` is called at a moment of its second window. Returns everything that it ends with."""
    run = make_run()

    def moment(name):
        if name == at:
            bad(run)

    for window, i in itertools.product(range(3), range(2)):
        is_second = window == 1
        if is_second and i == 1 and has_short_window:
            run.stepper.unscale_()
            moment("unscaled")
            run.stepper.flush()
            continue
        moment("empty" if is_second and i == 0 else "inside" if is_second else "")
        with run.stepper.forward():
            run.loss = run.model(X * (window + i + 1)).square().mean()
            moment("forward" if is_second and i == 0 else "")
        moment("loss" if is_second and i == 0 else "second loss" if is_second else "")
        run.stepper.backward(run.loss)
        moment("first" if is_second and i == 0 else "full" if is_second else "")
        run.stepper.step()
    parts = (run.model, run.optimizer, run.stepper)
    return [part.state_dict() for part in parts]


def assert_same(one, other):
    """Equal, bit for bit, through dicts, lists and tuples."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


# -- what each refusal says, and its error ----------------------------------------------------------------------------

SAYS = {
    "no_module": (ArgumentError, "there is nothing to train", "several go into one nn.ModuleList"),
    "no_optimizer": (ArgumentError, "there is nothing to step", "pass torch.optim.AdamW(model.parameters())"),
    "same_parameter_twice": (ArgumentError, "stepped twice with one gradient", "give each parameter to one optimizer"),
    "foreign_parameters": (ArgumentError, "copied or cast after the optimizer was made", "pass nn.ModuleList([model,"),
    "inner_optimizer": (ArgumentError, "stepped with no gradient", "pass the MasterWeights that is around it"),
    "foreign_scheduler": (ArgumentError, "that nobody uses here", "from the optimizer that the stepper gets"),
    "no_scheduler": (ArgumentError, "", ""),
    "bad_clip_norm": (ArgumentError, "no gradient could be clipped to it", "pass clip_norm=1.0, or leave it out"),
    "no_ema": (ArgumentError, "no update that a skipped step could hold back", "pass ema=halfstep.EMA(model, decay="),
    "bad_on_overflow": (ArgumentError, "there is no such reaction", 'pass on_overflow="warn"'),
    "policy_option": (UnsupportedError, "the option could not take effect", ""),
    "weights_of_another_dtype": (ArgumentError, "a stepper casts no weights", "before its optimizer is made"),
    "closure_optimizer_with": (UnsupportedError, "", "or use an optimizer that steps with one gradient"),
    "size_inside_window": (CallOrderError, "its size would change under way", "end the window first with flush()"),
    "inside_forward": (CallOrderError, "autocast must not choose again", "leave the with block first"),
    "backward_without_forward": (
        CallOrderError,
        "the second loss of one forward pass",
        "compute the loss inside `with",
    ),
    "window_is_full": (CallOrderError, "added to a mean that is complete", "call step() after each backward()"),
    "backward_after_unscale": (
        CallOrderError,
        "a scaled gradient would be added",
        "after the window's last backward()",
    ),
    "unscaled_already": (CallOrderError, "makes them too small by that factor", "step() ends the window"),
    "nothing_to_step": (CallOrderError, "no gradient that it could use", "call stepper.backward(loss) first"),
    "gradients_changed": (
        CallOrderError,
        "they are still multiplied by the scale",
        "pass clip_norm to the Stepper; or",
    ),
    "step_by_hand": (CallOrderError, "the update would be too large", "leave optimizer.step() out of the loop"),
    "parameters_changed": (CallOrderError, "have not seen every micro-batch", "add or remove parameters after a step"),
    "step_while_perturbed": (CallOrderError, "the step would be undone", "leave the with block, then call step()"),
    "state_inside_window": (CallOrderError, "would lose them without a word", "at the end of an epoch call flush()"),
    "bad_weight": (ArgumentError, "turn descent into ascent", "leave out a micro-batch that has nothing to learn from"),
    "closure_returned": (ArgumentError, "backward starts from a loss", "return the loss tensor, or (loss, weight)"),
    "bad_retries": (ArgumentError, "nothing could be run that often", "pass retries=1"),
    "closure_sees_later_batch": (ArgumentError, "learned several times", "stepper.run(loss_of, x, y, retries=1)"),
    "retries_in_part_of_window": (CallOrderError, "a retry must repeat the whole window", "or for none"),
    "closure_optimizer": (CallOrderError, "one gradient is not enough for it", "call stepper.run(closure)"),
    "foreign_shift": (ArgumentError, "be added to a weight and taken back", "build the shifts from take_gradients()"),
    "no_sync_with_16_bit": (
        UnsupportedError,
        "the ranks' weights would drift apart",
        "leave no_sync() out",
    ),
    "distributed_clipping": (
        UnsupportedError,
        "the norm of a gradient is that of all shards",
        "use halfstep.GradScaler",
    ),
    "no_closure": (ArgumentError, "there is no forward pass to run", "pass a function that returns the loss"),
    "bad_inputs": (ArgumentError, "no gradient could reach them", "made with requires_grad_()"),
    "same_scheduler_twice": (ArgumentError, "the learning rate would move twice", "list it once"),
    "foreign_ema": (ArgumentError, "weights that this stepper does not move", "halfstep.EMA(model)"),
    "no_parameters": (ArgumentError, "there is nothing to step", "make it from the model's parameters()"),
    "step_while_swapped": (CallOrderError, "the averages would be trained", "leave the swapped() block first"),
    "retries_with_closure_optimizer": (UnsupportedError, "that could be run again", "leave retries out"),
    "other_moments": (ArgumentError, "another one than the policy says", "use an optimizer of halfstep.optim"),
    "released": (CallOrderError, "looks at all of them", "use one or the other"),
    "clips_by_itself": (ArgumentError, "read all of them once more", "pass clip_norm to the Stepper"),
    "no_masters": (ArgumentError, "updates smaller than half a unit", "halfstep.MasterWeights(optimizer)"),
    "listed_twice": (ArgumentError, "counted twice in the norm", "from model.parameters()"),
    "retries_on_several_ranks": (UnsupportedError, "paired wrongly", "leave retries out"),
    "bad_state": (StateError, "nothing was loaded", "load what Stepper.state_dict() of the same set-up saved"),
    "copied": (UnsupportedError, "another one's optimizer", "save state_dict(), and load it"),
    # Made elsewhere, reached through the stepper: arguments that it shares with scales and scalers.
    "": (HalfstepError, "", ""),
}


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad call.

    Args:
        refusal: name of the function in ``refusals`` that makes the error; "" where it is made elsewhere.
        moment: of the second window of the run, where it is made.
        call: takes the run.
        asked: what the first part of the error says, with the values.
        true: what its second part says.
        also: what else it says.
    """

    refusal: str
    moment: str
    call: Callable[[Any], object]
    asked: str
    true: str
    also: str = ""

    def check(self, error):
        """The error has four parts, and each says what it should."""
        kind, why, fix = SAYS[self.refusal]
        assert isinstance(error, kind)
        parts = (error.asked, error.true, error.why, error.fix)
        assert all(parts)
        assert str(error) == "{}\n  true: {}\n  why:  {}\n  fix:  {}".format(*parts)
        for part, words in zip(parts, (self.asked, self.true, why, fix), strict=True):
            assert words in part
        assert self.also in str(error)


# -- the bad calls ----------------------------------------------------------------------------------------------------


def build(**options):
    """A second stepper, around the same model and optimizer unless told otherwise."""

    def call(run):
        made = {name: option(run) if inspect.isfunction(option) else option for name, option in options.items()}
        given = {"model": run.model, "optimizer": run.optimizer, "policy": "fp32", **made}
        return halfstep.Stepper(given.pop("model"), given.pop("optimizer"), **given)

    return call


def call(name, *args, **kwargs):
    """A call of the stepper that is in use."""
    return lambda run: getattr(run.stepper, name)(*args, **kwargs)


def leaf():
    return nn.Parameter(torch.ones(1))


def backward(weight=None, change=lambda loss: loss):
    return lambda run: run.stepper.backward(change(run.loss), weight)


def backward_of_another_loss(run):
    run.stepper.backward(run.model[0].weight.sum())


def set_size(run):
    run.stepper.accumulate = 3


def step_perturbed(name):
    def call(run):
        weight = run.model[0].weight
        with run.stepper.perturbed({weight: torch.ones_like(weight)}):
            getattr(run.stepper, name)()

    return call


def perturb(make_shifts):
    def call(run):
        with run.stepper.perturbed(make_shifts(run.model[0].weight)):
            pytest.fail("the block must not be entered")

    return call


def with_another_gradient(name):
    """A gradient is not the one that backward left; put back afterwards, so that the run can go on."""

    def call(run):
        weight = run.model[0].weight
        gradient, weight.grad = weight.grad, None if name == "step" else weight.grad.clone()
        try:
            getattr(run.stepper, name)()
        finally:
            weight.grad = gradient

    return call


def with_another_group(run):
    run.optimizer.add_param_group({"params": [leaf()]})
    try:
        run.stepper.step()
    finally:
        run.optimizer.param_groups.pop()


def load(change):
    """Load the present state with a change, which is returned or made in place."""

    def call(run):
        state = copy.deepcopy(run.stepper.state_dict())
        state["counts"]["steps"] += 5  # nothing of this is to be taken over either
        changed = change(state)
        run.stepper.load_state_dict(state if changed is None else changed)

    return call


def without(key, part=None):
    def change(state):
        del (state if part is None else state[part])[key]

    return load(change)


def half_model(num_half=2):
    """Options for a model of two layers in fp32, as many of them in bf16."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for layer in model[:num_half]:
        layer.bfloat16()
    return {"model": model, "optimizer": SGD(model.parameters(), 0.1)}


def building():
    for model in (None, 5, "model", [nn.Linear(1, 1)], nn.Linear):
        asked = f"Stepper(model={type(model).__name__})"
        yield "no_module", "inside", build(model=model), asked, "the model is a torch.nn.Module"
    for value in (None, 5, [], [5], {}, SGD):
        asked = f"Stepper(optimizer={value!r})"
        yield "no_optimizer", "inside", build(optimizer=value), asked, "it is a torch.optim.Optimizer, or a list of"
    optimizers = build(optimizer=lambda run: [run.optimizer, SGD(run.model[2].parameters(), 0.1)])
    yield "same_parameter_twice", "inside", optimizers, "the second one SGD", "they share 2 parameters"
    for num, make in {
        "2 of its 2": lambda run: SGD(nn.Linear(1, 1).parameters(), 0.1),
        "1 of its 7": lambda run: SGD([*run.model.parameters(), leaf()], 0.1),
        "6 of its 6": lambda run: SGD(copy.deepcopy(run.model).parameters(), 0.1),
    }.items():
        true = f"{num} parameters are not in the model"
        yield "foreign_parameters", "inside", build(optimizer=make), "Stepper with SGD", true
    wrapped = half_model()
    inner = wrapped["optimizer"]
    wrapped["keep"] = halfstep.MasterWeights(inner)
    bad = lambda run: wrapped["keep"] and build(model=wrapped["model"], optimizer=inner)(run)  # noqa: E731
    yield "inner_optimizer", "inside", bad, "Stepper with SGD", "the inner optimizer of a MasterWeights"
    scheduler = build(scheduler=lambda run: schedulers.StepLR(SGD(run.model.parameters(), 0.1), 1))
    asked, true = "Stepper(scheduler=StepLR)", "it was made for another optimizer than this stepper's"
    yield "foreign_scheduler", "inside", scheduler, asked, true
    true = "a stepper calls scheduler.step() after each step that was applied"
    for value in (5, "step", [None], lambda run: len):
        also = "has no method step\n  fix:  pass a torch LRScheduler"
        yield "no_scheduler", "inside", build(scheduler=value), "Stepper(scheduler=", true, also
    plateau = build(scheduler=lambda run: schedulers.ReduceLROnPlateau(run.optimizer))
    also = "this one wants a validation metric as well\n  fix:  step it yourself, with the metric"
    yield "no_scheduler", "inside", plateau, "Stepper(scheduler=ReduceLROnPlateau)", true, also
    for value in (0, 0.0, -1, math.nan, math.inf, True, "1", torch.tensor(1.0), [1.0]):
        true = "a finite number above 0, or None"
        yield "bad_clip_norm", "inside", build(clip_norm=value), f"clip_norm={value!r}", true
    for value in (5, "ema", halfstep.EMA):
        yield "no_ema", "inside", build(ema=value), f"ema={value!r}", "it is a halfstep.EMA"
    for value in (5, None, "raise", [], torch.ones(2)):
        yield "bad_on_overflow", "inside", build(on_overflow=value), f"on_overflow={value!r}", '"warn", "ignore", or'
    for name, value in itertools.product(("accumulate", "repeat_after"), (0, -1, 1.5, True, "two", math.nan, 10**400)):
        yield "", "inside", build(**{name: value}), f"{name}={value!r}", f"{name} counts", "a whole number, at least 1"
    for value in (5, "x", halfstep.NoScale, 1024.0):
        yield "", "inside", build(scale=value), f"scale={value!r}", "scale is a halfstep Scale object: NoScale"
    for value in (5, None, "x", []):
        yield "", "inside", build(on_repeat=value), f"on_repeat={value!r}", 'on_repeat is "warn", "raise"'


def policies():
    mixed = halfstep.Policy.parse("fp16-mixed")
    half = halfstep.Policy(param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16, cast_forward_inputs=False)
    for asked, options, also in [
        (
            "output_dtype=torch.float32",
            {"policy": dataclasses.replace(mixed, output_dtype="fp32")},
            "cast_output(model",
        ),
        (
            "scaling=static",
            {"policy": dataclasses.replace(mixed, scaling="static")},
            "scale=halfstep.StaticScale(1024)",
        ),
        ("cast_forward_inputs=False", {"policy": half, **half_model()}, "a stepper casts no inputs anyway"),
    ]:
        true = "a stepper wraps the forward pass, and does not call the model"
        yield "policy_option", "inside", build(**options), f"under a policy with {asked}", true, also
    true = "it wants torch.bfloat16 weights, and 0.weight is torch.float32"
    policy, asked = build(policy="bf16-true", **half_model(num_half=0)), "Stepper under the policy bf16-true"
    also = 'cast_model(model, "bf16-true") before its optimizer is made, or use the policy that fits'
    yield "weights_of_another_dtype", "inside", policy, asked, true, also
    for policy in (5, "nonsense", None, []):
        yield "", "inside", build(policy=policy), f"the policy {policy!r}", ""
    yield (
        "weights_of_another_dtype",
        "inside",
        build(policy="fp16-master"),
        "fp16-master",
        "wants torch.float16 weights",
        'cast_model(model, "fp16-master") before its optimizer is made, or halfstep.MasterWeights(optimizer, dtype='
        "torch.float16), or use the policy",
    )
    bare, true = build(policy="bf16-master", **half_model()), "it wants fp32 masters, and this optimizer keeps none"
    yield "no_masters", "inside", bare, "Stepper under the policy bf16-master with SGD", true
    half = half_model()["model"]
    packed = {"model": half, "optimizer": AdamW(half.parameters())}
    moments, true = (
        build(policy="bf16-master,moments=int8", **packed),
        "it wants int8 moments, and this optimizer keeps",
    )
    yield "other_moments", "inside", moments, "Stepper under the policy bf16-master,moments=int8 with AdamW", true
    half = half_model()["model"]
    clips = build(policy="bf16-master", model=half, optimizer=AdamW(half.parameters(), clip_norm=1.0))
    yield "clips_by_itself", "inside", clips, "Stepper around AdamW(clip_norm=...)", "knows their norm"
    half = half_model()["model"]
    released = AdamW(half.parameters())
    release_gradients(half, released)
    again = build(policy="bf16-master", model=half, optimizer=released)
    yield "released", "inside", again, "whose gradients are released", "as soon as it exists"
    linear, half = nn.Linear(1, 1), half_model()["model"]
    optimizer, other = LBFGS([linear.weight]), SGD([linear.bias], 0.1)
    for option, options, also in [
        ("clip_norm", {"model": linear, "optimizer": optimizer, "clip_norm": 1.0}, "a line search compares losses"),
        ("another optimizer", {"model": linear, "optimizer": [other, optimizer]}, "the others would see half of it"),
        ("16-bit weights", {"model": half, "optimizer": LBFGS(half.parameters())}, "are widened to fp32"),
    ]:
        asked, true = f"Stepper with LBFGS and {option}", "evaluates the loss several times and needs a closure"
        yield "closure_optimizer_with", "inside", build(**options), asked, true, also


def order():
    asked, true = "accumulate was set inside a window", "the window holds 1 micro-batch already"
    yield "size_inside_window", "inside", set_size, asked, true
    for name in ("backward", "step", "flush", "unscale_", "take_gradients"):
        bad = backward() if name == "backward" else call(name)
        yield "inside_forward", "forward", bad, f"{name}() inside forward()", "is still open, and autocast with it"
    asked, true = "backward() without forward()", "no block of stepper.forward() has been left since"
    for moment in ("empty", "first", "inside"):
        yield "backward_without_forward", moment, backward_of_another_loss, asked, true
    asked, true = "backward() in a window that is full", "it holds 2 micro-batches, which is accumulate=2"
    yield "window_is_full", "full", backward_of_another_loss, asked, true
    true = "this window's gradients are unscaled already"
    yield "backward_after_unscale", "unscaled", backward_of_another_loss, "backward() after unscale_()", true
    true = "the gradients of Adam are unscaled already"
    yield "unscaled_already", "unscaled", call("unscale_"), "unscale_() for the second time in one window", true
    for name, moment, holds in [
        ("step", "empty", "is empty"),
        ("unscale_", "empty", "is empty"),
        ("take_gradients", "empty", "is empty"),
        ("step", "inside", "holds 1 of 2 micro-batches, all counted"),
        ("step", "loss", "is empty"),
        ("step", "second loss", "holds 1 of 2 micro-batches, all counted"),
    ]:
        true = f"no backward() since the last step(); the window {holds}"
        yield "nothing_to_step", moment, call(name), f"{name}() without backward()", true
    for name in ("step", "flush", "unscale_", "take_gradients"):
        asked, true = "gradients that changed after backward()", "those of 0.weight were written or replaced since"
        yield "gradients_changed", "full", with_another_gradient(name), asked, true
    asked, true = "other parameters than the window began with", "it began with 6, the optimizers hold 7 now"
    yield "parameters_changed", "full", with_another_group, asked, true
    for name in ("step", "flush", "unscale_", "take_gradients"):
        asked, true = f"{name}() inside perturbed()", "the weights are shifted, and are put back when the block is left"
        yield "step_while_perturbed", "full", step_perturbed(name), asked, true
    for moment, holds in {"first": "1 micro-batch", "inside": "1 micro-batch", "full": "2 micro-batches"}.items():
        true = f"the window holds {holds} whose gradients are in no state"
        yield "state_inside_window", moment, call("state_dict"), "state_dict() inside a window", true
        yield "state_inside_window", moment, call("load_state_dict", {}), "load_state_dict() inside a window", true


def arguments():
    numbers = (0, 0.0, -1, math.nan, math.inf, True, "3", [1])
    tensors = (torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(2), torch.tensor(1j))
    for moment, weight in itertools.product(("loss", "second loss"), (*numbers, *tensors)):
        asked, true = f"backward(loss, weight={weight!r})", "a finite number above 0, such as its number of tokens"
        yield "bad_weight", moment, backward(weight), asked, true
    for moment, (asked, change, true) in itertools.product(("loss", "second loss"), [
        ("backward() of a NoneType", lambda loss: None, "backward starts from a tensor"),
        ("backward() of a float", lambda loss: loss.item(), "backward starts from a tensor"),
        ("backward() of a loss of shape (2,)", lambda loss: loss.expand(2), "a loss is one number"),
        ("backward() of a loss of shape (0,)", lambda loss: loss.expand(2)[:0], "a loss is one number"),
        ("backward() of a loss without a graph", lambda loss: loss.detach(), "or it was detached"),
    ]):  # fmt: skip
        yield "", moment, backward(change=change), asked, true
    results = {"NoneType": None, "float": 1.0, "tuple of length 0": (), "tuple of length 3": (1, 2, 3), "list": []}
    for moment, (words, result) in itertools.product(("empty", "inside"), results.items()):
        bad = call("run", lambda result=result: result)
        yield "closure_returned", moment, bad, "run(closure)", f"the closure returned {words}"
    for retries in (-1, 1.5, True, "1", None):
        bad = call("run", leaf, retries=retries)
        yield "bad_retries", "inside", bad, f"run(retries={retries!r})", "it is a whole number, 0 or more"
    asked, true = "run(closure, retries=...) with accumulate=2", "when the loop's variables hold the last batch"
    yield "closure_sees_later_batch", "empty", call("run", leaf, retries=1), asked, true
    bad = call("run", lambda x: x, leaf(), retries=1)
    asked, true = "run(..., retries=...) in a window that was begun without", "of this window cannot be run again"
    yield "retries_in_part_of_window", "inside", bad, asked, true
    for true, make_shifts in [
        ("of shape (3, 4) in float32, is for a tensor of shape (4, 3)", lambda weight: {weight: torch.ones(3, 4)}),
        ("of shape () in float32, is for a tensor of shape (4, 3)", lambda weight: {weight: torch.ones(())}),
        ("a shift, a tensor of shape (1,) in float32, is for", lambda weight: {leaf(): torch.ones(1)}),
        ("is for a str that is no parameter of the optimizers", lambda weight: {"0.weight": torch.ones(4, 3)}),
        (
            "that is no parameter of the optimizers",
            lambda weight: {weight: torch.ones(4, 3), leaf(): torch.ones(1)},
        ),  # the second one
    ]:
        yield "foreign_shift", "full", perturb(make_shifts), "perturbed(shifts)", true
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        true = "it holds a model, optimizers and schedulers that belong to each other"
        yield "copied", "inside", lambda run, make=make: make(run.stepper), "a copy of a Stepper", true


def states():
    for true, also, bad in [
        ("the state has version 99", "this version reads another form", load(lambda s: s.update(version=99))),
        ("schedulers saved: 0, attached: 1", "its own scheduler", load(lambda s: s.update(schedulers=[]))),
        ("this stepper has an EMA, the state has none", "from nothing", load(lambda s: s.update(ema=None))),
        ("skipped_steps is -1", "from these counts", load(lambda s: s["counts"].update(skipped_steps=-1))),
        ("counts is a NoneType", "cannot be read from it", load(lambda s: s.update(counts=None))),
        ("its keys are counts, ema, scale, version", "schedulers would have to be made up", without("schedulers")),
        ("its keys are none", "would have to be made up", load(lambda s: {})),
        ("its keys are param_groups, state", "made up", load(lambda s: SGD([leaf()], 0.1).state_dict())),
        ("a list was passed", "only a dict can hold a state", load(lambda s: [s])),
    ]:
        yield "bad_state", "empty", bad, "Stepper.load_state_dict()", true, also
    infinite = load(lambda s: s["scale"].update(scale=math.inf))
    for bad in (infinite, without("scale", "scale"), without("averages", "ema")):
        yield "", "empty", bad, "load_state_dict", ""


BAD = [Bad(*row) for row in itertools.chain(building(), policies(), order(), arguments(), states())]
IDS = [f"{one.refusal or 'shared'}-{one.moment}-{i}" for i, one in enumerate(BAD)]


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Names of the refusals that were made, in order."""
    names = []
    for name, make in REFUSALS.items():
        monkeypatch.setattr(refusals, name, lambda *a, name=name, make=make, **k: names.append(name) or make(*a, **k))
    return names


@pytest.fixture(scope="module")
def undisturbed():
    return {is_short: play(has_short_window=is_short) for is_short in (False, True)}


@pytest.mark.parametrize("bad", BAD, ids=IDS)
def test_a_bad_call_is_refused_and_changes_nothing(bad, made, undisturbed):
    calls = []

    def attempt(run):
        calls.append(bad)
        with pytest.raises(HalfstepError) as refusal:
            bad.call(run)
        bad.check(refusal.value)

    is_short = bad.moment == "unscaled"
    ended = play(bad.moment, attempt, has_short_window=is_short)
    assert calls == [bad], "made once"
    assert made == ([bad.refusal] if bad.refusal else [])
    assert_same(ended, undisturbed[is_short])


def check(refusal, error, asked, true):
    Bad(refusal, "", print, asked, true).check(error)


@pytest.mark.parametrize("name", ["step", "flush", "unscale_", "take_gradients"])
def test_a_closure_optimizer_takes_no_other_calls(name, made):
    ends = []
    for is_bad in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        stepper = halfstep.Stepper(model, LBFGS(model.parameters(), max_iter=3), policy="fp32")
        for step in range(3):
            if is_bad and step == 1:
                with pytest.raises(CallOrderError) as refusal:
                    getattr(stepper, name)()
                check("closure_optimizer", refusal.value, f"{name}() with LBFGS", "needs a closure")
            stepper.run(lambda model=model: model(X).square().mean())
        ends.append([model.state_dict(), stepper.state_dict()])
    assert made == ["closure_optimizer"]
    assert_same(*ends)


@pytest.mark.parametrize("name", ["flush", "take_gradients", "state_dict", "load_state_dict", "step", "unscale_"])
def test_between_two_passes_only_the_second_one_can_follow(name, made):
    ends = []
    for is_bad in (False, True):
        run = make_run()
        for _ in range(2):
            with run.stepper.forward():
                loss = run.model(X).square().mean()
            run.stepper.backward(loss)
            if len(run.stepper.take_gradients()) == 6 and is_bad:
                with pytest.raises(CallOrderError) as refusal:
                    getattr(run.stepper, name)(*([{}] if name == "load_state_dict" else []))
                asked = f"{name}() " + ("inside a window" if "state" in name else "without backward()")
                check(made[-1], refusal.value, asked, "window")
            with run.stepper.forward():
                loss = run.model(X + 1).square().mean()
            run.stepper.backward(loss)
            assert run.stepper.flush().is_applied
        ends.append([part.state_dict() for part in (run.model, run.optimizer, run.stepper)])
    assert made == ["state_inside_window" if "state" in name else "nothing_to_step"] * 2
    assert_same(*ends)


def test_a_state_of_a_scaler_is_refused_where_nothing_is_scaled(made):
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32")
    with pytest.raises(StateError) as refusal:
        stepper.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    check("bad_state", refusal.value, "load_state_dict", "the state is a loss scaler's, this policy scales not")
    assert made == ["bad_state"]


def test_an_ema_without_a_place_is_refused(made):
    run, model = make_run(), nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32", scale=halfstep.DynamicScale())
    before = stepper.state_dict()
    with pytest.raises(StateError) as refusal:
        stepper.load_state_dict({**run.stepper.state_dict(), "schedulers": []})
    check("bad_state", refusal.value, "load_state_dict", "the state has an EMA, this stepper has none")
    assert stepper.state_dict() == before


def test_sharded_parameters_are_refused(made, tmp_path):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        from torch.distributed.tensor import DTensor, init_device_mesh

        mesh, model = init_device_mesh("cpu", (1,)), nn.Linear(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh))
        with pytest.raises(UnsupportedError) as refusal:
            halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32")
    finally:
        dist.destroy_process_group()
    check("distributed_clipping", refusal.value, "Stepper with DTensor", "each rank holds a shard of every gradient")


def test_flat_parameters_are_refused():
    """What FullyShardedDataParallel (torch's first) makes of a module's parameters; torch tells them by this mark."""
    model = nn.Linear(2, 2)
    model.weight._is_flat_param = True
    with pytest.raises(UnsupportedError, match="flat ones of FullyShardedDataParallel"):
        halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_sync_is_refused_where_it_would_let_ranks_drift(made, tmp_path, dtype):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        module = nn.Linear(2, 1).to(dtype)
        model = nn.parallel.DistributedDataParallel(module)
        optimizer = SGD(module.parameters(), 0.1)
        if dtype != torch.float32:
            optimizer = halfstep.MasterWeights(optimizer)
        policy = "fp32" if dtype == torch.float32 else "bf16-master"
        stepper = halfstep.Stepper(model, optimizer, policy=policy, accumulate=2)
        before = [p.clone() for p in module.parameters()]
        with model.no_sync():
            with stepper.forward():
                loss = model(torch.ones(1, 2, dtype=dtype)).float().sum()
            if dtype == torch.float32:
                stepper.backward(loss)
            else:
                with pytest.raises(UnsupportedError) as refusal:
                    stepper.backward(loss)
                check("no_sync_with_16_bit", refusal.value, "inside no_sync()", "fp32 sums")
                assert all(map(torch.equal, before, module.parameters()))
        for _ in range(1 if dtype == torch.float32 else 2):  # the window goes on where it was
            with stepper.forward():
                loss = model(torch.ones(1, 2, dtype=dtype)).float().sum()
            stepper.backward(loss)
            outcome = stepper.step()
        assert outcome.is_applied
    finally:
        dist.destroy_process_group()


def test_fp16_gradients_cannot_be_unscaled_in_place():
    model = nn.Linear(2, 1).half()
    options = {"policy": "fp32", "scale": halfstep.StaticScale(64.0)}
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), **options)
    with stepper.forward():
        loss = (model.weight.float().sum() + model.bias.float().sum()) * 2.0**-20
    stepper.backward(loss)
    with pytest.raises(HalfstepError, match=r"FP16 gradients.\n.*\n.*lost\n.*leave unscale_\(\) out") as caught:
        stepper.unscale_()
    assert "to clip, use halfstep.Stepper(clip_norm=...)" in caught.value.fix
    assert stepper.step().grad_norm == pytest.approx(3**0.5 * 2.0**-20)


def test_every_refusal_has_a_bad_call():
    """A new refusal needs a bad call above, or a test of its own."""
    alone = {"closure_optimizer", "distributed_clipping", "retries_with_closure_optimizer", *NOTICED_BY.values()}
    alone |= {"retries_on_several_ranks", "listed_twice", "no_sync_with_16_bit"}
    assert {one.refusal for one in BAD} | alone == {*REFUSALS, ""} == set(SAYS)


# -- bad input of every kind: an error of ours, whoever notices, and nothing changed ----------------------------------


def swapped_step(run):
    with run.stepper.ema.swapped():
        run.stepper.step()


def run_perturbed(run):
    weight = run.model[0].weight
    with run.stepper.perturbed({weight: torch.ones_like(weight)}):
        run.stepper.run(weight.sum)


def gradient_of(inputs, change=lambda loss: loss):
    return lambda run: run.stepper.grad(change(run.loss), inputs(run) if callable(inputs) else inputs)


def touched_between(touch):
    """Gradients are changed behind the first micro-batch; put back after the refusal of the next call."""

    def call(run):
        before = {p: p.grad for p in run.model.parameters()}
        touch(run)
        try:
            run.stepper.backward(run.loss)
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient

    return call


def emptied(run):
    optimizer = SGD(run.model.parameters(), 0.1)
    optimizer.param_groups[0]["params"].clear()
    return optimizer


COMPLEX = torch.tensor(1 + 1j)
WRONG = {
    "clip_norm huge": ("inside", build(clip_norm=10**400)),
    "weight huge": ("second loss", backward(10**400)),
    "loss complex": ("second loss", backward(change=lambda loss: loss * COMPLEX)),
    "inputs=5": ("second loss", lambda run: run.stepper.backward(run.loss, inputs=5)),
    "inputs=[]": ("second loss", lambda run: run.stepper.backward(run.loss, inputs=[])),
    "inputs=[5]": ("second loss", lambda run: run.stepper.backward(run.loss, inputs=[5])),
    "inputs without grad": ("second loss", lambda run: run.stepper.backward(run.loss, inputs=[torch.ones(1)])),
    "step by hand": ("full", lambda run: run.optimizer.step()),
    "run(None)": ("inside", call("run", None)),
    "run(5)": ("inside", call("run", 5)),
    "run inside perturbed": ("inside", run_perturbed),
    "perturbed(None)": ("full", perturb(lambda weight: None)),
    "perturbed(list)": ("full", perturb(lambda weight: [weight])),
    "perturbed(number)": ("full", perturb(lambda weight: {weight: 5})),
    "perturbed(complex)": ("full", perturb(lambda weight: {weight: torch.ones(4, 3) * COMPLEX})),
    "grad inputs=5": ("loss", gradient_of(5)),
    "grad inputs=None": ("loss", gradient_of(None)),
    "grad inputs=[]": ("loss", gradient_of([])),
    "grad inputs without grad": ("loss", gradient_of(torch.ones(1))),
    "grad inputs unused": ("loss", gradient_of(leaf())),
    "grad outputs vector": ("loss", gradient_of(leaf(), lambda loss: loss.expand(2))),
    "grad outputs complex": ("loss", gradient_of(leaf(), lambda loss: loss * COMPLEX)),
    "grad outputs number": ("loss", gradient_of(leaf(), lambda loss: 5)),
    "state scale=None": ("empty", load(lambda s: s.update(scale=None))),
    "state scale=str": ("empty", load(lambda s: s.update(scale="x"))),
    "state scale=list": ("empty", load(lambda s: s.update(scale=[5]))),
    "state counts={}": ("empty", load(lambda s: s.update(counts={}))),
    "state schedulers=None": ("empty", load(lambda s: s.update(schedulers=None))),
    "state schedulers=5": ("empty", load(lambda s: s.update(schedulers=5))),
    "state scheduler None": ("empty", load(lambda s: s.update(schedulers=[None]))),
    "state scheduler empty": ("empty", load(lambda s: s.update(schedulers=[{}]))),
    "state scheduler text": ("empty", load(lambda s: s["schedulers"][0].update(last_epoch="x"))),
    "state ema=5": ("empty", load(lambda s: s.update(ema=5))),
    "state ema={}": ("empty", load(lambda s: s.update(ema={}))),
    "state text": ("empty", load(lambda s: "x")),
    "scheduler is an optimizer": ("inside", build(scheduler=lambda run: run.optimizer)),
    "scheduler is a class": ("inside", build(scheduler=schedulers.StepLR)),
    "scheduler twice": ("inside", build(scheduler=lambda run: [schedulers.StepLR(run.optimizer, 1)] * 2)),
    "ema of another model": ("inside", build(ema=lambda run: halfstep.EMA(nn.Linear(1, 1)))),
    "optimizer without parameters": ("inside", build(optimizer=emptied)),
    "lbfgs accumulate": ("inside", build(optimizer=lambda run: LBFGS(run.model.parameters()), accumulate=4)),
    "zero_grad in a window": ("second loss", touched_between(lambda run: run.optimizer.zero_grad())),
    "clip in a window": (
        "second loss",
        touched_between(lambda run: setattr(run.model[0].weight, "grad", run.model[0].weight.grad / 2)),
    ),
    "ema swapped": ("full", swapped_step),
}
NOTICED_BY = {  # the refusal, where it is one of the stepper's own
    "step by hand": "step_by_hand",
    "run(None)": "no_closure",
    "inputs=5": "bad_inputs",
    "grad inputs=[]": "bad_inputs",
    "scheduler twice": "same_scheduler_twice",
    "ema of another model": "foreign_ema",
    "optimizer without parameters": "no_parameters",
    "ema swapped": "step_while_swapped",
    "run inside perturbed": "step_while_perturbed",
}


@pytest.mark.parametrize(("name", "moment", "bad"), [pytest.param(name, *row, id=name) for name, row in WRONG.items()])
def test_bad_input_is_refused_in_our_words_and_changes_nothing(name, moment, bad, undisturbed, made):
    def attempt(run):
        with pytest.raises(HalfstepError) as refusal:
            bad(run)
        error = refusal.value
        assert all((error.asked, error.true, error.why, error.fix))
        if name in NOTICED_BY:
            assert made == [NOTICED_BY[name]]
            kind, why, fix = SAYS[NOTICED_BY[name]]
            assert isinstance(error, kind)
            assert why in error.why
            assert fix in error.fix

    assert_same(play(moment, attempt), undisturbed[False])


@pytest.mark.parametrize("result", [None, 1.0, ()])
def test_a_closure_that_returns_no_loss_leaves_retries_possible(result):
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32")
    with pytest.raises(ArgumentError, match="return the loss tensor"):
        stepper.run(lambda: result, retries=1)
    assert stepper.run(lambda: model(torch.ones(1, 1)).sum(), retries=1).is_applied


def test_a_step_is_refused_in_the_outer_of_two_perturbed_blocks():
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, SGD(model.parameters(), 0.1), policy="fp32")
    shifts = {model.weight: torch.ones(1, 1)}
    with stepper.forward():
        loss = model(torch.ones(1, 1)).sum()
    stepper.backward(loss)
    with stepper.perturbed(shifts):
        with stepper.perturbed(shifts):
            pass
        with pytest.raises(CallOrderError, match=r"step\(\) inside perturbed"):
            stepper.step()
    assert stepper.step().is_applied


@pytest.mark.parametrize("retries", [1, "x", -1])
def test_retries_that_a_closure_optimizer_cannot_carry_out_are_refused(retries):
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, LBFGS(model.parameters()), policy="fp32")
    with pytest.raises(HalfstepError, match="retries"):
        stepper.run(lambda: model(torch.ones(1, 1)).square().sum(), retries=retries)


def test_backward_of_ones_own_is_refused_with_a_closure_optimizer():
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, LBFGS(model.parameters()), policy="fp32")
    with stepper.forward():
        loss = model(torch.ones(1, 1)).square().sum()
    with pytest.raises(CallOrderError, match=r"stepper.run\(closure\)"):
        stepper.backward(loss)


def test_discard_is_the_way_out_of_a_window_that_cannot_be_used(undisturbed):
    def attempt(run):
        before = copy.deepcopy(run.model.state_dict())
        with run.stepper.forward():
            loss = run.model(X * 100).square().mean()
        run.stepper.backward(loss)
        run.model[0].weight.grad.mul_(2.0)
        for name in ("flush", "unscale_", "take_gradients"):
            with pytest.raises(CallOrderError, match="discard"):
                getattr(run.stepper, name)()
        run.stepper.discard()
        assert run.stepper.num_micro_batches == 0
        assert all(p.grad is None for p in run.model.parameters())
        assert_same(run.model.state_dict(), before)

    assert_same(play("empty", attempt), undisturbed[False])
