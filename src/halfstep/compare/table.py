"""The study as tables in a terminal.

Purpose: the verdicts, readable without opening a file. Method: one rich table per task; cells come from cells.py. Not
here: printing, which is the command line's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfstep.compare import cells
from halfstep.compare._extras import need
from halfstep.compare.rows import Row
from halfstep.compare.run import Study
from halfstep.compare.tasks import Task
from halfstep.compare.verdict import Verdict
from halfstep.compare.words import Words

_LOOKS = {
    Verdict.MATCHES: "green",
    Verdict.WORSE: "yellow",
    Verdict.STALLS: "bold red",
    Verdict.DIVERGES: "bold magenta",
}
_MARKS = {Verdict.MATCHES: "✓", Verdict.WORSE: "△", Verdict.STALLS: "✗", Verdict.DIVERGES: "✗"}


def tables(study: Study, words: Words) -> Iterator[Any]:
    """One rich table per task.

    Args:
        study: what was measured.
        words: in which language.

    Yields:
        Things that a rich console prints.
    """
    for task in study.settings.tasks:
        yield _table(study, task, words)


def _table(study: Study, task: Task, words: Words) -> Any:
    table = need("rich.table", "the table in the terminal").Table(
        title=f"[bold]{words.name_of('task', task.name)}[/]  [dim]{task.name}[/]",
        caption=f"{words('error')}: {words(task.metric_name + '_long')}",
        title_justify="left",
        caption_justify="left",
        header_style="dim",
        box=need("rich.box", "the table in the terminal").SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column(words("regime"), no_wrap=True)
    for key in ("error", "difference"):
        table.add_column(words(key), justify="right", no_wrap=True)
    table.add_column(words("verdict"), no_wrap=True)
    for key in ("skipped", "zeros", "activations", "time", "scale"):
        table.add_column(words(key), justify="right")
    for row in study.rows_of(task.name):
        table.add_row(*_cells(row, words))
    return table


def _cells(row: Row, words: Words) -> list[str]:
    look, mark = ("dim", " ") if cells.is_plain_reference(row) else (_LOOKS[row.verdict], _MARKS[row.verdict])
    return [
        row.regime,
        cells.error(row),
        cells.difference(row),
        f"[{look}]{mark} {cells.verdict(row, words)}[/]",
        cells.skipped(row),
        cells.zeros(row),
        cells.kib(row.peak_activation_bytes),
        cells.time_ratio(row, words),
        cells.scale(row.final_scale),
    ]
