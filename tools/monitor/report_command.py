"""The `monitor report` subcommand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.recording import RecordingReader
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.table import write_table
from dataparallel.tools.monitor.thin_samples import thin

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "report",
        summary="Sum up a recording: devices, phases, stragglers, energy, what to change first.",
        examples=[
            "dataparallel monitor report run.jsonl",
            "dataparallel monitor report run.jsonl --json > report.json",
            "dataparallel monitor report run.jsonl --csv run.csv",
        ],
        run=_run,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a recording of dataparallel monitor record"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="TABLE",
        help="write all samples into a table instead, a row per device and sample",
    )


def _run(arguments: argparse.Namespace) -> int:
    reader = RecordingReader(arguments.file)
    if arguments.csv is not None:
        number = write_table(arguments.csv, reader)
        print("\n".join((*reader.problems, f"wrote {number} rows to {arguments.csv}")))
        return 0
    samples = thin(reader)
    report = make_report(samples, reader.problems)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
        return 0
    with needs_extra("monitor"):
        from dataparallel.tools.monitor.report_text import print_report
    print_report(report)
    return 0
