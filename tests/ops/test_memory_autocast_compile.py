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
