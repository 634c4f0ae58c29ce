"""The findings as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataparallel.tools.doctor.check import Check

_SIGNS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "problem": ("✗", "bold red")}


def build_table(checks: Sequence[Check]) -> Table:
    """A table with one row per finding, its remedy below it, and a heading per group."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    group = ""
    for check in checks:
        if check.group != group:
            if group:
                table.add_row()
            table.add_row(Text(check.group, style="bold"))
            group = check.group
        sign, color = _SIGNS[check.status]
        # Text, not markup: remedies hold square brackets.
        found = Text(check.detail)
        if check.status != "ok":
            found = Text.assemble((f"{check.status}: ", color), found)
        if check.remedy:
            found.append(f"\n→ {check.remedy}", style="cyan")
        table.add_row(Text.assemble((f"  {sign} ", color), check.name), found)
    return table


def print_table(checks: Sequence[Check], console: Console | None = None) -> None:
    """Print the findings and a closing line.

    Args:
        checks: What was found.
        console: Where to print. Default: the terminal.
    """
    console = console or Console()
    console.print(build_table(checks))
    console.print(_conclusion(checks))


def _conclusion(checks: Sequence[Check]) -> Text:
    problems = [check.name for check in checks if check.status == "problem"]
    broken = [check.name for check in checks if check.essential and check.name in problems]
    if broken:
        return Text(f"\ndataparallel cannot work here: {', '.join(broken)}", style="bold red")
    if problems:
        return Text(f"\ndataparallel works; look at: {', '.join(problems)}", style="yellow")
    return Text("\ndataparallel works on this machine", style="bold green")
