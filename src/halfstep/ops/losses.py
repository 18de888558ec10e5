"""Cross entropy and the Dice loss, in fp32 whatever the dtype of the scores.

A loss is one number: rounding it to 16 bits saves nothing, hides small improvements, and overflows when it is summed or
scaled. So losses are fp32. What is large are the scores, and of those only the 16-bit tensor itself is kept for
backward. torch's cross_entropy on 16-bit scores keeps their log-probabilities rounded to 16 bits (a log-probability of
-10 is off by up to 1/32 in bf16, its probability by 3 %), and on fp32 scores an fp32 tensor of their size.

A mean over no valid label is 0 with zero gradients, not 0/0. Labels that are ignored contribute nothing, even where
their scores are not finite.

Not here: losses for regression (torch's are sums of few terms: call them on ``x.float()``).

Sources: Szegedy et al., "Rethinking the Inception Architecture" (arXiv 1512.00567), section 7, for label smoothing;
Milletari et al., "V-Net" (arXiv 1606.04797), section 3, for the Dice loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.ops.checks import (
    autocast_off,
    check_floating,
    check_reduction,
    check_same_shape,
    is_narrow,
    seen_on_host,
    widened,
)
from halfstep.ops.chunks import in_chunks
from halfstep.ops.reductions import as_rows, reduced_shape


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy between scores and labels, as ``torch.nn.functional.cross_entropy`` means it, in fp32.

    Args:
        logits: floating scores ``[classes]``, ``[batch, classes]`` or ``[batch, classes, ...]``.
        target: int64 labels of the same shape without the classes, in ``[0, classes)`` or ``ignore_index``; or
            floating probabilities of the shape of ``logits`` (then ``ignore_index`` has no effect, and an fp32 copy
            of 16-bit scores is kept for backward).
        weight: of each class, ``[classes]``; the mean divides by the weights of the labels that occur.
        ignore_index: label that contributes nothing. It may be negative.
        reduction: ``"mean"`` over valid labels, ``"sum"``, or ``"none"``.
        label_smoothing: share of the target spread evenly over all classes, in ``[0, 1]``.

    Returns:
        An fp32 tensor (fp64 for fp64 scores), under autocast too: a scalar, or one loss for each label.
        The mean over no valid label, or over none at all, is 0.

    Raises:
        ArgumentError: dtypes or shapes do not fit, a label is out of range (seen on the CPU; on a GPU torch stops the
            process), the smoothing is not in ``[0, 1]``, or the reduction is unknown.

    Example:
        >>> cross_entropy(torch.zeros(2, 3, dtype=torch.half), torch.tensor([-100, -100]))
        tensor(0.)
    """
    check_floating(logits, "cross_entropy", "logits")
    check_reduction(reduction, "cross_entropy")
    _check_smoothing(label_smoothing)
    if target.is_floating_point() and target.shape == logits.shape:
        with autocast_off(logits):
            wide, wide_target = widened(logits), widened(target).to(widened(logits).dtype)
            w = None if weight is None else weight.to(wide.dtype)
            if not wide.numel() and reduction == "mean":  # torch: 0/0
                reduction = "sum"
            return F.cross_entropy(wide, wide_target, weight=w, reduction=reduction, label_smoothing=label_smoothing)
    _check_labels(logits, target, weight)
    losses = _losses_of_labels(logits, target, weight, ignore_index, label_smoothing)
    if reduction == "mean":
        return losses.sum() / _total_weight(target, weight, ignore_index, losses.dtype)
    return losses.sum() if reduction == "sum" else losses


