"""A measurement's JSON and picture on disk.

Method: whether the folder can be written, and whether matplotlib is there, is found out before anything is measured.
Both files are made beside their place and moved there, so that an interrupted run leaves no half of one.

Not here: what is in them (reports.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

from halfstep.bench.reports import Report
from halfstep.errors import ArgumentError, MissingDependencyError


def names_of(name: str) -> tuple[str, str]:
    """The files of a report.

    Example:
        >>> names_of("matmul")
        ('matmul.json', 'matmul.png')
    """
    return f"{name}.json", f"{name}.png"


def check_folder(folder: Path, name: str) -> None:
    """Find out before a run whether its files can be written.

    Args:
        folder: which need not exist.
        name: of the report.

    Raises:
        ArgumentError: it could not be written.
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            asked="the picture of the measurement",
            true="the package 'matplotlib' is not installed",
            why="halfstep's core needs torch alone; pictures need a package more",
            fix="pip install 'halfstep[cli]', or leave --out out",
        )
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".halfstep-", dir=existing))
    except OSError as error:
        raise _unwritable(folder, name, error) from error


def as_text(report: Report) -> str:
    """The report's data as JSON."""
    return json.dumps(report.plain, indent=2, ensure_ascii=False, allow_nan=False)


def write(report: Report, folder: Path) -> list[Path]:
    """Write both files.

    Args:
        report: from reports.py.
        folder: where to; made if it does not exist.

    Returns:
        The files.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    data, picture = names_of(report.name)
    text, figure = as_text(report) + "\n", report.draw()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".halfstep-", dir=folder) as draft:
            (Path(draft) / data).write_text(text, encoding="utf-8")
            figure.savefig(Path(draft) / picture)
            for name in (data, picture):
                (Path(draft) / name).replace(folder / name)
    except OSError as error:
        raise _unwritable(folder, report.name, error) from error
    return [folder / data, folder / picture]


def _unwritable(folder: Path, name: str, error: OSError) -> ArgumentError:
    return ArgumentError(
        asked=f"files in {str(folder)!r}",
        true=f"the system says: {error.strerror or error}",
        why=f"{' and '.join(names_of(name))} have to be written there",
        fix="pass --out with a folder that you may write to",
    )
