"""The common work of all benchmarks: measure plans, show tables, write JSON with the setting.

The commands of ``dataparallel bench`` are a plan and what is concluded from it; :func:`run` does
the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.harness import Contestant, Outcome, Spread, Tell, measure
from dataparallel.tools.doctor.check import usable_cores

#: Variables that change speed or memory without being seen in the command. Idle threads that spin,
#: for one, decide much where other programs use the cores too.
_TELLING = ("OMP_", "MKL_", "KMP_", "MALLOC_", "LD_PRELOAD", "ATEN_", "GLOO_", "NCCL_", "TORCH_")

#: The results of each plan's contestants, by the plan's name.
Measured = Mapping[str, Sequence[Outcome]]


@dataclass(frozen=True)
class Report:
    """The report of one benchmark: tables and lines, and below them how it was measured.

    ``content`` is written as JSON; there may be dataclasses in it. It is right if all computed what
    they should, and met what was asked for.
    """

    parts: Sequence[Table | Text | str]
    notes: Sequence[str]
    content: Mapping[str, Any]
    is_right: bool = True


def run(
    arguments: argparse.Namespace,
    plans: Mapping[str, Sequence[Contestant]],
    conclude: Callable[[Measured], Report],
) -> int:
    """Measure the contestants of each plan interleaved, conclude, show and write.

    The arguments are the command line's. Returns the exit status.
    """
    measured = {}
    with progress(arguments.rounds * sum(map(len, plans.values()))) as tell:
        for name, contestants in plans.items():
            outcomes = measure(name, contestants, arguments.rounds, arguments.steps, tell)
            measured[name] = outcomes
    return publish(conclude(measured), arguments)


def publish(report: Report, arguments: argparse.Namespace) -> int:
    """Show a report, write it if that is wanted, and return the exit status."""
    if arguments.json != "-":
        console = Console()
        for part in report.parts:
            if isinstance(part, Table):
                print_table(part, console)
            else:
                console.print(part, markup=False, highlight=False, soft_wrap=True)
        for note in report.notes:
            console.print(Text(note, style="dim"))
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "run"}
        write_json(arguments.json, {"setting": environment() | options, **report.content})
    return int(not report.is_right)


@contextlib.contextmanager
def progress(turns: int) -> Iterator[Tell]:
    """Show a bar in the terminal while a measurement takes so many turns."""
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting", total=turns)

        def tell(what: str, begun: int) -> None:
            shown.update(task, description=what, advance=begun)

        yield tell


# --- tables ------------------------------------------------------------------------------------


def new_table(title: str, *headings: str, gap: int = 2) -> Table:
    """Return an empty table in the style of all benchmarks; its first column has no heading."""
    padding = (0, gap - 1, 0, 0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=padding)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table whole: in a narrower terminal its lines run on and no digit is lost."""
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    options = console.options.update(width=max(console.width, needed))
    console.print(Segments(console.render(table, options)), crop=False)


def milli(seconds: float) -> str:
    """Milliseconds, with three digits or a little more."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def span(value: Spread) -> str:
    """Smallest and largest over the rounds, of a ratio."""
    return f"{value.low:.2f}..{value.high:.2f}"


def agreement(text: str, agrees: bool) -> Text:
    """Return a figure with a mark that says whether the contestant computes what it should."""
    return Text(f"{text} ✓", style="green") if agrees else Text(f"{text} ✗", style="bold red")


# --- files -------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Command, date, machine, versions: what has to be known beside any figure."""
    return {
        "command": sys.orig_argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_TELLING)},
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write to a file, whole or not at all, or for ``-`` to the standard output."""
    text = json.dumps(content, indent=2, default=dataclasses.asdict) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = pathlib.Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_text(text)
    temporary.replace(target)
