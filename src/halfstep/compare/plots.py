"""The pictures of the study, one per question.

Purpose: readable from the last row of a lecture hall. Method: matplotlib's ``Figure`` without pyplot, so that nothing
global is kept and no display is needed. `pictures` says which there are; each is drawn by a function of its own file.

Not here: captions (report.py), words (texts/), looks (plot_style.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.compare.plot_bytes import draw_bytes
from halfstep.compare.plot_curves import draw_curves
from halfstep.compare.plot_gradients import draw_gradients, lesson
from halfstep.compare.plot_quality import compares_storages, draw_quality
from halfstep.compare.plot_scale import draw_scale
from halfstep.compare.plot_style import drawing_with, plot_words
from halfstep.compare.run import Study
from halfstep.compare.task import Task
from halfstep.compare.words import Words


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        name: file name without ending.
        kind: ``"curves"``, ``"quality"``, ``"gradients"``, ``"scale"`` or ``"bytes"``; chooses the caption.
        task: what it is about; None for all tasks.
        draw: makes the figure.
    """

    name: str
    kind: str
    task: Task | None
    draw: Callable[[Words], Any]

    def save(self, path: Path, words: Words) -> None:
        """Draw it as a PNG, in the words' language where a font can write it."""
        drawable, font = plot_words(words)
        with drawing_with(font):  # until it is saved: matplotlib looks fonts up when it draws
            self.draw(drawable).savefig(path)


def pictures(study: Study) -> Iterator[Picture]:
    """The pictures that this study can show: one per question, and those only whose runs exist."""
    for task in study.settings.tasks:
        yield Picture(f"curves-{task.name}", "curves", task, partial(draw_curves, study, task))
        if compares_storages(study, task):
            yield Picture(f"quality-{task.name}", "quality", task, partial(draw_quality, study, task))
    shown = lesson(study)
    if shown is not None:
        yield Picture("gradients", "gradients", shown, partial(draw_gradients, study, shown))
        yield Picture("scale", "scale", shown, partial(draw_scale, study, shown))
    yield Picture("bytes", "bytes", None, partial(draw_bytes, study))
