"""The command line: each command one library call and a renderer.

Purpose: `halfstep probe`, `halfstep formats`, `halfstep compare`, `halfstep bench`. Method: typer reads the functions'
signatures; rich draws. Both come with the extra ``cli``. This module can be imported without them, so that `main` can
say so in plain words.

Not here: anything that a program could want, which is in the library; tables (cli_tables.py).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from halfstep import cli_tables
from halfstep.errors import ArgumentError, HalfstepError, HalfstepWarning, MissingDependencyError

if TYPE_CHECKING:
    from halfstep.bench.reports import Report
    from halfstep.compare.run import Progress
    from halfstep.hardware import Hardware

try:
    import typer
except ImportError:  # `main` says what to install
    typer = None  # type: ignore[assignment]

_HELP = "Half-precision training: what this machine can do, what the formats can hold, what each choice costs."
T = TypeVar("T")
EXIT_BAD_INPUT = 2  # what typer exits with for a bad option


def probe(
    ops: Annotated[bool, typer.Option("--ops", help="Which dtype each operation runs in, by running it.")] = False,
    policy: Annotated[str | None, typer.Option(help="With --ops: under this policy (default: bf16-mixed).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1, ...; default: the accelerator, if any.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data as JSON.")] = False,
) -> None:
    """What this machine multiplies natively, and which dtype to train in, with the reason."""
    from halfstep.hardware import choose_dtype
    from halfstep.hardware import probe as probe_hardware

    if policy is not None and not ops:
        raise ArgumentError(
            asked=f"halfstep probe --policy {policy}",
            true="probe reads facts about the device, and chooses a dtype by them",
            why="a policy changes neither",
            fix="add --ops to see which dtype each operation runs in under it",
        )
    hardware = probe_hardware(device)
    if ops:
        _probe_ops(policy or "bf16-mixed", device or hardware.device_type, hardware, as_json=as_json)
        return
    choice = choose_dtype(hardware)
    if as_json:
        typer.echo(json.dumps({"hardware": hardware.as_dict(), "choice": choice.as_dict()}, indent=2))
    else:
        _console().print(cli_tables.facts(hardware.as_dict(), choice.as_dict()))


def _probe_ops(name: str, device: str, hardware: Hardware, *, as_json: bool) -> None:
    import warnings

    import torch

    from halfstep.autocast_ops import ops_table
    from halfstep.policy import Policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)  # advice for a training run, and none is started
        policy = Policy.parse(name, hardware=hardware)
        table = ops_table(policy, device)
    if as_json:
        operations = [op.as_dict() for op in table]
        facts = {"policy": str(policy), "hardware": hardware.as_dict(), "torch": torch.__version__}
        typer.echo(json.dumps({**facts, "operations": operations}, indent=2))
    else:
        where = f"{hardware.name or device}, torch {torch.__version__}"
        _console().print(*cli_tables.operations(table, str(policy), where), sep="\n")


def formats() -> None:
    """The float formats' limits, and what each means for a gradient."""
    from halfstep.formats import formats_table

    rows = formats_table()
    _console().print(cli_tables.formats(rows), *(f"[bold]{row['name']}[/]  {row['meaning']}" for row in rows), sep="\n")


