"""Products of 16-bit tensors as fp32 products rounded once: which, how exactly, and what is left alone."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import emulated_attention, emulation
from halfstep.emulation import emulate, needs_emulation
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.hardware import Hardware

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FORMATS = {"fp16": HALF, "bf16": BF16}
aten = torch.ops.aten


class Spy(TorchDispatchMode):
    """Records what torch is finally asked to run: entered before the emulation, it sits below it."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if any(word in name for word in ("mm.", "mm_", "mv.", "dot.", "convolution", "conv_", "attention", "linear")):
            flat = itertools.chain.from_iterable(arg if isinstance(arg, (list, tuple)) else [arg] for arg in args)
            self.products += [arg.dtype for arg in flat if isinstance(arg, torch.Tensor)]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def spied(format="fp16"):
    with Spy() as spy, emulate(format):
        yield spy


def half(*shape, dtype=HALF):
    return torch.randn(shape).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# One rounding, forward and backward
# ---------------------------------------------------------------------------------------------------------------------

# name: (function, shapes of its tensors). The same function on fp32 copies of the tensors, rounded once, is the oracle.
PRODUCTS = {
    "mm": (torch.mm, [(5, 33), (33, 7)]),
    "mm of a transposed view": (lambda a, b: a.t() @ b.t(), [(33, 5), (7, 33)]),
    "mm of every second column": (lambda a, b: a[:, ::2] @ b[::2], [(5, 66), (66, 7)]),
    "bmm": (torch.bmm, [(3, 5, 33), (3, 33, 7)]),
    "mv": (torch.mv, [(5, 33), (33,)]),
    "dot": (torch.dot, [(333,), (333,)]),
    "vdot": (torch.vdot, [(333,), (333,)]),
    "addmm": (torch.addmm, [(7,), (5, 33), (33, 7)]),
    "addmv": (torch.addmv, [(5,), (5, 33), (33,)]),
    "addbmm": (torch.addbmm, [(5, 7), (3, 5, 33), (3, 33, 7)]),
    "baddbmm": (torch.baddbmm, [(3, 5, 7), (3, 5, 33), (3, 33, 7)]),
    "linear": (F.linear, [(2, 5, 33), (7, 33), (7,)]),
    "matmul with broadcasting": (torch.matmul, [(2, 1, 5, 33), (3, 33, 7)]),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), [(3, 5, 33), (3, 33, 7)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, ([1, 2], [0, 1])), [(5, 3, 11), (3, 11, 7)]),
    "inner": (torch.inner, [(5, 33), (7, 33)]),
    "bilinear": (F.bilinear, [(5, 4), (5, 3), (2, 4, 3)]),
    "conv1d": (F.conv1d, [(2, 3, 19), (4, 3, 5), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), [(2, 3, 9, 9), (4, 3, 3, 3), (4,)]),
    "conv2d padding same": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=2), [(2, 3, 9, 9), (4, 3, 3, 3)]),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=4), [(2, 4, 9, 9), (4, 1, 3, 3)]),
    "conv3d": (F.conv3d, [(2, 3, 5, 5, 5), (4, 3, 3, 3, 3), (4,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        [(2, 3, 5, 5), (3, 4, 3, 3), (4,)],
    ),
    "conv_tbc": (torch.conv_tbc, [(9, 2, 3), (3, 3, 4), (4,)]),
}


# Their backward rounds more than once, on a GPU too: how often. conv_tbc adds three taps into one 16-bit tensor, and
# what was broadcast is multiplied, rounded, and summed.
SEVERAL_ROUNDINGS = {"conv_tbc": 3, "matmul with broadcasting": 2}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_is_the_fp32_product_rounded_once(name, format):
    function, shapes = PRODUCTS[name]
    tensors = [half(*shape, dtype=FORMATS[format]) for shape in shapes]
    with spied(format) as spy:
        result = function(*tensors)
    assert torch.equal(result, function(*[tensor.float() for tensor in tensors]).to(FORMATS[format]))
    assert result.dtype == FORMATS[format]
    assert set(spy.products) <= {FP32}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in SEVERAL_ROUNDINGS])
def test_gradients_are_the_fp32_gradients_rounded_once(name, format):
    function, shapes = PRODUCTS[name]
    tensors = [half(*shape, dtype=FORMATS[format]).requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    with spied(format) as spy:
        result = function(*tensors)
        upstream = torch.randn(result.shape).to(result.dtype)
        result.backward(upstream)
    function(*wide).backward(upstream.float())
    for tensor, reference in zip(tensors, wide, strict=True):
        assert torch.equal(tensor.grad, reference.grad.to(FORMATS[format]))
    assert set(spy.products) <= {FP32}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SEVERAL_ROUNDINGS)
