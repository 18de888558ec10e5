"""Sinusoidal and rotary embeddings: positions and angles in fp32, one rounding at the end."""

import math

import pytest
import torch

from halfstep import ops
from halfstep.errors import ArgumentError

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinusoidal_values_and_layout(dtype):
    e = ops.sinusoidal_embedding(torch.tensor([0, 1, 3]), 4, base=100.0, dtype=dtype)
    rows = [[math.sin(p), math.sin(p / 10), math.cos(p), math.cos(p / 10)] for p in (0, 1, 3)]
    assert e.dtype == dtype
    assert torch.equal(e, torch.tensor(rows, dtype=torch.float64).to(dtype)) or dtype == torch.float32
    torch.testing.assert_close(e.double(), torch.tensor(rows, dtype=torch.float64), rtol=0, atol=torch.finfo(dtype).eps)


def test_fractions_of_timesteps_count():
    e = ops.sinusoidal_embedding(torch.tensor([999.0, 999.25]), 64)
    assert (e[0] - e[1]).abs().max() > 0.2
    assert ops.sinusoidal_embedding(torch.zeros(2, 3), 8).shape == (2, 3, 8)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_that_of_complex_numbers(dtype, interleaved):
    x = torch.randn(2, 3, 50, 8).to(dtype).requires_grad_()
    cos, sin = ops.rotary_embedding(torch.arange(50), 8)
    y = ops.apply_rotary(x, cos, sin, interleaved=interleaved)
    d = x.detach().double().requires_grad_()
    a, b = (d[..., ::2], d[..., 1::2]) if interleaved else d.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones(50, 4).double(), torch.atan2(sin.double(), cos.double()))
    exact = (
        torch.stack((turned.real, turned.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((turned.real, turned.imag), -1)
    )
    g = torch.randn(y.shape).to(dtype)
    limit = torch.finfo(dtype).eps * 4
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=limit)
    (found,), (true,) = torch.autograd.grad(y, x, g), torch.autograd.grad(exact, d, g.double())
    torch.testing.assert_close(found.double(), true, rtol=0, atol=limit)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("angles_shape", [(5, 4), (1, 5, 4), (3, 1, 1, 4), (1, 2, 5, 4), (3, 2, 5, 4), (1, 4)])
@pytest.mark.parametrize("size", [2**18, 80, 24, 1])  # everything, one of a batch, some rows, one row
def test_pieces_of_a_rotation_are_the_whole(dtype, interleaved, angles_shape, size, monkeypatch):
    monkeypatch.setattr("halfstep.ops.chunks._HOST_ELEMENTS", size)
    x = torch.randn(5, 2, 3, 8).transpose(0, 2).to(dtype).requires_grad_()  # [3, 2, 5, 8], not contiguous
    angles = torch.randn(angles_shape)
    cos, sin = angles.cos(), angles.sin()
    y = ops.apply_rotary(x, cos, sin, interleaved=interleaved)
    exact = ops.apply_rotary(x.float(), cos, sin, interleaved=interleaved)
    g = torch.randn(y.shape).to(dtype)
    limit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), exact, rtol=limit, atol=limit)
    assert y.is_contiguous()
    (found,), (true,) = torch.autograd.grad(y, x, g, create_graph=True), torch.autograd.grad(exact, x, g.float())
    torch.testing.assert_close(found, true, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rotation_has_second_derivatives_and_its_angles_first_ones(dtype):
    x = torch.randn(3, 8).to(dtype).requires_grad_()
    cos, sin = ops.rotary_embedding(torch.arange(3), 8)
    (g,) = torch.autograd.grad(ops.apply_rotary(x, cos, sin).float().pow(2).sum(), x, create_graph=True)
    assert torch.allclose(torch.autograd.grad(g.float().sum(), x)[0].float(), torch.full((3, 8), 2.0), rtol=0.03)
    cos.requires_grad_()
    ops.apply_rotary(x, cos, sin).float().sum().backward()
    torch.testing.assert_close(cos.grad, x.detach()[:, :4].float() + x.detach()[:, 4:].float())


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(64).half(), torch.randn(64).half()
    cos, sin = ops.rotary_embedding(torch.tensor([5, 9, 4000, 4004]), 64)
    turned_q, turned_k = ops.apply_rotary(q.expand(4, 64), cos, sin), ops.apply_rotary(k.expand(4, 64), cos, sin)
    near, far = turned_q[0].double() @ turned_k[1].double(), turned_q[2].double() @ turned_k[3].double()
    assert near.item() == pytest.approx(far.item(), abs=0.05)


def test_rotary_passes_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in ops.rotary_embedding(torch.arange(3), 4))
    assert torch.autograd.gradcheck(lambda x: ops.apply_rotary(x, cos, sin), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.apply_rotary(x, cos, sin), x)


def test_bad_input():
    for dtype, limit in ((torch.float16, 2048), (torch.bfloat16, 256)):
        with pytest.raises(ArgumentError, match=rf"integers exactly only up to {limit}[\s\S]*no later cast tells them"):
            ops.rotary_embedding(torch.arange(4).to(dtype), 8)
    for size, base in ((7, 10.0), (0, 10.0), (8, 0.0)):
        with pytest.raises(ArgumentError, match=f"an embedding of size {size} with base"):
            ops.sinusoidal_embedding(torch.arange(4), size, base=base)
    with pytest.raises(ArgumentError, match=r"fix: .*rotary_embedding\(positions, 8\)"):
        ops.apply_rotary(torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3, 8))
