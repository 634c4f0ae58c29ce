"""The results of `bench collectives` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.collectives_summary import CollectiveRow, MemoryRow
from dataparallel.tools.bench.collectives_tasks import size_name
from dataparallel.tools.bench.report import agreement, new_table, ratio_range
from dataparallel.tools.bench.summary import Spread
from dataparallel.tools.bench.verdict import Verdict

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def build_comparison(rows: Sequence[CollectiveRow], title: str) -> Table:
    """One line per size; 80 columns wide.

    Args:
        rows: Of one operation.
        title: Stands above the table.
    """
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for heading in ("ours", "min..max", "torch", "min..max", "ours\n/torch", "min..max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            agreement(f"{size_name(row.size)}", row.agrees),
            *duration(row.ours),
            *duration(row.torch),
            f"{row.ratio.median:.2f}",
            ratio_range(row.ratio),
        )
    return table


def build_memory(rows: Sequence[MemoryRow], title: str) -> Table:
    """One line per size; 80 columns wide.

    Args:
        rows: In the order of the sizes.
        title: Stands above the table.
    """
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for heading in (
        "copy\nGB/s",
        "min..max",
        "sum\nGB/s",
        "min..max",
        "ours\nuses",
        "min..max",
        "torch\nuses",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            size_name(row.size),
            *_rate(row.copy),
            *_rate(row.sum),
            _percent(row.ours.median),
            f"{_percent(row.ours.low)}..{_percent(row.ours.high)}",
            _percent(row.torch.median),
        )
    return table


def conclusion(verdict: Verdict, name: str = "geometric mean of ours / torch") -> Text:
    """A figure and whether it is within its bar, as a sentence.

    Args:
        verdict: A ratio.
        name: What it is.
    """
    # One digit more than elsewhere, to be seen on which side of a bar it is.
    text = Text(f"{name}: {verdict.value:.3f} ({verdict.low:.2f}..{verdict.high:.2f})")
    if verdict.met is not None:
        words, style = ("met", "green") if verdict.met else ("missed", "bold red")
        text.append(f"  bar {verdict.bar:.2f} {words}", style=style)
    return text


def duration(seconds: Spread) -> tuple[str, str]:
    """A median with its unit, and the range in the same unit."""
    unit, scale = next((each for each in _UNITS if seconds.median >= each[1]), _UNITS[-1])
    # Three digits or a little more.
    digits = 0 if seconds.median >= 100 * scale else 1 if seconds.median >= 10 * scale else 2
    median, low, high = (
        f"{each / scale:.{digits}f}" for each in (seconds.median, seconds.low, seconds.high)
    )
    return f"{median} {unit}", f"{low}..{high}"


def _rate(value: Spread) -> tuple[str, str]:
    return f"{value.median * 1e-9:.1f}", f"{value.low * 1e-9:.1f}..{value.high * 1e-9:.1f}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"
