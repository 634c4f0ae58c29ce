"""The `doctor` subcommand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.doctor import accelerators, basics, kernels
from dataparallel.tools.doctor.check import Check, Probe

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "doctor",
        summary="Show devices, drivers, compilers and extras, and what to do about missing ones.",
        examples=["dataparallel doctor", "dataparallel doctor --json > machine.json"],
        run=_run,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


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


def _run(arguments: argparse.Namespace) -> int:
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
