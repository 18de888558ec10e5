"""Measure the stable functions, and torch's own on the same 16-bit inputs, against fp64: ``python tests/ops/errors.py``
prints the table of docs/concepts/stable-functions.md.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import ops
from halfstep.formats import format_of

_path = Path(__file__).parents[1] / "tolerances.py"
_spec = importlib.util.spec_from_file_location("tolerances", _path)
_tolerances = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tolerances)
TOLERANCES = _tolerances.TOLERANCES

FORMATS = ("fp16", "bf16")
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Entry:
    """One function: ours, torch's, and what it is measured on."""

    ours: Function
    torchs: Function
    exact: Function  # of fp64 tensors
    inputs: Callable[[torch.dtype, torch.Generator], list[Tensor]]  # the first is differentiated


def rows(dtype: torch.dtype, generator: torch.Generator, sizes: tuple[float, ...], n: int = 96) -> Tensor:
    """``[len(sizes) * 8, n]`` normal numbers of these sizes."""
    parts = [torch.randn(8, n, generator=generator) * size for size in sizes]
    return torch.cat(parts).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def limits(dtype: torch.dtype, n: int = 96) -> Tensor:
    """Rows at the format's ends: all largest, both signs, subnormals, one large among zeros, zeros and ones."""
    fmt = format_of(dtype)
    x = torch.zeros(6, n)
    x[0] = fmt.largest
    x[1, ::2], x[1, 1::2] = fmt.largest, -fmt.largest
    x[2] = torch.arange(n) * fmt.smallest_subnormal
    x[3, 0] = fmt.largest
    x[4, 0] = fmt.smallest_subnormal
    x[5, ::3] = 1.0
    return x.to(dtype)


