"""Buffers that training forward changes, remembered so that a skipped step leaves them as they were.

A forward pass in training mode writes BatchNorm's running statistics and counters before anyone knows whether the step
will be taken. One activation that overflows makes them inf for ever, although the scaler skips the step.

Method: a copy is taken when a window begins, and put back on the device, without a read on the host, where the window
is skipped. Which buffers need one is learned: every buffer is copied until a whole window, in the present mode of its
module, has left its values alone. A mask or a table of positions costs its bytes for one window; running statistics of
a module in training mode are always copied. Later windows look at version counters only, which torch's batch norm does
not move when it runs eagerly (2.13), nor do writes through ``.data``.

Where the host knows of the skip, a buffer that was replaced, resized, made or removed is what it was before, too. Where
only the device knows, it cannot be; nor can a buffer that changes for the first time in a later window (a codebook that
is refreshed now and then) and was not copied that time. If just such a window is skipped, a warning names them.

A forward pass that makes running statistics inf while its gradients stay finite is no skip: the step is applied, and
the statistics stay.
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
    """One place for a buffer, as it was when the window began."""

    module: nn.Module
    name: str
    was_training: bool
    buffer: Tensor | None
    version: int
    value: Tensor | None  # a copy; None: believed to stay as it is

    @property
    def now(self) -> Tensor | None:
        """What the module holds now."""
        table = self.module._buffers
        return table[self.name] if self.name in table else None  # noqa: SIM401  (a scripted module's has no get)

    @property
    def was_written(self) -> bool:
        """Whether the buffer was written by an operation that counts versions."""
        return self.buffer is not None and _version(self.buffer) != self.version

    @property
    def was_replaced(self) -> bool:
        """Whether the module holds another one."""
        return self.now is not self.buffer

    def has_new_values(self) -> bool | Tensor:
        """Whether its values differ from the copy; a 0-dim tensor where only the device knows."""
        assert self.buffer is not None
        assert self.value is not None
        return (local_part(self.buffer) != local_part(self.value)).any()

    def put_back(self) -> bool:
        """The host knows that the window is skipped. Returns whether everything could be put back."""
        if self.was_replaced:
            self.module._buffers[self.name] = self.buffer
        if self.value is not None and self.buffer is not None:
            self.buffer.copy_(self.value)
            return True
        return not self.was_written

    def put_back_where(self, is_bad: Tensor) -> bool:
        """Only the device knows. Returns whether everything would be put back."""
        now, saved = self.now, self.value if self.was_written or self.value is not None else self.buffer
        if not (self.was_replaced or self.was_written or self.value is not None):
            return True
        if now is None or saved is None or now.shape != saved.shape or now.dtype != saved.dtype:
            return False
        torch.where(is_bad, saved, now, out=now)
        return True


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
        self._is_open = False  # between remember() and finish()
        self._travelling: list[tuple[_Remembered, HostCopy]] = []  # whether values have changed, known to the device

    def remember(self) -> None:
        """A window begins: copy what its forward passes may change."""
        self._is_open = True
        with torch.no_grad():
            self._remembered = [
                _Remembered(
                    *(module, name, module.training, buffer, -1 if buffer is None else _version(buffer)),
                    value=_copy(buffer) if self._may_change(module, name) else None,
                )
                for module, name, buffer in _buffers_of(self._model)
            ]

    def remember_more(self) -> None:
        """Another forward pass of the window: norms that were frozen when it began may be in training mode now."""
        for one in self._remembered:
            if one.value is None and not one.was_training and self._always_changes(one.module):
                one.value, one.was_training = _copy(one.buffer), True

    def finish(self, found_inf: Number) -> list[str]:
        """The window is over: where it is skipped, give buffers their remembered bits; drop the copies.

        Args:
            found_inf: 0.0 or 1.0, as a number, or 0-dim where only the device knows.

        Returns:
            Names of buffers that keep what the window did to them if it is skipped.
        """
        if not self._is_open:
            return []
        self._is_open = False
        missed: list[_Remembered] = []
        flags: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for one in self._remembered:
                self._learn_from(one)
                if isinstance(found_inf, Tensor):
                    home = one.buffer.device if one.buffer is not None else found_inf.device
                    if home not in flags:
                        flags[home] = moved(found_inf, home) != 0
                    is_back = one.put_back_where(flags[home])
                else:
                    is_back = found_inf == 0 or one.put_back()
                if not is_back:
                    missed.append(one)
            missed += self._remove_new(found_inf)
        for one in self._remembered:
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

    def _learn_from(self, one: _Remembered) -> None:
        """Values are compared once for each buffer and mode: batch norm moves no version counter."""
        if one.was_written or one.was_replaced:
            self._note(one, True)
        elif one.value is not None and self._is_unknown(one):
            has_changed = one.has_new_values()
            if is_host(one.value.device):
                self._note(one, bool(has_changed))
            else:
                flag = torch.as_tensor(has_changed, dtype=torch.float32).reshape(1)
                self._travelling.append((one, HostCopy(flag)))

    def _remove_new(self, found_inf: Number) -> list[_Remembered]:
        """Buffers that the window's forward passes registered: taken away again where the host knows of the skip."""
        if isinstance(found_inf, float) and found_inf == 0:
            return []
        known = {(id(one.module), one.name) for one in self._remembered}
        new = [(m, name) for m, name, _ in _buffers_of(self._model) if (id(m), name) not in known]
        if isinstance(found_inf, float):
            for module, name in new:
                del module._buffers[name]
            return []
        return [_Remembered(module, name, module.training, None, -1, None) for module, name in new]

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


def _buffers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
    # In half the time of model.modules(), which goes by names. A module that two others share may come twice.
    stack = [model]
    while stack:
        module = stack.pop()
        for name, buffer in module._buffers.items():
            yield module, name, buffer
        stack += [child for _, child in module._modules.items() if child is not None]


def _copy(buffer: Tensor | None) -> Tensor | None:
    """A copy, of what can be compared and written in place; other buffers are watched by their version alone."""
    if buffer is None or buffer.layout != torch.strided or buffer.is_meta or nn.parameter.is_lazy(buffer):
        return None
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return None if is_expanded or buffer.is_nested else buffer.detach().clone()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
