"""The `bench` subcommand: one benchmark per subject, and the options of each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import (
    above_zero,
    add_command,
    count,
    device_names,
    late,
    names_in,
)
from dataparallel.tools.bench.cases import CASES
from dataparallel.tools.bench.collectives_tasks import (
    FORMS,
    HYBRID_PROCESSES,
    OPERATIONS,
    SIZES,
    sizes,
)
from dataparallel.tools.bench.contestants import MODES
from dataparallel.tools.bench.gradient_sets import GRADIENT_SETS
from dataparallel.tools.bench.kernels_cases import DTYPES, KERNELS, SIZES_ON_CPU
from dataparallel.tools.bench.kernels_timing import FOOTPRINT
from dataparallel.tools.bench.layout import layouts

if TYPE_CHECKING:
    import argparse

    from dataparallel.tools.arguments import Subparsers

_LAYOUTS = "1x1,1x2,1x4,2x1,2x2,2x4"


def add_to(commands: Subparsers) -> None:
    """Add the subcommand, with its own subcommands, to the command line."""
    parser = add_command(
        commands,
        "bench",
        summary="Measure speed and memory beside a peer, interleaved in one run.",
        examples=[
            "dataparallel bench train --help",
            "dataparallel bench reducer --help",
            "dataparallel bench collectives --help",
            "dataparallel bench autograd --help",
            "dataparallel bench kernels --help",
        ],
    )
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT")
    _add_train(subjects)
    _add_reducer(subjects)
    _add_collectives(subjects)
    _add_autograd(subjects)
    _add_kernels(subjects)


def _add_train(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "train",
        summary="Step time and peak memory beside the bare module and torch DDP.",
        examples=[
            "dataparallel bench train",
            "dataparallel bench train --cases mlp,conv --rounds 3",
            "dataparallel bench train --peers ddp --bar 0.8 --bar-worst 1 --bar-memory 0.6",
            "dataparallel bench train --processes 2 --devices cpu --peers ddp",
            "dataparallel bench train --devices cpu --cases deep --peers ddp",
            "dataparallel bench train --devices cpu,cpu --peers watched",
            "dataparallel bench train --wrapper dp --mode forward --peers bare",
            "dataparallel bench train --mode forward-backward --devices virtual:0,virtual:1",
            "dataparallel bench train --json results.json",
        ],
        run=late(lambda: importlib.import_module("dataparallel.tools.bench.train"), extra="tools"),
    )
    _add_contestants(parser)
    add = parser.add_argument
    _add_bucket_view(parser)
    add("--mode", choices=list(MODES), default="step",
        help="what is repeated: " + "; ".join(f"{k}: {v}" for k, v in MODES.items()))  # fmt: skip
    add("--loss", choices=["gathered", "replicas"], default="gathered",
        help="where ours takes the loss: of the gathered output (default), "
        "or in each replica (model.loss)")  # fmt: skip
    add("--optimizer", choices=["sgd", "momentum", "adamw"], default="sgd",
        help="of all contestants; default: sgd, which keeps no state")  # fmt: skip
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions per turn; default: about half a second's worth")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")
    _add_bars(parser)


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
    add("--peers", type=names_in(("bare", "ddp", "watched")), default=None, metavar="LIST",
        help="whom to compare with: bare, ddp, watched (ours with a StepMonitor); default: "
        "bare,ddp (bare alone on virtual devices)")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica, and of the bare module; default: 1")  # fmt: skip


def _add_bars(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "bars", "upper limits of ours / torch DDP (or the first peer), shown as met or missed"
    )
    add = group.add_argument
    add("--bar", type=above_zero, metavar="R", help="geometric mean of the times over the cases")
    add("--bar-worst", type=above_zero, metavar="R", help="time of each case")
    add("--bar-memory", type=above_zero, metavar="R", help="geometric mean of the peak memory")
    add("--bar-memory-worst", type=above_zero, metavar="R", help="peak memory of each case")
    add("--check", action="store_true", help="exit with status 1 if a bar is missed")


def _add_bucket_view(parser: argparse.ArgumentParser) -> None:
    """The option that says how our DDP keeps gradients; ``output.bucket_view`` reads it."""
    parser.add_argument(
        "--bucket-view",
        choices=["on", "off"],
        default=None,
        help="gradient_as_bucket_view of our DDP; default: on with several processes, where it "
        "saves a copy, else off. torch DDP always has it on",
    )


def _add_reducer(subjects: Subparsers) -> None:
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
        run=late(
            lambda: importlib.import_module("dataparallel.tools.bench.reducer"), extra="tools"
        ),
    )
    add = parser.add_argument
    sets = list(GRADIENT_SETS)
    add("--gradients", type=names_in(sets), default=sets, metavar="LIST",
        help="sets of parameters: small (402), large (8 x 4 MiB), mixed; default: all")  # fmt: skip
    add("--layouts", type=layouts, default=layouts(_LAYOUTS), metavar="LIST",
        help="processes x replicas of ours; torch DDP gets one process per replica; "
        f"default: {_LAYOUTS}")  # fmt: skip
    add("--device", default="cpu", metavar="TYPE",
        help="all replicas on the CPU (default), or each on an own device of a type")  # fmt: skip
    add("--peers", type=names_in(("bare", "ddp")), default=None, metavar="LIST",
        help="whom to compare with; default: bare,ddp (bare alone on virtual devices)")  # fmt: skip
    add("--overlap", type=names_in(("none", *CASES)), default=["mlp"], metavar="LIST",
        help=f"models for the overlap: {','.join(CASES)}; or none; default: mlp")  # fmt: skip
    add("--bucket-cap-mb", type=above_zero, default=None, metavar="MIB",
        help="size limit of a bucket, ours and the peer's; default: each one's own")  # fmt: skip
    _add_bucket_view(parser)
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions per turn; default: about half a second's worth")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica; default: 1")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")


def _add_collectives(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "collectives",
        summary="Latency of collectives of replicas and of processes, beside torch's.",
        examples=[
            "dataparallel bench collectives",
            "dataparallel bench collectives --bar 0.5 --bar-process 1.1 --check",
            "dataparallel bench collectives --forms local --devices cpu,cpu,cpu,cpu",
            "dataparallel bench collectives --forms hybrid --sizes 64KiB,1MiB",
            "dataparallel bench collectives --forms process --operations all_reduce,"
            "all_gather_tensor",
            "dataparallel bench collectives --sizes 1KiB,1MiB --rounds 3 --json results.json",
        ],
        run=late(
            lambda: importlib.import_module("dataparallel.tools.bench.collectives"), extra="tools"
        ),
    )
    add = parser.add_argument
    add("--forms", type=names_in(FORMS), default=list(FORMS[:2]), metavar="LIST",
        help="local: all_reduce of replicas in one process beside torch's in place between "
        "processes; process: ours beside torch's functional ones in the same processes; "
        f"hybrid: as local, but the replicas of {HYBRID_PROCESSES} processes; default: "
        "local,process")  # fmt: skip
    add("--sizes", type=sizes, default=sizes(SIZES), metavar="LIST",
        help="of each member's input, float32; default: 1KiB to 64MiB by factors of 4")  # fmt: skip
    add("--operations", type=names_in(OPERATIONS), default=[OPERATIONS[0]], metavar="LIST",
        help=f"of the process form: {','.join(OPERATIONS)}; default: {OPERATIONS[0]}")  # fmt: skip
    add("--devices", type=device_names, default=["cpu", "cpu"], metavar="LIST",
        help="one device per replica of a process; torch gets one process per replica, on "
        "its device; default: cpu,cpu")  # fmt: skip
    add("--threads-per-replica", type=count, default=1, metavar="N",
        help="intra-op threads of each replica and process; default: 1")  # fmt: skip
    add("--rounds", type=count, default=7, metavar="N", help="turns of each contestant; default: 7")
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions of the largest size per turn; smaller ones get more, up to 200; "
        "default: about half a second's worth")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")
    bars = parser.add_argument_group(
        "bars", "upper limits of geometric means over the sizes, shown as met or missed"
    )
    add = bars.add_argument
    add(
        "--bar", type=above_zero, metavar="R", help="replicas / torch's processes, local and hybrid"
    )
    add("--bar-process", type=above_zero, metavar="R",
        help="our process form / torch's functional form, each operation")  # fmt: skip
    add("--check", action="store_true", help="exit with status 1 if a bar is missed")


def _add_autograd(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "autograd",
        summary="Backward across worker processes, beside torch.distributed.autograd.",
        examples=[
            "dataparallel bench autograd",
            "dataparallel bench autograd --quick",
            "dataparallel bench autograd --workers 2 --calls 1,64 --kib 64",
            "dataparallel bench autograd --transport uv --json results.json",
        ],
        run=late(
            lambda: importlib.import_module("dataparallel.tools.bench.autograd"), extra="tools"
        ),
    )
    add = parser.add_argument
    add("--workers", type=_counts, default=[2, 4], metavar="LIST",
        help="numbers of worker processes, each at least 2; the first worker calls the others in "
        "turn; default: 2,4")  # fmt: skip
    add("--calls", type=_counts, default=[1, 4, 16, 64], metavar="LIST",
        help="lengths of the chains of calls with tiny tensors; default: 1,4,16,64")  # fmt: skip
    add("--kib", type=count, default=1024, metavar="N",
        help="of the tensors of one more chain of 4 calls; default: 1024")  # fmt: skip
    add("--transport", choices=("default", "uv"), default="default",
        help="of torch's RPC: what it chooses itself (default; within a machine shared memory, "
        "for which every worker keeps a core busy), or uv: TCP")  # fmt: skip
    add("--rounds", type=count, default=None, metavar="N",
        help="turns through all chains; default: 11")  # fmt: skip
    add("--quick", action="store_true",
        help="3 rounds of 2 repetitions: enough to see that all works, too little for "
        "figures")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds to FILE, or to - (stdout)")


def _counts(text: str) -> list[int]:
    return sorted({count(word.strip()) for word in text.split(",")})


def _add_kernels(subjects: Subparsers) -> None:
    parser = add_command(
        subjects,
        "kernels",
        summary="Bytes per second of the kernels beside a copy, and time beside torch's.",
        examples=[
            "dataparallel bench kernels",
            "dataparallel bench kernels --device 0 --check --json results.json --plot rates.png",
            "dataparallel bench kernels --kernels reduce_add,flatten --sizes 16MiB,256MiB",
            "dataparallel bench kernels --device cpu --kernels reduce_add --sizes 64KiB",
            "dataparallel bench kernels --dtypes bfloat16 --rounds 3 --steps 20",
        ],
        run=late(
            lambda: importlib.import_module("dataparallel.tools.bench.kernels"), extra="tools"
        ),
    )
    add = parser.add_argument
    add("--kernels", type=names_in(KERNELS), default=list(KERNELS), metavar="LIST",
        help=f"{','.join(KERNELS)}; default: all")  # fmt: skip
    add("--sizes", type=sizes, default=None, metavar="LIST",
        help="of each input of reduce_add, of all tensors of a list; "
        "default: 64KiB to 256MiB by factors of 4; on the CPU "
        f"{SIZES_ON_CPU}")  # fmt: skip
    add("--dtypes", type=names_in(list(DTYPES)), default=list(DTYPES), metavar="LIST",
        help=f"of the tensors; default: {','.join(DTYPES)}")  # fmt: skip
    add("--device", default=None, metavar="DEVICE",
        help="for example 0 or cpu; default: the first accelerator, or the CPU")  # fmt: skip
    add("--footprint", type=_size, default=FOOTPRINT, metavar="SIZE",
        help="of the sets of buffers that each contestant goes round, to find nothing in caches; "
        f"default: {FOOTPRINT // 2**20}MiB, in 64 sets at most")  # fmt: skip
    add("--rounds", type=count, default=11, metavar="N",
        help="turns of each contestant; default: 11")  # fmt: skip
    add("--steps", type=count, default=None, metavar="N",
        help="calls per turn; default: about 5 ms' worth, 3 to 50")  # fmt: skip
    add(
        "--json", metavar="FILE", help="write all figures and conclusions to FILE, or to - (stdout)"
    )
    add("--plot", metavar="FILE", help="draw bytes per second over bytes moved, for example "
        "rates.png; needs matplotlib")  # fmt: skip
    add("--check", action="store_true",
        help="exit with status 1 if a bar is missed; only on a device with kernels")  # fmt: skip


def _size(text: str) -> int:
    return max(sizes(text))
