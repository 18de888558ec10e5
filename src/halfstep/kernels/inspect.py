"""One read of the gradients: is each finite, which one is inf or NaN, how large is it.

Method: one number per gradient that is finite exactly when every element is, inf or NaN otherwise. Either the largest
magnitude, which torch finds at memory bandwidth, or the L2 norm, where clipping or a report wants it, or both.

The norm is computed so that no square overflows or vanishes. On CUDA and XPU one multi-tensor call per dtype
accumulates in fp64. On the CPU a gradient is cut into rows of at most 2**14 elements, whose norms are taken in fp32 in
one call and put together in fp64 on the host. Only a row that fp32 cannot judge (its norm is inf, 0 or so small that
squares may have vanished) is read again, by itself, in fp64.

Nothing is written, and what is allocated is a few numbers per gradient. Nothing is read on the host, except on the CPU,
where the host is the device. What this module does not do: agree across ranks (a DTensor answers for its local part),
or decide anything.

Error: the largest magnitude is exact. A norm on the CPU is right to 2**-14 relative at worst: a lane of the sum (of at
least 8, on x86) rounds 2**11 times by 2**-24. Measured worst, over rows of 2**14: 1.4e-5 for constants, 2e-6 for sorted
log-normal values, 6e-7 for unsorted ones, 4e-8 for normal ones. Its bits do not depend on the number of threads. Fewer
and longer sums (one dot product of 2**20 elements) would be wrong by 4.5e-4 for constants.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep._compat import has_float64, is_dense, is_host, local_part, moved
from halfstep.errors import ArgumentError
from halfstep.formats import FP32

BLOCK = 2**14  # elements of one fp32 sum: short sums keep their bits, and the rows of a gradient share the threads
_BUFFER = 2**16  # 16-bit elements that are widened at once: 256 KiB of fp32, which stay in a core's cache

# A norm of a row is trusted from here up to the largest finite number. Squares below fp32's smallest normal, 2**-126,
# may be flushed to 0: 2**14 of them are 2**-112, which is 2**-16 of the square of this norm. A sum of squares that
# overflowed, in whatever lane, is inf, and a finite row never makes a NaN.
_TRUSTED_NORM = 2.0**-48

_HOST = torch.device("cpu")  # named wherever a tensor is made: the user may have set another default device
_WIDE_DTYPES = frozenset({torch.float32, torch.float64})
_PLAIN_DTYPES = _WIDE_DTYPES | {torch.float16, torch.bfloat16}
_vector_norm = torch.linalg.vector_norm

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

    def total_norm(self, device: torch.device, *, below_fp64: bool = False) -> Tensor:
        """The L2 norm of all gradients of all devices together, 0-dim, on ``device``; optionally without fp64.

        Finite exactly when every gradient is. fp64 where ``device`` has it, else fp32. Waits for no device.
        """
        answers = self._asked_for(self.norms, "norm")
        if self.is_on_host:
            dtype = torch.float64 if has_float64(device) else torch.float32
            return _number(self.total_norm_on_host(below_fp64=below_fp64), dtype, device)
        parts = []
        for home, norms in zip(answers, self._masked(answers, below_fp64), strict=True):
            # In fp64 the squares of narrower gradients' norms fit: one kernel instead of a dozen.
            fits = norms.dtype == torch.float64 and not any(self.are_fp64[home])
            parts.append(moved(torch.linalg.vector_norm(norms) if fits else _root_of_squares(norms), device))
        return parts[0] if len(parts) == 1 else _root_of_squares(torch.stack(parts))

    @property
    def is_on_host(self) -> bool:
        """Whether every gradient is in the host's memory, where nothing needs waiting."""
        return all(map(is_host, self.positions))

    def total_norm_on_host(self, *, below_fp64: bool = False) -> float:
        """:meth:`total_norm` as a number. Waits for gradients that are elsewhere."""
        return _together(self._on_host(self._asked_for(self.norms, "norm"), below_fp64))

    def total_largest(self, device: torch.device, *, below_fp64: bool = False) -> Tensor:
        """The largest magnitude of all, 0-dim fp32, on ``device``; NaN if an element is; optionally without fp64."""
        answers = self._asked_for(self.largest, "largest")
        if all(map(is_host, answers)):
            sizes = self._on_host(answers, below_fp64)
            total = math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)
            return _number(total, torch.float32, device)
        parts = [moved(sizes.amax().float(), device) for sizes in self._masked(answers, below_fp64)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).amax()

    def _on_host(self, answers: Mapping[torch.device, Tensor], below_fp64: bool) -> list[float]:
        # Read from the tensors each time: a copy of this inspection may hold others.
        sizes: list[float] = []
        for home, row in answers.items():
            numbers = row.tolist()
            if below_fp64 and True in self.are_fp64[home]:
                numbers = [n for n, is_fp64 in zip(numbers, self.are_fp64[home], strict=True) if not is_fp64]
            sizes += numbers
        return sizes

    def _masked(self, answers: Mapping[torch.device, Tensor], below_fp64: bool) -> list[Tensor]:
        return [
            row.masked_fill(torch.tensor(self.are_fp64[home], device=home), 0.0)
            if below_fp64 and any(self.are_fp64[home])
            else row
            for home, row in answers.items()
        ]

    def _asked_for(self, answers: Mapping[torch.device, Tensor] | None, name: str) -> Mapping[torch.device, Tensor]:
        if answers is None:
            raise ArgumentError(
                asked=f"a total of an inspection without {name}",
                true=f"these gradients were inspected with {name}=False",
                why="it was not recorded, and the gradients may have changed since",
                fix=f"call inspect(gradients, {name}=True)",
            )
        return answers

    def faults(self, sizes: Sequence[float] | None = None) -> dict[int, FaultKind]:
        """Position and kind of every gradient that is not finite. Reads on the host: for reports, not for steps.

        Args:
            sizes: all norms, device after device, where the host has them already; nothing is read then.
        """
        if sizes is None:
            sizes = [size for row in (self.norms or self.largest or {}).values() for size in row.tolist()]
        positions = itertools.chain.from_iterable(self.positions.values())
        return {
            position: "nan" if math.isnan(size) else "inf"
            for position, size in zip(positions, sizes, strict=True)
            if not math.isfinite(size)
        }


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
    groups: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    device: torch.device | None = None
    for position, gradient in enumerate(gradients):
        if gradient is None:
            continue
        values = real_values(gradient)
        if not values.numel():
            continue
        if values.device != device:
            device = values.device
            places, tensors = groups.setdefault(device, ([], []))
        places.append(position)
        tensors.append(values)
    norms = {home: _norms(home, tensors) for home, (_, tensors) in groups.items()} if norm else None
    magnitudes = {home: _largest(home, tensors) for home, (_, tensors) in groups.items()} if largest else None
    return Inspection(
        positions={home: tuple(places) for home, (places, _) in groups.items()},
        are_fp64={home: tuple([t.dtype == torch.float64 for t in tensors]) for home, (_, tensors) in groups.items()},
        found_inf={home: _found_inf(home, sizes) for home, sizes in (norms or magnitudes or {}).items()},
        largest=magnitudes,
        norms=norms,
    )


