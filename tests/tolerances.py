"""How far results may be from fp64, in ulp of the format that the input has: operation x dtype, with the reason.

An error of 0.5 is one correct rounding. For each format: the output, then the gradient. An ulp is taken at the size of
the exact value ("element"), or at the largest of its row ("row") or of all ("tensor"), where values are differences of
larger ones.
"""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """Bounds in ulp for (output, gradient), and what they follow from."""

    fp16: tuple[float, float]
    bf16: tuple[float, float]
    at: tuple[str, str]
    reason: str


TOLERANCES = {
    "softmax": Tolerance(
        (0.51, 1.5), (0.51, 1.5), ("element", "tensor"),
        "one rounding of an fp32 result; backward starts from the rounded probabilities, as torch's does",
    ),
    "log_softmax": Tolerance((0.51, 0.51), (0.51, 0.51), ("row", "row"), "fp32 throughout, one rounding at the end"),
    "cross_entropy": Tolerance((0.01, 0.51), (0.01, 0.51), ("row", "row"), "fp32 loss; its gradient is rounded once"),
    "binary_cross_entropy": Tolerance((0.01, 0.51), (0.01, 0.51), ("element", "element"), "fp32 loss; one rounding"),
    "binary_cross_entropy_with_logits": Tolerance(
        (0.01, 0.51), (0.01, 0.51), ("element", "element"), "fp32 loss, by a formula without differences"
    ),
    "dice_loss": Tolerance((0.01, 0.51), (0.01, 0.51), ("row", "row"), "fp32 loss; its gradient is rounded once"),
    "layer_norm": Tolerance(
        (0.75, 0.75), (0.55, 0.55), ("row", "row"),
        "one rounding; the mean is subtracted in fp32, which cancels where it is 1000 deviations",
    ),
    "rms_norm": Tolerance((0.51, 0.51), (0.51, 0.51), ("element", "row"), "fp32 throughout, one rounding at the end"),
    "normalize": Tolerance((0.51, 0.51), (0.51, 0.51), ("element", "row"), "fp32 throughout, one rounding at the end"),
    "norm": Tolerance((0.01, 0.51), (0.01, 0.51), ("element", "element"), "fp32 norm; its gradient is rounded once"),
    "sum": Tolerance((0.01, 0.51), (0.01, 0.51), ("row", "row"), "fp32 sum; its gradient is the incoming one"),
    "attention": Tolerance(
        (1.5, 3.0), (1.5, 3.0), ("tensor", "tensor"),
        "torch's kernel rounds the probabilities to 16 bits between its two products, and again in backward",
    ),
    "apply_rotary": Tolerance((0.51, 0.51), (0.51, 0.51), ("row", "row"), "fp32 angles and products, one rounding"),
}  # fmt: skip
