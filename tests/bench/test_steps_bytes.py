"""Bytes that live and bytes that move, against the table that was derived by hand and against real tensors."""

import pytest
import torch

from halfstep.bench.steps_bytes import floor_seconds, live_bytes, moved_bytes, new_probe, predicted_bytes
from halfstep.bench.steps_recipes import RULES, HalfstepRecipe, TorchRecipe
from halfstep.bench.steps_storages import DEFAULTS, MOMENTS, WEIGHTS, Storage

CPU = torch.device("cpu")
SHAPES = ((64, 96), (8, 96), (33, 50))  # the last with groups that are not full

# weight + rest, then one moment, in bytes per parameter; a group of 32 codes has 2 bytes of scale
_HELD = {"fp32": 4, "fp32-master": 2 + 4, "split": 2 + 2, "split8": 2 + 1, "stochastic": 2, "none": 2}
_MOMENT = {"fp32": 4, "bf16": 2, "int8": 1 + 2 / 32}
_NUM_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1}


def by_hand(rule, storage):
    gradient = 4 if storage.weights == "fp32" else 2
    return _HELD[storage.weights] + gradient + _NUM_MOMENTS[rule] * _MOMENT[storage.moments]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", [f"{weights}+{moments}" for weights in WEIGHTS for moments in MOMENTS])
def test_what_is_predicted_is_what_lives_and_what_the_table_says(rule, name):
    storage = Storage.parse(name)
    predicted = predicted_bytes(rule, storage, SHAPES, torch.bfloat16)
    assert HalfstepRecipe(rule, storage, "torch").build(SHAPES, CPU).num_bytes == predicted
    full = ((320, 96),)
    assert predicted_bytes(rule, storage, full, torch.float16) / (320 * 96) == pytest.approx(
        by_hand(rule.name, storage), rel=1e-3
    )


def test_the_rows_of_the_table_of_bytes():
    found = [predicted_bytes(RULES["adamw"], Storage.parse(name), ((320, 96),), torch.bfloat16) for name in DEFAULTS]
    lives = [num_bytes / (320 * 96) for num_bytes in found]
    assert lives == pytest.approx([16, 16, 14, 10, 8.125, 7.125, 6.125], rel=1e-3)
    moves = dict(zip(DEFAULTS, (moved_bytes(num_bytes) / (320 * 96) for num_bytes in found), strict=True))
    assert moves["fp32"] == pytest.approx(32, rel=1e-3)
    assert moves["split+bf16"] == pytest.approx(20, rel=1e-3)
    assert moves["split8+int8"] == pytest.approx(14.25, rel=1e-3)


@pytest.mark.parametrize(("name", "expected"), [("adamw", 16), ("adam", 16), ("sgd", 12), ("lion", 16)])
def test_torchs_recipe_keeps_all_in_fp32(name, expected):
    ready = TorchRecipe(RULES[name]).build(SHAPES, CPU)
    assert ready.num_bytes == sum(weight.nbytes * 2 for weight in ready.weights), "there is no state before a step"
    ready.prepare()
    ready.step()
    num_params = sum(weight.numel() for weight in ready.weights)
    assert ready.num_bytes / num_params == pytest.approx(expected, rel=3e-3)


def test_a_step_is_measured_with_the_bytes_that_it_leaves():
    """Nothing that halfstep keeps is made by the first step."""
    for name in DEFAULTS:
        ready = HalfstepRecipe(RULES["adamw"], Storage.parse(name), "torch").build(SHAPES, CPU)
        before = ready.num_bytes
        ready.prepare()
        ready.step()
        assert ready.num_bytes == before


def test_views_count_once_and_empty_tensors_nothing():
    whole = torch.zeros(10, 10)
    assert live_bytes([whole, whole[3:], whole.T, torch.empty(0)]) == 400
    assert live_bytes([whole[:1]]) == 400, "the storage lives as a whole"
    assert live_bytes([]) == 0


def test_the_floor_is_time_in_proportion_to_bytes():
    assert floor_seconds(100 * 16, 100, 0.25) == pytest.approx(1.0)  # 32 bytes for each of the probe's 8
    probe = new_probe(10, CPU)
    assert torch.equal(probe(), torch.full((10,), 1.0000001))
    assert torch.equal(probe(), torch.full((10,), 1.0000001) * 1.0000001), "in place, and again"
