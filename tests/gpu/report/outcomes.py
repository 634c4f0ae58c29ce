"""A plugin of pytest that writes down each outcome at once, so that what is stopped has told it."""

from __future__ import annotations

import json
import os
from typing import Any

#: Names the file.
VARIABLE = "DATAPARALLEL_OUTCOMES"


def _write(**content: Any) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    """A test has gone through one of its three phases."""
    if report.when == "call" or report.outcome != "passed":
        _write(
            test=report.nodeid,
            outcome=report.outcome,
            seconds=report.duration,
            told=_told(report),
        )


def pytest_collectreport(report: Any) -> None:
    """A file could not be imported, or is left out."""
    if report.outcome != "passed":
        _write(test=report.nodeid, outcome=report.outcome, seconds=0.0, told=_told(report))


def _told(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "" if report.outcome == "passed" else str(report.longreprtext)
