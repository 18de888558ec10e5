"""Both sides of a comparison do the same work: the same gradients, clipped to the same norm, one step."""

import warnings

import pytest
import torch

from halfstep.bench.steps_recipes import CLIP_NORM, LEARNING_RATE, RULES, HalfstepRecipe, TorchRecipe
from halfstep.bench.steps_storages import DEFAULTS, Storage

CPU = torch.device("cpu")
BOTH_SIDES = (TorchRecipe(RULES["adamw"]), HalfstepRecipe(RULES["adamw"], Storage("split"), "torch"))
SHAPES = ((1600, 1600), (64, 32))  # the norm of the gradients is beyond CLIP_NORM, so that clipping shows


def stepped(recipe, num_steps=2):
    ready = recipe.build(SHAPES, CPU)
    for _ in range(num_steps):
        ready.prepare()
        ready.step()
    return ready


def by_hand(rule, num_steps=2):
    """The same without a scaler."""
    ready = TorchRecipe(rule).build(SHAPES, CPU)
    optimizer = getattr(torch.optim, rule.torch_name)(ready.weights, **{"lr": LEARNING_RATE, **rule.options})
    scale = torch.amp.GradScaler("cpu").get_scale() or 2.0**16
    for _ in range(num_steps):
        ready.prepare()
        for weight in ready.weights:
            weight.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(ready.weights, CLIP_NORM)
        assert norm > CLIP_NORM
        optimizer.step()
    return ready


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_torchs_recipe_and_ours_take_the_step_that_is_taken_by_hand(name):
    expected = [weight.detach() for weight in by_hand(RULES[name]).weights]
    start = [weight.detach() for weight in TorchRecipe(RULES[name]).build(SHAPES, CPU).weights]
    for recipe in (TorchRecipe(RULES[name]), HalfstepRecipe(RULES[name], Storage("fp32"), "torch")):
        found = [weight.detach() for weight in stepped(recipe).weights]
        for a, b, before in zip(found, expected, start, strict=True):
            moved = (b - before).abs().max()
            assert moved > 0
            assert (a - b).abs().max() < 1e-3 * moved


def test_lion_is_compared_with_adamw():
    assert isinstance(TorchRecipe(RULES["lion"]).build(((2, 2),), CPU).optimizer, torch.optim.AdamW)
    assert "AdamW" in RULES["lion"].note
    ready = stepped(HalfstepRecipe(RULES["lion"], Storage("fp32"), "torch"), num_steps=1)
    before = TorchRecipe(RULES["lion"]).build(SHAPES, CPU).weights[0]
    moved = (ready.weights[0] - before).abs()
    assert moved.median().item() == pytest.approx(LEARNING_RATE, rel=0.02), "each weight by the learning rate"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("half_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*DEFAULTS, "none", "fp32+int8"])
def test_every_recipe_steps_without_a_warning_and_moves_every_tensor(rule, name, half_dtype):
    recipe = HalfstepRecipe(rule, Storage.parse(name), "torch", half_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready = recipe.build(((32, 64), (4, 64)), CPU)
        before = [weight.detach().clone() for weight in ready.weights]
        dtype = torch.float32 if name.startswith("fp32") and "master" not in name else half_dtype
        for _ in range(3):
            ready.prepare()
            assert all(weight.grad.dtype == dtype and weight.grad.isfinite().all() for weight in ready.weights)
            ready.step()
    assert all(weight.dtype == dtype for weight in ready.weights)
    assert all(not torch.equal(weight, old) for weight, old in zip(ready.weights, before, strict=True))


@pytest.mark.parametrize("recipe", BOTH_SIDES)
def test_gradients_are_set_anew_for_every_step(recipe):
    ready = recipe.build(((16, 32),), CPU)
    ready.prepare()
    first = ready.weights[0].grad.clone()
    assert first.std() > 0
    ready.weights[0].grad.zero_()
    ready.prepare()
    assert torch.equal(ready.weights[0].grad, first)


@pytest.mark.parametrize("recipe", BOTH_SIDES)
@pytest.mark.filterwarnings("ignore:.*skipped.*")
def test_both_sides_look_whether_the_gradients_are_finite(recipe):
    ready = stepped(recipe, num_steps=1)
    before = [weight.detach().clone() for weight in ready.weights]
    ready.prepare()
    ready.weights[1].grad[0, 0] = torch.inf
    ready.step()
    assert all(torch.equal(weight, old) for weight, old in zip(ready.weights, before, strict=True))


def test_the_random_state_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stepped(HalfstepRecipe(RULES["adamw"], Storage("stochastic", "int8"), "torch"), num_steps=1)
    assert torch.equal(before, torch.get_rng_state())
