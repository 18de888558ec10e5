"""Read fp32 products as tf32 for a while, and leave torch's switches as they were.

A100 and newer multiply fp32 numbers on Tensor Cores if they may drop 13 of the 23 mantissa bits on the way in; sums
stay fp32. torch has one switch for matrix products (off), one for convolutions and one for recurrent layers (both on),
each of them twice: ``fp32_precision`` (a tree, in which what says nothing follows its parent) and the older
``allow_tf32`` and ``set_float32_matmul_precision``. torch keeps the two apart, and reading an old switch raises
RuntimeError once the new one says something else, which has stopped torch.compile on GPUs (#189955). So this

- sets the new switches, since they can say "tf32" for CUDA alone, and then the old ones where they disagree;
- finds out which switches say something and which follow, by turning the parent and looking, because torch only tells
  what holds in the end: a switch that followed is left following;
- on the way back writes the same, the last one to leave first.

The switches belong to the process, not to a thread: while it looks, products of other threads may meet a turned one.
A backward pass is multiplied as the switches stand when it runs.

Not here: Intel GPUs and oneDNN on CPUs (``torch.backends.mkldnn``), which are left alone; the policy ``tf32``, which
asks that the switch is on.

Sources: NVIDIA A100 whitepaper, TF32; torch's notes on CUDA semantics, "TensorFloat-32 on Ampere and later devices";
pytorch/pytorch#179445, #189955.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from halfstep.errors import ArgumentError, CallOrderError, PrecisionWarning, warn
from halfstep.hardware import Hardware, count_devices, probe

P = ParamSpec("P")
R = TypeVar("R")


class TF32Switch:
    """A handle on TF32 products; :func:`enable_tf32` makes it, switched on.

    ``disable()`` and leaving the ``with`` block put everything back. Handles nest; if they are closed in another order
    than the reverse, TF32 stays on until the last one is closed, and the first state comes back then.

    Args:
        is_available: whether to touch the switches at all.
        reason: why.
    """

    def __init__(self, *, is_available: bool, reason: str) -> None:
        self.is_available = is_available
        self.reason = reason
        self._before: _Switches | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether this handle holds the switches on now."""
        return self._before is not None

    def enable(self) -> None:
        """Set the switches; nothing if this handle holds them already, or the hardware has no TF32."""
        with _lock:
            if self.is_available and self._before is None:
                self._before = _Switches.read()
                _open.append(self)
                try:
                    _switch_on(self._before)
                except BaseException:
                    self._close()
                    raise

    def disable(self) -> None:
        """Put the switches back as :meth:`enable` found them; nothing if this handle does not hold them."""
        with _lock:
            if self._before is not None:
                self._close()

    def _close(self) -> None:
        before, self._before = self._before, None
        place = _open.index(self)
        del _open[place]
        if place < len(_open):
            _open[place]._before = before  # whoever came later puts back what I found
        elif before is not None:
            before.write()

    def __enter__(self) -> TF32Switch:
        self.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: TF32 while it runs, and not before."""
        self.disable()
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise ArgumentError(
                asked=f"enable_tf32() around {getattr(function, '__name__', function)}()",
                true="it is a generator or a coroutine",
                why="its body runs after the call has returned, in pieces, with other code in between",
                fix="write `with enable_tf32():` around the products inside it",
            )

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with TF32Switch(is_available=self.is_available, reason=self.reason):
                return function(*args, **kwargs)

        return run

    def __reduce__(self) -> Any:
        raise CallOrderError(
            asked="to copy or pickle a TF32Switch",
            true="it holds what torch's switches were in this process",
            why="a copy would put them back a second time, or in a process where they were others",
            fix="call enable_tf32() where it is needed",
        )

    def __repr__(self) -> str:
        return f"TF32Switch({'on' if self.is_enabled else 'off'}: {self.reason})"


def enable_tf32(*, hardware: Hardware | None = None) -> TF32Switch:
    """Let fp32 matrix products, convolutions and recurrent layers on CUDA devices read their inputs as tf32.

    It acts at once, and goes back at the end of a ``with`` block, of a decorated function, or on ``disable()``. Run the
    backward pass inside too. On a machine without TF32 no switch is touched and products stay fp32.

    Args:
        hardware: the facts to judge by. Default: those of this machine, as far as they can be read without starting
            CUDA: where torch sees a CUDA device but has not started it, the switches are set unasked (a card without
            TF32 ignores them).

    Returns:
        The handle, with ``is_available``, ``is_enabled`` and ``reason``.

    Raises:
        ArgumentError: ``hardware`` is no Hardware.

    Warns:
        PrecisionWarning: there is no TF32 here.

    Example:
        >>> h200 = Hardware("cuda", "NVIDIA H200", capability=(9, 0))
        >>> before = torch.backends.cuda.matmul.fp32_precision
        >>> with enable_tf32(hardware=h200) as tf32:
        ...     torch.backends.cuda.matmul.fp32_precision, tf32.reason
        ('tf32', 'tf32: sm_90 multiplies it natively')
        >>> torch.backends.cuda.matmul.fp32_precision == before
        True
    """
    is_available, reason = _judge(hardware)
    if not is_available:
        warn(f"enable_tf32() changes nothing here: {reason}.", PrecisionWarning)
    handle = TF32Switch(is_available=is_available, reason=reason)
    handle.enable()
    return handle


def _judge(hardware: Hardware | None) -> tuple[bool, str]:
    """Whether there is TF32, and the sentence that says why."""
    if hardware is None:
        if not count_devices("cuda"):
            return (
                False,
                f"fp32: torch {torch.__version__} sees no CUDA device, and tf32 is a way of theirs to multiply",
            )
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True, "tf32: set without asking the card, which would start CUDA; one that has no TF32 ignores it"
        hardware = probe("cuda")
    if not isinstance(hardware, Hardware):
        raise ArgumentError(
            asked=f"enable_tf32() with hardware={hardware!r}",
            true="hardware is a halfstep.hardware.Hardware",
            why="a name or a device says nothing about TF32 by itself",
            fix="pass halfstep.probe(device), or leave it out",
        )
    if hardware.device_type == "cuda" and "tf32" in hardware.native_formats:
        return True, f"tf32: {hardware.label} multiplies it natively"
    if "tf32" in hardware.native_formats:
        return False, f'fp32: {hardware.label} has a switch of its own, torch.set_float32_matmul_precision("high")'
    return False, f"fp32: {hardware.label} has no tf32, only {', '.join(hardware.native_formats)}"


# --- torch's switches

_lock = threading.RLock()
_open: list[TF32Switch] = []  # handles that hold the switches on, in the order in which they were opened

_ON, _OFF, _FOLLOWS = "tf32", "ieee", "none"  # torch's words
# Ours, for convolutions and recurrent layers as torch 2.13 begins: on, unless a parent says otherwise. torch has no
# word that sets it again, so it is never written over without need.
_DEFAULT = "default"


def _operations() -> tuple[Any, ...]:
    """The owners of one ``fp32_precision`` each, for what is multiplied on CUDA devices."""
    cudnn: Any = torch.backends.cudnn  # the names below are new, and torch's stubs have none of them
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def _onednn() -> Any:
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul


def _parent() -> Any:
    return torch.backends.cudnn  # whose fp32_precision is that of all of CUDA, whatever its name says


def _root() -> Any:
    return torch.backends


@dataclass(frozen=True)
class _Switches:
    """What the switches for CUDA say themselves, beside what holds in the end.

    Args:
        parent: of all of CUDA.
        operations: of matrix products, convolutions, recurrent layers.
        onednn: of matrix products elsewhere. Not set here, but a user who sets ``matmul`` inside sets it too.
        matmul: the older switch, ``set_float32_matmul_precision``.
        cudnn: the older switch ``torch.backends.cudnn.allow_tf32``.
    """

    parent: str
    operations: tuple[str, ...]
    onednn: str
    matmul: str
    cudnn: bool

    @classmethod
    def read(cls) -> _Switches:
        """Turn the parents, look what follows, and put them back."""
        root_says = _root().fp32_precision
        seen = [_seen(_root(), value, (_parent(), _onednn())) for value in (_ON, _OFF)]
        _root().fp32_precision = root_says
        parent, onednn = (_FOLLOWS if pair == (_ON, _OFF) else pair[0] for pair in zip(*seen, strict=True))
        try:
            under_on = _seen(_parent(), _ON, _operations())
            under_off = _seen(_parent(), _OFF, _operations())
            _root().fp32_precision = _FOLLOWS
            alone = _seen(_parent(), _FOLLOWS, _operations())
            operations = tuple(map(_interpreted, under_on, under_off, alone))
            return cls(parent, operations, onednn, *_old_switches(operations))
        finally:
            _root().fp32_precision = root_says
            _parent().fp32_precision = parent

    def write(self) -> None:
        """Make the switches say this again."""
        now = _Switches.read()
        if now.matmul != self.matmul:
            _set_old_matmul(self.matmul)
        if now.cudnn != self.cudnn:
            _set_old_cudnn(self.cudnn)
        now = _Switches.read()
        for owner, says, said in zip(_operations(), now.operations, self.operations, strict=True):
            if says != said:
                owner.fp32_precision = _ON if said == _DEFAULT else said
        if now.onednn != self.onednn:
            _onednn().fp32_precision = self.onednn
        _parent().fp32_precision = self.parent


@contextlib.contextmanager
def tf32_switched(*, is_on: bool) -> Iterator[None]:
    """All of CUDA's TF32 switches on or off for a block, whatever the hardware, and as they were afterwards.

    Unlike `enable_tf32` it can switch off, asks no hardware, and opens no handle: for measuring both ways.

    Args:
        is_on: whether fp32 products and convolutions read their inputs as tf32 inside.

    Example:
        >>> with tf32_switched(is_on=True):
        ...     torch.backends.cuda.matmul.fp32_precision
        'tf32'
    """
    with _lock:
        before = _Switches.read()
    try:
        with _lock:
            (_switch_on if is_on else _switch_off)(before)
        yield
    finally:
        with _lock:
            before.write()


def _switch_off(before: _Switches) -> None:
    """By the parent, so that one that says nothing still says nothing; the older switches decide nothing then."""
    _parent().fp32_precision = _OFF
    for owner, says in zip(_operations(), before.operations, strict=True):
        if says == _ON:
            owner.fp32_precision = _OFF


def _switch_on(before: _Switches) -> None:
    _set_new_ones_on(before.operations)
    if before.matmul == "highest":
        _set_old_matmul("high")
    if not before.cudnn:
        _set_old_cudnn(True)


def _set_new_ones_on(operations: tuple[str, ...]) -> None:
    _parent().fp32_precision = _ON
    for owner, says in zip(_operations(), operations, strict=True):
        if says == _OFF:
            owner.fp32_precision = _ON


def _seen(parent: Any, value: str, owners: Iterable[Any]) -> list[str]:
    """What holds for some switches while a parent says this."""
    parent.fp32_precision = value
    return [str(owner.fp32_precision) for owner in owners]


def _interpreted(under_on: str, under_off: str, alone: str) -> str:
    if (under_on, under_off) == (_ON, _OFF):
        return _DEFAULT if alone == _ON else _FOLLOWS
    return under_on


def _old_switches(operations: tuple[str, ...]) -> tuple[str, bool]:
    """The older switches. They can be read where the new ones agree with them: all on, one that is off raises."""
    _set_new_ones_on(operations)
    try:
        is_matmul_on = _reads_true(lambda: torch.backends.cuda.matmul.allow_tf32)
        matmul = _old_matmul() if is_matmul_on else "highest"
        return matmul, _reads_true(lambda: torch.backends.cudnn.allow_tf32)
    finally:
        for owner, says in zip(_operations(), operations, strict=True):
            if says == _OFF:
                owner.fp32_precision = _OFF


def _reads_true(read: Callable[[], bool]) -> bool:
    try:
        return bool(read())
    except RuntimeError:
        return False


def _old_matmul() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the switch for oneDNN disagrees, and is none of ours; "medium" means "high" to CUDA
        return "high"


def _set_old_matmul(value: str) -> None:
    with _without_advice():
        if value == "medium":
            torch.set_float32_matmul_precision(value)
        else:  # unlike that function, this leaves oneDNN alone
            torch.backends.cuda.matmul.allow_tf32 = value == "high"


def _set_old_cudnn(value: bool) -> None:
    with _without_advice():
        torch.backends.cudnn.allow_tf32 = value


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Some versions of torch advise against the older switches, which must be set while torch itself reads them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        yield