def test_gradients_that_autograd_adds_up_in_the_format(name, format):
    function, shapes = PRODUCTS[name]
    tensors = [half(*shape, dtype=FORMATS[format]).requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    with spied(format) as spy:
        result = function(*tensors)
        upstream = torch.randn(result.shape).to(result.dtype)
        result.backward(upstream)
    function(*wide).backward(upstream.float())
    half_ulp = torch.finfo(FORMATS[format]).eps / 2
    for tensor, reference in zip(tensors, wide, strict=True):
        error = (tensor.grad - reference.grad).norm() / reference.grad.norm()
        assert error < SEVERAL_ROUNDINGS[name] * half_ulp
    assert set(spy.products) <= {FP32}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_products_of_integers_equal_exact_arithmetic_rounded_once(data):
    """Sums of four products below 2**22 are exact in fp32, so Python's integers are the oracle, inf included."""
    integers = st.integers(-2047, 2047)
    rows = data.draw(st.lists(st.lists(integers, min_size=4, max_size=4), min_size=1, max_size=4))
    column = data.draw(st.lists(integers, min_size=4, max_size=4))
    exact = [float(sum(a * b for a, b in zip(row, column, strict=True))) for row in rows]
    expected = torch.tensor(exact).half()  # the exact sum fits in fp32: this is its one rounding
    with emulate("fp16"):
        assert torch.equal(torch.tensor(rows).half() @ torch.tensor(column).half(), expected)


def test_sums_may_pass_the_largest_value_on_the_way_but_not_at_the_end():
    row = torch.full((1, 3), 300.0).half()
    with emulate("fp16"):
        back = row @ torch.tensor([[300.0], [-300.0], [100.0]]).half()  # 90000, 0, 30000
        beyond = row @ torch.tensor([[300.0], [-300.0], [300.0]]).half()  # 90000, 0, 90000
        edge = torch.tensor([[65504.0, 1.0]]).half() @ torch.tensor([[1.0, 1.0], [15.0, 16.0]]).half()
    assert back.item() == 30000.0
    assert beyond.item() == math.inf
    assert edge.tolist() == [[65504.0, math.inf]]  # 65519 rounds down, 65520 is the first value that rounds to inf


def test_small_terms_are_not_lost_one_by_one():
    """64 terms of 2**-11 beside a 1: each alone would be rounded away, together they are 64 * 2**-11."""
    row = torch.cat([torch.ones(1), torch.full((64,), 2.0**-11)]).half()
    with emulate("fp16"):
        assert torch.dot(row, torch.ones(65).half()).item() == 1.0 + 64 * 2.0**-11


def test_alpha_and_beta_take_part_before_the_rounding():
    c, a, b = half(5, 7), half(5, 33), half(33, 7)
    with emulate("fp16"):
        result = torch.addmm(c, a, b, beta=0.3, alpha=1.7)
    assert torch.equal(result, torch.addmm(c.float(), a.float(), b.float(), beta=0.3, alpha=1.7).half())


@pytest.mark.parametrize("with_out_dtype", [False, True])
def test_grouped_mm(with_out_dtype):
    x, weights, ends = half(6, 16), half(2, 16, 8), torch.tensor([2, 6], dtype=torch.int32)
    options = {"out_dtype": HALF} if with_out_dtype else {}
    with spied() as spy:
        result = F.grouped_mm(x, weights, offs=ends, **options)
    expected = torch.cat([x[:2].float() @ weights[0].float(), x[2:].float() @ weights[1].float()]).half()
    assert torch.equal(result, expected)
    assert set(spy.products) <= {FP32, torch.int32}


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="this torch has no lists of products")
def test_lists_of_products():
    a, b = [half(5, 33), half(4, 6)], [half(33, 7), half(6, 2)]
    with spied() as spy:
        results = torch._foreach_mm(a, b)
    for result, x, y in zip(results, a, b, strict=True):
        assert torch.equal(result, (x.float() @ y.float()).half())
    assert set(spy.products) == {FP32}


# ---------------------------------------------------------------------------------------------------------------------
# Forms and layouts
# ---------------------------------------------------------------------------------------------------------------------


