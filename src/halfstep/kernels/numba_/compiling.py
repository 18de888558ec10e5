"""How functions are compiled, and where the machine code is kept, so that only the first process waits for it.

numba keeps code beside the source, and asks for the one file's date whether it is still right. These functions lie in
several files, and a rule in another folder; so they get a folder of their own whose name is a hash of all of them. It
lies in the user's cache folder, or under NUMBA_CACHE_DIR; where neither can be written every process compiles.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function that only compiled ones call: without the ways in for Python and C, in half the time."""
    if function is None:
        return functools.partial(inner, **options)
    return numba.njit(**OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)


@functools.cache
def cache_folder() -> Path:
    """Where the code compiled from these very sources is kept."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return _base_folder() / f"numba-{digest.hexdigest()[:16]}"


def _base_folder() -> Path:
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR) / "halfstep"
    given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "halfstep"


@functools.cache
def _drop_damaged(folder: Path) -> None:
    """Delete files that a crash or a full disk has cut: numba would fail on them in every process."""
    for path in folder.rglob("*.nb[ci]"):
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            is_whole = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == pickle.STOP
        if not is_whole:
            path.unlink(missing_ok=True)


_lock = threading.Lock()  # numba's setting is one for the process


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """numba asks for the folder when a function is decorated, and remembers the answer."""
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def compiled(decorator: Callable[..., Any], *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` or ``numba.cfunc`` with the options of all loops, kept on disk if there is a place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            folder = cache_folder()
            # Asked first: numba would turn to the folder of the source, where it finds code compiled from older files.
            folder.mkdir(parents=True, exist_ok=True)
            _drop_damaged(folder)
            tempfile.TemporaryFile(dir=folder).close()
            with _kept_in(folder):
                return decorator(*arguments, cache=True, **OPTIONS)(function)
        except (RuntimeError, OSError):  # there is no home, or no folder can be written
            return decorator(*arguments, **OPTIONS)(function)

    return decorate