def _found_inf(device: torch.device, sizes: Tensor) -> Tensor:
    if is_host(device):
        return _number(float(not all(map(math.isfinite, sizes.tolist()))), torch.float32, device)
    return (sizes * 0.0).sum().ne(0.0).float()  # times zero a finite size is 0, any other is NaN


def real_values(gradient: Tensor) -> Tensor:
    """The stored numbers of a gradient as one real floating tensor without a graph, a view wherever that is possible.

    Duplicates in a sparse gradient are added first: two fp16 values of 40000 are an overflow, although each is finite.
    """
    if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.dtype in _PLAIN_DTYPES:
        # Nearly always. The questions below, and torch.no_grad, cost as much as reading a small gradient.
        return gradient.detach() if gradient.requires_grad else gradient
    with torch.no_grad():
        return _unusual_values(gradient).detach()


def _unusual_values(gradient: Tensor) -> Tensor:
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
    if device.type != "cpu":
        return _norms_by_foreach(values)
    return _row([_norm_on_host(v) for v in values], torch.float64)


def _largest(device: torch.device, values: list[Tensor]) -> Tensor:
    if device.type != "cpu":
        return _by_dtype(values, lambda group: torch._foreach_norm(group, math.inf))
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    return _row(_largest_on_host(values), dtype)


