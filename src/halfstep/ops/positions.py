"""Position embeddings whose positions and angles are fp32, whatever dtype the result has.

bf16 cannot tell position 257 from 256, fp16 stops at 2048; an angle of 4000 radians in 16 bits is off by several
radians. Only sines and cosines, which lie in [-1, 1], may be rounded. Frequencies are computed when they are needed,
from two numbers, so that there is no buffer for ``model.half()`` to round.

fp32 holds positions up to 2**24 exactly; an angle there is as exact as in the fp32 models that these embeddings come
from: an fp32 angle near 4096 has a spacing of 2.4e-4 or 4.9e-4 radians.

Not here: learned positions; scaled variants for long contexts (pass scaled positions or another base).

Sources: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), section 3.5; Su et al., "RoFormer" (arXiv
2104.09864), section 3.2.2; EleutherAI/gpt-neox#1003 and huggingface/transformers#29285 for what goes wrong in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ArgumentError
from halfstep.ops.checks import NARROW, autocast_off, check_floating, is_narrow, widened
from halfstep.ops.chunks import pieces_of


def sinusoidal_embedding(
    positions: Tensor, size: int, *, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines and cosines of positions (or diffusion timesteps) at geometrically spaced frequencies.

    Args:
        positions: integers, or fp32 or fp64 numbers, of any shape.
        size: of the embedding, even: first ``size / 2`` sines, then as many cosines.
        base: the largest wavelength is almost ``2 pi base``.
        dtype: of the result; only the finished values are cast to it.

    Returns:
        ``[*positions.shape, size]``.

    Raises:
        ArgumentError: positions are 16-bit floats or complex, ``size`` is odd, or ``dtype`` is not floating.

    Example:
        >>> sinusoidal_embedding(torch.arange(4096), 64, dtype=torch.bfloat16).shape
        torch.Size([4096, 64])
    """
    angles = _angles(positions, size, base, dtype)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


