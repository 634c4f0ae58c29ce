"""The results of `bench train` as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.summary import Row, Spread


def build_table(results: Mapping[str, Sequence[Row]], title: str) -> Table:
    """One section per case, one line per contestant; 80 columns wide.

    Args:
        results: Rows by a heading that names the case.
        title: Stands above the table.
    """
    with_device_memory = any(row.device_bytes for rows in results.values() for row in rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("ms", "min..max", "speed-\nup", "ours\n/this", "host\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    if with_device_memory:
        table.add_column("device\nMiB", justify="right", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    for case, rows in results.items():
        table.add_section()
        table.add_row(Text(case, style="bold"))
        for row in rows:
            memory = [_mebibytes(row.host_bytes)]
            if with_device_memory:
                memory.append(_mebibytes(row.device_bytes))
            table.add_row(
                Text(f"  {row.title}", style="cyan" if row.contestant == "ours" else ""),
                _milliseconds(row.seconds.median),
                f"{_milliseconds(row.seconds.low)}..{_milliseconds(row.seconds.high)}",
                _ratio(row.speedup if row.contestant != "bare" else None),
                _ratio(row.ours_over_this if row.contestant != "ours" else None),
                *memory,
                _loss(row),
            )
    return table


def print_results(
    results: Mapping[str, Sequence[Row]], title: str, notes: Sequence[str], console: Console
) -> None:
    """Print the table and, below it, how it was measured."""
    console.print(build_table(results, title))
    for note in notes:
        console.print(Text(note, style="dim"))


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f}"


def _ratio(value: Spread | None) -> str:
    return f"{value.median:.2f}" if value else ""


def _loss(row: Row) -> Text:
    if row.agrees:
        return Text(f"{row.loss:.4f} ✓", style="green")
    return Text(f"{row.loss:.4f} ✗", style="bold red")
