"""The results of `bench kernels` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.collectives_tasks import size_name
from dataparallel.tools.bench.kernels_summary import KernelRow, KernelVerdict
from dataparallel.tools.bench.report import agreement, new_table, ratio_range
from dataparallel.tools.bench.summary import Spread


def build_kernel(rows: Sequence[KernelRow], title: str) -> Table:
    """One section per variant, one line per size; 80 columns wide.

    Args:
        rows: Of one kernel and type.
        title: Stands above the table.
    """
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for heading in ("GB/s", "/copy", "min..max", "/best", "min..max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    if any(row.launch for row in rows):
        table.add_column("launch µs\nours best", justify="right", no_wrap=True)
    for variant in dict.fromkeys(row.case.variant for row in rows):
        table.add_section()
        table.add_row(Text(variant, style="bold"))
        for row in rows:
            if row.case.variant == variant:
                table.add_row(*_line(row))
    return table


def _line(row: KernelRow) -> list[str | Text]:
    best = row.best
    line: list[str | Text] = [
        agreement(f"  {size_name(row.case.size)}", row.agrees),
        rate(row.rate.median),
        f"{row.share.median:.2f}",
        ratio_range(row.share),
        f"{best.ratio.median:.2f}" if best else "",
        ratio_range(best.ratio) if best else "",
        best.name if best else "",
    ]
    if row.launch:
        line.append(
            f"{_microseconds(row.launch)} {_microseconds(best.launch if best else None):>4}"
        )
    return line


def verdict_line(verdict: KernelVerdict) -> Text:
    """A bar and what became of it, as a sentence.

    Args:
        verdict: Of all cases that it is about.
    """
    text = Text(f"{verdict.name}: ")
    if verdict.value is None:
        return text.append("no case measured")
    text.append(f"worst {verdict.value:.3f} ({verdict.worst})")
    words, style = (
        ("met", "green") if verdict.met else (f"missed by {len(verdict.missed)}", "bold red")
    )
    return text.append(f"  bar {verdict.bar:.2f}, {verdict.cases} cases: {words}", style=style)


def rate(bytes_per_second: float) -> str:
    """Gigabytes per second, in three digits or a little more."""
    value = bytes_per_second * 1e-9
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _microseconds(seconds: Spread | None) -> str:
    if seconds is None:
        return ""
    value = seconds.median * 1e6
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
