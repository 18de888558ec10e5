"""Tables that the command line prints: plain data in, things that rich prints out.

Not here: `compare`'s and `bench`'s tables, which stand beside what they show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.autocast_ops import OpDtypes, OpKind


_FAILS = "†"
_MEANINGS = {
    "runs in 16 bits": "whatever comes in",
    "runs in fp32": "whatever comes in",
    "widest input": "16 bits with 16 bits, fp32 as soon as one tensor is fp32",
    "follows its input": "16 bits with 16 bits, fp32 with fp32",
    "refused": "by torch, with the first line of its error",
}


class _Trimmed:
    """A table without the blanks that rich pads its lines with, which a pipe or a file would keep."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for line in console.render_lines(self.table, options, pad=False):
            kept = list(dropwhile(lambda segment: not segment.text.strip(), reversed(line)))[::-1]
            yield from kept[:-1]
            yield from (Segment(last.text.rstrip(), last.style) for last in kept[-1:])
            yield Segment.line()


def facts(hardware: dict[str, Any], choice: dict[str, Any]) -> Any:
    """A device and the dtype to train in on it, from their ``as_dict``."""
    from rich.table import Table

    scaling = "needs loss scaling" if choice["needs_scaling"] else "needs no loss scaling"
    memory = hardware["memory_bytes"]
    known = {
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
    for name, text in known.items():
        if text:
            table.add_row(f"[dim]{name}[/]", text)
    return _Trimmed(table)


def formats(rows: list[dict[str, Any]]) -> Any:
    """The float formats' limits, from ``formats_table``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    limits = {"largest": "largest", "smallest normal": "smallest_normal", "smallest subnormal": "smallest_subnormal"}
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("format", no_wrap=True)
    table.add_column("sign+exp+\nmantissa", no_wrap=True)
    for name in (*limits, "epsilon"):
        table.add_column(name, justify="right", min_width=11)
    for row in rows:
        bits = f"1+{row['exponent_bits']}+{row['mantissa_bits']}"
        numbers = (f"{row[key]:.6g}" for key in (*limits.values(), "epsilon"))
        table.add_row(f"[bold]{row['name']}[/]", bits, *numbers)
    return _Trimmed(table)


def operations(table: Sequence[OpDtypes], policy: str, where: str) -> Iterator[Any]:
    """Operations by what decides their dtype, then halfstep's own, then what fails.

    Args:
        table: from ``ops_table``.
        policy: its name.
        where: device and version, for the heading.

    Yields:
        Lines and grids, fit for any width.
    """
    from halfstep.autocast_cases import HALFSTEP
    from halfstep.autocast_ops import OpKind

    yield f"Operations under [bold]{policy}[/]  [dim]{where}[/]"
    of_torch = [op for op in table if op.family != HALFSTEP]
    for kind in OpKind:
        yield from _kind(kind, [op for op in of_torch if op.kind is kind])
    own = [op for op in table if op.family == HALFSTEP]
    if own:
        yield f"\n[bold]{HALFSTEP}[/]  [dim]fp32 inside, rounded to the input's dtype at the end[/]"
        rounded = {"": None, "rounded once": True, "more than once": False}
        groups = {name: [op for op in own if op.rounds_once is value] for name, value in rounded.items()}
        yield _grid({name: ops for name, ops in groups.items() if ops}, marks_failures=True)
    yield from _failures(table)
    if any(op.rounds_once is False for op in table):
        yield "\n[dim]* rounded to 16 bits more than once: up to some ulp from the exact result[/]"
    if any(_is_marked(op) for op in table):
        yield f'\n[dim]{_FAILS} fails with some inputs: those under "fails"[/]'


def _kind(kind: OpKind, ops: Sequence[OpDtypes]) -> Iterator[Any]:
    if not ops:
        return
    needs = _needs(kind, ops)
    exception = f"; except {_FAILS}" if any(map(_is_marked, ops)) else ""
    yield f"\n[bold]{kind.value}[/]  [dim]{needs or _MEANINGS[kind.value] + exception}[/]"
    families: dict[str, list[OpDtypes]] = {}
    for op in ops:
        families.setdefault(op.family, []).append(op)
    yield _grid(families, marks_failures=not needs)


def _needs(kind: OpKind, ops: Sequence[OpDtypes]) -> str:
    """The inputs that all of them need, where all fail with the others: 16-bit weights meet fp32 without autocast."""
    inputs = {"runs in 16 bits": "16-bit", "runs in fp32": "fp32"}.get(kind.value, "")
    failed = [{run.given for run in op.runs if run.error and "+" not in run.given} for op in ops]
    is_needed = inputs and all(given and ("fp32" in given) == (inputs == "16-bit") for given in failed)
    return f"needs {inputs} inputs" if is_needed else ""


def _is_marked(op: OpDtypes) -> bool:
    """Whether it runs with some inputs and fails with others."""
    return 0 < sum(bool(run.error) for run in op.runs) < len(op.runs)


def _grid(families: dict[str, list[OpDtypes]], *, marks_failures: bool = False) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=18)
    grid.add_column()
    for family, ops in families.items():
        names = (op.name + "*" * (op.rounds_once is False) + _FAILS * (marks_failures and _is_marked(op)) for op in ops)
        grid.add_row(f"  [dim]{family}[/]", ", ".join(names))
    return _Trimmed(grid)


def _failures(table: Sequence[OpDtypes]) -> Iterator[Any]:
    """What runs with some inputs and not with others, by the inputs that it fails with."""
    failing: dict[str, list[OpDtypes]] = {}
    for op in table:
        for run in op.runs:
            if run.error:
                failing.setdefault(run.given, []).append(op)
    if failing:
        yield "\n[bold]fails[/]  [dim]with these inputs; torch's errors are in --json[/]"
        yield _grid({f"with {given}": ops for given, ops in failing.items()})
