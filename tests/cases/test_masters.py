"""MP-16: parameters added after wrapping. MP-25: eps that is zero in fp16. MP-56: moments narrowed on load."""

import copy

import pytest
import torch
from torch import nn

from halfstep.errors import PrecisionWarning
from halfstep.optim.masters import MasterWeights

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def step_with_ones(optimizer, *weights):
    optimizer.zero_grad()
    sum(w.sum() for w in weights).backward()
    optimizer.step()


def test_MP_16_a_group_added_later_trains_with_its_own_settings(param):
    a, b = param([1.0], torch.half), param([1.0], torch.half)
    optimizer = MasterWeights(SGD([a], 0.1))
    optimizer.add_param_group({"params": [b], "lr": 0.1, "weight_decay": 0.5})
    assert optimizer.inner.param_groups[1]["weight_decay"] == 0.5
    optimizer.param_groups[1]["weight_decay"] = 0.0
    step_with_ones(optimizer, a, b)
    assert a.item() == b.item() == pytest.approx(0.89990234375)
    assert [optimizer.state[w]["master"].item() for w in (a, b)] == pytest.approx([0.9, 0.9], abs=1e-7)


def test_MP_16_unfreezing_later_has_the_same_effect(param):
    a, b = param([1.0], torch.half), param([1.0], torch.half).requires_grad_(False)
    optimizer = MasterWeights(SGD([a, b], 0.1))
    step_with_ones(optimizer, a)
    assert b.item() == 1.0
    b.requires_grad_(True)
    step_with_ones(optimizer, a, b)
    assert b.item() == 0.89990234375
    assert optimizer.state[b]["master"].item() == pytest.approx(0.9)


@pytest.mark.parametrize(("gradient", "wanted"), [(0.0, 1.0), (1e-4, 0.999), (1.0, 0.999)])
@pytest.mark.parametrize("fused", [False, True])
def test_MP_25_adam_computes_in_fp32(param, gradient, wanted, fused):
    p = param([1.0], torch.half)
    optimizer = MasterWeights(Adam([p], lr=1e-3, fused=fused))
    p.grad = torch.tensor([gradient]).half()
    optimizer.step()
    assert p.item() == torch.tensor(wanted).half().item()
    assert optimizer.state[p]["master"].item() == pytest.approx(wanted, abs=1e-6)
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32


def test_MP_56_every_state_keeps_value_and_dtype(param):
    p = param([1.0], torch.half)
    optimizer = MasterWeights(Adam([p]))
    optimizer.state[p] = {
        "master": torch.tensor([1.00001]),
        "step": torch.tensor(1.0),
        "exp_avg": torch.tensor([1e-9]),
        "exp_avg_sq": torch.tensor([1e-9]),
    }
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = param([1.0], torch.half)
    resumed = MasterWeights(Adam([fresh]))
    resumed.load_state_dict(saved)
    for name, value in optimizer.state[p].items():
        assert resumed.state[fresh][name].dtype == value.dtype == torch.float32
        assert torch.equal(resumed.state[fresh][name], value), name


def test_MP_56_a_checkpoint_with_fp16_moments_warns(param):
    p = param([1.0], torch.half)
    plain = Adam([p])
    p.grad = torch.ones_like(p)
    plain.step()
    optimizer = MasterWeights(Adam([nn.Parameter(torch.ones(1).half())]))
    with pytest.warns(PrecisionWarning, match="kept in 16 bits"):
        optimizer.load_state_dict(plain.state_dict())
