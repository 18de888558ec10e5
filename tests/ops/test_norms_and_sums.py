"""layer_norm, rms_norm, normalize, norm, sum, mean: limits of formats, shapes, dtypes, derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep import ops
from halfstep.errors import ArgumentError
from halfstep.formats import BF16, FP16

HALVES = [torch.float16, torch.bfloat16]
every_half = pytest.mark.parametrize("dtype", HALVES)


def halves(dtype):
    """Every finite number of a format."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return every[every.isfinite()]


@every_half
@pytest.mark.parametrize("w_dtype", [None, torch.float32, "same"])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_layer_norm_and_its_weights_gradients(dtype, w_dtype, is_shifted):
    x = torch.randn(5, 3, 4, 6).to(dtype).requires_grad_()
    w_dtype = dtype if w_dtype == "same" else w_dtype
    w = None if w_dtype is None else (1 + 0.1 * torch.randn(4, 6)).to(w_dtype).requires_grad_()
    b = torch.randn(4, 6).to(w_dtype or dtype).requires_grad_() if is_shifted else None
    tensors = [t for t in (x, w, b) if t is not None]
    y = ops.layer_norm(x, (4, 6), w, b)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = F.layer_norm(wide[0], (4, 6), wide[1], wide[2])
    g = torch.randn(y.shape).to(dtype)
    found = torch.autograd.grad(y, tensors, g)
    true = torch.autograd.grad(exact, [t for t in wide if t is not None], g.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=eps)
    for ours, theirs, tensor in zip(found, true, tensors, strict=True):
        assert ours.dtype == tensor.dtype
        limit = eps if ours.dtype == dtype else 1e-5  # fp32 weights get fp32 gradients
        torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit * theirs.abs().max().item())


@every_half
def test_gradients_of_weights_are_added_up_in_fp32(dtype):
    """8192 rows of ones: torch 2.13 on the CPU gives 256 in bf16 and 2048 in fp16, with fp32 weights too."""
    x = torch.randn(8192, 64).to(dtype)
    w, b = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    ops.layer_norm(x, 64, w, b).backward(torch.ones(8192, 64, dtype=dtype))
    assert (b.grad == 8192).all()
    torchs = torch.zeros(64, requires_grad=True)
    F.layer_norm(x, (64,), torch.ones(64), torchs).backward(torch.ones(8192, 64, dtype=dtype))
    assert (torchs.grad < 8192).all()  # if this goes red, torch was mended


@every_half
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-12])
def test_constant_rows_have_finite_gradients(dtype, eps):
    """torch with 16-bit weights: rstd = 1e6 is inf in fp16, and 0 * inf is NaN in backward."""
    for function in (ops.layer_norm, ops.rms_norm):
        for value in (0.0, 3.0):
            x = torch.full((2, 16), value, dtype=dtype, requires_grad=True)
            w = torch.ones(16, dtype=dtype, requires_grad=True)
            y = function(x, 16, w, eps=eps)
            y.sum().backward()
            assert y.isfinite().all()
            assert x.grad.isfinite().all() or (value == 0.0 and eps < 1e-9 and dtype == torch.float16)
            assert w.grad.isfinite().all()


@every_half
def test_normalize_and_rms_norm_of_every_number(dtype):
    """Exhaustive: a row of one number becomes its sign; zero stays zero."""
    x = halves(dtype).unsqueeze(-1)
    assert torch.equal(ops.normalize(x, eps=1e-45), x.sign())
    size = x.double().abs()
    exact = x.double() / (size.square() + 1e-7).sqrt()
    error = (ops.rms_norm(x, 1, eps=1e-7).double() - exact).abs()
    fmt = FP16 if dtype == torch.float16 else BF16
    assert (error <= 0.51 * fmt.ulp(exact)).all()


