"""The `bench reducer` subcommand: rounds of reduction and their overlap, beside torch DDP."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dataparallel.tools.arguments import add_command, count, names_in
from dataparallel.tools.bench.contestants import ReducerTask, Task, TrainTask, plan_contestants
from dataparallel.tools.bench.layout import Layout, layouts
from dataparallel.tools.bench.output import (
    Tell,
    add_bucket_view,
    bucket_view,
    environment,
    progress,
    teller,
    write_json,
)
from dataparallel.tools.bench.reducer_summary import (
    OverlapRow,
    ReducerRow,
    summarize_overlap,
    summarize_reduction,
)
from dataparallel.tools.bench.rounds import Outcome, measure
from dataparallel.tools.bench.train import CASE_NAMES, above_zero, whole_batch
from dataparallel.tools.extras import needs_extra

if TYPE_CHECKING:
    from rich.console import Console

    from dataparallel.tools.arguments import Subparsers

_SETS = ("small", "large", "mixed")
_PEERS = ("bare", "ddp")
LAYOUTS = "1x1,1x2,1x4,2x1,2x2,2x4"


def add_to(subjects: Subparsers) -> None:
    """Add the subcommand to `bench`."""
    parser = add_command(
        subjects,
        "reducer",
        summary="Time of reducing gradients, and its overlap with backward, beside torch DDP.",
        examples=[
            "dataparallel bench reducer",
            "dataparallel bench reducer --gradients small --layouts 1x1,1x2 --overlap none",
            "dataparallel bench reducer --layouts 2x1 --overlap mlp,transformer --rounds 3",
            "dataparallel bench reducer --device virtual --layouts 1x2",
            "dataparallel bench reducer --json results.json",
        ],
        run=_run,
    )
    add = parser.add_argument
    add("--gradients", type=names_in(_SETS), default=list(_SETS), metavar="LIST",
        help="sets of parameters: small (402), large (8 x 4 MiB), mixed; default: all")  # fmt: skip
    add("--layouts", type=layouts, default=layouts(LAYOUTS), metavar="LIST",
        help="processes x replicas of ours; torch DDP gets one process per replica; "
        f"default: {LAYOUTS}")  # fmt: skip
    add("--device", default="cpu", metavar="TYPE",
        help="all replicas on the CPU (default), or each on an own device of a type")  # fmt: skip
    add("--peers", type=names_in(_PEERS), default=None, metavar="LIST",
        help="whom to compare with; default: bare,ddp (bare alone on virtual devices)")  # fmt: skip
    add("--overlap", type=names_in(("none", *CASE_NAMES)), default=["mlp"], metavar="LIST",
        help=f"models for the overlap: {','.join(CASE_NAMES)}; or none; default: mlp")  # fmt: skip
    add("--bucket-cap-mb", type=above_zero, default=None, metavar="MIB",
        help="size limit of a bucket, ours and the peer's; default: each one's own")  # fmt: skip
    add_bucket_view(parser)
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions per turn; default: about half a second's worth")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica; default: 1")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")


def _run(arguments: argparse.Namespace) -> int:
    with needs_extra("tools"):
        import psutil as psutil  # the workers need it; better to say so before they start
        from rich.console import Console
    peers = arguments.peers or (["bare"] if arguments.device == "virtual" else list(_PEERS))
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
        from dataparallel.tools.bench.cases import CASES

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
    from dataparallel.tools.bench.gradient_sets import GRADIENT_SETS
    from dataparallel.tools.bench.reducer_report import build_overlap, build_rounds
    from dataparallel.tools.bench.report import print_notes, print_table

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
