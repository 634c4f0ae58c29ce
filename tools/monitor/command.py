"""The `monitor` subcommand: its parts, and the options of each."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command, count, late
from dataparallel.tools.monitor.sizes import duration, size

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers

#: The endings that the name of a picture may have.
SUFFIXES = (".png", ".svg", ".pdf")
#: The variable with the token of `monitor serve` if it is not among the options.
TOKEN_VARIABLE = "DATAPARALLEL_MONITOR_TOKEN"

#: The least limit for a file of a recording: a smaller one would hold hardly more than its header.
_SMALLEST = 4096


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "monitor",
        summary="Show, record, plot and serve what every device and every replica is doing.",
        examples=[
            "dataparallel monitor top",
            "dataparallel monitor record run.jsonl --for 60",
            "dataparallel monitor report run.jsonl",
        ],
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(parts)
    _add_top(parts)
    _add_record(parts)
    _add_plot(parts)
    _add_report(parts)
    _add_serve(parts)


def _late(module: str) -> Callable[[argparse.Namespace], int]:
    return late(
        lambda: importlib.import_module(f"dataparallel.tools.monitor.{module}"), extra="monitor"
    )


def add_sampler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell what is watched: ``--source``, ``--only``, ``--attach`` ..."""
    parser.add_argument(
        "--source",
        default="auto",
        metavar="SOURCE",
        help="auto, nvml, cpu, or a recording to play back (default: auto, which is all that this "
        "machine has)",
    )
    _add_interval(parser)
    parser.add_argument(
        "--attach",
        metavar="PID",
        help="also watch the replicas of runs with a StepMonitor: the number of a process, or auto "
        "for all ranks and jobs of yours on this machine, also those that begin later",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="DEVICE",
        help="show these devices only: numbers of nvidia-smi (0, or 0:1 for a MIG instance of it), "
        "names (cuda:1, cpu), or how identities begin (GPU-5f3a, MIG-9b) (default: all)",
    )
    parser.add_argument(
        "--only-visible",
        action="store_true",
        help="leave out the devices that CUDA_VISIBLE_DEVICES hides (default: they are shown)",
    )
    parser.add_argument(
        "--speed",
        type=_speed,
        default=1.0,
        metavar="FACTOR",
        help="how many times faster a recording is played back, or max for all at once "
        "(default: 1)",
    )


def _add_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="seconds between samples (default: 1)",
    )


def _add_alert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alert",
        action="append",
        default=[],
        metavar="WHAT",
        help="tell when something is found, once until it has ended: finding, or a kind as "
        "'hot device', also with a severity (info, warning, error) or a share of the step: "
        "'finding>=error', 'input>=20%%'; may be given several times (default: none)",
    )
    parser.add_argument(
        "--exec",
        metavar="COMMAND",
        help="run this without a shell for each alert, which it gets as JSON on its input",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="send each alert there as JSON, by HTTP POST"
    )
    parser.add_argument("--exit-code", action="store_true", help="end with 3 if there was an alert")


def _add_top(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "top",
        summary="Show what every device, replica and process is doing; ? tells the keys, q quits.",
        examples=[
            "dataparallel monitor top",
            "dataparallel monitor top --attach auto",
            "dataparallel monitor top --once --json > machine.json",
            "dataparallel monitor top --source run.jsonl --speed 10",
        ],
        run=_late("top_command"),
    )
    add_sampler_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print one view and end; of a recording its last"
    )
    parser.add_argument(
        "--json", action="store_true", help="print samples as JSON, one object per line"
    )
    parser.add_argument("--read-only", action="store_true", help="offer no keys that end processes")
    parser.add_argument(
        "--ascii",
        action="store_true",
        help="draw with ASCII alone (default: only where the terminal's encoding has nothing else)",
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="show no colors (default: they are shown, unless NO_COLOR is set)",
    )


def _add_run(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "run",
        summary="Run a training as it is, record all of its ranks, and say what to change in it.",
        examples=[
            "dataparallel monitor run -- python train.py",
            "dataparallel monitor run -- torchrun --nproc-per-node 8 train.py --epochs 3",
            "dataparallel monitor run --record run.jsonl -- accelerate launch train.py",
        ],
        run=_late("run_command"),
    )
    parser.set_defaults(source="auto", attach=None, only=(), only_visible=False)
    _add_interval(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="where to record (default: monitor-DATE-TIME.jsonl in this folder)",
    )
    _add_alert_options(parser)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM",
        help="the program with its arguments, unchanged; `dataparallel monitor top --attach auto` "
        "in another terminal shows it live",
    )