def test_in_place_writes_once_into_the_same_tensor():
    c, a, b = half(5, 7), half(5, 33), half(33, 7)
    expected = torch.addmm(c.float(), a.float(), b.float()).half()
    pointer = c.data_ptr()
    with spied() as spy:
        returned = c.addmm_(a, b)
    assert returned is c
    assert c.data_ptr() == pointer
    assert torch.equal(c, expected)
    assert set(spy.products) == {FP32}


def test_in_place_cannot_grow_its_tensor():
    with emulate("fp16"), pytest.raises(RuntimeError, match="Bad in-place call"):
        half(7).addmm_(half(5, 3), half(3, 7))


@pytest.mark.parametrize("make_out", [lambda: half(5, 7), lambda: half(0), lambda: half(5, 14)[:, ::2]])
def test_out_is_filled_and_resized(make_out):
    a, b, out = half(5, 33), half(33, 7), make_out()
    with spied() as spy:
        returned = torch.mm(a, b, out=out)
    assert returned is out
    assert torch.equal(out, (a.float() @ b.float()).half())
    assert set(spy.products) == {FP32}


def test_out_may_be_an_input():
    a = half(6, 6)
    expected = (a.float() @ a.float()).half()
    with emulate("fp16"):
        torch.mm(a, a, out=a)
    assert torch.equal(a, expected)


def test_out_of_another_dtype_or_shape_meets_torchs_words():
    a = half(4, 4)
    with emulate("fp16"):
        with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
            torch.mm(a, a, out=torch.empty(4, 4))
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            torch.mm(a, a, out=half(3, 3))


@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_channels_last_stays_channels_last(function):
    x, weight = half(2, 4, 8, 8), half(4, 4, 3, 3)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with emulate("fp16"):
        result = function(x, weight)
        result.backward(torch.ones_like(result))
    native = x.detach().requires_grad_()
    native_result = function(native, weight)
    native_result.backward(torch.ones_like(native_result))
    assert result.stride() == native_result.stride()
    assert x.grad.stride() == native.grad.stride()
    assert torch.equal(result, function(x.float(), weight.float()).half())


def test_empty_tensors():
    with emulate("fp16"):
        assert (half(0, 3) @ half(3, 4)).shape == (0, 4)
        assert torch.equal(half(2, 0) @ half(0, 4), torch.zeros(2, 4).half())
        assert F.conv2d(half(0, 3, 5, 5), half(4, 3, 3, 3)).shape == (0, 4, 3, 3)
        assert F.linear(half(0, 3), half(4, 3), half(4)).dtype == HALF


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def attention_case(batch=2, heads=4, key_heads=4, queries=70, keys=90, width=16, mask=None, **options):
    tensors = [torch.randn(batch, heads, queries, width)]
    tensors += [torch.randn(batch, key_heads, keys, width) for _ in range(2)]
    masks = {
        None: {},
        "one for all": {"attn_mask": torch.randn(queries, keys)},
        "per sample": {"attn_mask": torch.where(torch.rand(batch, 1, 1, keys) < 0.7, 0.0, -torch.inf)},
        "per head": {"attn_mask": torch.randn(batch, heads, queries, keys)},
        "nothing to see": {"attn_mask": torch.full((queries, keys), -torch.inf)},
    }
    return tensors, options | masks[mask]


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, fewer keys than queries": {"is_causal": True, "keys": 20},
    "causal, more keys than queries": {"is_causal": True, "queries": 20},
    "scaled": {"scale": 0.3},
    "key heads shared": {"key_heads": 2, "is_causal": True},
    "one mask for all": {"mask": "one for all"},
    "a mask per sample": {"mask": "per sample"},
    "a mask per head": {"mask": "per head"},
    "all masked": {"mask": "nothing to see"},
}


@pytest.mark.parametrize("max_scores", [2**17, 64 * 90, 1])
@pytest.mark.parametrize("case", CASES)
def test_attention_without_rounding_is_torchs_fp32_kernel(case, max_scores, monkeypatch):
    """The same arithmetic, in whatever blocks: outputs, logsumexp, gradients and their layouts."""
    monkeypatch.setattr(emulated_attention, "_MAX_SCORES", max_scores)
    (query, key, value), options = attention_case(**CASES[case])
    named = {name: options[name] for name in options if name != "is_causal"}
    is_causal = options.get("is_causal", False)
    ours = emulated_attention.Attention(query, key, value, 0.0, is_causal, **named)
    out, logsumexp = ours.forward(torch.clone)
    expected, expected_logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, **named
    )
    upstream = torch.randn_like(out)
    grads = ours.backward(upstream, out, logsumexp, torch.clone)
    expected_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, query, key, value, expected, expected_logsumexp, 0.0, is_causal, **named
    )
    pairs = zip((out, logsumexp, *grads), (expected, expected_logsumexp, *expected_grads), strict=True)
    for result, reference in pairs:
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
        assert result.stride() == reference.stride()


