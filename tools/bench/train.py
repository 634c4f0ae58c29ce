"""What `bench train` does: a training step beside the bare module and torch DDP."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dataparallel.tools.bench.cases import whole_batch
from dataparallel.tools.bench.harness import CHECK_STEPS, Outcome, Tell, measure, plan_contestants
from dataparallel.tools.bench.output import (
    environment,
    print_notes,
    print_table,
    progress,
    write_json,
)
from dataparallel.tools.bench.results import (
    Comparison,
    Row,
    build_table,
    compare,
    describe,
    summarize,
)
from dataparallel.tools.bench.trainer import TrainTask


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    peers = arguments.peers or _default_peers(arguments.devices)
    _check(arguments, peers)
    results: dict[str, list[Row]] = {}
    records: list[dict[str, Any]] = []
    with progress(len(arguments.cases) * arguments.rounds * (1 + len(peers))) as tell:
        for name in arguments.cases:
            task = _task(name, arguments)
            outcomes, steps = _measure_case(task, peers, arguments, tell)
            title = f"{name} ({task.batch})"
            results[title] = summarize(outcomes)
            rows = [dataclasses.asdict(row) for row in results[title]]
            record = {"case": name, "title": title, "steps_per_round": steps}
            records.append({**record, "rows": rows})
    comparisons = [compare(results, peer) for peer in peers]
    if arguments.json != "-":
        _print(results, comparisons, arguments)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "run"}
        content = {"setting": {**environment(), **options, "peers": peers}, "cases": records}
        content["comparisons"] = [dataclasses.asdict(each) for each in comparisons]
        write_json(arguments.json, content)
    return int(not all(row.agrees for rows in results.values() for row in rows))


def _default_peers(names: Sequence[str]) -> list[str]:
    if _any_virtual(names):
        return ["bare"]
    return ["bare", "cores", "ddp"] if set(names) == {"cpu"} else ["bare", "ddp"]


def _any_virtual(devices: Sequence[str]) -> bool:
    return any(name.startswith("virtual") for name in devices)


def _check(arguments: argparse.Namespace, peers: Sequence[str]) -> None:
    if _any_virtual(arguments.devices) and "ddp" in peers:
        raise ValueError(
            "torch DDP has no process group for virtual devices; compare with --peers bare, or "
            "use --devices cpu,cpu"
        )
    if arguments.processes > 1 and arguments.wrapper == "dp":
        raise ValueError(
            f"DataParallel is for one process, but --processes is {arguments.processes}; use "
            "--wrapper ddp"
        )
    if arguments.processes > 1 and any(name != "cpu" for name in arguments.devices):
        raise ValueError(
            f"--processes {arguments.processes} would give all processes the same devices "
            f"{', '.join(arguments.devices)}; only the CPU can be shared so"
        )


def _task(name: str, arguments: argparse.Namespace) -> TrainTask:
    return TrainTask(
        "ours",
        tuple(arguments.devices),
        case=name,
        batch=whole_batch(name, arguments.processes * len(arguments.devices)),
        threads=arguments.threads_per_replica,
        loss=arguments.loss,
        optimizer=arguments.optimizer,
        compiles=arguments.compile,
        wrapper=arguments.wrapper,
    )


def _measure_case(
    task: TrainTask, peers: Sequence[str], arguments: argparse.Namespace, tell: Tell
) -> tuple[list[Outcome], int]:
    with tempfile.TemporaryDirectory() as folder:
        task = dataclasses.replace(task, meeting_point=str(pathlib.Path(folder) / "meeting"))
        contestants = plan_contestants(task, [task.devices] * arguments.processes, peers)
        rounds, steps = arguments.rounds, arguments.steps
        return measure(task.case, contestants, rounds, steps, tell)


def _print(
    results: dict[str, list[Row]],
    comparisons: Sequence[Comparison],
    arguments: argparse.Namespace,
) -> None:
    console = Console()
    where = f"{arguments.processes} x ({', '.join(arguments.devices)})"
    step = "zero_grad, forward, loss, backward, optimizer step"
    print_table(build_table(results, f"{step}\nreplicas on {where}"), console)
    for comparison in comparisons:
        console.print(describe(comparison), soft_wrap=True)
    print_notes(_notes(arguments), console)


def _notes(arguments: argparse.Namespace) -> list[str]:
    return [
        f"case (batch): medians of {arguments.rounds} interleaved rounds; PxR: P processes of R "
        "replicas",
        "speed-up: time of the bare module / this; ours/this: time of ours / this; means over "
        "cases are geometric",
        f"intra-op threads: {arguments.threads_per_replica} per replica, and for the bare module "
        "where no number is named",
        "gradient_as_bucket_view: torch DDP on, ours on with several processes; static_graph off; "
        f"{arguments.optimizer}",
        "MiB: peak of all processes of a contestant beyond the level before its model",
        f"loss: after {CHECK_STEPS} steps; ✓ losses and gradient norms are the reference's",
    ]
