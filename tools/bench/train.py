"""What `bench train` does: a training step beside the bare module and torch DDP."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dataparallel.tools.bench.cases import CASES
from dataparallel.tools.bench.contestants import MODES, TrainTask, plan_contestants
from dataparallel.tools.bench.output import (
    Tell,
    bucket_view,
    environment,
    progress,
    teller,
    write_json,
)
from dataparallel.tools.bench.report import build_comparison, build_table, print_notes, print_table
from dataparallel.tools.bench.rounds import CHECK_STEPS, measure
from dataparallel.tools.bench.summary import Measured, Row, measured_from, summarize
from dataparallel.tools.bench.verdict import Bars, Comparison, compare


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    peers = arguments.peers or _default_peers(arguments.devices)
    bars = Bars(
        arguments.bar, arguments.bar_worst, arguments.bar_memory, arguments.bar_memory_worst
    )
    _check(arguments, peers, bars)
    # The table must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    results: dict[str, list[Row]] = {}
    headings: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    with progress(console, len(arguments.cases) * arguments.rounds * (1 + len(peers))) as tell:
        for name in arguments.cases:
            task = _task(name, arguments)
            measured, steps = _measure_case(task, peers, arguments, tell)
            results[name] = summarize(measured)
            headings[name] = f"{name} ({task.batch})"
            records.append(_record(name, headings[name], steps, measured, results[name]))
    judged = "ddp" if "ddp" in peers else peers[0]
    comparisons = [compare(results, each, bars if each == judged else Bars()) for each in peers]
    if arguments.json != "-":
        with_headings = {headings[name]: rows for name, rows in results.items()}
        _print(with_headings, comparisons, arguments, console)
    if arguments.json:
        setting = {**environment(), **_setting(arguments, peers)}
        content = {"setting": setting, "cases": records}
        content["comparisons"] = [_comparison_record(each) for each in comparisons]
        write_json(arguments.json, content)
    disagree = not all(row.agrees for rows in results.values() for row in rows)
    missed = any(verdict.met is False for each in comparisons for verdict in each.verdicts)
    return int(disagree or (arguments.check and missed))


def _default_peers(devices: Sequence[str]) -> list[str]:
    return ["bare"] if _any_virtual(devices) else ["bare", "ddp"]


def _any_virtual(devices: Sequence[str]) -> bool:
    return any(name.startswith("virtual") for name in devices)


def _check(arguments: argparse.Namespace, peers: Sequence[str], bars: Bars) -> None:
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
    if arguments.check and not bars.any():
        raise ValueError("--check needs a bar to check, for example --bar 0.8")


def _task(name: str, arguments: argparse.Namespace) -> TrainTask:

    return TrainTask(
        "ours",
        tuple(arguments.devices),
        case=name,
        batch=whole_batch(name, CASES[name].batch, arguments.processes * len(arguments.devices)),
        threads=arguments.threads_per_replica,
        mode=arguments.mode,
        loss=arguments.loss,
        optimizer=arguments.optimizer,
        wrapper=arguments.wrapper,
        bucket_view=bucket_view(arguments.bucket_view, arguments.processes),
    )


def whole_batch(case: str, samples: int, replicas: int) -> int:
    """The batch of a case, rounded down to equal parts.

    Args:
        case: Its name, for the message.
        samples: Number of samples that it is known by.
        replicas: Number of parts.

    Raises:
        ValueError: There are fewer samples than parts.
    """
    if samples < replicas:
        raise ValueError(f"case {case!r} has {samples} samples, but there are {replicas} replicas")
    return samples // replicas * replicas


def _measure_case(
    task: TrainTask, peers: Sequence[str], arguments: argparse.Namespace, tell: Tell
) -> tuple[list[Measured], int]:
    with tempfile.TemporaryDirectory() as folder:
        task = dataclasses.replace(task, meeting_point=str(pathlib.Path(folder) / "meeting"))
        contestants = plan_contestants(task, [task.devices] * arguments.processes, peers)
        on_turn = teller(tell, task.case)
        outcomes, steps = measure(contestants, arguments.rounds, arguments.steps, on_turn)
    return [measured_from(outcome) for outcome in outcomes], steps


def _print(
    results: dict[str, list[Row]],
    comparisons: Sequence[Comparison],
    arguments: argparse.Namespace,
    console: Console,
) -> None:

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
    names = ("devices", "processes", "wrapper", "mode", "loss", "optimizer", "rounds")
    return {
        **{name: getattr(arguments, name) for name in names},
        "peers": list(peers),
        "threads_per_replica": arguments.threads_per_replica,
        "bucket_view": bucket_view(arguments.bucket_view, arguments.processes),
    }


def _record(
    name: str, title: str, steps: int, measured: Sequence[Measured], rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "case": name,
        "title": title,
        "steps_per_round": steps,
        "measured": [dataclasses.asdict(each) for each in measured],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    names = ("time_mean", "time_worst", "memory_mean", "memory_worst")
    met = {name: getattr(comparison, name).met for name in names}
    return {**dataclasses.asdict(comparison), "met": met}