def attention_fp64(query, key, value, **options):
    return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("key heads shared", "all masked")])
def test_attention_is_within_the_bound_of_its_roundings(case, format):
    """Each probability is rounded once, relative error u, and the output once: at most 2 u times the largest value."""
    dtype = FORMATS[format]
    tensors, options = attention_case(**CASES[case])
    query, key, value = (tensor.to(dtype) for tensor in tensors)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    with spied(format) as spy:
        result = F.scaled_dot_product_attention(query, key, value, **options)
    assert result.dtype == dtype
    assert set(spy.products) == {FP32}
    if options.get("attn_mask") is not None:
        options["attn_mask"] = options["attn_mask"].double()
    error = (result.double() - attention_fp64(query, key, value, **options)).abs().max()
    half_ulp = torch.finfo(dtype).eps / 2
    assert error <= 2.05 * half_ulp * value.abs().max()  # 2.05: fp32's own errors


def test_attention_gradients_are_close_and_in_the_format():
    tensors = [half(2, 2, 40, 16).requires_grad_() for _ in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with spied() as spy:
        result = F.scaled_dot_product_attention(*tensors)
        upstream = torch.randn_like(result)
        result.backward(upstream)
    F.scaled_dot_product_attention(*exact).backward(upstream.double())
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad.dtype == HALF
        relative = (tensor.grad - reference.grad).norm() / reference.grad.norm()
        assert relative < 2.0**-10
    assert set(spy.products) == {FP32}


def test_probabilities_are_rounded_before_they_meet_the_values():
    """exp(-18) is below half of fp16's smallest subnormal: 2048 keys of that weight vanish, 2048 exp(-18) 6e4 = 1.9."""
    query, key = torch.ones(1, 1, 1, 1).half(), torch.full((1, 1, 2049, 1), -18.0).half()
    key[0, 0, 0] = 0.0
    value = torch.full_like(key, 60000.0)
    value[0, 0, 0] = 0.0
    with emulate("fp16"):
        assert F.scaled_dot_product_attention(query, key, value, scale=1.0).item() == 0.0
        values = value.clone().requires_grad_()
        F.scaled_dot_product_attention(query, key, values, scale=1.0).backward(torch.full((1, 1, 1, 1), 60000.0).half())
    assert values.grad.flatten()[0] == 60000.0
    assert values.grad.flatten()[1:].count_nonzero() == 0  # 60000 * exp(-18) would be 9e-4
    assert F.scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=1.0).item() > 1.0
    assert F.scaled_dot_product_attention(query, key, value, scale=1.0).item() == 0.0  # as torch's own fp16 kernel


def test_gradients_of_scores_are_rounded_before_they_meet_the_keys():
    """1024 equal weights and values of +-2**-14 give gradients of scores of 2**-24 * upstream: with upstream 1/4 they
    are a quarter of the smallest subnormal, and vanish, though their sum over keys of +-1024 would not."""
    sign = torch.tensor([1.0, -1.0]).repeat(512).view(1, 1, 1024, 1)
    tensors = [torch.zeros(1, 1, 1, 1), sign * 1024, sign * 2.0**-14]

    def gradient_of_query(dtype, context):
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        with context:
            result = F.scaled_dot_product_attention(query, key, value, scale=1.0)
            result.backward(torch.full_like(result, 0.25))
        return query.grad.item()

    assert gradient_of_query(HALF, emulate("fp16")) == 0.0
    assert gradient_of_query(HALF, contextlib.nullcontext()) == 0.0
    assert gradient_of_query(FP32, contextlib.nullcontext()) == pytest.approx(2.0**-6)


