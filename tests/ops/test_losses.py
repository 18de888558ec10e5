"""cross_entropy, binary_cross_entropy (both), dice_loss, clamp_probability: torch's meaning, and formats' ends."""

import math

import pytest
import torch
import torch.nn.functional as F

from halfstep import ops
from halfstep.errors import ArgumentError

HALVES = [torch.float16, torch.bfloat16]
every_half = pytest.mark.parametrize("dtype", HALVES)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


# -- cross entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (40, 7), (4, 7, 3, 5)])
def test_cross_entropy_is_torchs_in_fp64(dtype, reduction, smoothing, is_weighted, shape):
    x = torch.randn(shape).to(dtype).requires_grad_()
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[::3] = -100
    weight = torch.rand(7) + 0.5 if is_weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss = ops.cross_entropy(x, target, weight=weight, **options)
    wide = x.detach().double().requires_grad_()
    exact = F.cross_entropy(wide, target, weight=None if weight is None else weight.double(), **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    exact.sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-6)
    assert x.grad.dtype == dtype


@every_half
def test_cross_entropy_of_many_pieces_is_that_of_one(dtype, monkeypatch):
    """Rows are cut into pieces; where is not to be seen, bit for bit, shared weights aside."""
    x, target, weight = torch.randn(64, 50).to(dtype), torch.randint(0, 50, (64,)), torch.rand(50)
    found = []
    for size in (2**18, 700, 50):  # all rows, 14 of them, one
        monkeypatch.setattr("halfstep.ops.chunks._HOST_ELEMENTS", size)
        y = x.clone().requires_grad_()
        loss = ops.cross_entropy(y, target, weight=weight, reduction="none", label_smoothing=0.1)
        loss.sum().backward()
        found.append((loss.detach(), y.grad))
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_valid_label_gives_zero_with_zero_gradients(dtype, smoothing):
    x = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf]], dtype=dtype, requires_grad=True)
    ignored = torch.tensor([-100, -100])
    assert F.cross_entropy(torch.zeros(2, 2), ignored).isnan()  # torch: 0/0
    for weight in (None, torch.ones(2)):
        loss = ops.cross_entropy(x, ignored, label_smoothing=smoothing, weight=weight)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(x.grad, torch.zeros_like(x))
    assert ops.cross_entropy(torch.zeros(0, 2, dtype=dtype), ignored[:0]).item() == 0.0
    assert ops.cross_entropy(torch.zeros(2, 2, dtype=dtype), ignored * 0, weight=torch.zeros(2)).item() == 0.0


@every_half
def test_nan_at_a_valid_label_is_not_hidden(dtype):
    x = torch.tensor([[math.nan, 1.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = ops.cross_entropy(x, torch.tensor([0, 1]))
    loss.backward()
    assert loss.isnan()
    assert x.grad[0].isnan().all()
    assert x.grad[1].isfinite().all()


@every_half
def test_cross_entropy_takes_probabilities(dtype):
    x, p = torch.randn(6, 5).to(dtype), torch.softmax(torch.randn(6, 5), -1)
    found, exact = (
        ops.cross_entropy(x, p, label_smoothing=0.1),
        F.cross_entropy(x.double(), p.double(), label_smoothing=0.1),
    )
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)


def test_losses_pass_gradcheck_once_and_twice():
    x, target = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, -100, 2])
    weight = torch.rand(5, dtype=torch.float64)

    def loss(x):
        return ops.cross_entropy(x, target, weight=weight, label_smoothing=0.1)

    assert torch.autograd.gradcheck(loss, x)
    assert torch.autograd.gradgradcheck(loss, x)
    p = (torch.rand(4, 5, dtype=torch.float64) * 0.9 + 0.05).requires_grad_()
    t = torch.rand(4, 5, dtype=torch.float64)
    for function in (ops.binary_cross_entropy, ops.binary_cross_entropy_with_logits, ops.dice_loss):
        assert torch.autograd.gradcheck(lambda p, f=function: f(p, t), p)
        assert torch.autograd.gradgradcheck(lambda p, f=function: f(p, t), p)


