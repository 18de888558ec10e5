"""MP-06: a finite fp16 gradient has norm inf when it is added up in fp16, and clipping by that norm zeroes it."""

import math

import pytest
import torch
from torch import nn

from halfstep.kernels.inspect import inspect

CPU = torch.device("cpu")


def norm_of(*gradients):
    return inspect(list(gradients)).total_norm(CPU)


def test_MP_06_the_reported_norms_are_right():
    assert norm_of(torch.full((1_000_000,), 100.0, dtype=torch.half)).item() == pytest.approx(1e5, rel=1e-6)
    assert norm_of(torch.tensor([300.0]).half()).item() == 300.0
    assert norm_of(torch.tensor([300.0]).half()).dtype in (torch.float32, torch.float64)


def test_MP_06_the_norm_clips_to_what_was_asked():
    """The whole recipe: measure in fp32, scale the gradient, and find 1e-3 in every element, not 0."""
    p = nn.Parameter(torch.zeros(1_000_000, dtype=torch.half))
    p.grad = torch.full_like(p, 100.0)
    p.grad.mul_((1.0 / norm_of(p.grad)).clamp(max=1.0).float())
    assert torch.equal(p.grad, torch.full_like(p, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1.0, 255.0, 300.0, 60000.0, 1e-4])
def test_MP_06_finite_gradients_have_a_finite_right_norm(dtype, magnitude):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (17, 5), (4, 4, 4), (1,), (70_000,)]
    gradients = [(torch.randn(s, generator=generator).clamp(-1, 1) * magnitude).to(dtype) for s in shapes]
    expected = math.sqrt(sum((g.double() ** 2).sum().item() for g in gradients))
    # fp32 adds 2**13 squares in a lane of a block: half of 2**-14 on the norm, which is what inspect promises
    assert norm_of(*gradients).item() == pytest.approx(expected, rel=2.0**-15)


@pytest.mark.parametrize("value", [3e19, 1e-24, 3e38, 1e-44])
def test_MP_06_squares_beyond_fp32_are_no_overflow_and_do_not_vanish(value):
    gradient = torch.full((100,), value)
    found = inspect([gradient])
    assert found.faults() == {}
    assert found.total_norm(CPU).item() == pytest.approx(gradient[0].double().item() * 10, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_MP_06_a_gradient_that_is_not_finite_is_still_seen(bad):
    gradients = [torch.full((1000,), 300.0).half(), torch.full((1000,), 300.0).half()]
    gradients[1][500] = bad
    assert list(inspect(gradients).faults()) == [1]


@pytest.mark.parametrize("make_optimizer", [
    lambda ps: torch.optim.SGD(ps, 2.0**-10),
    lambda ps: torch.optim.SGD(ps, 2.0**-10, momentum=0.9),
    lambda ps: torch.optim.SGD(ps, 2.0**-10, fused=True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_MP_06_a_large_norm_of_finite_gradients_never_skips_a_step(make_scaler, make_optimizer, dtype):
    """A gradient of 300 in each of 100 000 elements: its norm, 94868, is beyond fp16's largest value."""
    p = nn.Parameter(torch.zeros(100_000, dtype=dtype))
    optimizer, scaler = make_optimizer([p]), make_scaler(init_scale=1.0)
    scaler.scale((p.float() * 300.0).sum()).backward()
    assert norm_of(p.grad) > 65504
    scaler.step(optimizer)
    assert scaler.was_step_applied(optimizer)
    scaler.update()
    assert torch.equal(p.detach(), torch.full_like(p, -300.0 * 2.0**-10))
    assert scaler.get_scale() == 1.0
