"""Buffers that training forward changes, remembered so that a skipped step leaves them as they were.

A forward pass in training mode writes BatchNorm's running statistics and counters before anyone knows whether the step
will be taken. One activation that overflows makes them inf for ever, although the scaler skips the step.

Method: a copy is taken when a window begins, and put back on the device, without a read on the host, where the window
is skipped. Which buffers need one is learned by watching their version counters: every buffer is copied until a whole
window, in the present mode of its module, has left it alone. A mask or a table of positions costs its bytes for one
window; running statistics of a module in training mode are always copied. torch.compile counts versions like eager
code. A buffer that a module replaces, instead of writing into it, is its own copy.

A buffer that changes for the first time in a later window (a codebook that is refreshed now and then) was not copied
that time; if just that window is skipped, a warning says so, and from then on it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfstep._compat import moved
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
    def has_changed(self) -> bool:
        """Whether the buffer was written or replaced since."""
        return self.now is not self.buffer or _version(self.buffer) != self.version

    @property
    def saved(self) -> Tensor | None:
        """What it held, if that is known."""
        return self.value if _version(self.buffer) != self.version else self.buffer

    def put_back(self, found_inf: Number) -> None:
        now, saved = self.now, self.saved
        if now is None or saved is None or now.shape != saved.shape or now.dtype != saved.dtype:
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
        >>> guard.put_back(found_inf=1.0)
        >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
        ([0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # module -> (name of its buffer, training mode) -> whether some window changed it
        self._changes: MutableMapping[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
        self._remembered: list[_Remembered] = []

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

    def put_back(self, found_inf: Number) -> None:
        """Where ``found_inf`` (0.0 or 1.0, a number or 0-dim) is set, give changed buffers their remembered bits."""
        with torch.no_grad():
            for one in self._remembered:
                if one.has_changed:
                    one.put_back(found_inf)

    def finish(self) -> list[str]:
        """The window is over: learn from it, drop its copies.

        Returns:
            Names of buffers that it changed and that it had no copy of.
        """
        missed = [one for one in self._remembered if one.has_changed and one.saved is None]
        for one in self._remembered:
            seen = self._changes.setdefault(one.module, {})
            key = (one.name, one.was_training)
            seen[key] = seen.get(key, False) or one.has_changed
        self._remembered = []
        return [self._full_name(one) for one in missed]

    @property
    def num_bytes(self) -> int:
        """Bytes held in copies now."""
        return sum(one.value.nbytes for one in self._remembered if one.value is not None)

    def _may_change(self, module: nn.Module, name: str) -> bool:
        if module.training and getattr(module, "track_running_stats", False):
            return True  # whether or not this window happened to run through it
        return self._changes.get(module, {}).get((name, module.training), True)

    def _full_name(self, one: _Remembered) -> str:
        prefix = next((name for name, module in self._model.named_modules() if module is one.module), "")
        return f"{prefix}.{one.name}".lstrip(".")


def _buffers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
