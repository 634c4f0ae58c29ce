"""The `monitor plot` subcommand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.monitor.plot import SUFFIXES, check_target, write_plot
from dataparallel.tools.monitor.recording import read_recording

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "plot",
        summary="Draw a recording: devices, phases of each replica, imbalance, the last step.",
        examples=[
            "dataparallel monitor plot run.jsonl run.png",
            'dataparallel monitor plot run.jsonl run.pdf --title "four GPUs, batch 256"',
        ],
        run=_run,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a recording of dataparallel monitor record"
    )
    parser.add_argument(
        "picture", type=Path, metavar="PICTURE", help=f"what is written: {', '.join(SUFFIXES)}"
    )
    parser.add_argument("--title", help="stands above it (default: the name of the recording)")


def _run(arguments: argparse.Namespace) -> int:
    check_target(arguments.picture)
    recording = read_recording(arguments.file)
    for problem in recording.problems:
        print(f"dataparallel: {problem}", file=sys.stderr)
    write_plot(arguments.picture, recording.samples, arguments.title or arguments.file.name)
    print(f"{arguments.picture}: {len(recording.samples)} samples")
    return 0
