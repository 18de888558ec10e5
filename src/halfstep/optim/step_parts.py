"""One step of the inner optimizer, in parts: a few parameters at a time, with their gradients in fp32.

A part's widened gradients lie in one buffer that every part of a step uses again. On the CPU a part is small enough to
stay in the cache from the widening to the rounding; elsewhere it only has to be small beside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._compat import is_dense, is_host, moved
from halfstep.formats import FP32
from halfstep.kernels.choose import TORCH, Executor, choose
from halfstep.kernels.rounding import adopt
from halfstep.optim import initial_state

PART_ON_HOST = 2**20  # elements: 4 MiB of fp32, see benchmarks/bench_masters.py
PART_ON_DEVICE = 2**26


@dataclass(eq=False)
class Member:
    """A trainable parameter, and its master if it is 16-bit.

    ``alias`` is the weight as it was last written here: it keeps the old memory if ``.data`` is replaced, and shares
    the version counter, which every write that torch knows of moves.
    """

    parameter: Tensor
    master: nn.Parameter | None
    alias: Tensor | None = None
    version: int = -1
    _place: tuple[int, int, torch.Size] | None = None

    def __post_init__(self) -> None:
        self.dtype, self.device = self.parameter.dtype, self.parameter.device

    @property
    def stepped(self) -> Tensor:
        """What the inner optimizer steps."""
        return self.parameter if self.master is None else self.master

    def adopt(self) -> Tensor | None:
        """Make the weight its master if somebody has written it; how many values that were."""
        assert self.master is not None
        if self.parameter._version == self.version and self._is_in_place():
            return None
        self.alias = None
        return adopt(self.master.detach(), self.parameter.detach())

    def has_written(self) -> None:
        """Remember what the weight is like now that it has been written from its master."""
        if self.alias is None or not self._is_in_place():
            self.alias = self.parameter.detach()
            self._place = _place(self.alias)
        self.version = self.parameter._version

    def _is_in_place(self) -> bool:
        """Whether the weight is in the memory that it was written to."""
        return self.alias is not None and _place(self.parameter) == self._place

    def __getstate__(self) -> dict[str, Any]:
        """Copies know nothing of who has written the weight: they compare it before their first step."""
        return {**self.__dict__, "alias": None, "version": -1}


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()), tensor.shape


@dataclass(eq=False)
class Part:
    """Parameters that are stepped together, and the fp32 memory of their gradients.

    Args:
        members: with the index of their group and their gradient.
        buffer: fp32, one-dimensional; None: each widened gradient has memory of its own.
        executor: widens and rounds.
    """

    members: list[tuple[int, Member, Tensor]]
    buffer: Tensor | None = None
    executor: Executor = TORCH
    _pieces: list[Tensor | None] = field(default_factory=list)

    def widen_gradients(self, divisor: Tensor | None = None) -> None:
        """Give every master its parameter's gradient in fp32, and divide all gradients.

        Args:
            divisor: 0-dim, fp32; gradients that are not widened are divided in place.
        """
        self._pieces, dense, sources, others = [], [], [], []
        start = 0
        for _, member, gradient in self.members:
            master = member.master
            piece = None
            if master is None:
                others.append(gradient._values() if gradient.is_sparse else gradient)
            elif gradient.is_sparse:
                # Widened before duplicates are added: two fp16 values of 40000 make 80000, not inf.
                master.grad = gradient.float().coalesce()
                others.append(master.grad._values())
            else:
                piece = master.grad = self._piece(master, start)
                start += master.numel()
                dense.append(piece)
                sources.append(gradient)
            self._pieces.append(piece)
        self.executor.module.widen(dense, sources, divisor)
        if divisor is not None:
            _divide(others, divisor)

    def _piece(self, master: Tensor, start: int) -> Tensor:
        if self.buffer is None or not is_dense(master):
            return torch.empty_like(master, requires_grad=False)
        return self.buffer.as_strided(master.shape, master.stride(), start)

    def drop_widened_gradients(self) -> None:
        """The masters' gradients have been used."""
        for _, member, _ in self.members:
            if member.master is not None:
                member.master.grad = None

    def write_weights(self) -> list[Tensor]:
        """Round the masters into the weights; numbers that add up to how many values were saturated."""
        triples = [
            (member, member.master, piece)
            for (_, member, _), piece in zip(self.members, self._pieces, strict=True)
            if member.master is not None
        ]
        return write(triples, self.executor)

    def groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups with nothing but this part in them."""
        has_first_steps = initial_state.ignores_dampening_once(optimizer)
        found: dict[tuple[int, bool], list[Tensor]] = {}
        for index, member, _ in self.members:
            begins = has_first_steps and initial_state.begins(optimizer, member.stepped)
            found.setdefault((index, begins), []).append(member.stepped)
        return [
            {**optimizer.param_groups[index], "params": parameters, **({"dampening": 0} if begins else {})}
            for (index, begins), parameters in found.items()
        ]


def write(triples: Sequence[tuple[Member, Tensor, Tensor | None]], executor: Executor = TORCH) -> list[Tensor]:
    """Round masters into their weights; numbers that add up to how many values were saturated.

    Args:
        triples: members, their masters, and fp32 memory of the same shape that may be overwritten.
        executor: rounds.
    """
    if not triples:
        return []
    members, masters, scratch = zip(*triples, strict=True)
    weights = [member.parameter.detach() for member in members]
    counts: list[Tensor] = executor.module.round_into(weights, [master.detach() for master in masters], scratch)
    # An absurd step may have gone beyond fp32. The host knows that there was none; a device is not asked.
    if any(not is_host(count.device) or count for count in counts):
        torch._foreach_clamp_min_([master.detach() for master in masters], -FP32.largest)
        torch._foreach_clamp_max_([master.detach() for master in masters], FP32.largest)
    for member in members:
        member.has_written()
    return counts


def _divide(gradients: list[Tensor], divisor: Tensor) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), group in groups.items():
        torch._foreach_div_(group, moved(divisor, device))


def parts_of(members: list[tuple[int, Member, Tensor]], *, in_one: bool) -> list[Part]:
    """Cut a step into parts that share one buffer on each device; parameters without masters are a part of their own.

    Args:
        members: with the index of their group and their gradient, in the order of the groups.
        in_one: whether everything must be stepped in one call; the widened gradients then take memory of their own.
    """
    if in_one or not members:
        return [Part(members)]
    parts = [Part([one for one in members if one[1].master is None])]
    by_device: dict[torch.device, list[tuple[int, Member, Tensor]]] = {}
    for one in members:
        if one[1].master is not None:
            by_device.setdefault(one[1].device, []).append(one)
    for device, on_device in by_device.items():
        cut = _cut(on_device, PART_ON_HOST if is_host(device) else PART_ON_DEVICE)
        size = max(sum(member.parameter.numel() for _, member, _ in part) for part in cut)
        buffer = torch.empty(size, dtype=torch.float32, device=device)
        executor = choose(device, sum(member.parameter.numel() for _, member, _ in on_device))
        parts += [Part(part, buffer, executor) for part in cut]
    return [part for part in parts if part.members]


def _cut(members: list[tuple[int, Member, Tensor]], limit: int) -> list[list[tuple[int, Member, Tensor]]]:
    parts: list[list[tuple[int, Member, Tensor]]] = []
    room = 0
    for one in members:
        size = one[1].parameter.numel()
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(one)
        room -= size
    return parts


def plain_step(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Step one of torch's optimizers with these groups in place of its own; the wrapper has run the hooks already."""
    parameters = [p for group in groups for p in group["params"]]
    initial_state.forget_early_state(optimizer, parameters)
    own = optimizer.param_groups
    optimizer.param_groups = groups
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    begin = [p for group in groups if group.get("dampening") == 0 for p in group["params"]]
    try:
        result = step(optimizer)
    finally:
        optimizer.param_groups = own
    initial_state.has_begun(optimizer, begin)
    return result