def _losses_of_labels(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """One loss for each label, 0 where it is ignored, of the shape of ``target``."""

    def of_rows(x: Tensor, labels: Tensor, w: Tensor | None = None) -> Tensor:
        # No NaN of an ignored row may reach a product with its loss's gradient: 0 * NaN would stay NaN.
        is_ignored = (labels == ignore_index).unsqueeze(1)
        if seen_on_host(is_ignored.any()) is not False:
            x = x.masked_fill(is_ignored, 0.0)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
        if w is not None:
            options["weight"] = w.to(x.dtype)
        return F.cross_entropy(x, labels, **options)  # type: ignore[arg-type]

    def gradient(incoming: Tensor, x: Tensor, labels: Tensor, w: Tensor | None = None) -> Tensor:
        is_ignored = labels == ignore_index
        if seen_on_host(is_ignored.any()) is not False:
            x = x.masked_fill(is_ignored.unsqueeze(1), 0.0)
            labels, incoming = labels.masked_fill(is_ignored, 0), incoming.masked_fill(is_ignored, 0.0)
        labels, incoming = labels.unsqueeze(1), incoming.unsqueeze(1)
        at_label = (1 - label_smoothing) * incoming if w is None else (1 - label_smoothing) * incoming * w[labels]
        found = F.softmax(x, 1)
        if not label_smoothing:  # the 1 is subtracted first: exact where the probability is near
            return found.scatter_add_(1, labels, incoming.new_full(labels.shape, -1.0)).mul_(at_label)
        # s / C of each class' weight, and the label's own part: the softmax shares out the sum of both.
        share = label_smoothing / x.shape[1]
        spread = incoming * (share if w is None else (w * share).view(-1, *[1] * (x.dim() - 2)))
        total = at_label + (incoming * label_smoothing if w is None else spread.sum(1, keepdim=True))
        return found.mul_(total).sub_(spread).scatter_add_(1, labels, -at_label)

    rows, labels = (logits, target) if logits.dim() > 1 else (logits.unsqueeze(0), target.unsqueeze(0))
    shared = () if weight is None else (weight,)
    try:
        if is_narrow(logits):
            losses = in_chunks(of_rows, rows, labels, shared=shared, dtype=torch.float32, gradient=gradient)
        else:
            with autocast_off(logits):
                losses = of_rows(rows, labels, *shared)
    except IndexError as error:
        raise _label_out_of_range(logits, target, ignore_index) from error
    return losses.view(target.shape)


def _total_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by; 1 where nothing is valid, so that it is 0 and not 0/0."""
    is_valid = target != ignore_index
    if weight is None:
        return is_valid.sum().clamp(min=1).to(dtype)
    total = weight.to(dtype)[target.masked_fill(~is_valid, 0)].masked_fill(~is_valid, 0.0).sum()
    return torch.where(total == 0, 1.0, total)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(
            asked=f"cross_entropy(label_smoothing={label_smoothing})",
            true="it is the share of the target that is spread over all classes",
            why="a share lies in [0, 1]",
            fix="pass a number from 0 to 1; 0.1 is usual",
        )


def _check_labels(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    expected = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else logits.shape[1:]
    if target.dtype != torch.int64 or target.shape != expected or not logits.dim():
        raise ArgumentError(
            asked=f"cross_entropy of logits {tuple(logits.shape)} and a target {tuple(target.shape)} of {target.dtype}",
            true=f"labels for these logits are int64 of shape {tuple(expected)}, probabilities floating of "
            f"{tuple(logits.shape)}; dimension 1 holds the classes",
            why="labels and scores cannot be matched",
            fix="reshape the target, or pass target.long()",
        )
    num_classes = logits.shape[min(1, logits.dim() - 1)]
    if weight is not None and weight.shape != (num_classes,):
        raise ArgumentError(
            asked=f"cross_entropy with weight {tuple(weight.shape)}",
            true=f"there are {num_classes} classes",
            why="every class needs one weight",
            fix=f"pass a weight of shape ({num_classes},)",
        )


def _label_out_of_range(logits: Tensor, target: Tensor, ignore_index: int) -> ArgumentError:
    num_classes = logits.shape[min(1, logits.dim() - 1)]
    valid = target[target != ignore_index]
    return ArgumentError(
        asked=f"cross_entropy with labels from {valid.min().item()} to {valid.max().item()}",
        true=f"there are {num_classes} classes, labelled 0 to {num_classes - 1}, and ignore_index is {ignore_index}",
        why="a label without a score has no loss",
        fix="check the number of classes, or set such labels to ignore_index",
    )


def dice_loss(
    probabilities: Tensor,
    target: Tensor,
    *,
    dim: int | Sequence[int] | None = None,
    smooth: float = 1e-5,
    reduction: str = "mean",
) -> Tensor:
    """One minus the Dice coefficient, ``1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth)``, summed in fp32.

    fp16 sums of an image pass 65504 from 256 x 256 pixels on, and inf / inf is NaN.

    Args:
        probabilities: predicted, in ``[0, 1]``, floating, of any shape.
        target: 0, 1 or soft, of the same shape; any dtype (booleans and integers too).
        dim: dimensions that are summed, such as ``(-2, -1)`` for each image; None sums all.
        smooth: what makes an empty mask with an empty prediction right (loss 0), above 0.
        reduction: over what ``dim`` leaves: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        An fp32 tensor (fp64 for fp64), under autocast too. The mean over no image is 0.

    Raises:
        ArgumentError: the shapes differ, a dimension does not exist, ``smooth`` is not above 0, or the reduction is
            unknown.

    Example:
        >>> ones = torch.ones(512, 512, dtype=torch.half)
        >>> dice_loss(ones, ones)
        tensor(0.)
    """
    check_floating(probabilities, "dice_loss", "probabilities")
    check_same_shape(probabilities, target, "dice_loss")
    check_reduction(reduction, "dice_loss")
    if not smooth > 0:
        raise ArgumentError(
            asked=f"dice_loss(smooth={smooth})",
            true="an empty mask with an empty prediction has sums of 0",
            why="without a positive smooth it is 0 / 0",
            fix="leave smooth at 1e-5, or pass 1.0 for a gentler loss on small masks",
        )
    sums = _dice_sums(probabilities, target, dim)  # [rows, 3]
    overlap, of_prediction, of_target = sums.unbind(-1)
    losses = 1 - (2 * overlap + smooth) / (of_prediction + of_target + smooth)
    losses = losses.view(reduced_shape(probabilities, dim))
    if reduction == "none":
        return losses
    return losses.sum() / max(1, losses.numel()) if reduction == "mean" else losses.sum()


def _dice_sums(probabilities: Tensor, target: Tensor, dim: int | Sequence[int] | None) -> Tensor:
    """Overlap, prediction and target, each summed: ``[rows, 3]``."""
    dtype = torch.float32 if is_narrow(probabilities) else probabilities.dtype
    if not target.is_floating_point():
        target = target.to(probabilities.dtype)

    def of_rows(p: Tensor, t: Tensor) -> Tensor:
        return torch.stack(((p * t).sum(-1), p.sum(-1), t.sum(-1)), dim=-1)

    def gradient(incoming: Tensor, p: Tensor, t: Tensor) -> Tensor:
        of_overlap, of_prediction, _ = incoming.unsqueeze(-1).unbind(-2)  # [rows, 1]
        return torch.mul(t, of_overlap, out=p).add_(of_prediction)

    rows, target_rows = as_rows(probabilities, dim), as_rows(target, dim)
    if rows is not None and target_rows is not None:
        return in_chunks(of_rows, rows, target_rows, dtype=dtype, gradient=gradient)
    return in_chunks(
        lambda p, t: of_rows(p.unsqueeze(0), t.unsqueeze(0)),
        *(probabilities.reshape(-1), target.reshape(-1)),
        dtype=dtype,
        gradient=lambda incoming, p, t: gradient(incoming, p.unsqueeze(0), t.unsqueeze(0)),
    ).sum(0, keepdim=True)