@every_half
def test_norm_of_every_number_is_its_magnitude(dtype):
    x = halves(dtype)
    torch.testing.assert_close(ops.norm(x.unsqueeze(-1), -1), x.float().abs(), rtol=2e-7, atol=0)
    assert ops.norm(torch.stack((x, x)), 0).dtype == torch.float32


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (-1, 0, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_are_torchs_in_fp64(dtype, dim, keepdim):
    x = (torch.randn(4, 5, 6) * 10).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    for ours, theirs in (
        (ops.sum, torch.sum),
        (ops.mean, torch.mean),
        (ops.norm, lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)),
    ):
        found, exact = ours(x, dim, keepdim=keepdim), theirs(wide, dim=dim, keepdim=keepdim)
        assert found.dtype == (torch.float32 if dtype in HALVES else dtype)
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-5)
        (g,), (h,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(exact.sum(), wide)
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), h, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-7)


def test_what_fp16_cannot_hold():
    assert ops.norm(torch.full((1_000_000,), 100.0).half()).item() == pytest.approx(1e5, rel=1e-6)
    assert ops.norm(torch.full((100,), 60_000.0).half()).item() == pytest.approx(6e5, rel=1e-6)
    tiny = torch.full((4,), FP16.smallest_subnormal).half().requires_grad_()
    n = ops.norm(tiny)
    n.backward()
    assert n.item() == 2 * FP16.smallest_subnormal
    assert tiny.grad.tolist() == [0.5] * 4
    assert ops.sum(torch.ones(512, 512).half()).item() == 262_144
    assert ops.mean(torch.full((512, 512), 3.0).half()).item() == 3.0


@given(st.floats(2.0**-126, 1e37), st.integers(1, 300_000))
@settings(max_examples=25, deadline=None)
def test_norms_of_any_size_and_number(value, count):
    """Pieces and their joining: more elements than one piece holds, sizes whose squares fp32 cannot."""
    x = torch.full((count,), value).bfloat16()
    exact = x[0].double().item() * math.sqrt(count)
    expected = math.inf if exact > torch.finfo(torch.float32).max else pytest.approx(exact, rel=1e-5)
    assert ops.norm(x).item() == expected
    assert ops.norm(x.float()).item() == expected


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_nan_and_infinity_are_never_hidden(dtype):
    for bad, expected in ((math.nan, math.nan), (math.inf, math.inf), (-math.inf, math.inf)):
        x = torch.ones(3, 4, dtype=dtype)
        x[1, 2] = bad
        for dim in (None, -1):
            n = ops.norm(x, dim)
            n = n if dim is None else n[1]
            assert n.isnan() if math.isnan(expected) else n == math.inf
        assert not ops.sum(x).isfinite()
        assert ops.layer_norm(x, 4)[1].isnan().all()
        assert ops.rms_norm(x, 4)[1].isnan().any()
        assert ops.normalize(x)[1].isnan().any()
        for function in (ops.layer_norm, ops.rms_norm):
            assert function(x, 4)[0].isfinite().all()


def test_a_zero_norm_has_gradient_zero():
    for dtype in (*HALVES, torch.float32):
        x = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        for y in (ops.norm(x), ops.norm(x, -1).sum(), ops.normalize(x).sum()):
            (g,) = torch.autograd.grad(y, x)
            assert g.isfinite().all()
        assert (torch.autograd.grad(ops.norm(x), x)[0] == 0).all()


def test_derivatives_in_fp64_and_twice():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x, w: ops.layer_norm(x, 5, w, w),
        lambda x, w: ops.rms_norm(x, 5, w, 1e-3),
        lambda x, w: ops.normalize(x * w),
        lambda x, w: ops.norm(x * w, 0),
        lambda x, w: ops.norm(x * w),
        lambda x, w: ops.sum(x * w) + ops.mean(x).square(),
    ):
        assert torch.autograd.gradcheck(function, (x, w))
        assert torch.autograd.gradgradcheck(function, (x, w))


@every_half
@pytest.mark.parametrize(
    ("ours", "exact"),
    [
        (lambda x: ops.rms_norm(x, 5, eps=1e-3), lambda x: F.rms_norm(x, (5,), eps=1e-3)),
        (lambda x: ops.layer_norm(x, 5), lambda x: F.layer_norm(x, (5,))),
        (ops.normalize, lambda x: F.normalize(x, dim=-1)),
        (ops.norm, torch.linalg.vector_norm),
    ],
)
def test_second_derivatives_in_16_bits(dtype, ours, exact):
    def second(x, function):
        (g,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.to(torch.float64).square().sum(), x)[0].double()

    x = torch.randn(4, 5).to(dtype).requires_grad_()
    found, true = second(x, ours), second(x.detach().double().requires_grad_(), exact)
    assert (found - true).abs().max() <= 16 * torch.finfo(dtype).eps * true.abs().max()


