"""The `bench` subcommand, which groups one benchmark per subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.bench import autograd, collectives, kernels, reducer, train

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers


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
    train.add_to(subjects)
    reducer.add_to(subjects)
    collectives.add_to(subjects)
    autograd.add_to(subjects)
    kernels.add_to(subjects)
