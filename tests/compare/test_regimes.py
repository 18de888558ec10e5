"""Regimes are plain data: fresh scales, fp32 weights, nothing shared."""

import dataclasses
import pickle

import pytest
import torch

from halfstep.compare.regimes import REGIMES
from halfstep.compare.tasks import STORAGES, TASKS
from halfstep.policy import Policy


def test_every_regime_of_the_study_is_there():
    wanted = "fp32 fp16-unscaled fp16-static-8 fp16-static-1024 fp16-dynamic fp16-dynamic-from-8 fp16-adaptive bf16"
    assert set(wanted.split()) <= REGIMES.keys()


def test_first_scales():
    first = {name: regime.build_scale().get() for name, regime in REGIMES.items()}
    assert first["fp32"] == first["fp16-unscaled"] == first["bf16"] == 1.0
    assert first["fp16-static-8"] == first["fp16-dynamic-from-8"] == 8.0
    assert first["fp16-static-1024"] == 1024.0
    assert first["fp16-dynamic"] == 2.0**14


@pytest.mark.filterwarnings("ignore:bf16-true keeps no masters")
def test_every_regime_names_a_policy_that_says_what_it_does():
    for name, regime in REGIMES.items():
        policy = Policy.parse(regime.policy)
        assert policy.compute_dtype == regime.format.dtype, name
        assert (policy.param_dtype == regime.format.dtype) is (regime.has_half_weights or name == "fp32"), name
    for name in ("bf16-true", "bf16-master", "fp16-master"):
        assert REGIMES[name].policy == name
    assert REGIMES["bf16"].policy == "bf16-mixed"


def test_the_policy_of_a_storage_spells_masters_and_moments():
    assert REGIMES["fp16-split"].policy == "fp16-master,master=split"
    assert REGIMES["bf16-stochastic"].policy == "bf16-master,master=stochastic"
    assert REGIMES["bf16-split8-int8-released"].policy == "bf16-master,master=split8,moments=int8"
    for regime in REGIMES.values():
        if regime.is_packed:
            assert str(Policy.parse(regime.policy)) == regime.policy


def test_mistakes_are_marked_and_the_rest_is_not():
    assert [name for name, regime in REGIMES.items() if regime.mistake] == [
        name for name in REGIMES if name.startswith("wrong-")
    ]


def test_the_master_regimes_scale_as_the_mixed_ones_do():
    for master, mixed in (
        ("fp16-master", "fp16-dynamic"), ("fp16-split", "fp16-dynamic"),
        ("bf16-master", "bf16"), ("bf16-split8-int8", "bf16"),
    ):  # fmt: skip
        assert REGIMES[master].scale_settings() == REGIMES[mixed].scale_settings()
        assert REGIMES[master].format == REGIMES[mixed].format


def test_the_wrong_sum_is_bf16_masters_but_for_its_loop():
    wrong = REGIMES["wrong-sums-in-16-bits"]
    assert dataclasses.replace(wrong, name="bf16-master", mistake=None) == REGIMES["bf16-master"]
    assert wrong.scale_settings() == REGIMES["bf16-master"].scale_settings()


def test_two_runs_share_no_scale():
    regime = REGIMES["fp16-dynamic"]
    scale = regime.build_scale()
    scale.set_(2.0)
    assert regime.build_scale().get() == 2.0**14


def test_fp32_and_16_bit_weights_are_the_only_regimes_without_autocast():
    half = ["fp16-master", "bf16-master", "bf16-true", "fp16-split", *STORAGES, "wrong-sums-in-16-bits"]
    assert [name for name, regime in REGIMES.items() if regime.has_half_weights] == half
    assert [name for name, regime in REGIMES.items() if regime.autocast_dtype is None] == ["fp32", *half]
    assert REGIMES["bf16"].autocast_dtype is torch.bfloat16
    assert REGIMES["fp16-dynamic"].autocast_dtype is torch.float16


def test_tasks_and_regimes_travel_to_worker_processes():
    for value in (*REGIMES.values(), *TASKS.values()):
        assert pickle.loads(pickle.dumps(value)).name == value.name
    for regime in REGIMES.values():
        assert pickle.loads(pickle.dumps(regime)).autocast_dtype == regime.autocast_dtype