# -- accelerators: device tensors only -----------------------------------------------------------------------------


def _norms_by_foreach(values: list[Tensor]) -> Tensor:
    """One multi-tensor launch for each dtype; also right, if slow, on the CPU, where the tests run it."""
    wide_dtype = torch.float64 if has_float64(values[0].device) else torch.float32
    norms = _by_dtype(values, lambda group: torch._foreach_norm(group, 2, dtype=wide_dtype))
    squares_fit = wide_dtype == torch.float64 and all(v.dtype != torch.float64 for v in values)
    if squares_fit:
        return norms
    # The square of a finite value may overflow here: a largest element that is finite says that nothing is wrong.
    largest = _by_dtype(values, lambda group: torch._foreach_norm(group, math.inf))
    return torch.where(torch.isfinite(norms), norms, largest.to(wide_dtype))


def _by_dtype(values: list[Tensor], ask: Callable[[list[Tensor]], Sequence[Tensor]]) -> Tensor:
    """What ``ask`` answers, a number per tensor, as one row in order: fp64 if one of the numbers is, else fp32.

    A multi-tensor call on a list of several dtypes falls onto a slow path, so each dtype has its own; and what it
    answers is widened as one row, not number by number.
    """
    places: dict[torch.dtype, list[int]] = {}
    for place, v in enumerate(values):
        places.setdefault(v.dtype, []).append(place)
    rows = [torch.stack(list(ask([values[place] for place in group]))) for group in places.values()]
    wide_dtype = torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32
    if len(rows) == 1:
        return rows[0].to(wide_dtype)
    in_groups = itertools.chain.from_iterable(row.to(wide_dtype).unbind() for row in rows)
    answer_at = dict(zip(itertools.chain.from_iterable(places.values()), in_groups, strict=True))
    return torch.stack([answer_at[place] for place in range(len(values))])


def _root_of_squares(norms: Tensor) -> Tensor:
    """The norm of parts whose norms are given; no square overflows or vanishes, whatever the dtype."""
    bounds = torch.finfo(norms.dtype)
    unit = norms.amax().clamp(bounds.tiny, bounds.max)  # inf stays inf when divided by it, and NaN stays NaN
    total = torch.linalg.vector_norm(norms / unit) * unit
    return torch.where(norms.isfinite().all(), total.clamp(max=bounds.max), total)


# -- the CPU: numbers on the host ----------------------------------------------------------------------------------


def _row(numbers: list[float], dtype: torch.dtype) -> Tensor:
    # The array becomes the tensor's memory: a third of the time that torch.tensor takes to look at a list.
    return torch.frombuffer(array("d" if dtype == torch.float64 else "f", numbers), dtype=dtype)


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.float32 and FP32.largest < value < math.inf:
        return torch.tensor(value, dtype=dtype, device=device)  # may round to inf, where scalar_tensor raises
    number = torch.scalar_tensor(value, dtype=dtype, device=_HOST)  # in half the time of torch.tensor
    return number if is_host(device) else moved(number, device)


def _norm_on_host(values: Tensor) -> float:
    """The norm of one CPU gradient; finite exactly when every element is, NaN before inf."""
    if not values.is_contiguous():
        values = _flat_view(values)
    size = values.numel()
    if values.dtype not in _WIDE_DTYPES:
        if size > _BUFFER:
            return _norm_of_long_16_bit(values)
        values = values.float()
    if size > BLOCK:
        return _norm_of_rows(values)
    norm: float = _vector_norm(values).tolist()
    return norm if _TRUSTED_NORM <= norm < math.inf or math.isnan(norm) else _exact_norm(values)


