"""The `monitor` subcommand: its parts add themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.monitor import (
    plot_command,
    record_command,
    report_command,
    serve_command,
    top_command,
)

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "monitor",
        summary="Show, record, plot and serve what every device and every replica is doing.",
        examples=[
            "dataparallel monitor top",
            "dataparallel monitor record run.jsonl --for 60",
            "dataparallel monitor report run.jsonl",
        ],
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND")
    top_command.add_to(parts)
    record_command.add_to(parts)
    plot_command.add_to(parts)
    report_command.add_to(parts)
    serve_command.add_to(parts)
