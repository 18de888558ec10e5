"""What is kept for backward, what autocast changes, and torch.compile."""

import pytest
import torch
import torch.nn.functional as F

from halfstep import ops

HALVES = [torch.float16, torch.bfloat16]
N = 256
LABELS = torch.randint(0, N, (64,), generator=torch.Generator().manual_seed(0))

# name: (ours, torch's, fp32 elements that ours may keep: row statistics and weights)
CALLS = {
    "softmax": (ops.softmax, lambda x: F.softmax(x, -1), 0),
    "log_softmax": (ops.log_softmax, lambda x: F.log_softmax(x, -1), 0),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS), lambda x: F.cross_entropy(x, LABELS), 64),
    "bce": (
        lambda x: ops.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
        64,
    ),
    "bce_with_logits": (
        lambda x: ops.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        64,
    ),
    "dice_loss": (
        lambda x: ops.dice_loss(x, torch.ones_like(x)),
        lambda x: 1 - (2 * (x * torch.ones_like(x)).sum() + 1) / (x.sum() + N * 64 + 1),
        64,
    ),
    "layer_norm": (lambda x: ops.layer_norm(x, N), lambda x: F.layer_norm(x, (N,)), 64),
    "rms_norm": (lambda x: ops.rms_norm(x, N), lambda x: F.rms_norm(x, (N,)), 64),
    "normalize": (ops.normalize, lambda x: F.normalize(x, dim=-1), 64),
    "norm": (lambda x: ops.norm(x), lambda x: torch.linalg.vector_norm(x), 64),
    "sum": (ops.sum, torch.sum, 0),
    "mean": (ops.mean, torch.mean, 0),
    "rotary": (
        lambda x: ops.apply_rotary(x, *ops.rotary_embedding(torch.arange(64), N)),
        lambda x: x * torch.ones_like(x),
        64 * N,  # the two fp32 tables, [64, N / 2] each
    ),
    "attention": (
        lambda x: ops.attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        64,
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)
every_half = pytest.mark.parametrize("dtype", HALVES)


def bytes_of(tensors, dtypes):
    return sum(t.numel() * t.element_size() for t in tensors if t.dtype in dtypes)


@every_call
@every_half
def test_no_fp32_copy_is_kept_for_backward(name, dtype, saved):
    ours, torchs, allowed = CALLS[name]
    x = torch.randn(64, N).to(dtype).requires_grad_()
    kept, torchs_kept = saved(lambda: ours(x)), saved(lambda: torchs(x))
    assert bytes_of(kept, [torch.float32]) <= 4 * allowed
    # In 16 bits the input is kept where torch keeps its result; Dice keeps its target too, attention its result.
    num_kept = 2 if name in ("dice_loss", "attention") else 1
    assert bytes_of(kept, HALVES) <= max(bytes_of(torchs_kept, HALVES), 2 * x.numel() * num_kept)


def test_the_memory_test_can_fail(saved):
    x = torch.randn(64, N).half().requires_grad_()
    assert bytes_of(saved(lambda: F.softmax(x.float(), -1)), [torch.float32]) == 4 * x.numel()


@every_call
@every_half
def test_autocast_changes_nothing_but_attention(name, dtype):
    ours, _, _ = CALLS[name]
    results = []
    for is_on in (False, True):
        x = torch.randn(64, N, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            y = ours(x)
            y.sum().backward()
        results.append((y.detach(), x.grad))
    (y, g), (autocast_y, autocast_g) = results
    if name == "attention":
        assert autocast_y.dtype == torch.bfloat16
    elif name == "bce":  # its sigmoid belongs to the caller
        torch.testing.assert_close(y, autocast_y)
    else:
        assert torch.equal(y, autocast_y)
        assert torch.equal(g, autocast_g)
        assert y.dtype == autocast_y.dtype


@every_call
@every_half
def test_compiled_functions_agree(name, dtype):
    ours, _, _ = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, N).to(dtype)
    found = []
    for function in (ours, compiled):
        y = x.clone().requires_grad_()
        z = function(y)
        z.sum().backward()
        found.append((z.detach().float(), y.grad.float()))
    limit = 2 * torch.finfo(dtype).eps
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(eager, traced, rtol=limit, atol=limit * eager.abs().max().item())


