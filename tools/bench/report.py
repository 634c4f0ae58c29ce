"""The results of `bench train` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.summary import Row, Spread
from dataparallel.tools.bench.verdict import Comparison, Verdict


def build_table(results: Mapping[str, Sequence[Row]], title: str) -> Table:
    """One section per case, one line per contestant; 80 columns wide.

    Args:
        results: Rows by a heading that names the case.
        title: Stands above the table.
    """
    with_device_memory = any(row.device_bytes for rows in results.values() for row in rows)
    table = new_table(title)
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
                milliseconds(row.seconds.median),
                millisecond_range(row.seconds),
                _ratio(row.speedup if row.contestant != "bare" else None),
                _ratio(row.ours_over_this if row.contestant != "ours" else None),
                *memory,
                agreement(f"{row.loss:.4f}", row.agrees),
            )
    return table


def build_comparison(comparison: Comparison) -> Table:
    """One line per case, then the geometric mean and the worst case beside their bars.

    Args:
        comparison: Ours and one peer.
    """
    with_bars = any(verdict.bar is not None for verdict in comparison.verdicts)
    table = new_table(f"ours / {comparison.title}")
    table.add_column("", no_wrap=True)
    for name in ("time", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
        if name == "time":
            table.add_column("min..max", justify="right", no_wrap=True)
        if with_bars:
            table.add_column("bar", no_wrap=True)
    blank = [""] if with_bars else []
    for case, time in comparison.times.items():
        memory = comparison.memory[case]
        table.add_row(case, _ratio(time), ratio_range(time), *blank, _number(memory), *blank)
    table.add_section()
    lines = {
        "geometric mean": (comparison.time_mean, comparison.memory_mean),
        "worst": (comparison.time_worst, comparison.memory_worst),
    }
    for name, (time_verdict, memory_verdict) in lines.items():
        low, high = time_verdict.low, time_verdict.high
        table.add_row(
            Text(name, style="bold"),
            # One digit more, to be seen on which side of a bar it is.
            _number(time_verdict.value, 3),
            f"{_number(low)}..{_number(high)}",
            *([_bar(time_verdict)] if with_bars else []),
            _number(memory_verdict.value, 3),
            *([_bar(memory_verdict)] if with_bars else []),
        )
    return table


def new_table(title: str) -> Table:
    """An empty table in the style of all benchmarks."""
    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))


def print_table(table: Table, console: Console) -> None:
    """Print a table whole: in a narrower terminal its lines run on and no digit is lost."""
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    options = console.options.update(width=max(console.width, needed))
    console.print(Segments(console.render(table, options)), crop=False)


def print_notes(notes: Sequence[str], console: Console) -> None:
    """Print how something was measured, below its table."""
    for note in notes:
        console.print(Text(note, style="dim"))


def milliseconds(seconds: float) -> str:
    """Three digits or a little more."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def millisecond_range(seconds: Spread) -> str:
    """Smallest and largest over the rounds."""
    return f"{milliseconds(seconds.low)}..{milliseconds(seconds.high)}"


def ratio_range(value: Spread) -> str:
    """Smallest and largest over the rounds."""
    return f"{value.low:.2f}..{value.high:.2f}"


def agreement(text: str, agrees: bool) -> Text:
    """A figure with a mark that says whether the contestant computes what it should."""
    return Text(f"{text} ✓", style="green") if agrees else Text(f"{text} ✗", style="bold red")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f}"


def _ratio(value: Spread | None) -> str:
    return _number(value.median) if value else ""


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _bar(verdict: Verdict) -> Text:
    if verdict.met is None:
        return Text("")
    words, style = ("met", "green") if verdict.met else ("missed", "bold red")
    return Text(f"{verdict.bar:.2f} {words}", style=style)