def test_logsumexp_is_fp32_and_laid_out_as_torchs():
    query, key, value = half(2, 3, 8, 16), half(2, 3, 10, 16), half(2, 3, 10, 16)
    native = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    with emulate("fp16"):
        ours = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    for tensor, reference in zip(ours, native, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (reference.dtype, reference.shape, reference.stride())
    wide = aten._scaled_dot_product_flash_attention_for_cpu(query.float(), key.float(), value.float())
    torch.testing.assert_close(ours[1], wide[1])


def test_attention_keeps_the_layout_that_projections_give_it():
    query, key, value = (
        half(2, 10, 3, 16).transpose(1, 2) for _ in range(3)
    )  # [batch, length, heads, width] in memory
    with emulate("fp16"):
        assert F.scaled_dot_product_attention(query, key, value).transpose(1, 2).is_contiguous()


def test_attention_over_no_keys_gives_zeros():
    """torch's kernel, called by its name, divides by zero here and ends the process; its other path gives zeros."""
    query, nothing = half(1, 2, 3, 4), half(1, 2, 0, 4)
    with emulate("fp16"):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, nothing, nothing)
        assert torch.equal(out, torch.zeros(1, 2, 3, 4).half())
        assert torch.equal(logsumexp, torch.zeros(1, 2, 3))
        assert torch.equal(F.scaled_dot_product_attention(query, nothing, nothing), out)
        assert aten._scaled_dot_product_flash_attention_for_cpu(nothing, query, query)[0].shape == (1, 2, 0, 4)


def test_attention_that_torch_takes_apart_is_emulated_by_its_products():
    """With dropout, or a mask that learns, torch multiplies twice and rounds the scores in between."""
    query, key, value = (half(2, 2, 8, 16) for _ in range(3))
    mask = half(8, 8).requires_grad_()
    with spied() as spy:
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    assert set(spy.products) == {FP32}
    assert mask.grad.dtype == HALF


def test_attention_that_torch_refuses_is_refused_by_torch():
    query = half(1, 1, 4, 8)
    with emulate("fp16"), pytest.raises(RuntimeError, match="same head size"):
        aten._scaled_dot_product_flash_attention_for_cpu(query, query, half(1, 1, 4, 6))
    with emulate("fp16"), pytest.raises(RuntimeError, match="dropout"):
        aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast and autograd
# ---------------------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A convolution, attention, and linear layers around them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(self.conv(x).transpose(1, 2)))


@pytest.mark.parametrize("backward_in_autocast", [False, True])
def test_autocast_training_step_has_no_16_bit_product(backward_in_autocast):
    model, x = Everything(), torch.randn(2, 4, 8)
    with spied() as spy:
        with torch.autocast("cpu", HALF):
            loss = model(x).float().square().mean()
            if backward_in_autocast:
                loss.backward()
        if not backward_in_autocast:
            loss.backward()
    assert len(spy.products) > 40
    assert set(spy.products) == {FP32}
    assert all(parameter.grad.dtype == FP32 for parameter in model.parameters())


def test_gradients_do_not_depend_on_whether_backward_runs_in_autocast():
    """The products inside attention's backward must not be cast down by an autocast that is still on."""
    grads = []
    for backward_in_autocast in (False, True):
        torch.manual_seed(0)
        model, x = Everything(), torch.randn(2, 4, 8)
        with emulate("fp16"), torch.autocast("cpu", HALF):
            loss = model(x).float().square().mean()
            with torch.autocast("cpu", HALF, enabled=backward_in_autocast):
                loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_without_emulation_the_spy_sees_16_bit_products():
    model, x = Everything(), torch.randn(2, 4, 8)
    with Spy() as spy, torch.autocast("cpu", HALF):
        model(x)
    assert HALF in spy.products


def test_autocast_linear_is_bit_exact():
    layer, x = nn.Linear(33, 7), torch.randn(5, 33)
    with emulate("fp16"), torch.autocast("cpu", HALF):
        result = layer(x)
    narrow = [tensor.half().float() for tensor in (layer.bias, x, layer.weight)]
    assert torch.equal(result, torch.addmm(narrow[0], narrow[1], narrow[2].t()).half())


def test_retain_graph_gives_the_same_gradient_again():
    x, w = half(5, 33).requires_grad_(), half(33, 7)
    with emulate("fp16"):
        loss = (x @ w).float().square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "function", [lambda x, w: x @ w, lambda x, w: F.conv1d(x[None], w[:, :, None])[0].t()], ids=["mm", "conv1d"]
)
def test_double_backward(function):
    """A gradient penalty: close to fp64, and made of fp32 products only."""

    def penalty(x, w):
        (grad,) = torch.autograd.grad(function(x, w).tanh().sum(), x, create_graph=True)
        return grad.square().sum()

    x, w = (0.3 * torch.randn(12, 12)).half().requires_grad_(), (0.3 * torch.randn(12, 12)).half().requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, w)]
    with spied() as spy:
        penalty(x, w).backward()
    penalty(*exact).backward()
    for tensor, reference in zip((x, w), exact, strict=True):
        assert (tensor.grad - reference.grad).norm() / reference.grad.norm() < 5e-3
    assert set(spy.products) == {FP32}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_the_same_bits(use_reentrant):
    x, w = half(5, 8), half(8, 8)
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        leaf = x.clone().requires_grad_()
        with spied() as spy:
            run(lambda x: (x @ w).tanh() @ w, leaf).sum().backward()
        grads.append(leaf.grad)
        assert set(spy.products) == {FP32}
    assert torch.equal(*grads)


