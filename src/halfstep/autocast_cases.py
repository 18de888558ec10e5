"""The operations whose dtypes ``halfstep probe --ops`` finds out, each with inputs small enough to run at once.

A case is a function and the shapes that it takes. ``inputs`` are activations: they come in fp32, in 16 bits, or one of
each. ``weights`` come in the dtype that the policy keeps weights in. All values lie between 0 and 1, so that
logarithms, roots and cross entropies are defined.

Not here: what an operation runs in. Nothing in this file says so; ``autocast_ops`` finds it by running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import ops

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class OpCase:
    """One operation to run.

    Args:
        name: what a person calls it.
        family: what it belongs to, such as ``"products"``.
        call: takes one tensor per shape of ``inputs``, then one per shape of ``weights``.
        inputs: shapes of the activations.
        weights: shapes of the weights.
        is_random: whether two calls on the same tensors may differ, so that there is no exact value to compare with.
    """

    name: str
    family: str
    call: Callable[..., Any]
    inputs: tuple[Shape, ...] = ((4, 8),)
    weights: tuple[Shape, ...] = ()
    is_random: bool = False


def _from(module: Any, family: str, names: str, *inputs: Shape, then: tuple[Any, ...] = ()) -> Iterable[OpCase]:
    """Functions of a module that take tensors, and then the same few arguments."""
    for name in names.split():
        function = getattr(module, name)
        yield OpCase(name, family, partial(_call, function, then), inputs or ((4, 8),))


def _call(function: Callable[..., Any], then: tuple[Any, ...], *tensors: Tensor) -> Any:
    return function(*tensors, *then)


def _labels(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:1], device=x.device)


def _attention(x: Tensor, projections: Tensor, output: Tensor) -> Tensor:
    return F.multi_head_attention_forward(  # 2 heads, no biases
        x, x, x, 8, 2, projections, None, None, None, False, 0.0, output, None, need_weights=False
    )[0]


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, variance = torch.zeros_like(weight.detach()), torch.ones_like(weight.detach())
    return F.batch_norm(x, mean, variance, weight, bias, training=True)


def _ctc(x: Tensor) -> Tensor:
    targets, lengths = torch.ones(2, 2, dtype=torch.long, device=x.device), torch.tensor([4, 4])
    return F.ctc_loss(x, targets, lengths, torch.tensor([2, 2]))


def _convolution(name: str, dimensions: int) -> OpCase:
    image, kernel = (2, 4, *[5] * dimensions), (4, 4, *[3] * dimensions)
    return OpCase(name, "convolutions", getattr(F, name), (image,), (kernel, (4,)))


_ROW, _PAIR, _IMAGE, _CELL, _HEADS = (4, 8), ((4, 8),) * 2, (1, 2, 4, 4), (4, 8), (1, 2, 8, 8)
# Square matrices of one element: positive definite whatever the value, and with nothing to pivot.
_MATRIX = (1, 1)

TORCH_CASES: tuple[OpCase, ...] = (
    *_from(torch, "products", "matmul mm inner kron", (8, 8), (8, 8)),
    *_from(torch, "products", "bmm", (2, 8, 8), (2, 8, 8)),
    *_from(torch, "products", "mv", (8, 8), (8,)),
    *_from(torch, "products", "dot outer", (8,), (8,)),
    *_from(torch, "products", "addmm", (8, 8), (8, 8), (8, 8)),
    *_from(torch, "products", "addmv", (8,), (8, 8), (8,)),
    *_from(torch, "products", "addbmm", (8, 8), (2, 8, 8), (2, 8, 8)),
    *_from(torch, "products", "baddbmm", (2, 8, 8), (2, 8, 8), (2, 8, 8)),
    OpCase("einsum", "products", lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((2, 8, 8), (2, 8, 8))),
    OpCase("linear", "products", F.linear, (_ROW,), ((8, 8), (8,))),
    OpCase("bilinear", "products", F.bilinear, _PAIR, ((3, 8, 8), (3,))),
    *(_convolution(f"{name}{d}d", d) for name in ("conv", "conv_transpose") for d in (1, 2, 3)),
    *_from(F, "attention", "scaled_dot_product_attention", _HEADS, _HEADS, _HEADS),
    OpCase("multi_head_attention", "attention", _attention, ((3, 2, 8),), ((24, 8), (8, 8))),
    *(
        OpCase(name, "recurrent", getattr(torch, name), (_CELL, _CELL), ((gates * 8, 8), (gates * 8, 8)))
        for name, gates in (("rnn_tanh_cell", 1), ("gru_cell", 3))
    ),
    OpCase("lstm_cell", "recurrent", lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), (_CELL,) * 3, ((32, 8),) * 2),
    OpCase(
        "lstm",
        "recurrent",
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, False, 1, 0.0, True, False, False),
        ((3, 2, 8), (1, 2, 8), (1, 2, 8)),
        ((32, 8), (32, 8)),
    ),
    OpCase(
        "gru",
        "recurrent",
        lambda x, h, *w: torch.gru(x, h, w, False, 1, 0.0, True, False, False),
        ((3, 2, 8), (1, 2, 8)),
        ((24, 8), (24, 8)),
    ),
    OpCase("batch_norm", "norms", _batch_norm, (_ROW,), ((8,), (8,))),
    OpCase("layer_norm", "norms", lambda x, w, b: F.layer_norm(x, (8,), w, b), (_ROW,), ((8,), (8,))),
    OpCase("group_norm", "norms", lambda x, w, b: F.group_norm(x, 2, w, b), (_ROW,), ((8,), (8,))),
    OpCase("rms_norm", "norms", lambda x, w: F.rms_norm(x, (8,), w), (_ROW,), ((8,),)),
    *_from(F, "norms", "instance_norm", (2, 4, 8)),
    *_from(F, "norms", "normalize"),
    *_from(torch, "softmax", "softmax log_softmax logsumexp", then=(-1,)),
    OpCase("cross_entropy", "losses", lambda x: F.cross_entropy(x, _labels(x))),
    OpCase("nll_loss", "losses", lambda x: F.nll_loss(x, _labels(x))),
    *_from(F, "losses", "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss", *_PAIR),
    *_from(F, "losses", "binary_cross_entropy binary_cross_entropy_with_logits", *_PAIR),
    *_from(F, "losses", "gaussian_nll_loss triplet_margin_loss", _ROW, _ROW, _ROW),
    OpCase("cosine_embedding_loss", "losses", lambda a, b: F.cosine_embedding_loss(a, b, _ones(a)), _PAIR),
    OpCase("ctc_loss", "losses", _ctc, ((4, 2, 8),)),
    *_from(F, "distances", "cosine_similarity pairwise_distance", *_PAIR),
    *_from(torch, "distances", "cdist dist", *_PAIR),
    *_from(F, "distances", "pdist"),
    *_from(torch, "functions", "exp expm1 log log1p sqrt rsqrt reciprocal sin cos tan acos sinh erf erfinv"),
    *_from(torch, "functions", "pow", then=(3,)),
    *_from(F, "activations", "relu gelu silu elu softplus mish logsigmoid sigmoid tanh glu"),
    OpCase("prelu", "activations", F.prelu, (_ROW,), ((1,),)),
    *_from(torch, "two tensors", "add mul div maximum pow atan2", *_PAIR),
    *_from(torch, "two tensors", "addcmul addcdiv", _ROW, _ROW, _ROW),
    OpCase("cat", "two tensors", lambda a, b: torch.cat((a, b)), _PAIR),
    OpCase("stack", "two tensors", lambda a, b: torch.stack((a, b)), _PAIR),
    OpCase("where", "two tensors", lambda a, b: torch.where(a > 0.5, a, b), _PAIR),
    OpCase("lerp", "two tensors", lambda a, b: torch.lerp(a, b, 0.5), _PAIR),
    OpCase("index_copy", "two tensors", lambda a, b: a.index_copy(0, _labels(a), b), _PAIR),
    OpCase("index_add", "two tensors", lambda a, b: a.index_add(0, _labels(a), b), _PAIR),
    *_from(torch, "sums", "sum mean prod var std amax norm", (64, 64)),
    *_from(torch, "sums", "cumsum cumprod logcumsumexp", (4, 64), then=(-1,)),
    OpCase("interpolate nearest", "images", lambda x: F.interpolate(x, scale_factor=2), (_IMAGE,)),
    *(
        OpCase(f"interpolate {mode}", "images", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), (_IMAGE,))
        for mode in ("bilinear", "bicubic")
    ),
    *_from(F, "images", "avg_pool2d max_pool2d adaptive_avg_pool2d", _IMAGE, then=(2,)),
    *_from(F, "images", "avg_pool3d", (1, 2, 4, 4, 4), then=(2,)),
    OpCase("pad reflect", "images", lambda x: F.pad(x, (1, 1), mode="reflect"), ((1, 2, 4),)),
    OpCase("grid_sample", "images", lambda x, g: F.grid_sample(x, g, align_corners=False), (_IMAGE, (1, 3, 3, 2))),
    *_from(torch.linalg, "linear algebra", "inv cholesky det eigvalsh svdvals qr", _MATRIX),
    *_from(torch.linalg, "linear algebra", "solve", _MATRIX, _MATRIX),
    OpCase("fft.rfft", "linear algebra", torch.fft.rfft),
    OpCase("embedding", "other", lambda w: F.embedding(_labels(w), w)),
    OpCase("embedding_bag", "other", lambda w: F.embedding_bag(_labels(w).view(2, 2), w)),
    OpCase("dropout", "other", F.dropout, is_random=True),
)

HALFSTEP = "halfstep.ops"
HALFSTEP_CASES: tuple[OpCase, ...] = (
    *_from(ops, HALFSTEP, "softmax log_softmax normalize"),
    *_from(ops, HALFSTEP, "sum mean norm", (64, 64)),
    OpCase("layer_norm", HALFSTEP, lambda x, w, b: ops.layer_norm(x, 8, w, b), (_ROW,), ((8,), (8,))),
    OpCase("rms_norm", HALFSTEP, lambda x, w: ops.rms_norm(x, 8, w), (_ROW,), ((8,),)),
    OpCase("cross_entropy", HALFSTEP, lambda x: ops.cross_entropy(x, _labels(x))),
    *_from(ops, HALFSTEP, "binary_cross_entropy binary_cross_entropy_with_logits dice_loss", *_PAIR),
    OpCase("apply_rotary", HALFSTEP, ops.apply_rotary, (_ROW,), ((4, 4), (4, 4))),
    *_from(ops, HALFSTEP, "attention", _HEADS, _HEADS, _HEADS),
)
ALL_CASES = TORCH_CASES + HALFSTEP_CASES