@every_half
def test_cross_entropy_has_a_second_derivative_in_16_bits(dtype):
    def second(x, target, loss):
        (g,) = torch.autograd.grad(loss(x, target), x, create_graph=True)
        return torch.autograd.grad(g.to(torch.float64).square().sum(), x)[0].double()

    x, target = torch.randn(6, 5).to(dtype).requires_grad_(), torch.tensor([0, 4, -100, 2, 2, 1])
    exact = second(x.detach().double().requires_grad_(), target, F.cross_entropy)
    error = (second(x, target, ops.cross_entropy) - exact).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_cross_entropy_refuses_what_does_not_fit():
    x, target = torch.zeros(2, 3).half(), torch.tensor([0, 1])
    with pytest.raises(ArgumentError, match=r"labels from 0 to 3[\s\S]*3 classes, labelled 0 to 2"):
        ops.cross_entropy(x, torch.tensor([0, 3]))
    with pytest.raises(ArgumentError, match=r"labels from -1 to 0"):
        ops.cross_entropy(x.float(), torch.tensor([0, -1]))
    with pytest.raises(ArgumentError, match=r"int64 of shape \(2,\)[\s\S]*fix: .*target.long"):
        ops.cross_entropy(x, target.int())
    with pytest.raises(ArgumentError, match="cannot be matched"):
        ops.cross_entropy(x, torch.tensor([0, 1, 2]))
    with pytest.raises(ArgumentError, match=r"weight \(2,\)[\s\S]*there are 3 classes"):
        ops.cross_entropy(x, target, weight=torch.ones(2))
    with pytest.raises(ArgumentError, match=r"label_smoothing=1\.5"):
        ops.cross_entropy(x, target, label_smoothing=1.5)
    with pytest.raises(ArgumentError, match="reduction='max'"):
        ops.cross_entropy(x, target, reduction="max")
    with pytest.raises(ArgumentError, match=r"cross_entropy of logits with dtype torch\.int64"):
        ops.cross_entropy(x.long(), target)


# -- binary cross entropy --------------------------------------------------------------------------------------------


@every_half
@pytest.mark.parametrize("t", [0.0, 1.0, 0.3])
def test_binary_cross_entropy_is_finite_for_every_probability(dtype, t):
    """Exhaustive: every number of the format in [0, 1]."""
    every = torch.arange(2**15, dtype=torch.int16).view(dtype)
    p = every[every <= 1].clone().requires_grad_()
    loss = ops.binary_cross_entropy(p, torch.full_like(p, t, dtype=torch.float32), reduction="none")
    loss.sum().backward()
    assert loss.isfinite().all()
    assert p.grad.isfinite().all()
    exact = -(t * p.double().log() + (1 - t) * torch.log1p(-p.double())) if t == 0.3 else None
    if exact is not None:
        low, high = ops.probability.probability_bounds(dtype)
        is_inside = (p >= low) & (p <= high)
        torch.testing.assert_close(loss[is_inside].double(), exact[is_inside], rtol=1e-5, atol=1e-7)


@every_half
def test_a_confident_error_is_still_corrected(dtype):
    p = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype, requires_grad=True)
    loss = ops.binary_cross_entropy(p, torch.tensor([0.0, 1.0, 1.0, 0.0]), reduction="none")
    loss.sum().backward()
    eps = torch.finfo(dtype).eps
    assert loss[2:].tolist() == [0.0, 0.0]
    assert p.grad[0].item() == 2 / eps
    assert p.grad[1].item() == pytest.approx(-1 / max(1e-12, torch.finfo(dtype).tiny), rel=eps)
    assert p.grad[2:].tolist() == [-1.0, 1.0]


