"""The results of `bench reducer` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.reducer_summary import OverlapRow, ReducerRow
from dataparallel.tools.bench.report import (
    agreement,
    millisecond_range,
    milliseconds,
    new_table,
    ratio_range,
)
from dataparallel.tools.bench.summary import Spread


def build_rounds(rows: Sequence[ReducerRow]) -> Table:
    """One line per set of gradients and layout; 80 columns wide.

    Args:
        rows: In the order of the sets.
    """
    table = new_table("one round of reduction: backward, in ms")
    table.add_column("", no_wrap=True)
    headings = (
        "ours",
        "min..max",
        "torch\nDDP",
        "min..max",
        "ours\n/DDP",
        "min..max",
        "bare",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if row.gradients != before:
            before = row.gradients
            table.add_section()
            table.add_row(Text(before, style="bold"))
        ratio = row.ours_over_ddp
        table.add_row(
            agreement(f"  {row.layout}", row.agrees),
            *_time(row.ours),
            *_time(row.ddp),
            f"{ratio.median:.2f}" if ratio else "",
            ratio_range(ratio) if ratio else "",
            milliseconds(row.bare.median) if row.bare else "",
        )
    return table


def build_overlap(rows: Sequence[OverlapRow]) -> Table:
    """One line per model and contestant.

    Args:
        rows: In the order of the models.
    """
    table = new_table("overlap in a backward, in ms, by the wrappers' own timers")
    table.add_column("", no_wrap=True)
    headings = ("compu-\ntation", "communi-\ncation", "min..max", "hidden", "exposed", "min..max")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if row.case != before:
            before = row.case
            table.add_section()
            table.add_row(Text(before, style="bold"))
        exposed = row.exposed
        table.add_row(
            Text(f"  {row.title}", style="cyan" if row.contestant == "ours" else ""),
            milliseconds(row.computation.median),
            *_time(row.communication),
            milliseconds(row.hidden.median),
            f"{exposed.median:.0%}" if exposed else "",
            f"{exposed.low:.0%}..{exposed.high:.0%}" if exposed else "",
        )
    return table


def _time(seconds: Spread | None) -> tuple[str, str]:
    return (milliseconds(seconds.median), millisecond_range(seconds)) if seconds else ("", "")
