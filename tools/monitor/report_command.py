"""What `monitor report` does: sum up a recording."""

from __future__ import annotations

import argparse
import json

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.recording import RecordingReader
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.table import write_table
from dataparallel.tools.monitor.thin_samples import thin


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
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
