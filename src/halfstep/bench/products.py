"""One matrix product or convolution to time: dtype, size, layout, and what it costs.

Method: a product of two n x n matrices is 2 n^3 operations (a multiplication and an addition count as two); a
convolution of B images of S x S pixels and C channels to C channels with a 3 x 3 kernel is 2 B S^2 C^2 9. Operands are
random normal numbers: on a GPU the power that zeros save would show as speed.

Not here: timing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.formats import TF32, FloatFormat, dtype_of


class Layout(enum.Enum):
    """How the operands of a product lie in memory."""

    ROWS = "A B"  # both row by row, as a contiguous tensor is
    RIGHT_TRANSPOSED = "A Bᵀ"  # what nn.Linear does in the forward pass
    LEFT_TRANSPOSED = "Aᵀ B"  # what it does for the weight's gradient
    CONTIGUOUS = "contiguous"  # convolution, images as [batch, channels, height, width]
    CHANNELS_LAST = "channels_last"  # convolution, the channels of a pixel side by side

    @property
    def is_convolution(self) -> bool:
        """Whether it is a layout of images."""
        return self in (Layout.CONTIGUOUS, Layout.CHANNELS_LAST)


# Images and channels of the convolution that is timed: about what a middle layer of a ResNet sees.
BATCH, CHANNELS = 8, 64


@dataclass(frozen=True)
class Product:
    """One product to time.

    Args:
        format: of both operands and the result; tf32 is a product of fp32 tensors that are read as tf32.
        size: n of an n x n by n x n product; for a convolution the side of the image in pixels.
        layout: of the operands.

    Example:
        >>> from halfstep.formats import BF16
        >>> product = Product(BF16, 1024)
        >>> product.flops, product.num_bytes
        (2147483648, 6291456)
    """

    format: FloatFormat
    size: int
    layout: Layout = Layout.ROWS

    @property
    def flops(self) -> int:
        """Floating-point operations of one product."""
        if self.layout.is_convolution:
            return 2 * BATCH * self.size**2 * CHANNELS**2 * 9
        return 2 * self.size**3

    @property
    def num_bytes(self) -> int:
        """Bytes of operands and result."""
        numbers = 2 * BATCH * CHANNELS * self.size**2 + CHANNELS**2 * 9
        return (numbers if self.layout.is_convolution else 3 * self.size**2) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return torch.float32 if self.format == TF32 else dtype_of(self.format)

    @property
    def name(self) -> str:
        """For a progress bar or an error."""
        what = "convolution of images" if self.layout.is_convolution else "product"
        return f"{self.format} {what} {self.size}, {self.layout.value}"

    def build(self, device: torch.device) -> Callable[[], Tensor]:
        """Make the operands; the function that multiplies them once."""
        if self.layout.is_convolution:
            return self._build_convolution(device)
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.size, self.size)
        a, b = (torch.randn(shape, dtype=self.dtype, device=device, generator=generator) for _ in "ab")
        left = a.T if self.layout is Layout.LEFT_TRANSPOSED else a
        right = b.T if self.layout is Layout.RIGHT_TRANSPOSED else b
        out = torch.empty(shape, dtype=self.dtype, device=device)
        return lambda: torch.mm(left, right, out=out)

    def _build_convolution(self, device: torch.device) -> Callable[[], Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        order = torch.channels_last if self.layout is Layout.CHANNELS_LAST else torch.contiguous_format
        images, kernel = (
            torch.randn(shape, dtype=self.dtype, device=device, generator=generator).to(memory_format=order)
            for shape in ((BATCH, CHANNELS, self.size, self.size), (CHANNELS, CHANNELS, 3, 3))
        )
        return lambda: F.conv2d(images, kernel, padding=1)
