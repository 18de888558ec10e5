"""Optional packages of the `cli` extra, imported where they are used and missed in plain words.

Purpose: the core of halfstep needs torch alone; the study needs scikit-learn, matplotlib, jinja2 and rich. Not here:
any fallback. Without the package the study stops with one line that says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from halfstep.errors import MissingDependencyError


def need(module: str, purpose: str) -> Any:
    """Import an optional module, or say how to install it.

    Args:
        module: dotted name, for example ``"matplotlib.figure"``.
        purpose: what halfstep wanted it for, in a few words.

    Returns:
        The module.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module, purpose) from error


def check_installed(packages: Iterable[str], purpose: str) -> None:
    """Find out before a long run, and without importing anything, whether its packages are there.

    Args:
        packages: top-level names.
        purpose: as for `need`.

    Raises:
        MissingDependencyError: one is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise missing(package, purpose)


def missing(module: str, purpose: str) -> MissingDependencyError:
    """The error for an optional package that is not installed (returned, not raised)."""
    package = module.split(".")[0]
    return MissingDependencyError(
        asked=purpose,
        true=f"the package {package!r} is not installed",
        why="halfstep's core needs torch alone; the command line and the study use a few packages more",
        fix="pip install 'halfstep[cli]'",
    )
