"""The one rounding: every bf16 and fp16 value, every tie, against a closed form on integers."""

import pytest
import torch

from halfstep.formats import FP16
from halfstep.kernels.rounding import adopt, round_into, rounded


def around_every_bf16():
    """For each of the 2**16 patterns the fp32 values at and around it, at and around the middle to the next."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64).view(-1, 1) << 16
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF], dtype=torch.int64)
    return (high + low).to(torch.int32).view(-1).view(torch.float32)


def test_bf16_is_half_away_from_zero_for_every_pattern():
    x = around_every_bf16()
    finite = x[x.isfinite()]
    bits = finite.view(torch.int32).to(torch.int64)
    wanted = (bits + 0x8000) >> 16  # DESIGN 7
    is_inf = (wanted & 0x7FFF) == 0x7F80
    wanted = torch.where(is_inf, wanted - 1, wanted)  # saturates
    found = rounded(finite, torch.bfloat16).view(torch.int16).to(torch.int64)
    assert torch.equal(found, wanted)
    residual = bits - (found << 16)
    assert residual[~is_inf].min() >= -(2**15)
    assert residual[~is_inf].max() < 2**15
    assert (found != finite.bfloat16().view(torch.int16)).any(), "some tie must differ from torch's cast"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_saturate_and_nan_stays(dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    weight = torch.empty(5, dtype=dtype)
    assert round_into(weight, x).item() == 2
    largest = torch.finfo(dtype).max
    assert weight[:2].tolist() == [largest, -largest]
    assert weight[2].isnan()
    assert torch.equal(weight[3:].view(torch.int16), torch.tensor([0, -(2**15)], dtype=torch.int16))


def test_fp16_is_torchs_cast_wherever_that_is_finite():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.isfinite()]
    x = torch.cat([x, x + torch.roll(x, 1), x * 1.0001, (x + x.nextafter(x + 1)) / 2])
    x = x[x.abs() <= FP16.largest]
    assert torch.equal(rounded(x, torch.float16).view(torch.int16), x.half().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_the_hosts_shortcut_the_bits_are_the_same(dtype, monkeypatch):
    x = torch.cat([around_every_bf16(), torch.randn(1000)])
    x = x[~x.isnan()]
    wanted = rounded(x, dtype)
    monkeypatch.setattr("halfstep.kernels.rounding.is_host", lambda device: False)
    weight = torch.empty_like(x, dtype=dtype)
    count = round_into(weight, x, torch.empty_like(x))
    assert torch.equal(weight.view(torch.int16), wanted.view(torch.int16))
    assert count.item() == (x.abs() > torch.finfo(dtype).max).sum().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_host", [True, False])
def test_adopt_takes_over_what_differs_and_nothing_else(dtype, on_host, monkeypatch):
    master = torch.randn(1000)
    weight, before = rounded(master, dtype), master.clone()
    monkeypatch.setattr("halfstep.kernels.rounding.is_host", lambda device: on_host)
    assert int(adopt(master, weight) or 0) == 0
    assert torch.equal(master, before)
    weight[7] = -weight[7]
    assert adopt(master, weight).item() == 1
    assert master[7].item() == weight[7].item()
    before[7] = master[7]
    assert torch.equal(master, before)


def test_nothing_to_round():
    assert round_into(torch.empty(0, 3, dtype=torch.float16), torch.empty(0, 3)) is None
    scalar = torch.empty((), dtype=torch.bfloat16)
    round_into(scalar, torch.tensor(1.5))
    assert scalar.item() == 1.5