@every_half
@every_reduction
def test_both_losses_are_torchs_in_fp64(dtype, reduction):
    x, t = (torch.randn(9, 4) * 3).to(dtype), torch.rand(9, 4)
    weight, pos_weight = torch.rand(4) + 0.5, torch.rand(4) + 0.5
    found = ops.binary_cross_entropy_with_logits(x, t, weight=weight, pos_weight=pos_weight, reduction=reduction)
    exact = F.binary_cross_entropy_with_logits(
        x.double(), t.double(), weight.double(), pos_weight=pos_weight.double(), reduction=reduction
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    p = torch.sigmoid(x).clamp(0.01, 0.99)
    found = ops.binary_cross_entropy(p, t, weight=weight, reduction=reduction)
    exact = F.binary_cross_entropy(p.double(), t.double(), weight.double().expand(9, 4), reduction=reduction)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert found.dtype == torch.float32


def test_fp32_probabilities_go_to_torchs_kernel():
    p = torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    t = torch.tensor([1.0, 0.0, 1.0])
    found = ops.binary_cross_entropy(p, t, reduction="none")
    assert torch.equal(found, F.binary_cross_entropy(p, t, reduction="none"))


def test_binary_losses_at_the_ends_and_with_other_targets():
    x = torch.tensor([65504.0, -65504.0, math.nan]).half().requires_grad_()
    loss = ops.binary_cross_entropy_with_logits(x, torch.tensor([False, True, True]), reduction="none")
    loss[:2].sum().backward()
    assert loss[:2].tolist() == [65504.0, 65504.0]
    assert loss[2].isnan()
    assert x.grad[:2].tolist() == [1.0, -1.0]
    assert ops.binary_cross_entropy(torch.tensor([math.nan]).half(), torch.ones(1)).isnan()
    assert ops.binary_cross_entropy(torch.zeros(0).half(), torch.zeros(0)).item() == 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.binary_cross_entropy(torch.tensor([0.5]), torch.ones(1)).item() == pytest.approx(math.log(2))


def test_the_gradient_at_zero_is_one_half_minus_the_target():
    for dtype in (*HALVES, torch.float64):
        x, t = torch.zeros(3, dtype=dtype, requires_grad=True), torch.tensor([0.0, 1.0, 0.25])
        ops.binary_cross_entropy_with_logits(x, t, reduction="sum").backward()
        assert x.grad.tolist() == [0.5, -0.5, 0.25]


def test_binary_losses_refuse_what_does_not_fit():
    p = torch.tensor([0.5, 1.5]).half()
    with pytest.raises(ArgumentError, match=r"values from 0.5 to 1.5[\s\S]*fix: .*with_logits"):
        ops.binary_cross_entropy(p, torch.zeros(2))
    with pytest.raises(ArgumentError, match=r"predictions \(2,\) and targets \(2, 1\)"):
        ops.binary_cross_entropy_with_logits(p, torch.zeros(2, 1))
    with pytest.raises(ArgumentError, match=r"dtype torch\.int64"):
        ops.binary_cross_entropy_with_logits(torch.zeros(2, dtype=torch.int64), torch.zeros(2))


# -- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [None, 0.0, 1e-8, 1e-6, 1e-3, 0.25])
def test_clamped_probabilities_have_finite_logarithms_and_keep_the_distance(dtype, eps):
    p = torch.tensor([0.0, 1e-30, 0.5, 1.0, 2.0, -1.0], dtype=dtype)
    q = ops.clamp_probability(p, eps)
    assert ((q > 0) & (q < 1)).all()
    assert q.log().isfinite().all()
    assert torch.log1p(-q).isfinite().all()
    assert q[2] == 0.5
    if eps:
        assert (1 - q.double() >= eps * (1 - 1e-12)).all()
        assert (q.double() >= eps * (1 - torch.finfo(dtype).eps)).all()
    assert ops.clamp_probability(torch.tensor(math.nan, dtype=dtype), eps).isnan()


def test_clamp_probability_refuses():
    with pytest.raises(ArgumentError, match=r"eps=0\.5"):
        ops.clamp_probability(torch.zeros(1), 0.5)
    with pytest.raises(ArgumentError, match=r"dtype torch\.int64"):
        ops.clamp_probability(torch.zeros(1, dtype=torch.int64))


# -- dice ------------------------------------------------------------------------------------------------------------


@every_half
def test_dice_loss_over_all_and_over_images(dtype):
    p, t = torch.rand(3, 2, 64, 64).to(dtype), torch.rand(3, 2, 64, 64) < 0.3
    d, e = p.double(), t.double()
    exact = 1 - (2 * (d * e).sum((2, 3)) + 1e-5) / (d.sum((2, 3)) + e.sum((2, 3)) + 1e-5)
    found = ops.dice_loss(p, t, dim=(-2, -1), reduction="none")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert ops.dice_loss(p, t, dim=(2, 3)).item() == pytest.approx(exact.mean().item(), rel=1e-5)
    whole = 1 - (2 * (d * e).sum() + 1e-5) / (d.sum() + e.sum() + 1e-5)
    assert ops.dice_loss(p, t).item() == pytest.approx(whole.item(), rel=1e-5)


@every_half
def test_dice_loss_of_an_empty_mask_and_of_nan(dtype):
    empty = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    loss = ops.dice_loss(empty, torch.zeros(2, 8), dim=-1)
    loss.backward()
    assert loss.item() == 0.0
    assert empty.grad.isfinite().all()
    assert ops.dice_loss(torch.full((4,), math.nan, dtype=dtype), torch.ones(4)).isnan()


def test_dice_loss_refuses():
    with pytest.raises(ArgumentError, match=r"predictions \(2,\) and targets \(1,\)"):
        ops.dice_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ArgumentError, match="smooth=0"):
        ops.dice_loss(torch.zeros(2), torch.zeros(2), smooth=0)
