"""The command line: each command one library call and a renderer.

Purpose: `halfstep probe`, `halfstep formats`, `halfstep compare`. Method: typer reads the functions' signatures; rich
draws. Both come with the extra ``cli``. This module can be imported without them, so that `main` can say so in plain
words.

Not here: anything that a program could want; that is in the library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from halfstep.errors import HalfstepError, MissingDependencyError

if TYPE_CHECKING:
    from halfstep.compare.run import Progress

try:
    import typer
except ImportError:  # `main` says what to install
    typer = None  # type: ignore[assignment]

_HELP = "Half-precision training: what this machine can do, what the formats can hold, what each choice costs."
EXIT_BAD_INPUT = 2  # what typer exits with for a bad option


def probe(as_json: Annotated[bool, typer.Option("--json", help="Print facts and choice as JSON.")] = False) -> None:
    """What this machine multiplies natively, and which dtype to train in, with the reason."""
    from halfstep.hardware import choose_dtype
    from halfstep.hardware import probe as probe_hardware

    hardware = probe_hardware()
    choice = choose_dtype(hardware)
    if as_json:
        typer.echo(json.dumps({"hardware": hardware.as_dict(), "choice": choice.as_dict()}, indent=2))
    else:
        _console().print(_facts_table(hardware.as_dict(), choice.as_dict()))


def formats() -> None:
    """The float formats' limits, and what each means for a gradient."""
    from halfstep.formats import formats_table

    rows = formats_table()
    _console().print(_formats_table(rows), *(f"[bold]{row['name']}[/]  {row['meaning']}" for row in rows), sep="\n")


def compare(
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Run only this task; may be repeated.")] = None,
    regimes: Annotated[
        list[str] | None, typer.Option("--regime", help="Run only this regime; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per task and regime; 3 for the full study.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A lecture demonstration: fewer tasks, regimes, epochs.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.html, pictures and compare.json.")] = Path(
        "halfstep-compare"
    ),
    lang: Annotated[str, typer.Option(help="Language of table and report: en or zh.")] = "en",
    jobs: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """What each precision costs and buys on this machine: tasks x regimes x seeds, with verdicts that are computed."""
    from halfstep.compare import report, run, settings, table, words

    language = words.words_in(lang)
    chosen = settings.choose(tasks or (), regimes or (), num_seeds=seeds, is_quick=quick, num_jobs=jobs, device=device)
    report.check_report(out)
    with _progress_bar() as progress:
        study = run.compare(chosen, progress)
    paths = report.write_report(study, out, language)
    console = _console()
    console.print(*table.tables(study, language, console), sep="\n")
    console.print(f"{paths[0]}  (+ {', '.join(path.name for path in paths[1:])})", highlight=False)


def main() -> None:
    """Run the command line; every mistake of the user's ends in four lines and exit code 2."""
    try:
        if typer is None:
            raise _no_command_line()
        app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP)
        for command in (probe, formats, compare):
            app.command()(command)
        app(prog_name="halfstep")
    except HalfstepError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_INPUT)


def _no_command_line() -> MissingDependencyError:
    return MissingDependencyError(
        asked="the halfstep command line",
        true="the package 'typer' is not installed",
        why="halfstep's core needs torch alone; the command line needs a few packages more",
        fix="pip install 'halfstep[cli]'",
    )


# ---- renderers ------------------------------------------------------------------------------------------------------


def _console() -> Any:
    from rich.console import Console

    # Where output is no terminal there is no width to ask for; 80 columns would fold the tables.
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


def _facts_table(hardware: dict[str, Any], choice: dict[str, Any]) -> Any:
    from rich.table import Table

    scaling = "needs loss scaling" if choice["needs_scaling"] else "needs no loss scaling"
    memory = hardware["memory_bytes"]
    facts = {
        "train in": f"[bold]{choice['dtype']}[/], which {scaling}",
        "because": choice["reason"].removeprefix(f"{choice['dtype']}: "),
        "device": f"{hardware['name']} ({hardware['device_type']})",
        "capability": ".".join(map(str, hardware["capability"] or ())),
        "architecture": hardware["architecture"],
        "features": ", ".join(hardware["features"]),
        "native formats": ", ".join(hardware["native_formats"]),
        "matrix units": "yes" if hardware["tensor_cores"] else "no",
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "",
        "notes": "\n".join(note for note in hardware["notes"] if note not in choice["reason"]),
    }
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name, text in facts.items():
        if text:
            table.add_row(f"[dim]{name}[/]", text)
    return table


def _formats_table(rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    limits = {"largest": "largest", "smallest normal": "smallest_normal", "smallest subnormal": "smallest_subnormal"}
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("format")
    table.add_column("sign+exponent+mantissa")
    for name in (*limits, "epsilon"):
        table.add_column(name, justify="right")
    for row in rows:
        bits = f"1+{row['exponent_bits']}+{row['mantissa_bits']}"
        numbers = (f"{row[key]:.6g}" for key in (*limits.values(), "epsilon"))
        table.add_row(f"[bold]{row['name']}[/]", bits, *numbers)
    return table


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar on stderr; yields what `run.compare` calls after each run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(line, completed=done, total=total, description=name)
