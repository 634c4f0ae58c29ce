"""The command `monitor top`: a live view of devices, replicas and processes.

In a terminal it answers to keys and mouse, see :mod:`dataparallel.tools.monitor.top_app`. In a
pipe, and for a terminal that cannot do that, it is printed again for every sample.
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import sys
from collections import deque
from collections.abc import Iterable

from rich.console import Console

from dataparallel.errors import needs_extra
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.opening import SOURCES, open_sampler
from dataparallel.tools.monitor.signals import handled
from dataparallel.tools.monitor.view import View

#: Between the two samples of --once, at most; rates need two.
_SHORT = 0.25
#: If samples come faster than they are shown, so many of the last are kept.
_MOST_ARRIVED = 600


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    interval, speed = arguments.interval, arguments.speed
    if arguments.once:
        # Nobody waits for a recording of which only the end is shown.
        interval, speed = min(interval, _SHORT), math.inf
    changed = {**vars(arguments), "interval": interval, "speed": speed}
    with open_sampler(argparse.Namespace(**changed)) as sampler:
        samples: Iterable[Sample] = sampler.samples()
        if arguments.once and arguments.source in SOURCES:
            samples = itertools.islice(samples, 2)
        if arguments.json:
            for sample in deque(samples, maxlen=1) if arguments.once else samples:
                print(json_text(sample.to_json()), flush=True)
            return 0
        console = Console(highlight=False)
        # Keys come from the input, and textual draws on the third one.
        streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
        is_terminal = all(stream is not None and stream.isatty() for stream in streams)
        if is_terminal and not console.is_dumb_terminal and not arguments.once:
            is_live = arguments.source in SOURCES
            return run_app(sampler, is_live=is_live, read_only=arguments.read_only)
        print_views(samples, View(), console, only_last=arguments.once)
    return 0


def print_views(
    samples: Iterable[Sample], view: View, console: Console, *, only_last: bool
) -> None:
    """Print the view for every sample, or once when all have come."""
    for number, sample in enumerate(samples):
        view.add(sample)
        if not only_last:
            print("\n" if number else "", end="")
            _print(view, console)
    if only_last:
        _print(view, console)


def _print(view: View, console: Console) -> None:
    # Printed by Python, so that an output that is full or gone fails as for all commands.
    with console.capture() as captured:
        console.print(view)
    encoding = sys.stdout.encoding or "utf-8"
    print(captured.get().encode(encoding, "replace").decode(encoding), end="", flush=True)


def run_app(sampler: Sampler, *, is_live: bool, read_only: bool) -> int:
    """Show the view until q is pressed, or Ctrl-C; then the terminal is as it was before.

    Raises:
        RuntimeError: Sampling has failed.
        SystemExit: A signal has ended it.
    """
    # Printing needs no textual.
    with needs_extra("monitor"):
        from dataparallel.tools.monitor.top_app import TopApp

    arrived: deque[Sample] = deque(maxlen=_MOST_ARRIVED)
    received: list[int] = []
    # Ctrl-C from elsewhere, a polite kill, and the terminal's window that is closed. An ignored
    # signal stays so: nohup wants it.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [one for one in signals if signal.getsignal(one) != signal.SIG_IGN]
    with (
        handled(numbers, lambda number, frame: received.append(number)),
        # A reading that hangs must not keep anybody from leaving.
        BackgroundSampler(sampler, arrived.extend) as background,
    ):
        app = TopApp(
            View(interval=sampler.interval),
            arrived,
            lambda: background.has_ended,
            received,
            is_live=is_live,
            read_only=read_only,
        )
        app.run()
    if app.failure is not None:
        raise app.failure
    if received and received[0] != signal.SIGINT:
        raise SystemExit(128 + received[0])
    return app.return_code or 0
