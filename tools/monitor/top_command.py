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
from dataparallel.tools.monitor import bars
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
    is_live = arguments.source in SOURCES
    console = Console(highlight=False, no_color=arguments.no_color or None)
    # Keys come from the input, and textual draws on the third one.
    streams = (keys := sys.__stdin__, sys.__stdout__, sys.__stderr__)
    is_terminal = all(stream is not None and stream.isatty() for stream in streams)
    is_app = is_terminal and not (console.is_dumb_terminal or arguments.once or arguments.json)
    encoding = getattr(sys.__stderr__ if is_app else sys.stdout, "encoding", None) or "utf-8"
    changed = {"ascii": arguments.ascii or b"?" in "█⣿".encode(encoding, "replace")}
    changed |= {"interval": interval, "speed": speed}
    options = argparse.Namespace(**{**vars(arguments), **changed})
    if keys is not None and is_app:
        with TimelyEnd(keys) as end, open_sampler(options) as sampler:
            return run_app(sampler, end, options, is_live=is_live)
    with open_sampler(options) as sampler:
        samples: Iterable[Sample] = sampler.samples()
        if arguments.once and is_live:
            samples = itertools.islice(samples, 2)
        view = View()
        if arguments.json:
            for sample in deque(samples, maxlen=1) if arguments.once else samples:
                print(json_text(sample.to_json()), flush=True)
            return 0
        for number, sample in enumerate(samples):
            view.add(sample)
            if not arguments.once:
                print("\n" if number else "", end="")
                _print(view, console, encoding, in_ascii=options.ascii)
    if arguments.once:
        _print(view, console, encoding, in_ascii=options.ascii)
    return 0


def _print(view: View, console: Console, encoding: str, *, in_ascii: bool) -> None:
    # Printed by Python, so that an output that is full or gone fails as for all commands.
    with console.capture() as captured:
        console.print(view)
    text = bars.in_ascii(captured.get()) if in_ascii else captured.get()
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def run_app(sampler: Sampler, end: TimelyEnd, options: argparse.Namespace, *, is_live: bool) -> int:
    """Show the view until q is pressed, or Ctrl-C; then the terminal is as it was before.

    Raises:
        RuntimeError: Sampling has failed.
        SystemExit: A signal has ended it.
    """
    # Printing needs no textual.
    with needs_extra("monitor"):
        from textual.filter import NoColor

        from dataparallel.tools.monitor.top_app import TopApp
        from dataparallel.tools.monitor.top_widgets import Ascii

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
            read_only=options.read_only,
            line_filters=[Ascii()] * options.ascii + [NoColor()] * options.no_color,
        )
        app.run()
    if end.received:
        raise SystemExit(128 + end.received[0])
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
