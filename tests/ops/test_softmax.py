"""softmax, log_softmax, mask_value, attention: masks, limits, and what torch's kernels are called for."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep import ops
from halfstep.errors import ArgumentError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
both = pytest.mark.parametrize("function", [ops.softmax, ops.log_softmax])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@both
@every_dtype
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_fully_masked_row_gives_zeros_and_zero_gradients(function, dtype, dim):
    x = torch.randn(4, 3, 5).to(dtype).movedim(-1, dim).contiguous()
    x.movedim(dim, -1)[1, 2] = -math.inf
    x.movedim(dim, -1)[0, 0, 1:3] = -math.inf
    x.requires_grad_()
    y = function(x, dim)
    (g,) = torch.autograd.grad(y, x, torch.randn(y.shape).to(dtype))
    torchs = {ops.softmax: F.softmax, ops.log_softmax: F.log_softmax}[function](x.detach().double(), dim)
    is_dead = torchs.isnan()
    assert is_dead.any()
    assert (y[is_dead] == 0).all()
    assert (g[is_dead] == 0).all()
    assert g.isfinite().all()
    assert y.dtype == g.dtype == dtype
    torch.testing.assert_close(y[~is_dead].double(), torchs[~is_dead], rtol=4e-3, atol=1e-6)


@both
@every_dtype
def test_a_mask_is_the_same_as_minus_infinity(function, dtype):
    x, keep = torch.randn(6, 7).to(dtype), torch.rand(6, 7) < 0.5
    keep[2] = False
    keep[3] = True
    assert torch.equal(function(x, mask=keep), function(x.masked_fill(~keep, -math.inf)))
    assert torch.equal(function(x, mask=keep[3]), function(x))


@both
@every_dtype
def test_nan_and_infinity_are_never_hidden(function, dtype):
    rows = [[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0], [-math.inf, math.nan, -math.inf], [0.0, 0.0, 0.0]]
    y = function(torch.tensor(rows, dtype=dtype))
    assert y[:3].isnan().all()
    assert y[3].isfinite().all()


@both
def test_every_half_beside_a_zero(function):
    """Exhaustive: all 65 536 numbers of both formats, in rows of two."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        x = torch.stack((every, torch.zeros_like(every)), dim=-1)
        exact = {ops.softmax: torch.softmax, ops.log_softmax: torch.log_softmax}[function](x.double(), -1)
        found = function(x).double()
        assert torch.equal(found.isnan(), exact.isnan())
        limits = torch.finfo(dtype)
        error = (found - exact).abs()
        if function is ops.softmax:  # half a spacing, or fp32's own rounding
            assert (error <= exact.clamp(min=limits.tiny) * limits.eps * 0.51)[~exact.isnan()].all()
        else:
            is_inside = exact.isfinite()
            size = exact.abs().amax(-1, keepdim=True).expand_as(exact)
            assert (error <= size.clamp(min=limits.tiny) * limits.eps * 0.51)[is_inside].all()


def test_log_softmax_of_a_large_vocabulary_in_fp16():
    """torch 2.13 holds the sum of exponentials in fp16 on the CPU: from 65 505 equal scores on it is inf."""
    x = torch.zeros(2, 70_000, dtype=torch.half)
    assert F.log_softmax(x, -1).isinf().all()
    assert ops.log_softmax(x)[0, 0].item() == pytest.approx(-math.log(70_000), abs=2**-8)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([torch.float16, torch.bfloat16]), st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_probabilities_add_up_to_one(rows, columns, dtype, size):
    x = (torch.randn(rows, columns) * size).to(dtype)
    x[torch.rand(rows, columns) < 0.3] = -math.inf
    total = ops.softmax(x).double().sum(-1)
    is_dead = (x == -math.inf).all(-1)
    assert (total[is_dead] == 0).all()
    assert ((total - 1).abs() <= columns * torch.finfo(dtype).eps)[~is_dead].all()


@both
def test_empty_and_scalar_tensors_are_as_in_torch(function):
    assert function(torch.zeros(0, 3).half()).shape == (0, 3)
    assert function(torch.zeros(3, 0).half()).shape == (3, 0)
    assert function(torch.tensor(2.0).half(), 0).item() in (0.0, 1.0)


@both
def test_derivatives_in_fp64_and_twice(function):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(3, 5) < 0.7
    keep[1] = False
    assert torch.autograd.gradcheck(lambda x: function(x, mask=keep).masked_fill(~keep, 0.0), x)
    assert torch.autograd.gradgradcheck(lambda x: function(x, mask=keep).masked_fill(~keep, 0.0), x)