ONES_AND_ZEROS = (torch.arange(64 * N).view(64, N) % 3 == 0).float()
IGNORED = LABELS.masked_fill(torch.arange(64) % 5 == 0, -100)
WEIGHT = torch.linspace(0.5, 2.0, N)
PROBABILITIES = torch.linspace(0.01, 0.99, 64 * N).view(64, N)

# name: (function of [64, N] whose gradient in pieces is written by hand, its input's scale)
BY_HAND = {
    "log_softmax": lambda x: ops.log_softmax(x, 0) + ops.log_softmax(x),
    "cross_entropy": lambda x: ops.cross_entropy(x, IGNORED, reduction="sum"),
    "cross_entropy, weighted": lambda x: ops.cross_entropy(x, IGNORED, weight=WEIGHT, reduction="none"),
    "cross_entropy, smoothed": lambda x: ops.cross_entropy(x, IGNORED, label_smoothing=0.1, reduction="sum"),
    "cross_entropy, both, of images": lambda x: ops.cross_entropy(
        x.view(4, 16, 16, 16), IGNORED.repeat(16).view(4, 16, 16).clamp(max=15), weight=WEIGHT[:16],
        label_smoothing=0.1, reduction="sum",
    ),
    "bce": lambda x: ops.binary_cross_entropy(x.abs().clamp(max=1), PROBABILITIES, weight=WEIGHT, reduction="sum"),
    "bce_with_logits": lambda x: ops.binary_cross_entropy_with_logits(x, PROBABILITIES, reduction="sum"),
    "bce_with_logits, weighted": lambda x: ops.binary_cross_entropy_with_logits(
        x, ONES_AND_ZEROS, weight=WEIGHT, pos_weight=2 * WEIGHT, reduction="none"
    ),
    "dice_loss of rows": lambda x: ops.dice_loss(x, ONES_AND_ZEROS, dim=-1, reduction="sum"),
    "dice_loss": lambda x: 1000 * ops.dice_loss(x, ONES_AND_ZEROS),
    "normalize": ops.normalize,
    "normalize, floored": lambda x: ops.normalize(x, eps=16.0),
    "norm of rows": lambda x: ops.norm(x, -1),
    "norm": ops.norm,
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
@every_half
@pytest.mark.parametrize("size", [2**18, 8 * N])
def test_gradients_by_hand_are_autograds(name, dtype, size, monkeypatch):
    """With create_graph the function is differentiated as it stands; one rounding apart at most."""
    monkeypatch.setattr("halfstep.ops.chunks._HOST_ELEMENTS", size)
    x = torch.randn(64, N, generator=torch.Generator().manual_seed(2))
    x[::7] = 0.0
    x = x.to(dtype).requires_grad_()
    y = BY_HAND[name](x)
    incoming = torch.linspace(0.5, 2.0, y.numel()).view(y.shape).to(y.dtype)
    (by_hand,) = torch.autograd.grad(y, x, incoming, retain_graph=True)
    (by_autograd,) = torch.autograd.grad(y, x, incoming, create_graph=True)
    # Where every rounding of a value of 16 bits may fall to the other side, and where two of them add up.
    limit = torch.finfo(dtype).eps
    rows = by_autograd.detach().abs().amax(-1, keepdim=True).float()
    assert ((by_hand.float() - by_autograd.float()).abs() <= limit * rows).all()


def test_checkpointing_takes_saved_tensors_once():
    """Without re-entering, torch runs the forward pass again for each time that they are asked for."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 16, (8,))
    for function in (ops.log_softmax, lambda t: ops.cross_entropy(t, labels), ops.norm, ops.normalize):
        x.grad = None
        function(x).float().sum().backward()
        wanted, x.grad = x.grad, None
        checkpoint(function, x, use_reentrant=False).float().sum().backward()
        assert torch.equal(x.grad, wanted)
