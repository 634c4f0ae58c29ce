"""The start of a part that is a file of this folder, and the parts' tables.

Run as ``python -m tests.gpu.report.subject NAME --devices cuda:0,cuda:1``. Functions of a part run
in other processes, too, so none of them may be in a main module.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from dataparallel import devices
from tests.cluster import VIRTUAL_DEVICES, Cluster
from tests.gpu.report.run import NOT_RUN


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a part; each uses some of them."""
    parser = argparse.ArgumentParser(prog="tests.gpu.report.subject")
    add = parser.add_argument
    add("subject", choices=["links", "hybrid", "faults", "training", "speed", "step"])
    add("--devices", required=True, type=lambda text: text.split(","))
    add("--shape", default="1x1", help="processes x devices of each, for example 2x4")
    add("--how", choices=["raised", "killed"], default="raised")
    add("--millions", type=int, default=25, help="parameters in millions")
    add("--dtype", default="float32")
    add("--counts", default="1,2,4,8", help="numbers of devices")
    add("--eager", action="store_true", help="nothing compiled, nothing recorded in graphs")
    return parser.parse_args(argv)


def stop(why: str) -> NoReturn:
    """End a part that cannot run here."""
    print(f"not run: {why}", flush=True)
    raise SystemExit(NOT_RUN)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of figures, and hand it to the page."""
    print(title, *(" | ".join(map(str, row)) for row in (head, *rows)), sep="\n", flush=True)
    if path := os.environ.get("GPU_REPORT_FIGURES"):
        with open(path, "a", encoding="utf-8") as file:
            entry = {"title": title, "head": list(head), "rows": [list(row) for row in rows]}
            file.write(json.dumps(entry, default=str) + "\n")


def kind(names: Sequence[str]) -> str:
    """Return the type of the devices: "cuda", "virtual" or "cpu"."""
    return torch.device(names[0]).type


def backend(names: Sequence[str]) -> str:
    """Return the backend of a group: NCCL's for GPUs, the tests' own for virtual devices."""
    return {"cuda": "cpu:gloo,cuda:nccl", "virtual": "cpu:gloo,virtual:vccl"}.get(
        kind(names), "gloo"
    )


def in_processes(
    function: Callable[..., Any], size: int, names: Sequence[str], *args: object, **options: Any
) -> list[Any]:
    """Call ``function(rank, size, names, *args)`` in processes that form a group."""
    virtual = kind(names) == "virtual"
    if virtual:
        # The server that forks the processes must not have enabled them.
        highest = max(torch.device(name).index for name in names)
        os.environ[VIRTUAL_DEVICES] = str(highest + 1)
        os.environ.pop("DATAPARALLEL_VIRTUAL_DEVICES", None)
    cluster = Cluster()
    try:
        return cluster.run(
            function, size, list(names), *args, backend=backend(names), virtual=virtual, **options
        )
    finally:
        cluster.close()


def synchronize(names: Sequence[str]) -> None:
    """Wait for all devices."""
    for name in names:
        devices.synchronize(torch.device(name))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of some figures, with the smallest and the largest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    importlib.import_module(f"tests.gpu.report.{given.subject}").main(given)
