"""The command `bench host`: the cost of a step for the host, with next to no arithmetic in it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Kind, Outcome, team_of
from dataparallel.tools.bench.results import ResultRow, summarize
from dataparallel.tools.bench.trainer import TrainTask

_WRAPPERS: dict[Literal["dp", "ddp"], str] = {"dp": "our DP", "ddp": "our DDP"}


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if any(number % 2 for number in arguments.parameters):
        raise ValueError("each layer has two parameters, so --parameters takes even numbers")

    def conclude(measured: Mapping[str, Sequence[Outcome]]) -> runner.Report:
        outcomes = measured["host"]
        results = {
            number: summarize(outcomes, str(number), "step wall") for number in arguments.parameters
        }
        cases = [
            {"parameters": number, "steps_per_round": outcomes[0].steps, "rows": rows}
            for number, rows in results.items()
        ]
        return runner.Report(
            [_table(rows, number, arguments.devices) for number, rows in results.items()],
            _notes(arguments),
            {"cases": cases},
            all(row.agrees for rows in results.values() for row in rows),
        )

    return runner.run(arguments, {"host": _plan(arguments)}, conclude)


def _plan(arguments: argparse.Namespace) -> list[Contestant]:
    """Bare, halves, torch DDP where it can be, and ours with each number of replicas."""
    task = TrainTask(
        "ours",
        (),
        cases=tuple(map(str, arguments.parameters)),
        batch=2 * max(8, *arguments.replicas),
        counts=True,
    )

    def entry(kind: Kind, name: str, title: str, replicas: int = 1, **more: Any) -> Contestant:
        device, number = arguments.devices, replicas if kind == "ours" else 1
        slots = [f"virtual:{i}" if device == "virtual" else device for i in range(number)]
        own = dataclasses.replace(task, replicas=replicas, **more)
        return team_of(own, kind, [slots], name, title)

    contestants = [
        entry("bare", "bare", "bare module"),
        entry("bare", "halves", "two halves", 2, chunks=2),
    ]
    if not arguments.devices.startswith("virtual"):
        contestants.append(entry("ddp", "ddp", "torch DDP"))
    for wrapper, title in _WRAPPERS.items():
        for number in arguments.replicas:
            name = f"{wrapper}{number}"
            contestants.append(entry("ours", name, f"{title} {number}", number, wrapper=wrapper))
    return contestants


def _table(rows: Sequence[ResultRow], parameters: int, device: str) -> Table:
    """Return one line per contestant."""
    table = runner.new_table(
        f"{parameters} parameters on {device}: host microseconds, and counts of a step",
        *("for-\nward", "back-\nward", "step", "CPU", "x\nbare", "min..max"),
        *("calls,\nours", "calls,\nall", "opera-\ntors", "KiB", "blocks", "waits"),
        # Many columns, and 100 characters.
        gap=1,
    )
    phases = ("forward wall", "backward wall", "step wall", "step processor")
    for row in rows:
        counts, over = row.counts, row.over_bare
        assert over is not None
        table.add_row(
            Text(row.title if row.agrees else f"{row.title} ✗", style="" if row.agrees else "red"),
            *(f"{row.seconds[phase].median * 1e6:.0f}" for phase in phases),
            f"{over.median:.2f}",
            f"{over.low:.1f}..{over.high:.1f}",
            str(counts["package_calls"]),
            str(counts["python_calls"]),
            str(counts["operators"]),
            f"{counts['copied_bytes'] / 1024:.1f}",
            str(counts["allocations"]),
            "?" if counts["host_waits"] is None else str(counts["host_waits"]),
        )
    return table


def _notes(arguments: argparse.Namespace) -> list[str]:
    return [
        f"medians of {arguments.rounds} interleaved rounds; our DP 2: DataParallel, two replicas",
        "step: zero_grad, forward with the loss, backward, optimizer; CPU: time of all threads",
        "x bare: step / that of the bare module, in each round; ✗: it computes something else",
        "calls: of Python functions, of this package and in all",
        "KiB: copied by operators that only copy; blocks: of memory, new in operators' results",
        "waits: how often the host waits for a device; ?: not known",
    ]
