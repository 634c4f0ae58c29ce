"""The `bench` subcommand and its options."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import (
    add_command,
    count,
    counts,
    device_names,
    late,
    names_in,
    positive,
    size,
)

if TYPE_CHECKING:
    import argparse

    from dataparallel.tools.arguments import Subparsers


#: The names of the models in ``cases.py``, which needs torch; the options do without.
CASES = ("mlp", "wide", "deep", "transformer", "conv")


def add_to(commands: Subparsers) -> None:
    """Add the subcommand, with its own subcommand, to the command line."""
    parser = add_command(
        commands,
        "bench",
        summary="Measure speed and memory beside a peer, interleaved in one run.",
        examples=[
            f"dataparallel bench {subject} --help" for subject in ("train", "host", "simulate")
        ],
    )
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT")
    _add_train(subjects)
    _add_host(subjects)
    _add_simulate(subjects)


def _add_train(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "train",
        summary="Step time and peak memory beside the bare module and torch DDP.",
        examples=[
            "dataparallel bench train",
            "dataparallel bench train --cases mlp,conv --rounds 3",
            "dataparallel bench train --processes 2 --devices cpu --peers ddp",
            "dataparallel bench train --devices cpu --cases deep --peers ddp",
            "dataparallel bench train --devices cpu,cpu --peers watched",
            "dataparallel bench train --cases deep --peers locked,ddp",
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
    add(
        "--compile",
        action="store_true",
        help="let torch.compile compile the module of each contestant before it is wrapped",
    )
    add_rounds(parser)


def _add_host(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "host",
        summary="What a step costs the host: time, Python calls, operators, copies, waits.",
        examples=[
            "dataparallel bench host",
            "dataparallel bench host --devices virtual",
            "dataparallel bench host --parameters 400 --replicas 1,2 --rounds 9",
            "dataparallel bench host --devices cuda:0 --json host.json",
        ],
        run=late(lambda: importlib.import_module("dataparallel.tools.bench.host"), extra="tools"),
    )
    add = parser.add_argument
    add("--devices", default="cpu", metavar="DEVICE",
        help="cpu (default) or another device, with a slot on it for each replica; virtual: a "
        "virtual device for each")  # fmt: skip
    add("--parameters", type=counts, default=[20, 100, 400, 2000], metavar="LIST",
        help="sizes of the models, two parameters per layer; default: 20,100,400,2000")  # fmt: skip
    add("--replicas", type=counts, default=[1, 2, 4, 8], metavar="LIST",
        help="of ours; default: 1,2,4,8")  # fmt: skip
    add_rounds(parser, rounds=5)


def _add_simulate(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "simulate",
        summary="A training step on a stated machine with several GPUs, simulated without one.",
        examples=[
            "dataparallel bench simulate",
            "dataparallel bench simulate --gpus 2,4,8 --machine a100-nvlink",
            "dataparallel bench simulate --machine pcie4 --forward-ms 100 --backward-ms 200",
            "dataparallel bench simulate --parameters 100M --forward-ms 10 --backward-ms 20",
            "dataparallel bench simulate --contestants ddp,torch-ddp --trace step.json",
            "dataparallel bench simulate --contestants spread,torch-ddp --optimizer adamw",
            "dataparallel bench simulate --parameters 100M --measure cuda:0 --profile gpu.json",
            "dataparallel bench simulate --parameters 100M --profile gpu.json",
        ],
        run=late(
            lambda: importlib.import_module("dataparallel.tools.bench.simulate.simulate"),
            extra="tools",
        ),
    )
    names = ("ddp", "captured", "spread", "dp", "torch-ddp", "torch-dp", "bare")
    add = parser.add_argument
    add("--gpus", type=counts, default=[8], metavar="LIST",
        help="numbers of devices, a table for each; default: 8")  # fmt: skip
    add("--machine", default="h100-nvlink", metavar="NAME",
        help="h100-nvlink (default), a100-nvlink, pcie4, t4x2, or a file like those in "
        "tools/bench/simulate/machines")  # fmt: skip
    add("--parameters", type=size, default=10**9, metavar="N",
        help="about so many parameters, with K, M or G; default: 1G")  # fmt: skip
    add("--layers", type=count, default=12, metavar="N",
        help="layers of the transformer, with 12 parameters each; default: 12")  # fmt: skip
    for phase in ("forward", "backward"):
        add(f"--{phase}-ms", type=positive, default=None, metavar="MS",
            help=f"let the {phase} pass of the bare module take so long per device, with its "
            "products of matrices scaled; default: the roofline of the machine")  # fmt: skip
    add("--optimizer", choices=["sgd", "adamw"], default="sgd",
        help="the optimizer, whose work originals='spread' divides; default: sgd")  # fmt: skip
    add("--profile", metavar="FILE",
        help="take the times of kernels and host from what --measure has written")  # fmt: skip
    add("--measure", metavar="DEVICE",
        help="measure the bare module on a device, for example cuda:0, write --profile (default: "
        "stdout), and simulate nothing")  # fmt: skip
    add("--contestants", type=names_in(names), default=list(names), metavar="LIST",
        help=f"whom to play; default: {','.join(names)}")  # fmt: skip
    add("--trace", metavar="FILE",
        help="write what each stream did, for ui.perfetto.dev or chrome://tracing")  # fmt: skip
    add("--json", metavar="FILE", help="write all figures to FILE, or to - (stdout)")


def add_rounds(parser: argparse.ArgumentParser, rounds: int = 7, steps: int | None = None) -> None:
    """Add the options that all benchmarks have, those of developers too."""
    add, usual = parser.add_argument, "about half a second's worth"
    add("--rounds", type=count, default=rounds, metavar="N",
        help=f"turns of each contestant; default: {rounds}")  # fmt: skip
    add("--steps", type=count, default=steps, metavar="N",
        help=f"repetitions per turn; default: {steps or usual}")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")


def _add_contestants(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", type=names_in(CASES), default=list(CASES), metavar="LIST",
        help=f"models to measure; default: {','.join(CASES)}")  # fmt: skip
    add("--wrapper", choices=["dp", "ddp", "captured"], default="ddp",
        help="ours: DataParallel (dp), DistributedDataParallel (ddp, the default), or the same "
        "with capture=True, on GPUs")  # fmt: skip
    add("--devices", type=device_names, default=["cpu", "cpu"], metavar="LIST",
        help="one device per replica of each process; default: cpu,cpu")  # fmt: skip
    add("--processes", type=count, default=1, metavar="P",
        help="processes of ours, each with all of --devices and its part of the batch; "
        "default: 1. torch DDP gets one process per replica")  # fmt: skip
    peers = names_in(("bare", "cores", "ddp", "watched", "locked"))
    add("--peers", type=peers, default=None, metavar="LIST",
        help="whom to compare with: bare, cores (bare with all cores as intra-op threads), ddp, "
        "watched (ours with a StepMonitor), locked (ours with the lock of a free-threaded Python); "
        "default: bare,cores,ddp on the CPU, bare on virtual devices, else bare,ddp")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica, and of bare; default: 1")  # fmt: skip