def scores(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    return [torch.cat((rows(dtype, generator, (1e-3, 1.0, 10.0, 1000.0)), limits(dtype)))]


def scores_and_labels(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    (x,) = scores(dtype, generator)
    return [x, torch.randint(0, x.shape[1], (x.shape[0],), generator=generator)]


def any_size(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    sizes = (1e-6, 1e-3, 1.0, 1e3, 2e4) if dtype == torch.float16 else (1e-30, 1e-3, 1.0, 1e20, 1e37)
    return [torch.cat((rows(dtype, generator, sizes), limits(dtype)))]


def with_weight(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    (x,) = any_size(dtype, generator)
    return [x, 1 + 0.1 * torch.randn(x.shape[1], generator=generator)]


def off_centre(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    x = torch.cat((rows(dtype, generator, (1e-2, 1.0, 1e3)), (1000 + rows(dtype, generator, (4.0,))).to(dtype)))
    return [x, 1 + 0.1 * torch.randn(x.shape[1], generator=generator)]


def probabilities(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Every number of the format between the bounds, with target 0 and with target 1."""
    every = torch.arange(2**15, dtype=torch.int16).view(dtype)
    low, high = ops.probability.probability_bounds(dtype)
    p = every[(every >= low) & (every <= high)].repeat(2, 1)
    return [p, torch.tensor([[0.0], [1.0]]).expand_as(p).to(dtype)]


def logits(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Every finite number of the format, with target 0 and with target 1."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite()].repeat(2, 1)
    return [x, torch.tensor([[0.0], [1.0]]).expand_as(x).to(dtype)]


def masks(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    p = torch.rand(6, 512 * 16, generator=generator).to(dtype)
    return [p, (torch.rand(p.shape, generator=generator) < 0.3).to(dtype)]


def heads(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    def make() -> Tensor:
        return torch.randn(2, 4, 64, 32, generator=generator)

    return [(make() * 2).to(dtype), (make() * 2).to(dtype), make().to(dtype)]


def queries(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(4096, 64, generator=generator).to(dtype)]


def dice(p: Tensor, t: Tensor) -> Tensor:
    return 1 - (2 * (p * t).sum(-1) + 1e-5) / (p.sum(-1) + t.sum(-1) + 1e-5)


def l2(x: Tensor) -> Tensor:
    """In fp64: scaled, for bf16's squares pass even fp64's comfort after sums; and zero where all is zero."""
    return torch.linalg.vector_norm(x, dim=-1)


def bce(p: Tensor, t: Tensor) -> Tensor:
    return -(t * p.log() + (1 - t) * torch.log1p(-p))


def bce_logits(x: Tensor, t: Tensor) -> Tensor:
    return -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x))


def rotate(x: Tensor) -> Tensor:
    """The angles are fp32's by contract; the rotation is exact."""
    angles = (torch.arange(4096.0)[:, None] * (1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64))).double()
    first, second = x.chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1)


def rotate_in_dtype(x: Tensor) -> Tensor:
    """What a model cast to 16 bits does: positions and frequencies are of its dtype."""
    frequencies = (1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64)).to(x.dtype)
    angles = torch.arange(4096).to(x.dtype)[:, None] * frequencies
    first, second = x.chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1)


def of_last(function: Function) -> Function:
    return lambda x, w: function(x, x.shape[-1:], w.to(x.dtype))


ENTRIES = {
    "softmax": Entry(ops.softmax, *[lambda x: F.softmax(x, -1)] * 2, scores),
    "log_softmax": Entry(ops.log_softmax, *[lambda x: F.log_softmax(x, -1)] * 2, scores),
    "cross_entropy": Entry(
        lambda x, t: ops.cross_entropy(x, t, reduction="none"),
        *[lambda x, t: F.cross_entropy(x, t, reduction="none")] * 2,
        scores_and_labels,
    ),
    "binary_cross_entropy": Entry(
        lambda p, t: ops.binary_cross_entropy(p, t, reduction="none"),
        lambda p, t: F.binary_cross_entropy(p, t, reduction="none"),
        bce,
        probabilities,
    ),
    "binary_cross_entropy_with_logits": Entry(
        lambda x, t: ops.binary_cross_entropy_with_logits(x, t, reduction="none"),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
        bce_logits,
        logits,
    ),
    "dice_loss": Entry(lambda p, t: ops.dice_loss(p, t, dim=-1, reduction="none"), dice, dice, masks),
    "layer_norm": Entry(
        lambda x, w: ops.layer_norm(x, x.shape[-1:], w), *[of_last(F.layer_norm)] * 2, off_centre
    ),
    "rms_norm": Entry(
        lambda x, w: ops.rms_norm(x, x.shape[-1:], w, 1e-6),
        *[lambda x, w: F.rms_norm(x, x.shape[-1:], w.to(x.dtype), 1e-6)] * 2,
        with_weight,
    ),
    "normalize": Entry(lambda x: ops.normalize(x, eps=1e-12), *[lambda x: F.normalize(x, dim=-1)] * 2, any_size),
    "norm": Entry(lambda x: ops.norm(x, -1), l2, l2, any_size),
    "sum": Entry(lambda x: ops.sum(x, -1), *[lambda x: x.sum(-1)] * 2, lambda d, g: [rows(d, g, (1.0, 100.0), 4096)]),
    "attention": Entry(ops.attention, *[F.scaled_dot_product_attention] * 2, heads),
    "apply_rotary": Entry(
        lambda x: ops.apply_rotary(x, *ops.rotary_embedding(torch.arange(4096), 64)), rotate_in_dtype, rotate, queries
    ),
}  # fmt: skip


def worst_ulp(found: Tensor, exact: Tensor, name: str, at: str) -> float:
    """Largest error in ulp of the format; inf where a finite value became NaN or inf."""
    fmt = format_of(name)
    is_inside = exact.abs() <= fmt.largest
    size = exact.abs()
    if at == "row" and exact.dim() > 1:
        size = size.amax(-1, keepdim=True).expand_as(exact)
    elif at == "tensor":
        size = size.amax().expand_as(exact)
    elif at == "row":
        size = size.clamp(min=1.0)  # losses: of the size of a bit, or larger
    error = ((found.double() - exact).abs() / fmt.ulp(size.clamp(max=fmt.largest)))[is_inside]
    return math.inf if not error.isfinite().all() else error.max().item()


def measure(operation: str, name: str, *, of_torch: bool = False) -> tuple[float, float]:
    """Worst error in ulp of the output and of the gradient."""
    entry = ENTRIES[operation]
    dtype = format_of(name).dtype
    generator = torch.Generator().manual_seed(20261129)
    inputs = entry.inputs(dtype, generator)
    x = inputs[0].clone().requires_grad_()
    wide = inputs[0].double().requires_grad_()
    rest = [t.double() if t.is_floating_point() else t for t in inputs[1:]]
    y = (entry.torchs if of_torch else entry.ours)(x, *inputs[1:])
    exact = entry.exact(wide, *rest)
    incoming = torch.randn(y.shape, generator=generator).to(y.dtype)
    if y.dim() == 1 or y.dtype == torch.float32:
        incoming = torch.ones_like(y)  # one loss each: a factor would only be a factor
    (gradient,) = torch.autograd.grad(y, x, incoming)
    (exact_gradient,) = torch.autograd.grad(exact, wide, incoming.double())
    at = TOLERANCES[operation].at
    return worst_ulp(y.detach(), exact.detach(), name, at[0]), worst_ulp(gradient, exact_gradient, name, at[1])


def shown(value: float) -> str:
    """Two digits, or what is beyond counting."""
    if not math.isfinite(value):
        return "NaN/inf"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table() -> str:
    """The table of the documentation: worst errors, ours and torch's, output and gradient."""
    lines = [
        "| function | fp16: output, gradient | torch's fp16 | bf16: output, gradient | torch's bf16 |",
        "|---|---|---|---|---|",
    ]
    for operation in ENTRIES:
        pairs = [measure(operation, name, of_torch=of_torch) for name in FORMATS for of_torch in (False, True)]
        cells = [", ".join(shown(value) for value in pair) for pair in pairs]
        lines.append(f"| `{operation}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())  # noqa: T201
