"""Operations and bytes against torch's own counter and real tensors; results against the product they stand for."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from halfstep.bench.products import Layout, Product
from halfstep.formats import BF16, FP16, FP32, TF32

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("size", [1, 7, 16])
def test_flops_are_torchs_count(layout, size):
    product = Product(FP32, size, layout)
    multiply = product.build(CPU)
    with FlopCounterMode(display=False) as counter:
        multiply()
    assert counter.get_total_flops() == product.flops


@pytest.mark.parametrize("fmt", [FP32, TF32, FP16, BF16], ids=str)
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.CHANNELS_LAST])
def test_bytes_are_those_of_the_tensors(monkeypatch, fmt, layout):
    made = []
    for name in ("randn", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: made.append(real(*a, **k)) or made[-1])
    product = Product(fmt, 7, layout)
    result = product.build(CPU)()
    tensors = made if layout is Layout.ROWS else [*made, result]
    assert sum(tensor.nbytes for tensor in tensors) == product.num_bytes
    assert {tensor.dtype for tensor in tensors} == {product.dtype}


def test_transposed_layouts_are_views_of_the_same_operands():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 5, generator=generator) for _ in "ab")
    for layout, expected in (
        (Layout.ROWS, a @ b),
        (Layout.RIGHT_TRANSPOSED, a @ b.T),
        (Layout.LEFT_TRANSPOSED, a.T @ b),
    ):
        assert torch.allclose(Product(FP32, 5, layout).build(CPU)(), expected, rtol=0, atol=1e-5)


def test_channels_last_is_what_the_convolution_sees():
    last, contiguous = (Product(FP32, 7, layout).build(CPU)() for layout in (Layout.CHANNELS_LAST, Layout.CONTIGUOUS))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert contiguous.is_contiguous()
    assert torch.allclose(last, contiguous, rtol=0, atol=1e-3)


def test_the_random_state_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Product(FP32, 4).build(CPU)()
    assert torch.equal(before, torch.get_rng_state())