def test_backward_outside_means_the_same_but_runs_in_torchs_kernels():
    x, w = half(5, 33).requires_grad_(), half(33, 7)
    with emulate("fp16"):
        result = x @ w
    with Spy() as spy:
        result.sum().backward()
    assert HALF in spy.products
    torch.testing.assert_close(x.grad, (torch.ones(5, 7) @ w.float().t()).half(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x, w, b, image, kernel = half(2, 5, 33), half(7, 33), half(7), half(2, 3, 8, 8), half(4, 3, 3, 3)
    query = half(2, 2, 8, 16)
    with mode(), spied() as spy:
        outputs = [F.linear(x, w, b), F.conv2d(image, kernel), torch.einsum("bik,jk->bij", x, w), x @ w.t()]
        F.scaled_dot_product_attention(query, query, query)
    wide = [tensor.float() for tensor in (x, w, b)]
    assert torch.equal(outputs[0], F.linear(*wide).half())
    assert torch.equal(outputs[1], F.conv2d(image.float(), kernel.float()).half())
    assert torch.equal(outputs[2], torch.einsum("bik,jk->bij", *wide[:2]).half())
    assert torch.equal(outputs[3], (wide[0] @ wide[1].t()).half())
    assert set(spy.products) == {FP32}


def test_vmap_and_functional_gradients():
    x, w = half(3, 5, 8), half(8, 8)
    with spied() as spy:
        mapped = torch.vmap(lambda one: one @ w)(x)
        grad = torch.func.grad(lambda one: (one @ w).sum())(x[0])
    assert torch.equal(mapped, (x.float() @ w.float()).half())
    assert torch.equal(grad, (torch.ones(5, 8) @ w.float().t()).half())
    assert set(spy.products) == {FP32}


def test_compiled_functions_are_emulated_too():
    a = half(8, 8)
    compiled = torch.compile(lambda x: (x @ x).sin(), backend="eager")
    compiled(a)
    with emulate("fp16"):
        assert torch.equal(compiled(a), (a.float() @ a.float()).half().sin())


def test_recurrent_cells_are_made_of_products():
    lstm, gru, x = nn.LSTM(8, 8).half(), nn.GRU(8, 8).half(), half(3, 2, 8)
    with spied() as spy:
        (lstm(x)[0].sum() + gru(x)[0].sum()).backward()
    assert set(spy.products) == {FP32}
    assert lstm.weight_hh_l0.grad.dtype == HALF


# ---------------------------------------------------------------------------------------------------------------------
# Same training as torch's own fp16
# ---------------------------------------------------------------------------------------------------------------------


def sigmoid_net(widths, seed):
    torch.manual_seed(seed)
    layers = []
    for num_in, num_out in itertools.pairwise(widths):
        layers += [nn.Linear(num_in, num_out), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])


def train(seed, context, num_steps=150):
    model = sigmoid_net((16, 32, 8, 32, 16), seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.rand(32, 16, generator=torch.Generator().manual_seed(7))
    scale = 1024.0
    for _ in range(num_steps):
        optimizer.zero_grad()
        with context:
            with torch.autocast("cpu", HALF):
                prediction = model(x)
            loss = F.mse_loss(prediction.float(), x)
            (scale * loss).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
    return loss.item()


def test_training_ends_where_torchs_own_fp16_ends():
    emulated = [train(seed, emulate("fp16")) for seed in range(3)]
    native = [train(seed, contextlib.nullcontext()) for seed in range(3)]
    spread = max(native) - min(native)
    assert all(abs(ours - theirs) < 0.05 * spread for ours, theirs in zip(emulated, native, strict=True))
    assert max(emulated) < 0.9 * torch.rand(4096).var().item()  # it did learn: better than predicting the mean


def test_small_gradients_underflow_as_in_torchs_own_fp16():
    """A deep sigmoid net without loss scaling: the first layers' gradients vanish, in emulation as in torch's fp16."""
    shares = []
    for context in (emulate("fp16"), contextlib.nullcontext()):
        model, x = sigmoid_net((64, 256, 128, 64, 32, 8, 32, 64, 128, 256, 64), 0), torch.rand(64, 64)
        with context:
            with torch.autocast("cpu", HALF):
                prediction = model(x)
            F.mse_loss(prediction.float(), x).backward()
        shares.append([(layer.weight.grad == 0).float().mean().item() for layer in model[::2]])
    emulated, native = shares
    assert emulated[0] == native[0] == 1.0
    assert emulated[-1] < 0.1
    assert emulated == pytest.approx(native, abs=0.03)


# ---------------------------------------------------------------------------------------------------------------------
# Enter, exit, nest
# ---------------------------------------------------------------------------------------------------------------------


def dtypes_of_a_product():
    with Spy() as spy:
        half(2, 3) @ half(3, 2)
    return set(spy.products)


def test_nothing_is_left_behind():
    with emulate("fp16"):
        pass
    assert dtypes_of_a_product() == {HALF}
    with pytest.raises(KeyError), emulate("fp16"):
        raise KeyError
    assert dtypes_of_a_product() == {HALF}
    with contextlib.suppress(RuntimeError), emulate("fp16"):
        half(2, 3) @ half(5, 2)
    assert dtypes_of_a_product() == {HALF}


def test_nested_in_itself_in_the_other_format_and_entered_again():
    a, b = half(4, 4), half(4, 4, dtype=BF16)
    expected = (a.float() @ a.float()).half(), (b.float() @ b.float()).bfloat16()
    context = emulate("fp16")
    with Spy() as spy:
        with context, context, emulate("bf16"):
            assert torch.equal(a @ a, expected[0])
            assert torch.equal(b @ b, expected[1])
        with context:
            assert torch.equal(a @ a, expected[0])
    assert set(spy.products) == {FP32}


def test_decorator():
    a = half(4, 4)

    @emulate("fp16")
    def product():
        with Spy() as inner:  # entered after, so it sits above and sees what the emulation is asked for
            result = a @ a
        return result, inner.products

    with Spy() as spy:
        result, asked = product()
        assert torch.equal(product()[0], result)
    assert set(asked) == {HALF}
    assert set(spy.products) == {FP32}


# ---------------------------------------------------------------------------------------------------------------------
# Left alone
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_other_dtypes_pass_through(dtype):
    a = torch.randint(-9, 9, (4, 4)).to(dtype)
    with spied("fp16") as spy:
        result = a @ a
    assert torch.equal(result, a @ a)
    assert set(spy.products) == {dtype}


def test_element_wise_operations_stay_in_the_format():
    a = half(64)
    with emulate("fp16"):
        for function in (torch.sigmoid, torch.exp, torch.softmax):
            arguments = (a, 0) if function is torch.softmax else (a,)
            assert torch.equal(function(*arguments), function(*arguments))
            assert function(*arguments).dtype == HALF


def test_mixed_dtypes_meet_torchs_error():
    with emulate("fp16"):
        with pytest.raises(RuntimeError, match="same dtype"):
            half(2, 3) @ torch.randn(3, 2)
        with pytest.raises(RuntimeError, match="should be the same"):
            F.conv2d(half(1, 1, 3, 3), half(1, 1, 3, 3), torch.randn(1))


@pytest.mark.parametrize(
    "product",
    [
        lambda a: a.to("meta") @ a.to("meta"),
        lambda a: a.to_sparse() @ a,
        lambda a: F.linear(torch.nested.as_nested_tensor([a, a[:2]], layout=torch.jagged), a),
    ],
    ids=["meta", "sparse", "nested"],
)
def test_tensors_that_are_not_dense_cpu_tensors_are_torchs_business(product):
    with spied() as spy:
        product(half(4, 4))
    assert set(spy.products) == {HALF}


def test_fake_tensors_get_shapes_and_dtypes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 4, dtype=HALF)
        with emulate("fp16"):
            result = F.scaled_dot_product_attention(query, query, query) @ torch.empty(4, 3, dtype=HALF)
    assert (result.shape, result.dtype) == ((1, 2, 8, 3), HALF)


# ---------------------------------------------------------------------------------------------------------------------
# Refused by name
# ---------------------------------------------------------------------------------------------------------------------


def encoder_layer(dtype):
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().to(dtype)


@contextlib.contextmanager
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@contextlib.contextmanager
def setting(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.parametrize(("dtype", "autocast"), [(HALF, False), (FP32, True)])
def test_fused_encoder_inference(dtype, autocast):
    layer, x = encoder_layer(dtype), torch.randn(2, 5, 16, dtype=dtype)
    with torch.no_grad(), spied() as spy, torch.autocast("cpu", HALF, enabled=autocast):
        with pytest.raises(UnsupportedError) as caught:
            layer(x)
        with without_fast_path():
            assert layer(x).dtype in (HALF, FP32)
    error = caught.value
    assert error.asked == "aten._transformer_encoder_layer_fwd.default in fp16 under halfstep.emulate('fp16')"
    assert error.true == "emulation replaces single products, convolutions and attention"
    assert "TransformerEncoderLayer fuses several products" in error.why
    assert "torch.backends.mha.set_fastpath_enabled(False)" in error.fix
    assert set(spy.products) == {FP32}


def test_fused_encoder_inference_in_fp32_is_none_of_our_business():
    layer, x = encoder_layer(FP32), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = layer(x)
        with emulate("fp16"):
            assert torch.equal(layer(x), expected)


def test_fused_attention_inference():
    module, x = nn.MultiheadAttention(16, 2, batch_first=True).eval().half(), half(2, 5, 16)
    with torch.no_grad(), emulate("fp16"):
        with pytest.raises(UnsupportedError, match="MultiheadAttention fuses several products") as caught:
            module(x, x, x)
        with without_fast_path():
            assert module(x, x, x)[0].dtype == HALF
    assert "aten._native_multi_head_attention" in caught.value.asked


def test_fused_lstm():
    lstm, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    with spied() as spy, torch.autocast("cpu", HALF):
        with pytest.raises(UnsupportedError, match="oneDNN's LSTM fuses all time steps") as caught:
            lstm(x)
        with setting(torch.backends.mkldnn, "enabled", False):
            lstm(x)
        with torch.autocast("cpu", enabled=False):
            lstm(x)
    assert "aten.mkldnn_rnn_layer" in caught.value.asked
    assert "torch.backends.mkldnn.enabled = False" in caught.value.fix
    assert set(spy.products) == {FP32}


def test_higher_order_operations():
    from torch._higher_order_ops.while_loop import while_loop_op

    operands = (torch.tensor(3), half(4, 4))
    functions = (lambda i, a: i > 0, lambda i, a: (i - 1, a @ a))
    with emulate("fp16"), pytest.raises(UnsupportedError, match="runs functions of yours as one operation") as caught:
        while_loop_op(*functions, operands, ())
    assert caught.value.asked == "while_loop in fp16 under halfstep.emulate('fp16')"
    assert "torch.nn.functional.scaled_dot_product_attention" in caught.value.fix
    assert while_loop_op(*functions, (operands[0], torch.eye(4)), ())[1].equal(torch.eye(4))


@pytest.mark.parametrize("format", ["fp32", "tf32", "fp8_e5m2", torch.float32])
def test_formats_that_are_not_16_bit_are_refused(format):
    with pytest.raises(ArgumentError) as caught:
        emulate(format)
    assert "emulation is for products of fp16 and bf16 tensors" in str(caught.value)
    assert 'pass "fp16" or "bf16"' in caught.value.fix


def test_an_unknown_format_is_refused():
    with pytest.raises(ArgumentError, match="halfprecision"):
        emulate("halfprecision")


@pytest.mark.parametrize(("given", "dtype"), [("half", HALF), (HALF, HALF), ("bfloat16", BF16), (BF16, BF16)])
def test_formats_by_any_name(given, dtype):
    a = half(3, 3, dtype=dtype)
    with Spy() as spy, emulate(given):
        assert (a @ a).dtype == dtype
    assert set(spy.products) == {FP32}


# ---------------------------------------------------------------------------------------------------------------------
# Whether it is needed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "needs_fp16", "needs_bf16"),
    [
        (("avx2",), True, True),
        (("avx2", "avx512", "avx512_bf16"), True, False),
        (("avx512", "avx512_bf16", "avx512_fp16"), False, False),
        (("amx_bf16",), True, False),
        (("neon", "arm_bf16", "arm_fp16"), False, False),
    ],
)
def test_needs_emulation_follows_the_instructions(features, needs_fp16, needs_bf16, monkeypatch):
    monkeypatch.setattr(emulation, "_this_cpu", lambda: Hardware("cpu", features=features))
    assert needs_emulation("fp16") is needs_fp16
    assert needs_emulation(torch.bfloat16) is needs_bf16
    assert needs_emulation(torch.float32) is False


def test_needs_emulation_of_what_cannot_be_emulated():
    with pytest.raises(ArgumentError, match=r"needs_emulation\('fp8_e5m2'\)") as caught:
        needs_emulation("fp8_e5m2")
    assert caught.value.fix == "ask for fp16, bf16 or fp32"
