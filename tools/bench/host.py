"""What `bench host` does: what a step costs the host, with next to no arithmetic in it."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataparallel.errors import needs_extra
from dataparallel.tools.bench.harness import (
    Contestant,
    Kind,
    Outcome,
    Spread,
    measure,
    ratios,
    spread,
    team_of,
)
from dataparallel.tools.bench.host_steps import HostTask
from dataparallel.tools.bench.output import (
    environment,
    new_table,
    print_notes,
    print_table,
    progress,
    write_json,
)
from dataparallel.tools.bench.results import agree
from dataparallel.tools.monitor.command import SUFFIXES

_WRAPPERS: dict[Literal["dp", "ddp"], str] = {"dp": "our DP", "ddp": "our DDP"}


@dataclass(frozen=True)
class Row:
    """One contestant with one model.

    Attributes:
        contestant: Key of the contestant.
        title: What is shown.
        replicas: How many it has; of those without a wrapper of ours, how many parts of the batch.
        rounds: By phase and clock, such as ``"forward wall"`` and ``"step processor"``: seconds of
            one repetition, by round the median.
        seconds: The same over all rounds.
        over_bare: Wall time of the step over that of the bare module, round by round.
        counts: What a steady step does, by what is counted.
        agrees: Whether losses and gradient norms are the bare module's, to rounding.
    """

    contestant: str
    title: str
    replicas: int
    rounds: dict[str, tuple[float, ...]]
    seconds: dict[str, Spread]
    over_bare: Spread
    counts: dict[str, Any]
    agrees: bool


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    draw = _drawing(arguments.plot) if arguments.plot else None
    if any(number % 2 for number in arguments.parameters):
        raise ValueError("each layer has two parameters, so --parameters takes even numbers")
    with tempfile.TemporaryDirectory() as folder:
        contestants = plan(arguments, str(pathlib.Path(folder) / "meeting"))
        with progress(len(contestants) * arguments.rounds) as tell:
            rounds, steps = arguments.rounds, arguments.steps
            outcomes, steps = measure("host", contestants, rounds, steps, tell)
    results = {number: conclude(outcomes, number) for number in arguments.parameters}
    if arguments.json != "-":
        _print(results, arguments)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "run"}
        models = [
            {"parameters": number, "rows": [dataclasses.asdict(row) for row in rows]}
            for number, rows in results.items()
        ]
        setting = {**environment(), **options, "steps_per_round": steps}
        write_json(arguments.json, {"setting": setting, "models": models})
    if draw:
        draw(results, arguments.devices, arguments.plot)
    return int(not all(row.agrees for rows in results.values() for row in rows))


def _drawing(target: str) -> Any:
    """What draws; looked for before anything is measured."""
    if not target.lower().endswith(SUFFIXES):
        raise ValueError(f"{target}: a picture ends in one of {', '.join(SUFFIXES)}")
    with needs_extra("monitor"):
        from dataparallel.tools.bench.host_plot import draw
    return draw


# --- plan --------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace, meeting_point: str) -> list[Contestant]:
    """Bare, halves, torch DDP where it can be, and ours with each number of replicas."""
    task = HostTask(
        "ours",
        (),
        parameters=tuple(arguments.parameters),
        batch=2 * max(8, *arguments.replicas),
        meeting_point=meeting_point,
    )

    def entry(kind: Kind, replicas: int, name: str, title: str) -> Contestant:
        devices = _slots(arguments.devices, replicas if kind == "ours" else 1)
        return team_of(dataclasses.replace(task, replicas=replicas), kind, [devices], name, title)

    contestants = [
        entry("bare", 1, "bare", "bare module"),
        entry("bare", 2, "halves", "two halves"),
    ]
    if not arguments.devices.startswith("virtual"):
        contestants.append(entry("ddp", 1, "ddp", "torch DDP"))
    for wrapper, title in _WRAPPERS.items():
        task = dataclasses.replace(task, wrapper=wrapper)
        for number in arguments.replicas:
            contestants.append(entry("ours", number, f"{wrapper}{number}", f"{title} {number}"))
    return contestants


def _slots(device: str, number: int) -> list[str]:
    return [f"virtual:{i}" if device == "virtual" else device for i in range(number)]


# --- conclusions -------------------------------------------------------------------------------


def conclude(outcomes: Sequence[Outcome], parameters: int) -> list[Row]:
    """The lines of one model; the bare module is the first contestant."""
    key = str(parameters)
    bare = outcomes[0]
    rows = []
    for outcome in outcomes:
        rounds = {
            phase.removeprefix(f"{key} "): times
            for phase, times in outcome.seconds.items()
            if phase.startswith(f"{key} ")
        }
        who = outcome.contestant
        row = Row(
            contestant=who.name,
            title=who.title,
            replicas=who.tasks[0].replicas,
            rounds=rounds,
            seconds={phase: spread(times) for phase, times in rounds.items()},
            over_bare=ratios(rounds["step wall"], bare.seconds[f"{key} step wall"]),
            counts=outcome.finished[0][key],
            agrees=agree(outcome.checked[0][key], bare.checked[0][key]),
        )
        rows.append(row)
    return rows


def build_table(rows: Sequence[Row], title: str) -> Table:
    """One line per contestant."""
    table = new_table(
        title,
        *("for-\nward", "back-\nward", "step", "CPU", "x\nbare", "min..max"),
        *("calls,\nours", "calls,\nall", "opera-\ntors", "KiB", "blocks", "waits"),
        # Many columns, and 100 characters.
        gap=1,
    )
    phases = ("forward wall", "backward wall", "step wall", "step processor")
    for row in rows:
        counts, over = row.counts, row.over_bare
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


def _print(results: Mapping[int, Sequence[Row]], arguments: argparse.Namespace) -> None:
    console = Console()
    for number, rows in results.items():
        title = (
            f"{number} parameters on {arguments.devices}: host microseconds, and counts of a step"
        )
        print_table(build_table(rows, title), console)
    print_notes(_notes(arguments), console)


def _notes(arguments: argparse.Namespace) -> list[str]:
    return [
        f"medians of {arguments.rounds} interleaved rounds; our DP 2: DataParallel, two replicas",
        "step: zero_grad, forward, backward with the loss, optimizer; CPU: time of all threads",
        "x bare: step / that of the bare module, in each round; ✗: it computes something else",
        "calls: of Python functions, of this package and in all",
        "KiB: copied by operators that only copy; blocks: of memory, new in operators' results",
        "waits: how often the host waits for a device; ?: not known",
    ]