def _norm_of_long_16_bit(values: Tensor) -> float:
    # Widened one piece at a time, into a buffer that stays in cache: no fp32 copy of the gradient is ever held.
    buffer = torch.empty(_BUFFER, dtype=torch.float32, device=_HOST)
    pieces = torch.split(values.view(-1), _BUFFER)
    return _together([_norm_on_host(buffer[: len(piece)].copy_(piece)) for piece in pieces])


def _norm_of_rows(values: Tensor) -> float:
    """The norm of a contiguous fp32 or fp64 tensor of more than one row: row by row, and doubtful rows once more."""
    size = values.numel()
    num_rows, length = _rows_of(size)
    num_left = size - num_rows * length
    rows = (values.view(-1)[:-num_left] if num_left else values).view(num_rows, length)
    norms: list[float] = _vector_norm(rows, dim=1).tolist()
    total = sum(norms)
    if not (total < math.inf and min(norms) >= _TRUSTED_NORM) and not math.isnan(total):
        _judge_again(rows, norms)
    if num_left:
        norms.append(_norm_on_host(values.view(-1)[-num_left:]))
    return _together(norms)


@functools.lru_cache(maxsize=4096)
def _rows_of(size: int) -> tuple[int, int]:
    """How many rows of which length, at most BLOCK: all of equal length if that can be had, else fewest."""
    fewest = -(-size // BLOCK)
    # Up to twice as many; what does not divide costs another call, which only a gradient of few rows would notice.
    for num_rows in range(fewest, min(2 * fewest, fewest + 64) + 1):
        if size % num_rows == 0:
            return num_rows, size // num_rows
    return fewest, size // fewest


def _judge_again(rows: Tensor, norms: list[float]) -> None:
    """Put right, in place, the norms that fp32 cannot be trusted with; stop at the first that is really inf."""
    start = 0
    for is_doubtful, group in itertools.groupby(norms[:], lambda norm: not _TRUSTED_NORM <= norm < math.inf):
        stop = start + len(list(group))
        # Neighbours first together: the gradient of an embedding is zero in most of its rows, and that is all to know.
        if is_doubtful and (norms[start] or norms[stop - 1] or _largest_on_host([rows[start:stop]]) != [0.0]):
            for row in range(start, stop):
                norms[row] = _exact_norm(rows[row])
                if norms[row] == math.inf:
                    return
        start = stop


def _exact_norm(values: Tensor) -> float:
    """The fp64 norm of at most a row of a CPU gradient; inf or NaN only if an element is."""
    (largest,) = _largest_on_host([values])
    if largest == 0 or not math.isfinite(largest):
        return largest
    # A power of two near the largest, so that fp64 gradients beyond 1e154 do not overflow when squared.
    unit = 2.0 ** math.floor(math.log2(largest))
    norm: float = _vector_norm(values.double() / unit).tolist()
    return min(norm * unit, sys.float_info.max)  # finite elements, a norm beyond fp64: still finite


def _largest_on_host(values: Sequence[Tensor]) -> list[float]:
    """The largest magnitude in each CPU tensor; NaN if there is one."""
    # At memory bandwidth, where torch 2.13's inf-norm takes several times as long.
    return [abs(max(-low.tolist(), high.tolist())) for low, high in map(torch.aminmax, values)]  # type: ignore[operator]


def _together(norms: list[float]) -> float:
    """The norm of parts whose norms are given: NaN before inf, and finite if every part is."""
    total = sum(norms)
    if math.isnan(total) or math.inf in norms:
        return total
    return min(math.hypot(*norms), sys.float_info.max)


def _flat_view(values: Tensor) -> Tensor:
    """The elements as one row; their order does not matter. A copy only where strides leave gaps or overlap."""
    return values.as_strided((values.numel(),), (1,)) if is_dense(values) else values.reshape(-1)
