"""The `doctor` subcommand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command, count, late, positive
from dataparallel.tools.doctor import accelerators, basics, free_threading, kernels
from dataparallel.tools.doctor.check import Check, Probe

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "doctor",
        summary="Show devices, drivers, compilers and extras, and what to do about missing ones.",
        examples=[
            "dataparallel doctor",
            "dataparallel doctor --json > machine.json",
            "dataparallel doctor --fits train.py:make_model    # which mode has room for it",
            "dataparallel doctor --fits train.py:Net --gpus 4 --memory 24GiB",
            "dataparallel doctor --fits train.py:Net --optimizer sgd:momentum=0.9 --dtype bfloat16",
        ],
        run=_run,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--fits", metavar="FILE:NAME",
        help="instead, show which mode of training has room for the module that a function without "
        "arguments, or a class, of this file makes; it is built on the meta device")  # fmt: skip
    add("--gpus", type=count, metavar="N", help="devices; default: those of this machine")
    add("--memory", type=_memory, metavar="SIZE",
        help="of each device, as 24GiB or 80GB; default: that of this machine's")  # fmt: skip
    add("--optimizer", default="adamw", metavar="NAME",
        help="of torch.optim, also with arguments: sgd:momentum=0.9; default: adamw")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the parameters; default: as the module has them")  # fmt: skip


def _memory(text: str) -> int:
    """Convert a size such as ``24GiB``, ``80GB`` or a number of bytes."""
    number, power = text.strip().lower().removesuffix("b"), 1000
    if number.endswith("i"):
        number, power = number[:-1], 1024
    exponent = " kmgt".find(number[-1:]) if number[-1:].isalpha() else 0
    if exponent < 0 or (power == 1024 and not exponent):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size such as 24GiB or 80GB")
    scale: int = power**exponent
    return round(positive(number[:-1] if exponent else number) * scale)


def examine(probe: Probe | None = None) -> list[Check]:
    """Run all checks.

    Args:
        probe: How to look at the machine. Default: for real.

    Returns:
        One record per finding, in the order in which they are shown.
    """
    probe = probe or Probe()
    return [
        basics.python(probe),
        basics.torch(probe),
        basics.threads(probe),
        free_threading.interpreter_lock(probe),
        *accelerators.devices(probe),
        accelerators.driver(probe),
        *accelerators.peer_access(probe),
        *accelerators.copies(probe),
        accelerators.nccl(probe),
        *kernels.kernels(probe),
        *accelerators.virtual_devices(probe),
        *basics.extras(probe),
        accelerators.gpu_packages(probe),
    ]


def exit_status(checks: Sequence[Check]) -> int:
    """1 if the package cannot work on this machine, else 0."""
    return int(any(check.essential and check.status == "problem" for check in checks))


def _fits() -> ModuleType:
    from dataparallel.tools.doctor import fits

    return fits


def _run(arguments: argparse.Namespace) -> int:
    if arguments.fits:
        status: int = late(_fits, extra="tools")(arguments)
        return status
    checks = examine()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        show(checks)
    return exit_status(checks)


def show(checks: Sequence[Check]) -> None:
    """Print the findings and a closing line; this needs no optional package."""
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            print(group)
        first, *more = check.detail.splitlines()
        print(f"  {check.status:8} {check.name:18} {first}")
        for line in (*more, *([f"do: {check.remedy}"] if check.remedy else [])):
            print(f"{'':30}{line}")
    problems = [check for check in checks if check.status == "problem"]
    names = ", ".join(check.name for check in problems)
    if exit_status(checks):
        broken = ", ".join(check.name for check in problems if check.essential)
        print(f"dataparallel cannot work here: {broken}")
    elif problems:
        print(f"dataparallel works; look at: {names}")
    else:
        print("dataparallel works on this machine")
