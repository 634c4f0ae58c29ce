"""The `monitor top` subcommand: a live view of devices, replicas and processes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.opening import SOURCES, add_options, open_sampler
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.output import discard_output

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers
    from dataparallel.tools.monitor.sampler import Sampler

#: Between the two samples of --once, at most; rates need two.
_SHORT = 0.25


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to the command line."""
    parser = add_command(
        commands,
        "top",
        summary="Show what every device, replica and process is doing, until q is pressed.",
        examples=[
            "dataparallel monitor top",
            "dataparallel monitor top --attach auto",
            "dataparallel monitor top --once --json > machine.json",
            "dataparallel monitor top --source run.jsonl --speed 10",
        ],
        run=_run,
    )
    add_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print one view and end; of a recording its last"
    )
    parser.add_argument(
        "--json", action="store_true", help="print samples as JSON, one object per line"
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.once:
        arguments.interval = min(arguments.interval, _SHORT)
        # Nobody waits for a recording of which only the end is shown.
        arguments.speed = math.inf
    sampler = open_sampler(arguments)
    try:
        return _show(sampler, arguments)
    except BrokenPipeError:
        # Whoever reads has read enough.
        discard_output()
        return 0
    except KeyboardInterrupt:
        if arguments.once:
            raise
        # The usual way to end what does not end by itself.
        return 0
    finally:
        sampler.close()


def _show(sampler: Sampler, arguments: argparse.Namespace) -> int:
    last = arguments.source not in SOURCES
    if arguments.json:
        for sample in _chosen(sampler, once=arguments.once, last=last):
            print(json.dumps(sample.to_json()), flush=True)
        return 0
    with needs_extra("monitor"):
        from rich.console import Console

        from dataparallel.tools.monitor.live_view import is_live, print_view, run_live
        from dataparallel.tools.monitor.view import View
    console = Console(highlight=False)
    if is_live(console) and not arguments.once:
        run_live(sampler, console)
        return 0
    view = View(interval=None if arguments.once else sampler.interval)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if arguments.once:
        for sample in _several(sampler, last=last):
            view.add(sample)
        print_view(view, console, write)
        return 0
    for number, sample in enumerate(sampler.samples()):
        view.add(sample)
        write("\n" if number else "")
        print_view(view, console, write)
    return 0


def _chosen(sampler: Sampler, *, once: bool, last: bool) -> Iterator[Sample]:
    """The samples to print: all, or the one that is asked for."""
    if not once:
        yield from sampler.samples()
        return
    yield from deque(_several(sampler, last=last), maxlen=1)


def _several(sampler: Sampler, *, last: bool) -> Iterator[Sample]:
    """The samples of which one is shown: all of a recording, two of what goes on."""
    for number, sample in enumerate(sampler.samples(), start=1):
        yield sample
        if number == 2 and not last:
            return
