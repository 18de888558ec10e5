"""The stable functions as modules, and ``stabilize``, which puts them into a model that exists.

Every module derives from torch's of the same name, with its constructor, its attributes and its state_dict keys; only
``forward`` calls ``halfstep.ops``. So ``stabilize`` can turn a torch module into ours in place: parameters, hooks,
tied modules and references to it stay what they are, and so does an optimizer that holds its parameters.

``stabilize`` also raises ``eps`` values that the format rounds to zero, and judges what it cannot replace: an
activation that saturates has gradients that are exactly zero from some input on, and in 16 bits that comes early.

Not here: a judgement of functions called inside ``forward`` (only modules can be seen); casting (``halfstep.policy``).

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.3; the limits follow from
``halfstep.formats``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import ArgumentError
from halfstep.formats import FP32, FloatFormat, format_of

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "Change",
    "CrossEntropyLoss",
    "LayerNorm",
    "LogSoftmax",
    "RMSNorm",
    "RotaryEmbedding",
    "Softmax",
    "stabilize",
]


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with statistics and weights in fp32: see ``halfstep.ops.layer_norm``.

    Example:
        >>> LayerNorm(2, eps=1e-12).half()(torch.tensor([[1000.0, 1002.0]]).half()).tolist()
        [[-1.0, 1.0]]
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape and dtype."""
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with statistics and weights in fp32: see ``halfstep.ops.rms_norm``.

    ``eps=None`` means fp32's epsilon for every dtype, where torch takes that of the input (0.0078 for bf16).

    Example:
        >>> RMSNorm(2, eps=1e-12).half()(torch.tensor([[3e-4, -3e-4]]).half()).tolist()
        [[1.0, -1.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape and dtype."""
        return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Softmax(nn.Softmax):
    """``torch.nn.Softmax`` in which a fully masked row gives zeros: see ``halfstep.ops.softmax``.

    Example:
        >>> Softmax(dim=-1)(torch.full((1, 2), -torch.inf))
        tensor([[0., 0.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Scores to probabilities, of the same shape and dtype."""
        return ops.softmax(input, _dim_of(self))


class LogSoftmax(nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` in which a fully masked row gives zeros: see ``halfstep.ops.log_softmax``.

    Example:
        >>> LogSoftmax(dim=-1)(torch.full((1, 2), -torch.inf))
        tensor([[0., 0.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Scores to log-probabilities, of the same shape and dtype."""
        return ops.log_softmax(input, _dim_of(self))


def _dim_of(module: nn.Softmax | nn.LogSoftmax) -> int:
    if module.dim is None:
        raise ArgumentError(
            asked=f"{type(module).__name__}(dim=None)",
            true="without a dim torch guesses one from the number of dimensions",
            why="the guess is deprecated, and wrong for a batch of sequences",
            fix=f"pass {type(module).__name__}(dim=-1), or the dimension that is meant",
        )
    return module.dim


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` in fp32, 0 where no label is valid: see ``halfstep.ops.cross_entropy``.

    Example:
        >>> CrossEntropyLoss()(torch.zeros(1, 3).half(), torch.tensor([-100]))
        tensor(0.)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Scores ``[batch, classes, ...]`` and labels to an fp32 loss."""
        return ops.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class BCELoss(nn.BCELoss):
    """``torch.nn.BCELoss`` in fp32, with finite gradients at 0 and 1: see ``halfstep.ops.binary_cross_entropy``.

    Example:
        >>> BCELoss()(torch.tensor([1.0]).half(), torch.tensor([0.0]))
        tensor(7.6246)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Probabilities and targets of one shape to an fp32 loss."""
        return ops.binary_cross_entropy(input, target, weight=self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """``torch.nn.BCEWithLogitsLoss`` in fp32: see ``halfstep.ops.binary_cross_entropy_with_logits``.

    Example:
        >>> BCEWithLogitsLoss()(torch.tensor([30.0]).half(), torch.tensor([0.0]))
        tensor(30.)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Scores and targets of one shape to an fp32 loss."""
        return ops.binary_cross_entropy_with_logits(
            input, target, weight=self.weight, pos_weight=self.pos_weight, reduction=self.reduction
        )


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys by their positions; it has no buffer that ``model.half()`` could round.

    Args:
        dim: size of a head, even.
        base: the largest wavelength is almost ``2 pi base``.
        interleaved: which elements pair up, as in ``halfstep.ops.apply_rotary``.

    Example:
        >>> rotary = RotaryEmbedding(4).half()
        >>> rotary(torch.ones(1, 4096, 4).half(), torch.arange(4096)).dtype
        torch.float16
    """

    def __init__(self, dim: int, base: float = 10_000.0, *, interleaved: bool = False) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, base, interleaved

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[..., length, dim]`` and integer or fp32 positions ``[length]`` to the shape and dtype of ``x``."""
        cos, sin = ops.rotary_embedding(positions, self.dim, base=self.base)
        return ops.apply_rotary(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"


@dataclass(frozen=True)
class Change:
    """What ``stabilize`` did to one module, or thinks of it.

    Args:
        path: dotted name of the module in the model; ``""`` is the model itself.
        before: what it was, such as ``"torch.nn.Softmax"`` or ``"eps=1e-08"``.
        after: what it is now; the same as ``before`` if it was only judged.
        reason: why.
    """

    path: str
    before: str
    after: str
    reason: str

    @property
    def is_change(self) -> bool:
        """False where the module was judged and left."""
        return self.before != self.after


_REPLACEMENTS: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.Softmax: (
        Softmax,
        "a row of nothing but -inf is NaN in torch, and so are all gradients behind it; here 0",
    ),
    nn.LogSoftmax: (LogSoftmax, "on a CPU torch adds 16-bit exponentials up in 16 bits; a fully masked row is NaN"),
    nn.LayerNorm: (LayerNorm, "on a CPU torch keeps statistics, and adds gradients of weights up, in 16 bits"),
    nn.RMSNorm: (RMSNorm, "eps=None means another eps in each dtype, and on a CPU torch keeps five fp32 copies"),
    nn.CrossEntropyLoss: (CrossEntropyLoss, "log-probabilities and loss were 16-bit; no valid label was 0/0"),
    nn.BCELoss: (BCELoss, "gradients at p = 0 and p = 1 were beyond the format, and autocast refuses it on GPUs"),
    nn.BCEWithLogitsLoss: (BCEWithLogitsLoss, "loss and its sum were 16-bit"),
}

# Attributes by which modules, torch's and others', hold a small number that is added before dividing.
_EPS_NAMES = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps")

# Their kernels add eps in fp32, whatever the dtype of the input, so that 1e-8 is not lost; but on a CPU they keep the
# reciprocal of the deviation in the input's dtype, and for a constant input that is 1 / sqrt(eps).
_FP32_INSIDE = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def stabilize(model: nn.Module, policy: object) -> list[Change]:
    """Make a model's known weak spots safe in a 16-bit format, and say what was done and why.

    Modules of ``torch.nn`` (their very types, not what derives from them) become halfstep's of the same name, in
    place: the state_dict keys, parameters, hooks and references stay. ``eps`` attributes that round to zero become
    the format's smallest normal number. Sigmoid and tanh are judged, not changed. It cannot be undone: copy the model
    before, with ``copy.deepcopy``, if both are wanted. Doing it twice changes nothing more.

    Args:
        model: any module; changed in place.
        policy: what the model will compute in: a ``Policy``, or any object with ``compute_dtype``; or a dtype, its
            name, or a FloatFormat.

    Returns:
        One record for each change and each judgement, in the order of ``model.named_modules()``. Empty for fp32, tf32.

    Raises:
        ArgumentError: the policy names no format.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sigmoid())
        >>> for change in stabilize(model, torch.float16):
        ...     print(change.path, change.before, "->", change.after)
        1 torch.nn.LayerNorm -> halfstep.nn.LayerNorm
        2 torch.nn.Sigmoid -> torch.nn.Sigmoid
    """
    fmt = _format_of(policy)
    if fmt.mantissa_bits == FP32.mantissa_bits or fmt.dtype is None:
        return []
    changes = []
    for path, module in model.named_modules():
        changes += _replace(path, module) + _raise_eps(path, module, fmt) + _judge(path, module, fmt)
    return changes


def _format_of(policy: object) -> FloatFormat:
    named = getattr(policy, "compute_dtype", policy)
    if isinstance(named, (str, torch.dtype, FloatFormat)):
        return format_of(named)
    raise ArgumentError(
        asked=f"stabilize for {policy!r}",
        true="it needs to know the format that the model computes in",
        why="limits differ between formats",
        fix='pass a Policy, such as halfstep.Policy.parse("fp16-mixed"), or a dtype',
    )


def _replace(path: str, module: nn.Module) -> list[Change]:
    cls = type(module)
    if cls not in _REPLACEMENTS:
        return []
    ours, reason = _REPLACEMENTS[cls]
    # Ours add no attribute, so that the object can change its class and stay the same object to all who hold it.
    module.__class__ = ours
    return [Change(path, f"torch.nn.{cls.__name__}", f"halfstep.nn.{ours.__name__}", reason)]


def _raise_eps(path: str, module: nn.Module, fmt: FloatFormat) -> list[Change]:
    if isinstance(module, (LayerNorm, RMSNorm)):  # all of theirs is fp32
        return []
    changes = []
    for name in _EPS_NAMES:
        value = getattr(module, name, None)
        if not isinstance(value, float) or value <= 0:
            continue
        if isinstance(module, _FP32_INSIDE):
            is_lost = value**-0.5 > fmt.largest
            why = f"a constant input has the deviation sqrt(eps), whose reciprocal is beyond {fmt.largest:g}"
        else:
            is_lost = value <= fmt.smallest_subnormal / 2  # a tie goes to even: to zero
            why = f"it is zero in {fmt.name}, whose smallest number is {fmt.smallest_subnormal:.3g}, and 0/0 is NaN"
        if is_lost:
            setattr(module, name, fmt.smallest_normal)
            reason = f"{why}; now the smallest number with all its bits"
            changes.append(Change(path, f"{name}={value:g}", f"{name}={fmt.smallest_normal:g}", reason))
    return changes


def saturation(activation: str, format: FloatFormat) -> float:
    """The input from which on sigmoid or tanh rounds to 1, so that its gradient, made from the output, is 0.

    The spacing below 1 is half of epsilon, and what is within half of that rounds to 1: ``1 - sigmoid(x)`` is
    ``epsilon / 4`` at ``log(4 / epsilon - 1)``, ``1 - tanh(x)`` is at ``log(8 / epsilon - 1) / 2``.

    Args:
        activation: ``"sigmoid"`` or ``"tanh"``.
        format: of the output.

    Returns:
        A positive number. tanh saturates at its negative too, sigmoid there keeps small numbers and gradients.

    Example:
        >>> from halfstep.formats import FP16
        >>> round(saturation("sigmoid", FP16), 2), round(saturation("tanh", FP16), 2)
        (8.32, 4.51)
    """
    if activation == "sigmoid":
        return math.log(4 / format.epsilon - 1)
    return math.log(8 / format.epsilon - 1) / 2


_SATURATING = {nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}


def _judge(path: str, module: nn.Module, fmt: FloatFormat) -> list[Change]:
    kind = _SATURATING.get(type(module))
    if kind is not None:
        here, in_fp32 = saturation(kind, fmt), saturation(kind, FP32)
        sign = "inputs above" if kind == "sigmoid" else "inputs beyond +-"
        advice = (
            "before a binary cross entropy leave it out and use BCEWithLogitsLoss; inside a network prefer ReLU or GELU"
            if kind == "sigmoid"
            else "inside a network prefer ReLU or GELU, or normalise what goes in"
        )
        reason = (
            f"it saturates: for {sign} {here:.2f} its output is exactly 1 in {fmt.name} and its gradient exactly 0 "
            f"(in fp32 from {in_fp32:.2f} on); {advice}"
        )
    elif type(module) is nn.MultiheadAttention:
        reason = (
            "with need_weights=True it takes a plain softmax: a fully masked row is NaN; call it with "
            "need_weights=False, where torch's kernel gives zeros"
        )
    else:
        return []
    name = f"torch.nn.{type(module).__name__}"
    return [Change(path, name, name, reason)]
