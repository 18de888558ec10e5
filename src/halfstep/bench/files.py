"""matmul.json and matmul.png on disk.

Method: whether the folder can be written, and whether matplotlib is there, is found out before anything is measured.
Both files are made beside their place and moved there, so that an interrupted run leaves no half of one.

Not here: what is in them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from halfstep.bench.measure import Measurement
from halfstep.bench.verdict import noise_note, verdicts
from halfstep.errors import ArgumentError, MissingDependencyError

JSON_NAME, PICTURE_NAME = "matmul.json", "matmul.png"


def as_plain(measurement: Measurement, command: str) -> dict[str, Any]:
    """The measurement with its verdicts and the command that made it, as plain data for JSON.

    Args:
        measurement: from `measure`.
        command: what was typed.

    Returns:
        ``schema``, ``command``, ``verdicts``, ``noise`` (a sentence, or None), and the measurement's own keys.
    """
    said = [{"dtype": str(v.format), "ratio": v.ratio, "text": v.text} for v in verdicts(measurement)]
    head = {"schema": "halfstep.bench.matmul/1", "command": command, "verdicts": said}
    return {**head, "noise": noise_note(measurement) or None, **measurement.as_dict()}


def check_folder(folder: Path) -> None:
    """Find out before a run whether its files can be written.

    Args:
        folder: which need not exist.

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
        raise _unwritable(folder, error) from error


def write(measurement: Measurement, folder: Path, command: str) -> list[Path]:
    """Write both files.

    Args:
        measurement: from `measure`.
        folder: where to; made if it does not exist.
        command: what was typed.

    Returns:
        The files.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    from halfstep.bench.plot import draw

    text = json.dumps(as_plain(measurement, command), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    figure = draw(measurement)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".halfstep-", dir=folder) as draft:
            (Path(draft) / JSON_NAME).write_text(text, encoding="utf-8")
            figure.savefig(Path(draft) / PICTURE_NAME)
            for name in (JSON_NAME, PICTURE_NAME):
                (Path(draft) / name).replace(folder / name)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return [folder / JSON_NAME, folder / PICTURE_NAME]


def _unwritable(folder: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        asked=f"files in {str(folder)!r}",
        true=f"the system says: {error.strerror or error}",
        why=f"{JSON_NAME} and {PICTURE_NAME} have to be written there",
        fix="pass --out with a folder that you may write to",
    )