def compare(
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Run only this task; may be repeated.")] = None,
    regimes: Annotated[
        list[str] | None, typer.Option("--regime", help="Run only this regime; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per task and regime; 3 for the full study.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A lecture demonstration: fewer tasks, regimes, epochs.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, pictures and compare.json; default: halfstep-compare.")
    ] = None,
    lang: Annotated[str, typer.Option(help="Language of table and report: en or zh.")] = "en",
    jobs: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """What each precision costs and buys on this machine: tasks x regimes x seeds, with verdicts that are computed."""
    from halfstep.compare import report, run, settings, table, words

    language = words.words_in(lang)
    chosen = settings.choose(tasks or (), regimes or (), num_seeds=seeds, is_quick=quick, num_jobs=jobs, device=device)
    folder = out or report.default_folder(is_quick=quick)
    report.check_report(folder)
    with _progress_bar() as progress:
        study = run.compare(chosen, progress)
    paths = report.write_report(study, folder, language)
    console = _console()
    console.print(*table.tables(study, language, console), sep="\n")
    console.print(f"{paths[0]}  (+ {', '.join(path.name for path in paths[1:])})", highlight=False, soft_wrap=True)


def bench(
    steps: Annotated[bool, typer.Option("--steps", help="Measure optimizer steps: what it does by default.")] = False,
    matmul: Annotated[bool, typer.Option("--matmul", help="Measure matrix products and convolutions.")] = False,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Steps: adamw, adam, sgd or lion; may be repeated.")
    ] = None,
    storages: Annotated[
        list[str] | None, typer.Option("--storage", help="Steps: such as fp32 or split8+int8; may be repeated.")
    ] = None,
    executors: Annotated[
        list[str] | None, typer.Option("--executor", help="Steps: torch, numba or triton; may be repeated.")
    ] = None,
    params: Annotated[float | None, typer.Option(help="Steps: parameters in all, such as 50e6; default: 10e6.")] = None,
    tensors: Annotated[
        str | None, typer.Option(help="Steps: number of tensors (150), or number and size: 2048x16K, 10000x1000.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Products: n of n x n, such as 256,512,1024.")] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="Products: fp32, tf32, fp16, bf16; may be repeated. Steps: of 16-bit weights."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1, ...; default: the accelerator, if any.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the CPU; default: torch's.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time that all measurements may take; default: 60, of products 25.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for steps.json and steps.png, or matmul.*.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON.")] = False,
) -> None:
    """How fast this machine steps optimizers, by rule, storage and executor, against torch; or multiplies matrices."""
    if steps and matmul:
        raise ArgumentError(
            asked="halfstep bench --steps --matmul",
            true="one run measures optimizer steps or products",
            why="each needs the machine for itself",
            fix="run it twice",
        )
    where = {"device": device, "num_threads": threads, **({} if seconds is None else {"seconds": seconds})}
    of_steps = {"--rule": rules, "--storage": storages, "--executor": executors, "--params": params}
    if matmul:
        _refuse("--matmul", {**of_steps, "--tensors": tensors})
        _bench_products(sizes, dtypes or (), where, out, as_json=as_json)
    else:
        _refuse("--steps", {"--sizes": sizes, "a second --dtype": (dtypes or [])[1:] or None})
        names = {"rules": rules or (), "storages": storages or (), "executors": executors or ()}
        what = {**names, "tensors": tensors, "num_params": params, "half_dtype": (dtypes or ["bf16"])[0]}
        _bench_steps(what, where, out, as_json=as_json)


def _refuse(mode: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(
                asked=f"halfstep bench {mode} with {name}",
                true=f"{name} belongs to {'--matmul' if mode == '--steps' else '--steps'}",
                why="the option would change nothing",
                fix=f"leave {name} out",
            )


def _bench_products(
    sizes: str | None, dtypes: Sequence[str], where: dict[str, Any], out: Path | None, *, as_json: bool
) -> None:
    from halfstep.bench import measure, reports, settings, table

    chosen = settings.choose(dtypes, settings.read_sizes(sizes) if sizes is not None else (), **where)
    measured = _measured(reports.MATMUL, lambda bar: measure.measure(chosen, bar), out)
    _show(reports.of_products(measured, _command()), table.tables(measured), out, as_json=as_json)


def _bench_steps(what: dict[str, Any], where: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    from halfstep.bench import reports, steps_measure, steps_settings, steps_table

    chosen = steps_settings.choose(**what, **where)
    measured = _measured(reports.STEPS, lambda bar: steps_measure.measure(chosen, bar), out)
    _show(reports.of_steps(measured, _command()), steps_table.tables(measured), out, as_json=as_json)


def _measured(name: str, measure: Callable[[Progress], T], out: Path | None) -> T:
    """What is measured, behind a progress bar, once it is known that it can be written."""
    from halfstep.bench import files

    if out is not None:
        files.check_folder(out, name)
    with _progress_bar() as progress:
        return measure(progress)


def _command() -> str:
    return shlex.join(["halfstep", *sys.argv[1:]])


def _show(report: Report, tables: Iterable[Any], out: Path | None, *, as_json: bool) -> None:
    from halfstep.bench import files

    paths = [] if out is None else files.write(report, out)
    if as_json:
        typer.echo(files.as_text(report))
        return
    console = _console()
    console.print(*tables, sep="\n")
    for path in paths:
        console.print(str(path), highlight=False)


def main() -> None:
    """Run the command line; every mistake of the user's ends in four lines and exit code 2."""
    try:
        if typer is None:
            raise _no_command_line()
        app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP)
        for command in (probe, formats, compare, bench):
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


# ---- the terminal ---------------------------------------------------------------------------------------------------


def _console() -> Any:
    from rich.console import Console

    # Where output is no terminal there is no width to ask for; 80 columns would fold the tables.
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar on stderr; yields what `run.compare` calls after each run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(line, completed=done, total=total, description=name)
