"""Where torch's ``channels_last`` layout helps a model's convolutions.

Convolutions on Tensor Cores read [batch, height, width, channels]; in torch's usual layout, [batch, channels, height,
width], tensors are transposed on the way in and out. torch takes the new layout from the weight or from the input, and
layers hand it on. A weight that looks the same in both, as with a 1x1 kernel or one input channel, cannot tell which it
is in. Depthwise convolutions do not run on Tensor Cores, and those with many groups were once far slower in this layout
(pytorch/pytorch#34977, a V100): measure them.

Source: NVIDIA, "Optimizing Convolutional Layers", tensor layouts in memory: NCHW vs NHWC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ChannelsLast:
    """Whether torch's ``channels_last`` layout helps a model, and whether its weights are in it.

    Args:
        helps: whether a convolution is there whose kernels want it.
        is_set: whether the weights of all such convolutions are in it. (A weight that is the same in both layouts, as
            with a 1x1 kernel, counts as being in it: there the input's layout decides.)
        names: dotted names of those convolutions.
        memory_formats: what to call ``model.to(memory_format=...)`` with: ``"torch.channels_last"`` for Conv2d,
            ``"torch.channels_last_3d"`` for Conv3d.
        reason: why, and what to do.
    """

    helps: bool
    is_set: bool
    names: tuple[str, ...]
    memory_formats: tuple[str, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "names": list(self.names), "memory_formats": list(self.memory_formats)}

    def __str__(self) -> str:
        return f"channels_last: {self.reason}"


_FLAT = (nn.Conv2d, nn.ConvTranspose2d)
_SOLID = (nn.Conv3d, nn.ConvTranspose3d)


def channels_last(named: Mapping[nn.Module, tuple[str, ...]]) -> ChannelsLast | None:
    """The layout of a model's convolutions; None if it has none that torch could keep in it.

    Args:
        named: module -> its dotted names, from ``padding.names_of``.
    """
    convolutions = [module for module in named if isinstance(module, (*_FLAT, *_SOLID))]
    if not convolutions:
        return None
    dense = {
        m: torch.channels_last if isinstance(m, _FLAT) else torch.channels_last_3d
        for m in convolutions
        if m.groups == 1 or m.groups != m.in_channels
    }
    if not dense:
        reason = (
            "all convolutions are depthwise, and those do not run on Tensor Cores: measure before changing the layout"
        )
        return ChannelsLast(False, False, (), (), reason)
    is_set = all(m.weight.is_contiguous(memory_format=f) for m, f in dense.items())
    wanted = tuple(dict.fromkeys(str(f) for f in dense.values()))
    calls = " and ".join(f"model.to(memory_format={name})" for name in wanted)
    if is_set:
        reason = "the weights are in it or are the same in both layouts; give inputs in it too, and layers hand it on"
    else:
        reason = f"call {calls} and give inputs in it: other layouts are transposed on the way to Tensor Cores and back"
    if any(m.groups > 1 for m in dense):
        reason += "; grouped convolutions have been slower in it, so measure"
    return ChannelsLast(True, is_set, tuple(n for m in dense for n in named[m]), wanted, reason)