def test_total_has_a_second_derivative():
    x = torch.randn(8).bfloat16().requires_grad_()
    (g,) = torch.autograd.grad(ops.sum(x * x), x, create_graph=True)
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [2.0] * 8


def test_empty_tensors():
    for dtype in (torch.float16, torch.float32):
        assert ops.sum(torch.zeros(0, dtype=dtype)).item() == 0.0
        assert ops.norm(torch.zeros(0, 3, dtype=dtype), -1).shape == (0,)
        assert ops.normalize(torch.zeros(0, 3, dtype=dtype)).shape == (0, 3)
        assert ops.rms_norm(torch.zeros(0, 3, dtype=dtype), 3).shape == (0, 3)
        assert ops.layer_norm(torch.zeros(0, 3, dtype=dtype), 3).shape == (0, 3)
    with pytest.raises(ArgumentError, match=r"norm of a tensor of shape \(3, 0\) over dim=-1[\s\S]*no elements"):
        ops.norm(torch.zeros(3, 0), -1)
    with pytest.raises(ArgumentError, match=r"mean of a tensor of shape \(0,\)[\s\S]*no elements to average"):
        ops.mean(torch.zeros(0))
    with pytest.raises(ArgumentError, match="not empty"):
        ops.layer_norm(torch.zeros(3, 0), 0)


def test_bad_input():
    for function in (ops.sum, ops.mean, ops.norm, ops.normalize):
        with pytest.raises(ArgumentError, match=rf"{function.__name__} of x with dtype torch.int64"):
            function(torch.arange(3))
    for function in (ops.layer_norm, ops.rms_norm):
        with pytest.raises(ArgumentError, match=r"normalized_shape=\(4,\)[\s\S]*input has shape \(2, 3\)"):
            function(torch.zeros(2, 3), 4)
        with pytest.raises(ArgumentError, match=r"weight of shape \(2,\)"):
            function(torch.zeros(2, 3), 3, torch.ones(2))
        with pytest.raises(ArgumentError, match=r"dtype torch\.int64"):
            function(torch.arange(3), 3)


@every_half
def test_a_row_has_the_same_norm_in_any_company(dtype):
    """Rows outside the comfortable range are taken again; the others stay, bit for bit."""
    x = torch.randn(16, 300).to(dtype)
    strange = x.clone()
    strange[::3] = 0.0
    strange[1::3] = torch.finfo(dtype).max
    rest = [2, 5, 8, 11, 14]
    for function in (lambda x: ops.norm(x, -1), lambda x: ops.norm(x, -1) * 0 + ops.norm(x[:, 7:], -1)):
        assert torch.equal(function(x)[rest], function(strange)[rest])
    assert (ops.norm(strange, -1)[::3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_beyond_fp32_still_has_a_gradient(dtype):
    x = torch.full((2, 4), torch.finfo(dtype).max, dtype=dtype)
    x[1] = 1.0
    x.requires_grad_()
    n = ops.norm(x, -1)
    assert n.tolist() == [math.inf, 2.0]
    assert torch.autograd.grad(n, x, torch.ones(2))[0].tolist() == [[0.5] * 4] * 2
    assert ops.normalize(x).tolist() == [[0.5] * 4] * 2


@every_half
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_of_many_pieces(dtype, dim, keepdim, monkeypatch):
    monkeypatch.setattr("halfstep.ops.reductions._PIECE", 70)
    x = (torch.randn(7, 5, 6) * 10).to(dtype).requires_grad_()
    y = ops.sum(x, dim, keepdim=keepdim)
    exact = torch.sum(x.double(), dim=dim, keepdim=keepdim)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-5)
    g = torch.arange(float(y.numel())).view(y.shape)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(exact, x, g.double())[0])
