"""What `bench autograd` does: backward across worker processes, beside torch's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dataparallel.tools.bench.autograd_workers import Chain, Measured, Setting, work
from dataparallel.tools.bench.output import environment, write_json


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if min(arguments.workers) < 2:
        raise ValueError(f"--workers needs 2 or more, but got {min(arguments.workers)}")
    chains = [Chain(calls, 4) for calls in arguments.calls]
    setting = Setting(
        chains=(*chains, Chain(4, arguments.kib * 256)),
        rounds=arguments.rounds or (3 if arguments.quick else 11),
        repetitions=2 if arguments.quick else 20,
        transport=arguments.transport,
    )
    # The table must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    measured: dict[int, list[Measured]] = {}
    for workers in arguments.workers:
        with console.status(f"{workers} workers"):
            measured[workers] = measure(workers, setting)
    console.print(build_table(measured))
    console.print(
        f"[dim]medians of {setting.rounds} rounds; ours and torch's in turn in the same processes\n"
        "✓ every element of every gradient is right"
    )
    if arguments.json:
        write_json(arguments.json, _record(measured, setting))
    return int(not all(each.right for found in measured.values() for each in found))


def measure(workers: int, setting: Setting) -> list[Measured]:
    """Start worker processes and let the first one measure all chains.

    Raises:
        RuntimeError: A worker has failed; it has printed why.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(pathlib.Path(folder) / "meeting")
        processes = [
            context.Process(
                target=work,
                args=(rank, workers, meeting, setting, sender if rank == 0 else None),
                daemon=True,
            )
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        try:
            ended = [process.sentinel for process in processes]
            ready = multiprocessing.connection.wait([answer, *ended])
            if answer not in ready:
                raise RuntimeError("a worker of the benchmark failed; see what it has printed")
            found = [
                Measured(Chain(**each["chain"]), each["right"], each["seconds"])
                for each in json.loads(answer.recv_bytes())
            ]
            for process in processes:
                process.join(60)
            return found
        finally:
            for process in processes:
                process.kill()


def build_table(measured: dict[int, list[Measured]]) -> Table:
    """One line for each number of workers and chain; 80 columns wide."""
    table = Table(
        title="backward across workers, and one call of the forward",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    headings = (
        "ours\nms",
        "torch\nms",
        "ours\n/torch",
        "min..max",
        "call\n/torch",
        "min..max",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for workers, found in measured.items():
        table.add_section()
        table.add_row(f"[bold]{workers} workers")
        for each in found:
            backward, call = each.ratios("backward"), each.ratios("forward")
            table.add_row(
                f"  {each.chain.name} {'✓' if each.right else '✗'}",
                *(f"{statistics.median(each.seconds[f'{form} backward']) * 1e3:.2f}"
                  for form in ("ours", "torch")),
                *_ratio(backward),
                *_ratio(call),
            )  # fmt: skip
    return table


def _ratio(ratios: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}..{max(ratios):.2f}"


def _record(measured: dict[int, list[Measured]], setting: Setting) -> dict[str, Any]:
    return {
        "setting": {**environment(), **dataclasses.asdict(setting)},
        "rows": [
            {
                "workers": workers,
                "chain": each.chain.name,
                "right": each.right,
                "seconds": each.seconds,
            }
            for workers, found in measured.items()
            for each in found
        ],
    }
