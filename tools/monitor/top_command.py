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
from dataparallel.tools.monitor.signals import TimelyEnd, handled
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
    options = argparse.Namespace(**{**vars(arguments), "interval": interval, "speed": speed})
    is_live = arguments.source in SOURCES
    console = Console(highlight=False)
    # Keys come from the input, and textual draws on the third one.
    streams = (keys := sys.__stdin__, sys.__stdout__, sys.__stderr__)
    is_terminal = all(stream is not None and stream.isatty() for stream in streams)
    is_app = is_terminal and not (console.is_dumb_terminal or arguments.once or arguments.json)
    if keys is not None and is_app:
        with TimelyEnd(keys) as end, open_sampler(options) as sampler:
            return run_app(sampler, end, is_live=is_live, read_only=arguments.read_only)
    with open_sampler(options) as sampler:
        samples: Iterable[Sample] = sampler.samples()
        if arguments.once and is_live:
            samples = itertools.islice(samples, 2)
        if arguments.json:
            for sample in deque(samples, maxlen=1) if arguments.once else samples:
                print(json_text(sample.to_json()), flush=True)
        else:
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


def run_app(sampler: Sampler, end: TimelyEnd, *, is_live: bool, read_only: bool) -> int:
    """Show the view until q is pressed, or Ctrl-C; then the terminal is as it was before.

    Raises:
        RuntimeError: Sampling has failed.
        SystemExit: A signal has ended it.
    """
    # Printing needs no textual.
    with needs_extra("monitor"):
        from dataparallel.tools.monitor.top_app import TopApp

    arrived: deque[Sample] = deque(maxlen=_MOST_ARRIVED)
    # Ctrl-C from elsewhere, a polite kill, and the terminal's window that is closed. An ignored
    # signal stays so: nohup wants it.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [one for one in signals if signal.getsignal(one) != signal.SIG_IGN]
    with (
        handled(numbers, end.receive),
        # A reading that hangs must not keep anybody from leaving.
        BackgroundSampler(sampler, arrived.extend) as background,
    ):
        app = TopApp(
            View(interval=sampler.interval),
            arrived,
            lambda: background.has_ended,
            end.received,
            is_live=is_live,
            read_only=read_only,
        )
        app.run()
    if end.received:
        raise SystemExit(128 + end.received[0])
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
