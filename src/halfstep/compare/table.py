"""The study as tables in a terminal.

Purpose: the verdicts, readable without opening a file. Method: one rich table per task; cells come from cells.py. Not
here: printing, which is the command line's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from halfstep.compare import cells
from halfstep.compare._extras import need
from halfstep.compare.rows import Row, limits_of
from halfstep.compare.run import Study
from halfstep.compare.task import Task
from halfstep.compare.verdict import Verdict
from halfstep.compare.words import Words

_LOOKS = {
    Verdict.MATCHES: "green",
    Verdict.WORSE: "yellow",
    Verdict.STALLS: "bold red",
    Verdict.DIVERGES: "bold magenta",
}
_MARKS = {Verdict.MATCHES: "✓", Verdict.WORSE: "△", Verdict.STALLS: "✗", Verdict.DIVERGES: "✗"}


def tables(study: Study, words: Words, console: Any) -> Iterator[Any]:
    """One rich table per task, and a line about emulation where there was some.

    Args:
        study: what was measured.
        words: in which language.
        console: the rich console that will print them; where it is narrow, columns are left out (the report has all).

    Yields:
        Things that the console prints.
    """
    for task in study.settings.tasks:
        yield _widest_that_fits(study, task, words, console)
    if study.machine["emulated_formats"]:
        yield words("emulated_short", formats=", ".join(study.machine["emulated_formats"])) + "\n"


# The columns that can be left out, the least missed first.
_CAN_GO = ("activations", "zeros_short", "skipped", "scale", "bytes")


def _widest_that_fits(study: Study, task: Task, words: Words, console: Any) -> Any:
    for num_gone in range(len(_CAN_GO) + 1):
        table = _table(study, task, words, without=_CAN_GO[:num_gone])
        # Measured as if there were room for all: within its real width, rich squeezes a table until it fits.
        if console.measure(table, options=console.options.update_width(1000)).maximum <= console.width:
            break
    return table


def _table(study: Study, task: Task, words: Words, *, without: Sequence[str]) -> Any:
    rows = study.rows_of(task.name)
    columns = {key: column for key, column in _columns(rows, words).items() if key not in without}
    table = need("rich.table", "the table in the terminal").Table(
        title=f"[bold]{words.name_of('task', task.name)}[/]  [dim]{task.name}[/]",
        caption=_caption(task, words),
        title_style="",
        caption_style="dim",
        title_justify="left",
        caption_justify="left",
        header_style="dim",
        box=need("rich.box", "the table in the terminal").SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for key, (side, _) in columns.items():
        # Headings may take two lines, cells may not: a cell on two lines reads as two rows.
        name = words(key).replace(" ", "\n", 1) if key in _TWO_LINES else words(key)
        table.add_column(name, justify=side, no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns.values()))
    return table


def _caption(task: Task, words: Words) -> str:
    data = task.build_data()
    limits = {
        words("tolerance"): cells.tolerance(limits_of(task), words),
        words.constant(task.metric_name): cells.number(task.constant_metric(data)),
    }
    lines = [
        f"{words('error')}: {words(task.metric_name + '_long')}",
        "; ".join(f"{name}: {limit}" for name, limit in limits.items()),
        *([words.source(data.source, data.source_facts)] * bool(data.source)),
    ]
    return "\n".join(lines) + "\n"


_TWO_LINES = ("difference", "skipped", "scale", "bytes", "time")


def _columns(rows: Sequence[Row], words: Words) -> dict[str, tuple[str, Callable[[Row], str]]]:
    """Heading's key -> (side, cell of a row); bytes and time only where there are two that can be compared."""
    columns: dict[str, tuple[str, Callable[[Row], str]]] = {
        "regime": ("left", lambda row: row.regime),
        "error": ("right", cells.error),
        "difference": ("right", cells.difference),
        "verdict": ("left", lambda row: _verdict(row, words)),
        "skipped": ("right", cells.skipped),
        "zeros_short": ("right", cells.zeros_short),
        "activations": ("right", lambda row: cells.kib(row.peak_activation_bytes)),
        "scale": ("right", lambda row: cells.scale(row.final_scale)),
    }
    if len({cells.bytes_per_parameter(row) for row in rows}) > 1:
        columns["bytes"] = ("right", cells.bytes_per_parameter)
    if sum(row.step_time_ratio is not None for row in rows) > 1:
        columns["time"] = ("right", lambda row: cells.time_ratio(row, words))
    return columns


def _verdict(row: Row, words: Words) -> str:
    look, mark = ("dim", " ") if cells.is_plain_reference(row) else (_LOOKS[row.verdict], _MARKS[row.verdict])
    return f"[{look}]{mark} {cells.verdict(row, words)}[/]"
