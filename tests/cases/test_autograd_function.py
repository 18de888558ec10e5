"""MP-34: the backward of a custom Function runs in the dtype of its forward, on every thread and in recompute."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfstep import ops
from halfstep.errors import ArgumentError

HALVES = [torch.float16, torch.bfloat16]
every_half = pytest.mark.parametrize("dtype", HALVES)


def square(dtype=None, style="ctx"):
    """x @ x, and a list of (where, dtype of a product there)."""
    seen = []

    class WithContext(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = x @ x
            seen.append(("forward", y.dtype))
            return y

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            product = g @ x.mT
            seen.append(("backward", product.dtype))
            return product + x.mT @ g

    class WithSetup(torch.autograd.Function):
        @staticmethod
        def forward(x):
            y = x @ x
            seen.append(("forward", y.dtype))
            return y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        backward = staticmethod(WithContext.backward)

    cls = WithContext if style == "ctx" else WithSetup
    return ops.autograd_function(dtype)(cls), seen


def plain():
    """The reported Function, undecorated."""
    seen = {}

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(c, x):
            c.save_for_backward(x)
            seen["forward"] = (x @ x).dtype
            return x @ x

        @staticmethod
        def backward(c, g):
            (x,) = c.saved_tensors
            seen["backward"] = (x @ x).dtype
            return g.to(x.dtype)

    return Fn, seen


def leaf():
    return torch.full((2, 2), 0.5, requires_grad=True)


def test_MP_34_plain_torch_shows_the_fault():
    Fn, seen = plain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Fn.apply(leaf())
    y.sum().backward()
    assert seen == {"forward": torch.bfloat16, "backward": torch.float32}


@every_half
@pytest.mark.parametrize("style", ["ctx", "setup"])
def test_MP_34_backward_follows_the_autocast_of_forward(dtype, style):
    Fn, seen = square(style=style)
    x = leaf()
    with torch.autocast("cpu", dtype=dtype):
        y = Fn.apply(x)
    y.float().sum().backward()
    assert seen == [("forward", dtype), ("backward", dtype)]
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_MP_34_no_autocast_in_forward_means_none_in_backward():
    Fn, seen = square()
    x = leaf()
    y = Fn.apply(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
    assert seen == [("forward", torch.float32), ("backward", torch.float32)]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, "bf16"])
@pytest.mark.parametrize("outer", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("style", ["ctx", "setup"])
def test_MP_34_a_fixed_dtype_holds_under_any_autocast(dtype, outer, style):
    Fn, seen = square(dtype, style)
    x = leaf()
    with torch.autocast("cpu", dtype=outer or torch.bfloat16, enabled=outer is not None):
        y = Fn.apply(x)
        y.float().sum().backward()
    wanted = torch.bfloat16 if dtype == "bf16" else dtype
    assert seen == [("forward", wanted), ("backward", wanted)]
    assert x.grad.dtype == torch.float32


def in_thread(function):
    """Run on a thread of its own, and hand its error on."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@every_half
def test_MP_34_backward_on_a_worker_thread(dtype):
    Fn, seen = square()
    x = leaf()
    with torch.autocast("cpu", dtype=dtype):
        y = Fn.apply(x)
    in_thread(lambda: y.float().sum().backward())
    assert seen == [("forward", dtype), ("backward", dtype)]


@every_half
def test_MP_34_forward_on_a_worker_thread_with_a_fixed_dtype(dtype):
    """A new thread knows nothing of the caller's autocast; a fixed dtype does not need to."""
    Fn, seen = square(dtype)
    x = leaf()
    with torch.autocast("cpu", dtype=dtype):
        in_thread(lambda: Fn.apply(x).float().sum().backward())
    assert seen == [("forward", dtype), ("backward", dtype)]


@every_half
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_MP_34_recompute(dtype, use_reentrant):
    Fn, seen = square()
    x = leaf()
    with torch.autocast("cpu", dtype=dtype):
        y = checkpoint(lambda t: Fn.apply(t) * 1.0, x, use_reentrant=use_reentrant)
    y.float().sum().backward()
    assert seen == [("forward", dtype), ("forward", dtype), ("backward", dtype)]
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_MP_34_fp64_and_integers_are_not_cast():
    @ops.autograd_function(torch.bfloat16)
    class Take(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, index, factor):
            assert x.dtype == torch.float64
            assert index.dtype == torch.int64
            ctx.index, ctx.shape, ctx.factor = index, x.shape, factor
            return x[index] * factor

        @staticmethod
        def backward(ctx, g):
            return torch.zeros(ctx.shape, dtype=g.dtype).index_add(0, ctx.index, g * ctx.factor), None, None

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Take.apply(x, torch.tensor([0, 2]), 3.0), x)
    assert Take.__name__ == "Take"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does it itself
def test_MP_34_works_under_torch_compile():
    torch._dynamo.reset()

    def f(x):
        return ops.softmax(x.sin())

    @ops.autograd_function(torch.float32)
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return f(x) * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = leaf()
    y = torch.compile(lambda x: Double.apply(x), backend="aot_eager")(x)
    y.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_MP_34_refuses():
    with pytest.raises(ArgumentError, match=r"autocast has no other dtype"):
        ops.autograd_function("fp8_e5m2")
    with pytest.raises(ArgumentError, match=r"derived from torch\.autograd\.Function"):
        ops.autograd_function()(int)
