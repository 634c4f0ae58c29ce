"""The `bench` subcommand and its options."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command, count, device_names, late, names_in
from dataparallel.tools.bench.cases import CASES

if TYPE_CHECKING:
    import argparse

    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand, with its own subcommand, to the command line."""
    parser = add_command(
        commands,
        "bench",
        summary="Measure speed and memory beside a peer, interleaved in one run.",
        examples=["dataparallel bench train --help"],
    )
    parser = add_command(
        parser.add_subparsers(title="subjects", metavar="SUBJECT"),
        "train",
        summary="Step time and peak memory beside the bare module and torch DDP.",
        examples=[
            "dataparallel bench train",
            "dataparallel bench train --cases mlp,conv --rounds 3",
            "dataparallel bench train --processes 2 --devices cpu --peers ddp",
            "dataparallel bench train --devices cpu --cases deep --peers ddp",
            "dataparallel bench train --devices cpu,cpu --peers watched",
            "dataparallel bench train --wrapper dp --peers bare --devices virtual:0,virtual:1",
            "dataparallel bench train --json results.json",
        ],
        run=late(lambda: importlib.import_module("dataparallel.tools.bench.train"), extra="tools"),
    )
    _add_contestants(parser)
    add = parser.add_argument
    add("--loss", choices=["gathered", "replicas"], default="gathered",
        help="where ours takes the loss: of the gathered output (default), "
        "or in each replica (model.loss)")  # fmt: skip
    add("--optimizer", choices=["sgd", "adamw"], default="sgd",
        help="of all contestants; default: sgd, which keeps no state")  # fmt: skip
    add_rounds(parser)


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """The options that all benchmarks have, those of developers too."""
    add = parser.add_argument
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions per turn; default: about half a second's worth")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")


def _add_contestants(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", type=names_in(list(CASES)), default=list(CASES), metavar="LIST",
        help=f"models to measure; default: {','.join(CASES)}")  # fmt: skip
    add("--wrapper", choices=["dp", "ddp"], default="ddp",
        help="ours: DataParallel (dp) or DistributedDataParallel (ddp, the default)")  # fmt: skip
    add("--devices", type=device_names, default=["cpu", "cpu"], metavar="LIST",
        help="one device per replica of each process; default: cpu,cpu")  # fmt: skip
    add("--processes", type=count, default=1, metavar="P",
        help="processes of ours, each with all of --devices and its part of the batch; "
        "default: 1. torch DDP gets one process per replica")  # fmt: skip
    add("--peers", type=names_in(("bare", "cores", "ddp", "watched")), default=None, metavar="LIST",
        help="whom to compare with: bare, cores (bare with all cores as intra-op threads), ddp, "
        "watched (ours with a StepMonitor); default: bare,cores,ddp on the CPU, bare on virtual "
        "devices, else bare,ddp")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica, and of bare; default: 1")  # fmt: skip
