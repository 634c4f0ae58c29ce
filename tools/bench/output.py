"""What all benchmarks show and write: progress, tables, the setting of a run, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.harness import Spread, Tell
from dataparallel.tools.doctor.check import usable_cores

#: What changes speed or memory without being seen in the command. Idle threads that spin, for
#: one, decide much where other programs use the cores too.
_TELLING = ("OMP_", "MKL_", "KMP_", "MALLOC_", "LD_PRELOAD", "ATEN_", "GLOO_", "NCCL_", "TORCH_")


@contextlib.contextmanager
def progress(turns: int) -> Iterator[Tell]:
    """A bar in the terminal while something is measured, which will take so many turns."""
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting", total=turns)

        def tell(what: str, begun: int) -> None:
            shown.update(task, description=what, advance=begun)

        yield tell


# --- tables ------------------------------------------------------------------------------------


def new_table(title: str, *headings: str, gap: int = 2) -> Table:
    """An empty table in the style of all benchmarks; its first column has no heading."""
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


def print_notes(notes: Sequence[str], console: Console) -> None:
    """Print how something was measured, below its table."""
    for note in notes:
        console.print(Text(note, style="dim"))


def three_digits(value: float) -> str:
    """Three digits or a little more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def span(value: Spread) -> str:
    """Smallest and largest over the rounds, of a ratio."""
    return f"{value.low:.2f}..{value.high:.2f}"


def agreement(text: str, agrees: bool) -> Text:
    """A figure with a mark that says whether the contestant computes what it should."""
    return Text(f"{text} ✓", style="green") if agrees else Text(f"{text} ✗", style="bold red")


def met(bar: float, is_met: bool) -> Text:
    """A bar, and whether it is met."""
    words, style = ("met", "green") if is_met else ("missed", "bold red")
    return Text(f"{bar:.2f} {words}", style=style)


# --- files -------------------------------------------------------------------------------------


def environment(command: str = "dataparallel") -> dict[str, Any]:
    """Command, date, machine, versions: what has to be known beside any figure."""
    return {
        "command": [command, *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_TELLING)},
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write to a file, whole or not at all, or for ``-`` to the standard output."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = pathlib.Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_text(text)
    temporary.replace(target)
