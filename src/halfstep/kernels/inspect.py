"""One read of the gradients: is each finite, which one is inf or NaN, how large is it.

Method: one number per gradient that is finite exactly when every element is, inf or NaN otherwise. Either the largest
magnitude, which torch finds at memory bandwidth, or the L2 norm, where clipping or a report wants it, or both.

The norm is computed so that no square overflows or vanishes. On CUDA and XPU one multi-tensor call per dtype
accumulates in fp64; for the CPU see host_norms.py.

Nothing is written, and what is allocated is a few numbers per gradient. Nothing is read on the host, except on the CPU,
where the host is the device. What this module does not do: agree across ranks (a DTensor answers for its local part),
or decide anything.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep._compat import has_float64, is_host, local_part, moved
from halfstep.errors import ArgumentError
from halfstep.formats import FP32
from halfstep.kernels.choose import choose
from halfstep.kernels.host_norms import largest_of, norm_of, norms_in_one_pass, together, whole_norms

_HOST = torch.device("cpu")  # named wherever a tensor is made: the user may have set another default device
_WIDE_DTYPES = frozenset({torch.float32, torch.float64})
_PLAIN_DTYPES = _WIDE_DTYPES | {torch.float16, torch.bfloat16}

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
        return together(self._on_host(self._asked_for(self.norms, "norm"), below_fp64))

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


def inspect_whole(gradients: Sequence[Tensor]) -> Inspection:
    """:func:`inspect` for the norms of gradients that an optimizer has looked at, with fewer questions to each.

    Args:
        gradients: strided, contiguous, with all of their memory; fp32, bf16 or fp16; on one device.
    """
    num_elements = sum([gradient.numel() for gradient in gradients])
    home = gradients[0].device
    if not is_host(home) or choose(home, num_elements).name != "numba":
        return inspect(gradients)
    norms = whole_norms(gradients)
    if norms is None:
        return inspect(gradients)
    row = _row(norms, torch.float64)
    return Inspection(
        positions={home: tuple(range(len(gradients)))},
        are_fp64={home: (False,) * len(gradients)},
        found_inf={home: _found_inf(home, row)},
        largest=None,
        norms={home: row},
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
    if choose(device, sum(v.numel() for v in values)).name == "numba":
        return _row(norms_in_one_pass(values), torch.float64)
    return _row([norm_of(v) for v in values], torch.float64)


def _largest(device: torch.device, values: list[Tensor]) -> Tensor:
    if device.type != "cpu":
        return _by_dtype(values, lambda group: torch._foreach_norm(group, math.inf))
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    return _row(largest_of(values), dtype)


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
