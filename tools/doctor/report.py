"""The findings as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataparallel.tools.doctor.check import Check

_SIGNS = {"ok": ("✓ ok", "green"), "missing": ("– missing", "yellow"), "problem": ("✗ problem", "red")}


def build_table(checks: Sequence[Check]) -> Table:
    """A table with one row per finding and a section per group."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found")
    table.add_column("what to do")
    group = ""
    for check in checks:
        if check.group != group:
            if group:
                table.add_row()
            table.add_row(Text(check.group, style="bold"))
            group = check.group
        sign, colour = _SIGNS[check.status]
        # Text, not markup: remedies hold square brackets.
        table.add_row(
            Text(f"  {check.name}"),
            Text(sign, style=colour),
            Text(check.detail),
            Text(check.remedy, style="cyan"),
        )
    return table


def print_table(checks: Sequence[Check], console: Console | None = None) -> None:
    """Print the findings and a closing line.

    Args:
        checks: What was found.
        console: Where to print. Default: the terminal.
    """
    console = console or Console()
    console.print(build_table(checks))
    broken = [check.name for check in checks if check.essential and check.status == "problem"]
    problems = [check.name for check in checks if check.status == "problem"]
    console.print()
    if broken:
        console.print(f"dataparallel cannot work here: {', '.join(broken)}", style="bold red")
    elif problems:
        console.print(f"dataparallel works, but look at: {', '.join(problems)}", style="yellow")
    else:
        console.print("dataparallel works on this machine", style="bold green")
