"""The study on disk: one HTML page that needs nothing else, its pictures, and its numbers as JSON.

Purpose: something to show, to keep and to compute with. Method: everything is written into a fresh folder beside the
target and moved there when it is complete, so that an interrupted or failed run leaves no half of a report. The
pictures are inside the page (base64), so it works offline and can be mailed.

Not here: numbers (rows.py), pictures (plots.py), words (texts/).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.compare import cells
from halfstep.compare._extras import check_installed, need
from halfstep.compare.plot_gradients import DAMAGED, cure, loses_first_layer
from halfstep.compare.plot_style import plot_words
from halfstep.compare.plots import Picture, pictures
from halfstep.compare.rows import Row, limits_of
from halfstep.compare.run import Study
from halfstep.compare.settings import REFERENCE
from halfstep.compare.task import Task
from halfstep.compare.verdict import Verdict
from halfstep.compare.words import Words
from halfstep.errors import ArgumentError

FOLDER, QUICK_FOLDER = Path("halfstep-compare"), Path("halfstep-compare-quick")
REPORT_NAME, JSON_NAME = "report.html", "compare.json"


def write_report(study: Study, folder: Path, words: Words) -> list[Path]:
    """Write page, pictures and JSON.

    Args:
        study: what was measured.
        folder: where to; made if it does not exist. Files of an earlier report are replaced, others are left alone.
        words: in which language.

    Returns:
        The files, the page first.

    Raises:
        ArgumentError: the folder cannot be written; nothing of the report is left there.
    """
    with _complete_or_nothing(folder) as draft:
        shown = {picture.name: _write_picture(picture, draft, words) for picture in pictures(study)}
        plain = json.dumps(study.as_plain(), indent=2, ensure_ascii=False, allow_nan=False)
        (draft / JSON_NAME).write_text(plain + "\n", encoding="utf-8")
        (draft / REPORT_NAME).write_text(render_page(study, shown, words), encoding="utf-8")
        names = sorted(path.name for path in draft.iterdir())
    return [folder / name for name in sorted(names, key=lambda name: (name != REPORT_NAME, name))]


def default_folder(*, is_quick: bool) -> Path:
    """Where a report goes if nobody says so: a lecture's short form does not replace the study's.

    Example:
        >>> print(default_folder(is_quick=True))
        halfstep-compare-quick
    """
    return QUICK_FOLDER if is_quick else FOLDER


def check_report(folder: Path) -> None:
    """Find out before a long run whether its report can be made and written.

    Args:
        folder: the report's folder, which need not exist.

    Raises:
        ArgumentError: it could not be written.
        MissingDependencyError: a package that draws or writes is not installed.
    """
    check_installed(("matplotlib", "jinja2", "rich"), "pictures, page and table of the study")
    existing = _nearest_existing(folder)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".halfstep-", dir=existing))
    except OSError as error:
        raise _unwritable(folder, error) from error


@contextmanager
def _complete_or_nothing(folder: Path) -> Iterator[Path]:
    """A draft folder whose files move into ``folder`` when the block ends well, and vanish when it does not."""
    try:
        # On the same file system as the target, so that moving a file replaces it in one step.
        draft = Path(tempfile.mkdtemp(prefix=".halfstep-", dir=_nearest_existing(folder)))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield draft
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(draft.iterdir()):
                path.replace(folder / path.name)
        except OSError as error:
            raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _nearest_existing(folder: Path) -> Path:
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _unwritable(folder: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        asked=f"a report in {str(folder)!r}",
        true=f"the system says: {error.strerror or error}",
        why="page, pictures and numbers have to be written there",
        fix="pass --out with a folder that you may write to",
    )


def _write_picture(picture: Picture, folder: Path, words: Words) -> dict[str, Any]:
    path = folder / f"{picture.name}.png"
    picture.save(path, words)
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return {"picture": picture, "source": f"data:image/png;base64,{data}"}


# ---- the page -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """One task on the page."""

    task: Task
    title: str
    text: str
    picture: str
    caption: str
    quality: str | None
    rows: list[Any]
    source: str
    free_mistakes: list[Row]


def render_page(study: Study, shown: dict[str, dict[str, Any]], words: Words) -> str:
    """The page as text.

    Args:
        study: what was measured.
        shown: picture's name -> ``{"picture": Picture, "source": data URI}``.
        words: in which language.

    Returns:
        HTML that refers to nothing outside itself.
    """
    jinja2 = need("jinja2", "the HTML report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halfstep.compare"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return str(
        environment.get_template("report.html.j2").render(
            t=words,
            cells=cells,
            study=study,
            sections=[_section(study, task, shown, words) for task in study.settings.tasks],
            sources={name: entry["source"] for name, entry in shown.items()},
            captions=_captions(study, shown, words),
            limits={task.name: limits_of(task) for task in study.settings.tasks},
            constants={task.name: task.constant_metric(task.build_data()) for task in study.settings.tasks},
            emulated=", ".join(study.machine["emulated_formats"]),
            has_english_plots=plot_words(words)[0].code != words.code,
            command=_command(study, words),
        )
    )


def _section(study: Study, task: Task, shown: dict[str, dict[str, Any]], words: Words) -> _Section:
    data = task.build_data()
    caption = "sums_caption" if task.metric is None else "curves_caption"
    return _Section(
        task=task,
        title=words.name_of("task", task.name),
        text=words.texts.get(f"task.{task.name}.text", ""),
        picture=shown[f"curves-{task.name}"]["source"],
        caption=words(caption, metric=_sentence(words(f"{task.metric_name}_long"))),
        quality=shown[quality]["source"] if (quality := f"quality-{task.name}") in shown else None,
        rows=study.rows_of(task.name),
        source=words.source(data.source, data.source_facts) if data.source else "",
        free_mistakes=_free_mistakes(study, task),
    )


def _free_mistakes(study: Study, task: Task) -> list[Row]:
    """Rows of mistaken loops that learned as well as fp32, which the page is to admit."""
    mistaken = {regime.name for regime in study.settings.regimes if regime.mistake is not None}
    return [row for row in study.rows_of(task.name) if row.regime in mistaken and row.verdict is Verdict.MATCHES]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _captions(study: Study, shown: dict[str, dict[str, Any]], words: Words) -> dict[str, str]:
    captions = {"bytes": words("bytes_caption")}
    for entry in shown.values():
        picture: Picture = entry["picture"]
        if picture.kind == "gradients" and picture.task is not None:
            title = words.name_of("task", picture.task.name)
            captions["gradients"] = words("gradients_caption", task=title, fact=_fact(study, picture.task, words))
            captions["why"] = words("why" if loses_first_layer(study.runs_of(picture.task.name)) else "why_not")
            captions["scale"] = words("scale_caption", task=title)
    return captions


def _fact(study: Study, task: Task, words: Words) -> str:
    runs = study.runs_of(task.name)
    scaled = cure(runs)
    assert scaled is not None
    return words(
        "gradients_fact",
        unscaled=cells.percent(runs[DAMAGED].start_first_layer.zero_share),
        scaled=cells.percent(scaled.start_first_layer.zero_share),
        scale=cells.scale(scaled.scales[0]),
        fp32=cells.percent(runs[REFERENCE.name].start_first_layer.zero_share),
    )


def _command(study: Study, words: Words) -> str:
    """The command line that makes this report."""
    settings = study.settings
    parts = ["halfstep compare"]
    parts += [f"--task {task.name}" for task in settings.tasks]
    parts += [f"--regime {regime.name}" for regime in settings.regimes if settings.are_regimes_named]
    parts += ["--quick"] if settings.is_quick else []
    parts += [f"--seeds {settings.num_seeds}", f"--device {settings.device.type}", f"--lang {words.code}"]
    return " ".join(parts)