def _add_record(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "record",
        summary="Record what every device and every replica is doing into a file.",
        examples=[
            "dataparallel monitor record run.jsonl",
            "dataparallel monitor record run.jsonl --for 10min --attach auto",
            "dataparallel monitor record run.jsonl --interval 5 --max-size 1GB --keep 2",
            "dataparallel monitor record run.jsonl --alert 'finding>=error' --exec ./notify",
        ],
        run=_late("record_command"),
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="where to record; a recording is continued"
    )
    add_sampler_options(parser)
    parser.add_argument(
        "--for",
        dest="duration",
        type=duration,
        metavar="TIME",
        help="end after so many seconds, or 10min, 2h, 1d (default: at Ctrl-C, or at the end "
        "of the process that --attach names)",
    )
    parser.add_argument(
        "--max-size",
        type=_max_size,
        default=100_000_000,
        metavar="SIZE",
        help="greatest size of a file; then it is compressed to FILE.1.gz, what was FILE.1.gz is "
        "renamed to FILE.2.gz, and so on (default: 100MB)",
    )
    parser.add_argument(
        "--keep",
        type=count,
        default=15,
        metavar="NUMBER",
        help="how many older files are kept; the oldest one is dropped, which is told (default: "
        "15)",
    )

    _add_alert_options(parser)


def _add_serve(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "serve",
        summary="Serve a page with live charts, and metrics for Prometheus, over plain HTTP.",
        examples=[
            "dataparallel monitor serve",
            "dataparallel monitor serve --port 0 --source cpu",
            f"{TOKEN_VARIABLE}=$TOKEN dataparallel monitor serve --host 0.0.0.0",
        ],
        run=_late("serve_command"),
    )
    add_sampler_options(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="name or address of the interface; 0.0.0.0 for all. What is sent, the token too, is "
        "not encrypted (default: 127.0.0.1, which only this machine reaches)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8377,
        help="port; 0 for any that is free (default: %(default)s)",
    )
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--token",
        help="what readers must show, at least 16 characters; other users see options, so better "
        f"set the environment variable {TOKEN_VARIABLE} (default: none is needed on the loopback "
        "address, and without one there is no other address)",
    )
    access.add_argument(
        "--no-token",
        action="store_true",
        help="answer whoever reaches the address, which need not be loopback (default: off)",
    )
    parser.add_argument(
        "--commands",
        action="store_true",
        help="show the whole commands of other users' processes, which may hold what is secret, "
        "and not only their names (default: off)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no port; it is a number from 0 to 65535"
        )
    return int(text)


def _add_report(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "report",
        summary="Sum up recordings: devices, phases, stragglers, energy, what to change first.",
        examples=[
            "dataparallel monitor report run.jsonl",
            "dataparallel monitor report node0.jsonl node1.jsonl",
            "dataparallel monitor report run.jsonl --json > report.json",
        ],
        run=_late("report_command"),
    )
    _add_recordings(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_recordings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="recordings of dataparallel monitor record: one, or one of each machine of a job",
    )


def _add_plot(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "plot",
        summary="Draw recordings: devices, and the phases of each replica.",
        examples=[
            "dataparallel monitor plot run.jsonl run.png",
            "dataparallel monitor plot node0.jsonl node1.jsonl job.png",
            'dataparallel monitor plot run.jsonl run.pdf --title "four GPUs, batch 256"',
        ],
        run=_late("plot"),
    )
    _add_recordings(parser)
    parser.add_argument(
        "picture", type=Path, metavar="PICTURE", help=f"what is written: {', '.join(SUFFIXES)}"
    )
    parser.add_argument("--title", help="stands above it (default: the model and the devices)")
    parser.add_argument("--dark", action="store_true", help="draw on dark ground (default: off)")


def _speed(text: str) -> float:
    try:
        value = math.inf if text == "max" else float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor max")
    return value


def _max_size(text: str) -> int:
    value = size(text)
    if value < _SMALLEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is less than {_SMALLEST} bytes, too little for a recording; 100MB is usual"
        )
    return value
