"""What `monitor plot` does: draw a recording."""

from __future__ import annotations

import argparse
import sys

from dataparallel.tools.monitor.plot import check_target, write_plot
from dataparallel.tools.monitor.recording import read_recording


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    check_target(arguments.picture)
    recording = read_recording(arguments.file)
    for problem in recording.problems:
        print(f"dataparallel: {problem}", file=sys.stderr)
    write_plot(arguments.picture, recording.samples, arguments.title or arguments.file.name)
    print(f"{arguments.picture}: {len(recording.samples)} samples")
    return 0
