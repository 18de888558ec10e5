"""Every error and warning that halfstep raises, under one root.

A message has four parts: what was asked, what is true, why that fails, and one thing to do about it. Each class also
inherits the built-in exception that fits, so that code which catches ``ValueError`` or ``RuntimeError`` keeps working.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path


class HalfstepError(Exception):
    """Root of every error that halfstep raises on purpose.

    Args:
        asked: what the caller asked for, with the values.
        true: what is the case, with the values.
        why: why the two do not go together.
        fix: one thing to do.

    Example:
        >>> from halfstep.errors import ArgumentError
        >>> print(ArgumentError(asked="init_scale=-1.0", true="a loss scale multiplies the loss",
        ...                     why="a negative scale turns descent into ascent", fix="pass a positive number"))
        init_scale=-1.0
          true: a loss scale multiplies the loss
          why:  a negative scale turns descent into ascent
          fix:  pass a positive number
    """

    def __init__(self, *, asked: str, true: str, why: str, fix: str) -> None:
        super().__init__(f"{asked}\n  true: {true}\n  why:  {why}\n  fix:  {fix}")
        self.asked, self.true, self.why, self.fix = asked, true, why, fix

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional arguments; ours are keywords. Worker processes send errors by pickle.
        return (_rebuild, (type(self), self.asked, self.true, self.why, self.fix))


def _rebuild(cls: type[HalfstepError], asked: str, true: str, why: str, fix: str) -> HalfstepError:
    return cls(asked=asked, true=true, why=why, fix=fix)


class ArgumentError(HalfstepError, ValueError):
    """An argument has a value that cannot work."""


class FactorError(ArgumentError, AssertionError):
    """A growth or backoff factor is out of range; torch raises ``AssertionError`` here, so this is one too."""


class CallOrderError(HalfstepError, RuntimeError):
    """A method was called at a moment when it cannot do what its name says."""


class NotScaledError(CallOrderError, AssertionError):
    """``step`` or ``update`` before ``scale``; torch raises ``AssertionError`` here, so this is one too."""


class StateError(HalfstepError, ValueError):
    """A saved state is incomplete or holds values that no run can have; nothing of it was loaded."""


class UnsupportedError(HalfstepError, RuntimeError):
    """The operation, machine or version cannot do what was asked."""


class MissingDependencyError(HalfstepError, ImportError):
    """An optional package is not installed."""


class NonFiniteError(HalfstepError, FloatingPointError):
    """Step after step the gradients are inf or NaN: the loss or the forward pass is at fault, not the scale."""


class HalfstepWarning(UserWarning):
    """Root of every warning that halfstep issues."""


class SkippedStepWarning(HalfstepWarning):
    """An optimizer step was skipped because a gradient was inf or NaN."""


class PrecisionWarning(HalfstepWarning):
    """A choice of precision will lose accuracy or speed on this machine."""


def warn(message: str, category: type[Warning] = HalfstepWarning) -> None:
    """Issue a warning that points at the line of the caller's code from which halfstep was entered."""
    # warnings.warn(skip_file_prefixes=...) does this from Python 3.12 on.
    # A with block enters through contextlib, which is nobody's own line either.
    inside = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
