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
from dataparallel.tools.bench.command import MODES
from dataparallel.tools.bench.harness import CHECK_STEPS, Outcome, Tell, measure, plan_contestants
from dataparallel.tools.bench.output import (
    environment,
    print_notes,
    print_table,
    progress,
    write_json,
)
from dataparallel.tools.bench.report import build_comparison, build_table
from dataparallel.tools.bench.summary import BARS, Comparison, Row, compare, summarize
from dataparallel.tools.bench.trainer import TrainTask


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    peers = arguments.peers or (["bare"] if _any_virtual(arguments.devices) else ["bare", "ddp"])
    limits = (
        arguments.bar,
        arguments.bar_worst,
        arguments.bar_memory,
        arguments.bar_memory_worst,
    )
    bars = dict(zip(BARS, limits, strict=True))
    _check(arguments, peers, bars)
    results: dict[str, list[Row]] = {}
    headings: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    with progress(len(arguments.cases) * arguments.rounds * (1 + len(peers))) as tell:
        for name in arguments.cases:
            task = _task(name, arguments)
            outcomes, steps = _measure_case(task, peers, arguments, tell)
            results[name] = summarize(outcomes)
            headings[name] = f"{name} ({task.batch})"
            rows = [dataclasses.asdict(row) for row in results[name]]
            record = {"case": name, "title": headings[name], "steps_per_round": steps}
            records.append({**record, "rows": rows})
    judged = "ddp" if "ddp" in peers else peers[0]
    comparisons = [compare(results, each, bars if each == judged else {}) for each in peers]
    if arguments.json != "-":
        with_headings = {headings[name]: rows for name, rows in results.items()}
        _print(with_headings, comparisons, arguments)
    if arguments.json:
        content = {"setting": _setting(arguments, peers), "cases": records}
        content["comparisons"] = [_comparison_record(each) for each in comparisons]
        write_json(arguments.json, content)
    disagree = not all(row.agrees for rows in results.values() for row in rows)
    missed = any(each.met is False for one in comparisons for each in one.verdicts.values())
    return int(disagree or (arguments.check and missed))


def _any_virtual(devices: Sequence[str]) -> bool:
    return any(name.startswith("virtual") for name in devices)


def _check(
    arguments: argparse.Namespace, peers: Sequence[str], bars: dict[str, float | None]
) -> None:
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
    if arguments.check and not any(bars.values()):
        raise ValueError("--check needs a bar to check, for example --bar 0.8")


def bucket_view(given: str | None, processes: int) -> bool:
    """Whether our DDP's gradients are views of buckets, as the option says or by default."""
    return processes > 1 if given is None else given == "on"


def _task(name: str, arguments: argparse.Namespace) -> TrainTask:
    return TrainTask(
        "ours",
        tuple(arguments.devices),
        case=name,
        batch=whole_batch(name, arguments.processes * len(arguments.devices)),
        threads=arguments.threads_per_replica,
        mode=arguments.mode,
        loss=arguments.loss,
        optimizer=arguments.optimizer,
        wrapper=arguments.wrapper,
        bucket_view=bucket_view(arguments.bucket_view, arguments.processes),
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
    print_table(build_table(results, f"{MODES[arguments.mode]}\nreplicas on {where}"), console)
    for comparison in comparisons:
        print_table(build_comparison(comparison), console)
    print_notes(_notes(arguments), console)


def _notes(arguments: argparse.Namespace) -> list[str]:
    views = bucket_view(arguments.bucket_view, arguments.processes)
    return [
        f"case (batch): medians of {arguments.rounds} interleaved rounds; PxR: P processes of R "
        "replicas",
        "speed-up: time of the bare module / this; ours/this: time of ours / this",
        f"intra-op threads: {arguments.threads_per_replica} per replica, and for the bare module",
        f"gradient_as_bucket_view: torch DDP on, ours {'on' if views else 'off'}; "
        f"static_graph off; {arguments.optimizer}",
        "MiB: peak of all processes of a contestant beyond the level before its model",
        f"loss: after {CHECK_STEPS} steps; ✓ losses, gradient norms and parameters are the "
        "reference's",
    ]


def _setting(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    views = bucket_view(arguments.bucket_view, arguments.processes)
    return {**environment(), **options, "peers": list(peers), "bucket_view": views}


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    record = dataclasses.asdict(comparison)
    verdicts = record.pop("verdicts")
    met = {name: verdict.met for name, verdict in comparison.verdicts.items()}
    return {**record, **verdicts, "met": met}
