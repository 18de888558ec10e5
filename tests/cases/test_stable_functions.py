"""MP-22, 27, 29, 44: a fully masked row, a sum over an image, positions in 16 bits, a clamp that does nothing."""

import pytest
import torch
from torch import nn

from halfstep import ops
from halfstep.nn import RotaryEmbedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
@pytest.mark.parametrize("kind", ["mask", "minus infinity"])
def test_MP_22_a_fully_masked_row_poisons_nothing(dtype, kind):
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    v = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    keep = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    p = ops.softmax(x, mask=keep) if kind == "mask" else ops.softmax(x.masked_fill(~keep, float("-inf")))
    y = p @ v
    y[0].sum().backward()
    assert y.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert v.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    assert torch.equal(x.grad, torch.zeros_like(x))


@every_dtype
def test_MP_22_the_same_through_attention(dtype):
    q, k = (torch.zeros(n, 4, dtype=dtype, requires_grad=True) for n in (2, 3))
    v = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    keep = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    y = ops.attention(q, k, v, mask=keep)
    y[0].sum().backward()
    assert y.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert v.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


@every_dtype
def test_MP_27_a_mask_of_512_times_512(dtype):
    a = torch.ones(512 * 512, dtype=dtype, requires_grad=True)
    assert ops.sum(a * a).item() == 262_144
    loss = ops.dice_loss(a, torch.ones(512 * 512, dtype=dtype))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert a.grad.isfinite().all()


def rotated_ones(rotary, dtype):
    return rotary(torch.ones(4096, 32, dtype=dtype), torch.arange(4096))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_MP_29_positions_stay_distinct_after_casting_and_under_autocast(dtype):
    inv = 1 / 10000 ** (torch.arange(0, 32, 2).float() / 32)
    angles = torch.outer(torch.arange(4096.0), inv)
    with torch.autocast("cpu", dtype=dtype):
        cos, sin = ops.rotary_embedding(torch.arange(4096), 32)
        table = ops.sinusoidal_embedding(torch.arange(4096), 32)
    assert (cos - angles.cos()).abs().max() <= 1e-6
    assert (sin - angles.sin()).abs().max() <= 1e-6
    assert (table - torch.cat((angles.sin(), angles.cos()), -1)).abs().max() <= 1e-6
    assert len(torch.cat((cos, sin), -1).unique(dim=0)) == 4096


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_MP_29_casting_the_model_does_not_touch_the_table(dtype):
    model = nn.Sequential(nn.Linear(4, 4), RotaryEmbedding(32))
    exact = rotated_ones(model[1], torch.float32)
    model.to(dtype)
    found = rotated_ones(model[1], dtype)
    assert found.dtype == dtype
    assert torch.equal(found, exact.to(dtype))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@every_dtype
def test_MP_44_a_clamp_that_the_format_can_hold(dtype):
    p = torch.tensor([1.0, 0.5]).to(dtype).requires_grad_()
    y = 1 - torch.exp(torch.log1p(-ops.clamp_probability(p, 1e-6)))
    y.sum().backward()
    assert y.tolist() == pytest.approx([1.0, 0.5], abs=torch.finfo(dtype).eps + 1e-6)
    assert p.grad.tolist() == pytest.approx([0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_MP_44_plain_torch_shows_the_fault(dtype):
    p = torch.tensor([1.0, 0.5]).to(dtype).requires_grad_()
    (1 - torch.exp(torch.log1p(-p.clamp(max=1 - 1e-6)))).sum().backward()
    assert p.grad[0].isnan()
