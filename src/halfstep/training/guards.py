"""Buffers that training forward changes, remembered so that a skipped step leaves them as they were.

A forward pass in training mode writes BatchNorm's running statistics and counters before anyone knows whether the step
will be taken. One activation that overflows makes them inf for ever, although the scaler skips the step.

Method: a copy is taken when a window begins, and put back on the device, without a read on the host, where the window
is skipped. Which buffers need one is learned: every buffer is copied until a whole window, in the present mode of its
module, has left its values alone. A mask or a table of positions costs its bytes for one window; running statistics of
a module in training mode are always copied. A buffer that a module replaces, instead of writing into it, is its own
copy. Later windows look at version counters only, which torch's batch norm does not move when it runs eagerly (2.13).

A forward pass that makes running statistics inf while its gradients stay finite is no skip: the step is applied, and
the statistics stay.

A buffer that changes for the first time in a later window (a codebook that is refreshed now and then) was not copied
that time; if just that window is skipped, a warning says so, and from then on it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfstep._compat import HostCopy, is_host, local_part, moved
from halfstep.scaling.unscale import Number


@dataclass(eq=False)
class _Remembered:
    """One buffer as it was when the window began."""

    module: nn.Module
    name: str
    was_training: bool
    buffer: Tensor
    version: int
    value: Tensor | None  # a copy; None: believed to stay as it is

    @property
    def now(self) -> Tensor | None:
        """What the module holds now."""
        return self.module._buffers.get(self.name)

    @property
    def was_seen_changing(self) -> bool:
        """Whether the buffer was replaced, or written by an operation that counts versions."""
        return self.now is not self.buffer or _version(self.buffer) != self.version

    @property
    def saved(self) -> Tensor | None:
        """What it held, if that is known."""
        return self.buffer if _version(self.buffer) == self.version and self.value is None else self.value

    def has_new_values(self) -> bool | Tensor:
        """Whether its values have changed; a 0-dim tensor where only the device knows."""
        now = self.now
        if self.was_seen_changing or self.value is None or now is None:
            return self.was_seen_changing
        return (local_part(now) != local_part(self.value)).any()

    def put_back(self, found_inf: Number) -> None:
        now, saved = self.now, self.saved
        if now is None or saved is None or now is saved or now.shape != saved.shape or now.dtype != saved.dtype:
            return
        if isinstance(found_inf, float):
            if found_inf != 0:
                now.copy_(saved)
            return
        now.copy_(torch.where(moved(found_inf, now.device) != 0, saved, now))


class BufferGuard:
    """Remembers the buffers of a model, for one window after another.

    Args:
        model: its buffers, persistent or not, those of submodules that come and go included.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> guard = BufferGuard(norm)
        >>> guard.remember()
        >>> _ = norm(torch.tensor([[float("inf"), 1.0], [1.0, 2.0]]))
        >>> guard.finish(found_inf=1.0)
        []
        >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
        ([0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # module -> (name of its buffer, training mode) -> whether some window changed it
        self._changes: MutableMapping[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
        self._remembered: list[_Remembered] = []
        self._travelling: list[tuple[_Remembered, HostCopy]] = []  # whether values have changed, known to the device

    def remember(self) -> None:
        """A window begins: copy what its forward passes may change."""
        with torch.no_grad():
            self._remembered = [
                _Remembered(
                    *(module, name, module.training, buffer, _version(buffer)),
                    value=buffer.detach().clone() if self._may_change(module, name) else None,
                )
                for module, name, buffer in _buffers_of(self._model)
            ]

    def finish(self, found_inf: Number) -> list[str]:
        """The window is over: where it is skipped, give buffers their remembered bits; drop the copies.

        Args:
            found_inf: 0.0 or 1.0, as a number, or 0-dim where only the device knows.

        Returns:
            Names of buffers that the window changed and that it had no copy of.
        """
        missed = [one for one in self._remembered if one.was_seen_changing and one.saved is None]
        with torch.no_grad():
            for one in self._remembered:
                if one.was_seen_changing:
                    self._note(one, True)
                elif one.value is not None and self._is_unknown(one):
                    self._compare(one)
                one.put_back(found_inf)
                one.value = None
        self._remembered = []
        return [self._full_name(one) for one in missed]

    def learn(self) -> None:
        """Take in what earlier windows have found on their devices; to be called once those have had the time."""
        for one, flag in self._travelling:
            self._note(one, flag.read() != [0.0])
        self._travelling = []

    @property
    def num_bytes(self) -> int:
        """Bytes held in copies now."""
        return sum(one.value.nbytes for one in self._remembered if one.value is not None)

    def _compare(self, one: _Remembered) -> None:
        """Values are compared once for each buffer and mode: batch norm moves no version counter."""
        has_changed = one.has_new_values()
        if is_host(one.buffer.device):
            self._note(one, bool(has_changed))
        else:
            self._travelling.append((one, HostCopy(torch.as_tensor(has_changed, dtype=torch.float32).reshape(1))))

    def _note(self, one: _Remembered, has_changed: bool) -> None:
        seen = self._changes.setdefault(one.module, {})
        key = (one.name, one.was_training)
        seen[key] = has_changed or seen.get(key, False)

    def _is_unknown(self, one: _Remembered) -> bool:
        known = self._changes.get(one.module, {})
        return not self._always_changes(one.module) and (one.name, one.was_training) not in known

    def _may_change(self, module: nn.Module, name: str) -> bool:
        if self._always_changes(module):
            return True  # whether or not this window happens to run through it
        return self._changes.get(module, {}).get((name, module.training), True)

    def _always_changes(self, module: nn.Module) -> bool:
        return module.training and bool(getattr(module, "track_running_stats", False))

    def _full_name(self, one: _Remembered) -> str:
        prefix = next((name for name, module in self._model.named_modules() if module is one.module), "")
        return f"{prefix}.{one.name}".lstrip(".")


def _buffers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    # In half the time of model.modules(), which goes by names. A module that two others share may come twice.
    stack = [model]
    while stack:
        module = stack.pop()
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
        stack += [child for child in module._modules.values() if child is not None]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