def rotary_embedding(
    positions: Tensor, size: int, *, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``apply_rotary``.

    Args:
        positions: integers, or fp32 or fp64 numbers, of any shape.
        size: of a head, even.
        base: the largest wavelength is almost ``2 pi base``.
        dtype: of the result; only the finished values are cast to it. fp32 is best: ``apply_rotary`` rounds once.

    Returns:
        Two tensors ``[*positions.shape, size / 2]``.

    Raises:
        ArgumentError: positions are 16-bit floats or complex, ``size`` is odd, or ``dtype`` is not floating.

    Example:
        >>> cos, sin = rotary_embedding(torch.arange(3), 2)
        >>> cos[:, 0]
        tensor([ 1.0000,  0.5403, -0.4161])
    """
    angles = _angles(positions, size, base, dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of elements by their position's angles, in fp32.

    Args:
        x: queries or keys ``[..., size]``, floating.
        cos: ``[..., size / 2]``, broadcastable to ``x`` without its last dimension.
        sin: likewise.
        interleaved: which elements pair up: False takes element i and i + size / 2 (Llama, GPT-NeoX), True takes 2i and
            2i + 1 (RoFormer, GPT-J).

    Returns:
        A tensor like ``x``, of its dtype, under autocast too.

    Raises:
        ArgumentError: ``x`` is not floating, or the sizes do not fit.

    Example:
        >>> apply_rotary(torch.tensor([1.0, 0.0]).half(), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0., 1.], dtype=torch.float16)
    """
    check_floating(x, "apply_rotary")
    if not _is_rotated_by(x.shape, cos.shape) or cos.shape != sin.shape:
        raise ArgumentError(
            asked=f"apply_rotary of x {tuple(x.shape)} with cos {tuple(cos.shape)} and sin {tuple(sin.shape)}",
            true="every pair of elements is rotated by one angle",
            why="the last dimension of cos and sin must be half of that of x, every other one that of x, or 1",
            fix=f"call rotary_embedding(positions, {x.shape[-1] if x.dim() else 2}), with a position for each row of x",
        )
    with autocast_off(x):
        needs_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
        if is_narrow(x) and x.numel() and not needs_tables and not torch.compiler.is_compiling():
            result: Tensor = _Rotate.apply(x, cos, sin, interleaved, 1)  # type: ignore[no-untyped-call]
            return result
        # Widened once, so that the two parts of a gradient add up in fp32. Backward needs the tables, not this copy.
        first, second = _pairs(widened(x), interleaved)
        cos, sin = widened(cos), widened(sin)
        rotated = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
        return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


class _Rotate(torch.autograd.Function):
    """A rotation piece by piece, straight into the 16-bit result; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.sign = interleaved, sign
        result = x.new_empty(x.shape)
        _rotate_into(result, x, cos, sin, interleaved, sign)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tables = ctx.saved_tensors
        found = _Rotate.apply(gradient, *tables, ctx.interleaved, -ctx.sign)  # type: ignore[no-untyped-call]
        return found, None, None, None, None


def _rotate_into(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> None:
    """By the angles, or back with sign -1; rows of dimension 0 at a time, and where one is a batch, its own rows."""
    is_cut = cos.dim() == x.dim() and cos.shape[0] > 1
    if x.dim() > 2 and len(list(pieces_of(x))) == x.shape[0]:
        for i in range(x.shape[0]):
            c, s = (t[i] if is_cut else t[0] if t.dim() == x.dim() else t for t in (cos, sin))
            _rotate_into(result[i], x[i], c, s, interleaved, sign)
        return
    for rows in pieces_of(x):
        c, s = (widened(t[rows] if is_cut else t) for t in (cos, sin))
        first, second = _pairs(x[rows].float(), interleaved)
        to_first, to_second = _pairs(result[rows], interleaved)
        to_first.copy_((first * c).addcmul_(second, s, value=-sign))
        to_second.copy_((second * c).addcmul_(first, s, value=sign))


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views ``[..., size / 2]`` of the first and of the second element of every pair."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _is_rotated_by(shape: torch.Size, angles: torch.Size) -> bool:
    """Whether angles ``[..., size / 2]`` can be broadcast to pairs of ``[..., size]``."""
    if not shape or not angles or shape[-1] != 2 * angles[-1] or len(angles) > len(shape):
        return False
    return all(a in (1, s) for a, s in zip(reversed(angles[:-1]), reversed(shape[:-1]), strict=False))


def _angles(positions: Tensor, size: int, base: float, dtype: torch.dtype) -> Tensor:
    _check(positions, size, base, dtype)
    with autocast_off(positions):
        exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        # The reciprocal of a power, as models in use have it: base**-exponents differs in the last bit.
        return positions.to(torch.float32).unsqueeze(-1) * (1.0 / base**exponents)  # [..., size / 2]


def _check(positions: Tensor, size: int, base: float, dtype: torch.dtype) -> None:
    if positions.is_complex() or not dtype.is_floating_point:
        raise ArgumentError(
            asked=f"an embedding in {dtype} of positions of dtype {positions.dtype}",
            true="positions are real numbers, and sines and cosines lie between -1 and 1",
            why="a complex number is no angle here, and an integer holds nothing between -1, 0 and 1",
            fix="pass integer or fp32 positions, and a floating dtype",
        )
    if positions.dtype in NARROW:
        raise ArgumentError(
            asked=f"positions of dtype {positions.dtype}",
            true=f"{positions.dtype} holds integers exactly only up to {round(2 / torch.finfo(positions.dtype).eps)}",
            why="larger positions have already become the same, and no later cast tells them apart again",
            fix="make them as integers or fp32, such as torch.arange(length), after any cast of the inputs",
        )
    if size < 2 or size % 2 or not base > 0:
        raise ArgumentError(
            asked=f"an embedding of size {size} with base {base}",
            true="every frequency gives one sine and one cosine, and is base to some power",
            why="an odd size leaves one without its partner, a base of 0 or less has no such powers",
            fix="pass an even size, and a base such as 10000.0",
        )
