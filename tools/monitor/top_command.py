"""What `monitor top` does: a live view of devices, replicas and processes.

In a terminal it is drawn over and over in the same place, until a key ends it. In a pipe, and for a
terminal that cannot do that, it is printed again for every sample.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.live import Live

from dataparallel.monitor.readings.reading import Sample, json_text
from dataparallel.monitor.readings.sampler import Sampler
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.opening import SOURCES, open_sampler
from dataparallel.tools.monitor.signals import handled
from dataparallel.tools.monitor.view import View

#: Between the two samples of --once, at most; rates need two.
_SHORT = 0.25
#: Of samples that come faster than they are shown, so many of the last are.
_MOST_ARRIVED = 600
#: A key is answered, and a new size of the terminal is seen, within so many seconds.
_TICK = 0.1


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
        # Not the console's own answer, which FORCE_COLOR changes for pipes too.
        if sys.stdout.isatty() and not console.is_dumb_terminal and not arguments.once:
            run_live(sampler, console)
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


def run_live(sampler: Sampler, console: Console) -> None:
    """Show the view until q is pressed, or Ctrl-C; then the terminal is as it was before.

    Args:
        sampler: What is shown; it is closed.
        console: The terminal.

    Raises:
        RuntimeError: Sampling has failed.
    """
    view = View(interval=sampler.interval, fits_screen=True)
    live = Live(
        view,
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    arrived: deque[Sample] = deque(maxlen=_MOST_ARRIVED)
    received: list[int] = []
    # A polite kill, and the terminal's window that is closed. What is ignored stays so: nohup
    # wants it.
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [
        n for n in map(signal.Signals.__getitem__, names) if signal.getsignal(n) != signal.SIG_IGN
    ]
    with contextlib.ExitStack() as stack:
        # Ctrl-C is the usual way to end it where there is no keyboard.
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        stack.enter_context(handled(numbers, lambda number, frame: received.append(number)))
        key = stack.enter_context(keyboard())
        stack.enter_context(live)
        # A reading that hangs must not keep anybody from leaving.
        background = stack.enter_context(BackgroundSampler(sampler, arrived.extend, patience=1.0))
        view.tell("Ctrl-C quits" if key is None else "q quits")
        _show(view, arrived, background, key, live, received)


def _show(
    view: View,
    arrived: deque[Sample],
    background: BackgroundSampler,
    key: Callable[[float], str] | None,
    live: Live,
    received: list[int],
) -> None:
    drawn: object = None
    num_shown = 0
    while not received:
        # Asked first: what came before the end is still to be shown.
        has_ended = background.has_ended
        while arrived:
            view.add(arrived.popleft())
            num_shown += 1
        if has_ended:
            view.tell("the end" if key is None else "the end; q quits")
        if drawn != (num_shown, has_ended, live.console.size):
            drawn = (num_shown, has_ended, live.console.size)
            live.refresh()
        if key is None:
            if has_ended:
                return
            time.sleep(_TICK)
        elif key(_TICK) in ("q", "Q"):
            return
    raise SystemExit(128 + received[0])


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], str] | None]:
    """Within the ``with`` block the terminal gives keys as they are pressed, without echo.

    Yields:
        Waits so many seconds at most and returns the key that is pressed, or nothing. None where
        the input is no terminal, or the system has no termios. Ctrl-C still sends its signal.
    """
    try:
        import termios
        import tty

        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (ModuleNotFoundError, AttributeError, OSError, ValueError, termios.error):
        yield None
        return

    def wait(seconds: float) -> str:
        if not select.select([file], [], [], seconds)[0]:
            return ""
        try:
            # The whole sequence of a special key, such as an arrow.
            pressed = os.read(file, 64)
        except OSError:
            pressed = b""
        # Of a terminal that is gone no key comes any more.
        return pressed.decode(errors="replace") or "q"

    tty.setcbreak(file)
    try:
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
