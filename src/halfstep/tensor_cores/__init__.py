"""Sizes that Tensor Cores like: which layers of a model miss them, and a vocabulary padded without a trace.

``layers`` knows the sizes of each kind of layer, ``layout`` where ``channels_last`` helps; ``advice`` compares and
counts, in the words of ``wording``; ``padding`` pads products; ``checks`` refuses what none of them can read.
"""

from halfstep.tensor_cores.advice import Advice, Finding, tensor_core_advice
from halfstep.tensor_cores.layout import ChannelsLast
from halfstep.tensor_cores.padding import Padded, PaddedLinear, pad_to_multiple, unpad

__all__ = [
    "Advice",
    "ChannelsLast",
    "Finding",
    "Padded",
    "PaddedLinear",
    "pad_to_multiple",
    "tensor_core_advice",
    "unpad",
]
