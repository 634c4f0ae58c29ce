"""What `bench reducer` does: rounds of reduction and their overlap, beside torch DDP."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dataparallel.tools.bench.cases import CASES
from dataparallel.tools.bench.contestants import ReducerTask, Task, TrainTask, plan_contestants
from dataparallel.tools.bench.gradient_sets import GRADIENT_SETS
from dataparallel.tools.bench.layout import Layout
from dataparallel.tools.bench.output import (
    Tell,
    bucket_view,
    environment,
    progress,
    teller,
    write_json,
)
from dataparallel.tools.bench.reducer_report import build_overlap, build_rounds
from dataparallel.tools.bench.reducer_summary import (
    OverlapRow,
    ReducerRow,
    summarize_overlap,
    summarize_reduction,
)
from dataparallel.tools.bench.report import print_notes, print_table
from dataparallel.tools.bench.rounds import Outcome, measure
from dataparallel.tools.bench.train import whole_batch


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    peers = arguments.peers or (["bare"] if arguments.device == "virtual" else ["bare", "ddp"])
    if arguments.device == "virtual" and "ddp" in peers:
        raise ValueError(
            "torch DDP has no process group for virtual devices; compare with --peers bare, or "
            "use --device cpu"
        )
    models = [name for name in arguments.overlap if name != "none"]
    # One replica in one process has nothing to reduce.
    shared = [layout for layout in arguments.layouts if layout.total > 1]
    wrapped = sum(peer != "bare" for peer in peers)
    turns = len(arguments.layouts) * (1 + len(peers)) + len(models) * len(shared) * (1 + wrapped)
    console = Console(stderr=arguments.json == "-")
    run = _Measuring(arguments, peers)
    with progress(console, turns * arguments.rounds) as tell:
        by_layout = [run.reductions(layout, tell) for layout in arguments.layouts]
        rows = [row for of_one_set in zip(*by_layout, strict=True) for row in of_one_set]
        overlaps = [
            row for name in models for layout in shared for row in run.overlap(name, layout, tell)
        ]
    if arguments.json != "-":
        _print(rows, overlaps, arguments, console)
    if arguments.json:
        content: dict[str, Any] = {"setting": {**environment(), **_setting(arguments, peers)}}
        content["reductions"] = [dataclasses.asdict(row) for row in rows]
        content["overlaps"] = [dataclasses.asdict(row) for row in overlaps]
        content["measured"] = run.records
        write_json(arguments.json, content)
    return int(not all(row.agrees for row in rows))


class _Measuring:
    """The measurements of one run, and a record of all that came back.

    Args:
        arguments: Of the command.
        peers: Whom to compare with.
    """

    def __init__(self, arguments: argparse.Namespace, peers: Sequence[str]) -> None:
        self._arguments = arguments
        self._peers = peers
        self.records: list[dict[str, Any]] = []

    def reductions(self, layout: Layout, tell: Tell) -> list[ReducerRow]:
        """Rounds of all sets of gradients with one layout."""
        task = ReducerTask(
            "ours",
            (),
            threads=self._arguments.threads_per_replica,
            bucket_view=bucket_view(self._arguments.bucket_view, layout.processes),
            gradients=tuple(self._arguments.gradients),
            bucket_cap_mb=self._arguments.bucket_cap_mb,
        )
        outcomes = self._measure(task, layout, self._peers, str(layout), tell)
        return [summarize_reduction(name, str(layout), outcomes) for name in task.gradients]

    def overlap(self, name: str, layout: Layout, tell: Tell) -> list[OverlapRow]:
        """Communication and computation of one model."""

        task = TrainTask(
            "ours",
            (),
            threads=self._arguments.threads_per_replica,
            bucket_view=bucket_view(self._arguments.bucket_view, layout.processes),
            case=name,
            batch=whole_batch(name, CASES[name].batch, layout.total),
            mode="forward-backward",
            statistics=True,
        )
        # The bare module has no communication.
        peers = [peer for peer in self._peers if peer != "bare"]
        outcomes = self._measure(task, layout, peers, f"{name} {layout}", tell)
        return [summarize_overlap(name, outcome) for outcome in outcomes]

    def _measure(
        self, task: Task, layout: Layout, peers: Sequence[str], name: str, tell: Tell
    ) -> list[Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            task = dataclasses.replace(task, meeting_point=str(pathlib.Path(folder) / "meeting"))
            contestants = plan_contestants(task, layout.places(self._arguments.device), peers)
            rounds, steps = self._arguments.rounds, self._arguments.steps
            outcomes, steps = measure(contestants, rounds, steps, teller(tell, name))
        self.records += [
            {
                "subject": task.subject,
                "name": name,
                "contestant": outcome.contestant.title,
                "steps_per_round": steps,
                "seconds": outcome.seconds,
                "checked": outcome.checked,
                "finished": outcome.finished,
            }
            for outcome in outcomes
        ]
        return outcomes


def _print(
    rows: Sequence[ReducerRow],
    overlaps: Sequence[OverlapRow],
    arguments: argparse.Namespace,
    console: Console,
) -> None:

    sizes = [
        f"{name} {len(GRADIENT_SETS[name].shapes)}, {GRADIENT_SETS[name].numbers * 4 / 2**20:.1f}"
        for name in arguments.gradients
    ]
    limit = arguments.bucket_cap_mb
    views = arguments.bucket_view or "with several processes"
    cap = f"bucket_cap_mb={limit:g}" if limit else "their own bucket_cap_mb"
    print_table(build_rounds(rows), console)
    notes = [
        f"tensors and MiB: {'; '.join(sizes)}",
        f"PxR: P processes of R replicas; torch DDP: P*R processes; on {arguments.device}",
        f"medians of {arguments.rounds} interleaved rounds; ✓ all gradients are right",
        "bare: one replica, no wrapper; intra-op threads per replica: "
        f"{arguments.threads_per_replica}",
        f"gradient_as_bucket_view: torch DDP on, ours {views}",
        f"static_graph off; {cap}",
    ]
    print_notes(notes, console)
    if overlaps:
        console.print()
        print_table(build_overlap(overlaps), console)
        notes = [
            "communication: from the first bucket's launch to the last one's end; hidden: its",
            "part during computation; exposed: the rest, as a share of the communication",
            "in one process: the sums over replicas, made by the replicas' own threads",
        ]
        print_notes(notes, console)


def _setting(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    names = ("gradients", "device", "overlap", "bucket_cap_mb", "bucket_view", "rounds")
    return {
        **{name: getattr(arguments, name) for name in names},
        "layouts": [str(layout) for layout in arguments.layouts],
        "peers": list(peers),
        "threads_per_replica": arguments.threads_per_replica,
    }
