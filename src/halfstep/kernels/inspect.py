"""One read of the gradients: is each finite, which one is inf or NaN, how large is it.

Method: one number per gradient that is finite exactly when every element is, inf or NaN otherwise. Either the largest
magnitude, which torch finds at memory bandwidth, or the L2 norm, where clipping or a report wants it, or both.

The norm is computed so that no square overflows or vanishes. On CUDA and XPU one multi-tensor call accumulates in fp64.
On the CPU the norms of blocks of 2**14 elements are taken in fp32 and added in fp64; only gradients with a block whose
fp32 norm is not trustworthy (inf, NaN, or so small that squares vanish) are looked at again.

Nothing is written, and what is allocated is a few scalars per gradient. Nothing is read on the host, except on the CPU,
where the host is the device. What this module does not do: agree across ranks (a DTensor answers for its local part),
or decide anything.

Error: the largest magnitude is exact. A squared norm is right to 2**-13 relative at worst (one fp32 rounding for each
of the 2**14 / 8 additions in a lane; four times as many for 16-bit gradients, whose blocks are longer); measured, a
norm is right to 3e-5.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep._compat import has_float64, is_dense, local_part, moved
from halfstep.errors import ArgumentError

BLOCK = 2**14  # elements of one fp32 norm: short sums keep their bits, and the rows of a matrix of blocks share threads
_BUFFER = 2**16  # 16-bit elements that are widened at once: 256 KiB of fp32, which stay in a core's cache
_TRUSTED_NORM = 2.0**-50  # below it, squares of elements that matter may be fp32 subnormals or zero

_LARGEST_TRUSTED_NORM = 2.0**500  # beyond it, only in fp64, squares of norms may not add up

FaultKind = Literal["inf", "nan"]


@dataclass(frozen=True)
class Inspection:
    """What one read of the gradients found; every answer stays on the gradients' device until it is asked for.

    Args:
        positions: for each device, the places in the inspected sequence that the answers belong to.
        are_fp64: for each device, which of the gradients are fp64.
        found_inf: for each device, whether any gradient is inf or NaN: 0-dim fp32, exactly 0.0 or 1.0, never a count.
        largest: for each device, the largest magnitude of an element, fp32 or wider, shape ``[len(positions)]``; None
            unless it was asked for. Finite exactly when the gradient is; NaN if any element is NaN, else inf.
        norms: for each device, the L2 norms, fp64 (fp32 where the device has no fp64), same shape; None unless asked
            for. Finite, inf or NaN just as ``largest``.
    """

    positions: Mapping[torch.device, tuple[int, ...]]
    are_fp64: Mapping[torch.device, tuple[bool, ...]]
    found_inf: Mapping[torch.device, Tensor]
    largest: Mapping[torch.device, Tensor] | None
    norms: Mapping[torch.device, Tensor] | None

    def total_norm(self, device: torch.device) -> Tensor:
        """The L2 norm of all gradients of all devices together, 0-dim, on ``device``."""
        norms = self._asked_for(self.norms, "norm")
        parts: list[Tensor] = [moved(torch.linalg.vector_norm(n), device) for n in norms.values()]
        together: Tensor = torch.linalg.vector_norm(_stacked(parts, device))
        return together

    def total_largest(self, device: torch.device, *, below_fp64: bool = False) -> Tensor:
        """The largest magnitude of all, 0-dim fp32, on ``device``; NaN if an element is; optionally without fp64."""
        parts = []
        for home, largest in self._asked_for(self.largest, "largest").items():
            if below_fp64 and any(self.are_fp64[home]):
                largest = largest.masked_fill(torch.tensor(self.are_fp64[home], device=home), 0.0)
            parts.append(moved(largest.amax().float(), device))
        return parts[0] if len(parts) == 1 else _stacked(parts, device).amax()

    def _asked_for(self, answers: Mapping[torch.device, Tensor] | None, name: str) -> Mapping[torch.device, Tensor]:
        if answers is None:
            raise ArgumentError(
                asked=f"a total of an inspection without {name}",
                true=f"these gradients were inspected with {name}=False",
                why="it was not recorded, and the gradients may have changed since",
                fix=f"call inspect(gradients, {name}=True)",
            )
        return answers

    def faults(self) -> dict[int, FaultKind]:
        """Position and kind of every gradient that is not finite. Reads on the host: for reports, not for steps."""
        found: dict[int, FaultKind] = {}
        for device, sizes in (self.norms or self.largest or {}).items():
            for position, size in zip(self.positions[device], sizes.tolist(), strict=True):
                if not math.isfinite(size):
                    found[position] = "nan" if math.isnan(size) else "inf"
        return found


def inspect(gradients: Sequence[Tensor | None], *, norm: bool = True, largest: bool = False) -> Inspection:
    """Read every gradient once and say what is in it; write nothing, wait for nothing.

    Args:
        gradients: dense, sparse (duplicates are added before they are judged, in their own dtype), complex (judged
            by real and imaginary parts), 16-bit, on any mix of devices, or ``None`` for a parameter without one.
            Of a DTensor the local part is read.
        norm: find the L2 norms.
        largest: find the largest magnitudes. Both together are a second read.

    Returns:
        An :class:`Inspection`. Empty gradients and ``None`` are left out of it.

    Raises:
        ArgumentError: a gradient is not a floating or complex tensor, or neither answer was asked for.

    Example:
        >>> g = [torch.tensor([3.0, 4.0]), None, torch.tensor([float("inf")])]
        >>> found = inspect(g)
        >>> found.faults(), float(found.norms[g[0].device][0])
        ({2: 'inf'}, 5.0)
    """
    if not (norm or largest):
        raise ArgumentError(
            asked="inspect(norm=False, largest=False)",
            true="an inspection answers by the norm, the largest magnitude, or both",
            why="without either there is nothing to find",
            fix="ask for largest=True, which is the cheaper one",
        )
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    with torch.no_grad():
        for position, gradient in enumerate(gradients):
            if gradient is None:
                continue
            values = real_values(gradient)
            if values.numel():
                by_device.setdefault(values.device, {})[position] = values
        values_of = {device: list(found.values()) for device, found in by_device.items()}
        norms = {device: _norms(device, values) for device, values in values_of.items()} if norm else None
        magnitudes = {device: _largest(device, values) for device, values in values_of.items()} if largest else None
        return Inspection(
            positions={device: tuple(found) for device, found in by_device.items()},
            are_fp64={device: tuple(v.dtype == torch.float64 for v in values) for device, values in values_of.items()},
            # Times zero a finite size is 0, any other is NaN.
            found_inf={d: (sizes * 0.0).sum().ne(0.0).float() for d, sizes in (norms or magnitudes or {}).items()},
            largest=magnitudes,
            norms=norms,
        )


def _stacked(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(parts) if parts else torch.zeros(1, device=device)


def real_values(gradient: Tensor) -> Tensor:
    """The stored numbers of a gradient as one real floating tensor, a view wherever that is possible.

    Duplicates in a sparse gradient are added first: two fp16 values of 40000 are an overflow, although each is finite.
    """
    values = local_part(gradient)
    if values.layout == torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout != torch.strided:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
    if not values.is_floating_point():
        raise ArgumentError(
            asked=f"inspect() of a gradient of dtype {values.dtype}",
            true="gradients are floating or complex tensors",
            why="integers cannot hold inf or NaN, so nothing could be found",
            fix="pass parameters' .grad tensors",
        )
    return values


def _norms(device: torch.device, values: list[Tensor]) -> Tensor:
    return _norms_by_blocks(values) if device.type == "cpu" else _norms_by_foreach(values)


def _norms_by_foreach(values: list[Tensor]) -> Tensor:
    """One multi-tensor launch; also right, if slow, on the CPU, where the tests run it."""
    wide_dtype = torch.float64 if has_float64(values[0].device) else torch.float32
    norms = torch.stack([norm.to(wide_dtype) for norm in torch._foreach_norm(values, 2, dtype=wide_dtype)])
    squares_fit = wide_dtype == torch.float64 and all(v.dtype != torch.float64 for v in values)
    if squares_fit:
        return norms
    # The square of a finite value may overflow here: a largest element that is finite says that nothing is wrong.
    return torch.where(torch.isfinite(norms), norms, _largest(values[0].device, values).to(wide_dtype))


def _largest(device: torch.device, values: list[Tensor]) -> Tensor:
    if device.type == "cpu":  # runs at memory bandwidth, where torch 2.13's inf-norm takes several times as long
        lows, highs = zip(*map(torch.aminmax, values), strict=True)
        return torch.maximum(-_stacked_wide(lows), _stacked_wide(highs)).abs()
    return _stacked_wide(torch._foreach_norm(values, math.inf))


def _stacked_wide(scalars: Sequence[Tensor]) -> Tensor:
    """One row, fp64 if one of them is, else fp32."""
    if all(scalar.dtype == torch.float32 for scalar in scalars):
        return torch.stack(list(scalars))
    dtype = torch.float64 if any(scalar.dtype == torch.float64 for scalar in scalars) else torch.float32
    return torch.stack([scalar.to(dtype) for scalar in scalars])


def _norms_by_blocks(values: list[Tensor]) -> Tensor:
    """CPU: fp32 norms of blocks, added in fp64, with a second look at the blocks that fp32 cannot judge."""
    whole: list[Tensor] = []  # 1-d tensors of block norms, in order
    owners: list[int] = []  # the gradient that each of them belongs to
    short: list[Tensor] = []  # pieces of at most one block: normed in a single call
    short_owners: list[int] = []
    for owner, v in enumerate(values):
        flat = _flat_view(v)
        if v.dtype not in (torch.float32, torch.float64):
            whole.append(_block_norms_16_bit(flat))
            owners.append(owner)
            continue
        if flat.numel() <= BLOCK:
            short.append(flat)
            short_owners.append(owner)
            continue
        num_full = flat.numel() // BLOCK * BLOCK
        whole.append(torch.linalg.vector_norm(flat[:num_full].view(-1, BLOCK), dim=1))
        owners.append(owner)
        if num_full < flat.numel():
            short.append(flat[num_full:])
            short_owners.append(owner)
    if short:
        whole.append(torch.stack(torch._foreach_norm(short, 2)))
    block_norms = torch.cat(whole).double()
    owner_of: Tensor | None = None  # None: each gradient is one piece, in order
    norms = block_norms
    if owners:
        # Named devices: the user may have set another default.
        counts = torch.tensor([len(w) for w in whole[: len(owners)]] + [1] * len(short), device="cpu")
        owner_of = torch.tensor(owners + short_owners, device="cpu").repeat_interleave(counts)
        squares = torch.zeros(len(values), dtype=torch.float64, device="cpu").index_add_(
            0, owner_of, block_norms.square()
        )
        norms = squares.sqrt()
    smallest, largest = (bound.item() for bound in torch.aminmax(block_norms))
    if not (smallest >= _TRUSTED_NORM and largest <= _LARGEST_TRUSTED_NORM):  # NaN fails both
        doubtful = ~((block_norms >= _TRUSTED_NORM) & (block_norms <= _LARGEST_TRUSTED_NORM))
        pieces = doubtful.nonzero().flatten() if owner_of is None else torch.unique(owner_of[doubtful])
        for owner in pieces.tolist():
            norms[owner] = _exact_norm(values[owner])
    return norms


def _flat_view(values: Tensor) -> Tensor:
    """The elements as one row; their order does not matter. A copy only where strides leave gaps or overlap."""
    if values.is_contiguous() or not is_dense(values):
        return values.reshape(-1)
    return values.as_strided((values.numel(),), (1,))


def _block_norms_16_bit(flat: Tensor) -> Tensor:
    # Widened one block at a time, into a buffer that stays in cache: no fp32 copy of the gradient is ever held.
    buffer = torch.empty(min(_BUFFER, flat.numel()), dtype=torch.float32, device="cpu")
    blocks = torch.split(flat, _BUFFER)
    return torch.stack([torch.linalg.vector_norm(buffer[: len(block)].copy_(block)) for block in blocks])


def _exact_norm(values: Tensor) -> float:
    """The fp64 norm of one CPU gradient, block by block; inf or NaN only if an element is."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high).item()  # NaN if there is one
    if largest == 0 or not math.isfinite(largest):
        return largest
    # A power of two near the largest, so that fp64 gradients beyond 1e154 do not overflow when squared.
    unit = 2.0 ** math.floor(math.log2(largest))
    blocks = torch.split(values.reshape(-1), BLOCK)
    norm = math.hypot(*(torch.linalg.vector_norm(block.double() / unit).item() for block in blocks)) * unit
    return min(norm, sys.float_info.max)  # finite elements, a norm beyond fp64: still finite
