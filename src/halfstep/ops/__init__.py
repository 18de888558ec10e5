"""Numerically stable functions: fp32 inside, the input's own 16-bit dtype outside.

    softmax, log_softmax, mask_value            a fully masked row gives zeros, not NaN
    attention                                   torch's kernel, masks checked and combined
    cross_entropy, dice_loss                    no valid label and empty masks give 0, not 0/0
    binary_cross_entropy, ..._with_logits,
    clamp_probability                           finite values and gradients at p = 0 and p = 1
    layer_norm, rms_norm, normalize             statistics in fp32, on the CPU too
    sum, mean, norm                             fp32 results: 65504 is no limit
    sinusoidal_embedding, rotary_embedding,
    apply_rotary                                positions and angles in fp32
    autograd_function                           one dtype for a custom Function's forward and backward

Three rules hold for all of them. What maps a tensor to a tensor gives back the input's dtype; what reduces it to a few
numbers (losses, sums, norms) gives fp32. Inside, ``torch.autocast`` is switched off: the result does not depend on it
(``attention`` alone follows it, for its two products are what autocast is for). For backward no fp32 copy of a 16-bit
tensor is kept: where fp32 values are needed again they are made again, chunk by chunk. Where a kernel of torch does
all this already, it is called and the docstring says so. NaN and inf in the input are never hidden.

Functions that recompute (``log_softmax`` and ``rms_norm`` on 16-bit CPU tensors, the losses, ``normalize``, ``norm``)
work under autograd, twice if need be, and under torch.compile; torch.func's transforms refuse them.

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.3; Kalamkar et al., "A Study of
BFLOAT16 for Deep Learning Training" (arXiv 1905.12322), section 3.
"""

from halfstep.ops.attention import attention
from halfstep.ops.autograd import autograd_function
from halfstep.ops.losses import cross_entropy, dice_loss
from halfstep.ops.norms import layer_norm, normalize, rms_norm
from halfstep.ops.positions import apply_rotary, rotary_embedding, sinusoidal_embedding
from halfstep.ops.probability import binary_cross_entropy, binary_cross_entropy_with_logits, clamp_probability
from halfstep.ops.reductions import mean, norm, sum
from halfstep.ops.softmax import log_softmax, mask_value, softmax

__all__ = [
    "apply_rotary",
    "attention",
    "autograd_function",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "clamp_probability",
    "cross_entropy",
    "dice_loss",
    "layer_norm",
    "log_softmax",
    "mask_value",
    "mean",
    "norm",
    "normalize",
    "rms_norm",
    "rotary_embedding",
    "sinusoidal_embedding",
    "softmax",
    "sum",
]
