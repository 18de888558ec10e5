"""MP-18: an average kept in 16 bits stands still, because a step moves it by less than half of its ulp."""

import pytest
import torch
from torch import nn

from halfstep.training.ema import EMA


class Weights(nn.Module):
    """A weight of a given dtype, and the counter and statistics that BatchNorm keeps."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        self.norm = nn.BatchNorm1d(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.999, 0.9999])
def test_MP_18_the_average_follows_whatever_the_models_dtype(dtype, decay):
    model = Weights(dtype)
    ema = EMA(model, decay=decay)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(1000):
        ema.update()
    average = ema.state_dict()["averages"]["weight"]
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(2 - decay**1000, abs=1e-4)  # 1.6323 and 1.0952


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_MP_18_it_is_rounded_only_where_it_is_exported(dtype):
    model = Weights(dtype)
    ema = EMA(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(1000):
        with ema.swapped():  # rounding the average here, every time, would make it stand still
            assert model.weight.dtype == dtype
        ema.update()
    with ema.swapped():
        assert model.weight.item() == pytest.approx(
            2 - 0.999**1000, rel=2.0 ** (-8 if dtype == torch.bfloat16 else -11)
        )
    assert model.weight.item() == 2.0


def test_MP_18_integer_buffers_are_copied_and_not_averaged():
    model = Weights(torch.float32)
    ema = EMA(model, decay=0.999)
    for _ in range(7):
        model.norm(torch.randn(4, 1))
    ema.update()
    counter = ema.state_dict()["buffers"]["norm.num_batches_tracked"]
    assert (counter.dtype, counter.item()) == (torch.int64, 7)
    assert torch.equal(ema.state_dict()["buffers"]["norm.running_var"], model.norm.running_var)


def test_MP_18_a_skipped_step_does_not_move_it():
    model = Weights(torch.bfloat16)
    ema = EMA(model, decay=0.9)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(5):
        model.norm(torch.full((2, 1), float("inf")))
        ema.update(found_inf=torch.ones(()))
    saved = ema.state_dict()
    assert saved["averages"]["weight"].item() == 1.0
    assert saved["buffers"]["norm.num_batches_tracked"].item() == 0
    assert saved["buffers"]["norm.running_var"].item() == 1.0
    assert saved["num_updates"] == 0
