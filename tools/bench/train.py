"""The `bench train` subcommand: a training step beside the bare module and torch DDP."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dataparallel.tools.arguments import add_command, count, device_names, names_in
from dataparallel.tools.bench.contestants import MODES, plan_contestants
from dataparallel.tools.bench.rounds import CHECK_STEPS, measure
from dataparallel.tools.bench.summary import Measured, Row, summarise
from dataparallel.tools.extras import needs_extra

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers

_PEERS = ("bare", "ddp")
_CASES = ("mlp", "wide", "deep", "transformer", "conv")


def add_to(subjects: Subparsers) -> None:
    """Add the subcommand to `bench`."""
    parser = add_command(
        subjects,
        "train",
        summary="Step time and peak memory beside the bare module and torch DDP.",
        examples=[
            "dataparallel bench train",
            "dataparallel bench train --cases mlp,conv --rounds 3",
            "dataparallel bench train --mode forward --peers bare",
            "dataparallel bench train --mode forward-backward --devices virtual:0,virtual:1",
            "dataparallel bench train --json results.json",
        ],
        run=_run,
    )
    add = parser.add_argument
    add("--cases", type=names_in(_CASES), default=list(_CASES), metavar="LIST",
        help=f"models to measure; default: {','.join(_CASES)}")  # fmt: skip
    add("--devices", type=device_names, default=["cpu", "cpu"], metavar="LIST",
        help="one device per replica; default: cpu,cpu")  # fmt: skip
    add("--peers", type=names_in(_PEERS), default=None, metavar="LIST",
        help="whom to compare with; default: bare,ddp (bare alone on virtual devices)")  # fmt: skip
    add("--mode", choices=list(MODES), default="step",
        help="what is repeated: " + "; ".join(f"{k}: {v}" for k, v in MODES.items()))  # fmt: skip
    add("--loss", choices=["gathered", "replicas"], default="gathered",
        help="where DataParallel takes the loss: of the gathered output (default), "
        "or in each replica (model.loss)")  # fmt: skip
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions per turn; default: about half a second's worth")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica, and of the bare module; default: 1")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")


def _run(arguments: argparse.Namespace) -> int:
    with needs_extra("tools"):
        import psutil as psutil  # the workers need it; better to say so before they start
        from rich.console import Console

        from dataparallel.tools.bench.report import print_results
    peers = arguments.peers or _default_peers(arguments.devices)
    _check(arguments.devices, peers)
    # The table must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    results: dict[str, list[Row]] = {}
    records: list[dict[str, Any]] = []
    with _progress(console, len(arguments.cases) * arguments.rounds * (1 + len(peers))) as tell:
        for name in arguments.cases:
            title, measured, steps = _measure_case(name, peers, arguments, tell)
            results[title] = summarise(measured)
            records.append(_record(name, title, steps, measured, results[title]))
    what = f"{MODES[arguments.mode]}\nreplicas on {', '.join(arguments.devices)}"
    if arguments.json != "-":
        print_results(results, what, _notes(arguments), console)
    if arguments.json:
        _write_json(arguments.json, {"setting": _setting(arguments, peers), "cases": records})
    return int(not all(row.agrees for rows in results.values() for row in rows))


def _default_peers(devices: Sequence[str]) -> list[str]:
    return ["bare"] if _any_virtual(devices) else list(_PEERS)


def _any_virtual(devices: Sequence[str]) -> bool:
    return any(name.startswith("virtual") for name in devices)


def _check(devices: Sequence[str], peers: Sequence[str]) -> None:
    if _any_virtual(devices) and "ddp" in peers:
        raise ValueError(
            "torch DDP has no process group for virtual devices; compare with --peers bare, or "
            "use --devices cpu,cpu"
        )


def _measure_case(
    name: str, peers: Sequence[str], arguments: argparse.Namespace, tell: Callable[[str, int], None]
) -> tuple[str, list[Measured], int]:
    from dataparallel.tools.bench.cases import CASES

    with tempfile.TemporaryDirectory() as folder:
        contestants = plan_contestants(
            name,
            CASES[name].batch,
            arguments.devices,
            peers,
            threads=arguments.threads_per_replica,
            mode=arguments.mode,
            loss=arguments.loss,
            meeting_point=str(pathlib.Path(folder) / "meeting-point"),
        )

        def on_turn(what: str) -> None:
            tell(f"{name}: {what}", int(what.startswith("round")))

        measured, steps = measure(contestants, arguments.rounds, arguments.steps, on_turn)
    return f"{name} ({contestants[0].tasks[0].batch})", measured, steps


@contextlib.contextmanager
def _progress(console: Any, turns: int) -> Iterator[Callable[[str, int], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=turns)

        def tell(what: str, turns_begun: int) -> None:
            progress.update(task, description=what, advance=turns_begun)

        yield tell


def _notes(arguments: argparse.Namespace) -> list[str]:
    return [
        f"case (batch): medians of {arguments.rounds} interleaved rounds",
        "speed-up: time of the bare module / this; ours/this: time of DataParallel / this",
        f"intra-op threads: {arguments.threads_per_replica} per replica, and for the bare module",
        "MiB: peak of all processes of a contestant beyond the level before its model",
        f"loss: after {CHECK_STEPS} steps; ✓ losses and gradient norms are the reference's",
    ]


def _setting(arguments: argparse.Namespace, peers: Sequence[str]) -> dict[str, Any]:
    import torch

    return {
        "command": ["dataparallel", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "devices": arguments.devices,
        "peers": list(peers),
        "mode": arguments.mode,
        "loss": arguments.loss,
        "rounds": arguments.rounds,
        # Whether idle threads spin decides much where other programs use the cores too.
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_"))},
        "threads_per_replica": arguments.threads_per_replica,
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


def _write_json(path: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = pathlib.Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_text(text)
    temporary.replace(target)
