"""What `bench collectives` does: collectives of replicas and processes, beside torch's."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dataparallel.tools.bench.collectives_report import build_comparison, build_memory, conclusion
from dataparallel.tools.bench.collectives_summary import (
    CollectiveRow,
    MemoryRow,
    judge,
    summarize_memory,
    summarize_process,
    summarize_replicas,
)
from dataparallel.tools.bench.collectives_tasks import (
    HYBRID_PROCESSES,
    CollectivesTask,
    plan_members,
)
from dataparallel.tools.bench.output import environment, progress, teller, write_json
from dataparallel.tools.bench.report import print_notes, print_table
from dataparallel.tools.bench.rounds import Outcome, measure
from dataparallel.tools.bench.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """One form beside torch's."""

    form: str
    rows: list[CollectiveRow]
    verdicts: list[Verdict]


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    _check(arguments)
    # The tables must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    task = CollectivesTask(
        "ours",
        (),
        threads=arguments.threads_per_replica,
        sizes=tuple(arguments.sizes),
        forms=tuple(arguments.forms),
        operations=tuple(arguments.operations),
    )
    outcomes, steps = _measure(task, arguments, console)
    compared = [_compare(form, task, outcomes, arguments) for form in task.forms]
    memory = summarize_memory(task, outcomes) if "memory" in outcomes else []
    if arguments.json != "-":
        _print(compared, memory, arguments, console)
    if arguments.json:
        content = _record(compared, memory, arguments)
        content["steps_per_round"] = steps
        content["measured"] = [_measured(each) for each in outcomes.values()]
        write_json(arguments.json, content)
    right = all(row.agrees for each in compared for row in each.rows)
    missed = any(verdict.met is False for each in compared for verdict in each.verdicts)
    return int(not right or (arguments.check and missed))


def _check(arguments: argparse.Namespace) -> None:
    if arguments.check and not (arguments.bar or arguments.bar_process):
        raise ValueError("--check needs a bar to check, for example --bar 0.5")
    for option, bar, forms in (
        ("--bar", arguments.bar, ("local", "hybrid")),
        ("--bar-process", arguments.bar_process, ("process",)),
    ):
        if bar and not set(forms) & set(arguments.forms):
            raise ValueError(
                f"{option} is for the form {' or '.join(forms)}, but --forms is "
                f"{','.join(arguments.forms)}; add {forms[0]} or leave the bar out"
            )


def _measure(
    task: CollectivesTask, arguments: argparse.Namespace, console: Console
) -> tuple[dict[str, Outcome], int]:
    with tempfile.TemporaryDirectory() as folder:
        task = dataclasses.replace(task, meeting_point=str(pathlib.Path(folder) / "meeting"))
        contestants = plan_members(task, arguments.devices)
        with progress(console, arguments.rounds * len(contestants)) as tell:
            on_turn = teller(tell, "collectives")
            outcomes, steps = measure(contestants, arguments.rounds, arguments.steps, on_turn)
    return {each.contestant.name: each for each in outcomes}, steps


def _compare(
    form: str, task: CollectivesTask, outcomes: dict[str, Outcome], arguments: argparse.Namespace
) -> _Comparison:
    if form == "process":
        rows = summarize_process(task, outcomes["processes"])
        return _Comparison(form, rows, judge(rows, arguments.bar_process))
    rows = summarize_replicas(task, form, outcomes)
    return _Comparison(form, rows, judge(rows, arguments.bar))


def _print(
    compared: Sequence[_Comparison],
    memory: Sequence[MemoryRow],
    arguments: argparse.Namespace,
    console: Console,
) -> None:

    members = len(arguments.devices)
    for each in compared:
        for verdict in each.verdicts:
            own = [row for row in each.rows if row.operation == verdict.case]
            title = _title(each.form, verdict.case, arguments.devices)
            print_table(build_comparison(own, title), console)
            console.print(conclusion(verdict))
            console.print()
    if memory:
        title = f"memory bandwidth of {members} threads, and what all_reduce uses of it"
        print_table(build_memory(memory, title), console)
    print_notes(_notes(arguments), console)


def _title(form: str, operation: str, devices: Sequence[str]) -> str:
    members = len(devices)
    if form == "process":
        return f"process: {operation}, {members} processes\nours beside torch's functional form"
    processes = 1 if form == "local" else HYBRID_PROCESSES
    return (
        f"{form}: {operation}, replicas on {processes} x ({', '.join(devices)})\n"
        f"beside torch's in place, {members * processes} processes"
    )


def _notes(arguments: argparse.Namespace) -> Sequence[str]:
    notes = [
        f"medians of {arguments.rounds} interleaved rounds; a call and its wait, of the slowest "
        "member",
        "size: float32 input of each member; ✓ every element of every result is right",
        f"intra-op threads of each replica and process: {arguments.threads_per_replica}",
    ]
    if "local" in arguments.forms:
        notes += [
            "uses: bytes that an all_reduce must move (each input read, each result written)",
            "per second, as a share of the faster of copy and sum of that size",
        ]
    return notes


def _record(
    compared: Sequence[_Comparison], memory: Sequence[MemoryRow], arguments: argparse.Namespace
) -> dict[str, Any]:
    names = ("forms", "sizes", "operations", "devices", "threads_per_replica", "rounds")
    return {
        "setting": {**environment(), **{name: getattr(arguments, name) for name in names}},
        "comparisons": [
            {
                "form": each.form,
                "rows": [{**dataclasses.asdict(row), "agrees": row.agrees} for row in each.rows],
                "verdicts": [{**dataclasses.asdict(v), "met": v.met} for v in each.verdicts],
            }
            for each in compared
        ],
        "memory": [dataclasses.asdict(row) for row in memory],
    }


def _measured(outcome: Outcome) -> dict[str, Any]:
    return {
        "contestant": outcome.contestant.name,
        "seconds": outcome.seconds,
        "checked": outcome.checked,
        "finished": outcome.finished,
    }