def test_log_softmax_has_a_second_derivative_in_16_bits():
    x = torch.randn(3, 5).bfloat16().requires_grad_()
    (g,) = torch.autograd.grad(ops.log_softmax(x)[:, 0].sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.float().square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (g,) = torch.autograd.grad(F.log_softmax(wide, -1)[:, 0].sum(), wide, create_graph=True)
    (exact,) = torch.autograd.grad(g.square().sum(), wide)
    torch.testing.assert_close(h.double(), exact, rtol=0.02, atol=0.01)


def test_vmap_and_fake_tensors_take_the_path_without_a_look():
    x = torch.randn(4, 3, 5)
    x[1, 2] = -math.inf
    assert torch.equal(torch.vmap(ops.softmax)(x), ops.softmax(x))
    from torch._subclasses.fake_tensor import FakeTensorMode  # public enough: torch's own tutorials use it

    with FakeTensorMode():
        assert ops.softmax(torch.empty(3, 5).half()).shape == (3, 5)


@both
def test_bad_input(function):
    name = function.__name__
    with pytest.raises(ArgumentError, match=f"{name} of x with dtype torch.int64[\\s\\S]*fix: .*float"):
        function(torch.arange(3))
    with pytest.raises(ArgumentError, match=r"mask of dtype torch.float32[\s\S]*mask == 0 if 1 means drop"):
        function(torch.zeros(2, 3), mask=torch.ones(2, 3))
    with pytest.raises(ArgumentError, match=r"mask of shape \(3, 2\)[\s\S]*the scores have shape \(2, 3\)"):
        function(torch.zeros(2, 3), mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="cannot be broadcast"):
        function(torch.zeros(3), mask=torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mask_value_can_be_added_twice_and_is_zero_after_exp(dtype):
    value = ops.mask_value(dtype)
    m = torch.tensor(value, dtype=dtype)
    assert m.item() == value
    assert (m + m).isfinite()
    assert torch.softmax(torch.tensor([value, 0.0], dtype=dtype), -1).tolist() == [0.0, 1.0]
    with pytest.raises(ArgumentError, match="float format 'fp12'"):
        ops.mask_value("fp12")


# -- attention -------------------------------------------------------------------------------------------------------


def by_hand(q, k, v, mask=None, is_causal=False):
    """fp64, with zeros for rows that attend to nothing."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def heads(dtype, size=1.0, length=6, num_keys=6):
    return [
        (torch.randn(2, 3, n, 8) * factor).to(dtype).requires_grad_()
        for n, factor in ((length, size), (num_keys, size), (num_keys, 1.0))
    ]


@every_dtype
@pytest.mark.parametrize("kind", ["none", "boolean", "minus infinity", "bias"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_every_mask(dtype, kind, is_causal):
    q, k, v = heads(dtype)
    keep = torch.rand(2, 1, 6, 6) < 0.6
    keep[0, 0, 3] = False
    mask = {
        "none": None,
        "boolean": keep,
        "minus infinity": torch.zeros(2, 1, 6, 6).masked_fill(~keep, -math.inf),
        "bias": torch.randn(6, 6),
    }[kind]
    y = ops.attention(q, k, v, mask=mask, is_causal=is_causal)
    gradients = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    exact = by_hand(q, k, v, mask, is_causal)
    assert y.dtype == dtype
    assert all(g.isfinite().all() for g in gradients)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)
    if kind in ("boolean", "minus infinity"):
        assert (y[0, :, 3] == 0).all()
        assert (gradients[0][0, :, 3] == 0).all()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_scales_before_the_product(backend):
    """q k^T is about 720 000 here, beyond fp16's 65 504, before it is divided by sqrt(64)."""
    q, k, v = (torch.randn(1, 2, 16, 64).half() for _ in range(3))
    q, k = (q * 300).clamp(-1000, 1000), (k * 300).clamp(-1000, 1000)
    assert (q @ k.mT).isinf().any()
    with sdpa_kernel(backend):
        y = ops.attention(q, k, v)
    torch.testing.assert_close(y.double(), by_hand(q, k, v), rtol=0, atol=2**-9)


def test_attention_follows_autocast_and_takes_other_shapes():
    q, k, v = heads(torch.float32, length=3, num_keys=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.attention(q, k, v.to(torch.bfloat16), mask=torch.zeros(3, 9)).dtype == torch.bfloat16
    assert ops.attention(q, k, v).shape == (2, 3, 3, 8)


def test_attention_propagates_nan():
    q, k, v = heads(torch.float16)
    with torch.no_grad():
        v[0, 0, 2, 1] = math.nan
    assert ops.attention(q, k, v)[0, 0, :, 1].isnan().all()


def test_attention_refuses_what_does_not_fit():
    q, k, v = heads(torch.float16)
    with pytest.raises(ArgumentError, match=r"mask of dtype torch.int32"):
        ops.attention(q, k, v, mask=torch.ones(6, 6, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"mask of shape \(5, 6\)[\s\S]*scores have shape \(2, 3, 6, 6\)"):
        ops.attention(q, k, v, mask=torch.ones(5, 6, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"mask of shape \(5, 6\)"):
        ops.attention(q, k, v, mask=torch.ones(5, 6))
    with pytest.raises(ArgumentError, match=r"torch.float16 queries, torch.float32 keys"):
        ops.attention(q, k.float(), v)
    with pytest.raises(ArgumentError, match="which tensors were transposed"):
        ops.attention(q, k.mT, v)
    with pytest.raises(ArgumentError, match=r"it needs \[\.\.\., length, size\]"):
        ops.attention(q[0, 0, 0], k, v)
    with pytest.raises(ArgumentError, match="attention of query with dtype"):
        ops.attention(q.int(), k, v)
