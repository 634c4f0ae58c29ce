"""The view in a terminal, until a key ends it; or printed again and again where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.keys import Keys
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.signals import handled
from dataparallel.tools.monitor.view import View

#: Of samples that come faster than they are shown, so many of the last are.
_MOST_ARRIVED = 600
#: A key is answered, and a new size of the terminal is seen, within so many seconds.
_TICK = 0.1
#: Signals that end it: a polite kill, and the terminal's window that is closed.
_ENDING = {getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)}


def is_live(console: Console) -> bool:
    """Whether the view can be drawn over and over in the same place."""
    # Not the console's own answer, which FORCE_COLOR changes for pipes too.
    return sys.stdout.isatty() and not console.is_dumb_terminal


def show(sampler: Sampler, console: Console, once: Iterable[Sample] | None) -> None:
    """Show what a sampler sees: live in a terminal, printed again and again where there is none.

    Args:
        sampler: What is shown.
        console: The terminal, or what stands for it.
        once: The samples of which one view is printed instead.
    """
    if once is None and is_live(console):
        run_live(sampler, console)
        return
    view = View(interval=sampler.interval if once is None else None)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if once is not None:
        for sample in once:
            view.add(sample)
        print_view(view, console, write)
        return
    for number, sample in enumerate(sampler.samples()):
        view.add(sample)
        write("\n" if number else "")
        print_view(view, console, write)


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
    # Ctrl-C is the usual way to end it where there is no keyboard.
    with contextlib.suppress(KeyboardInterrupt), _signals() as received, Keys(sys.stdin) as keys:
        view.tell("q quit" if keys.active else "Ctrl-C quits")
        arrived: deque[Sample] = deque(maxlen=_MOST_ARRIVED)
        # A reading that hangs must not keep anybody from leaving.
        with live, BackgroundSampler(sampler, arrived.extend, patience=1.0) as background:
            _show(view, arrived, background, keys, live, received)


def _show(
    view: View,
    arrived: deque[Sample],
    background: BackgroundSampler,
    keys: Keys,
    live: Live,
    received: set[int],
) -> None:
    last: Sample | None = None
    drawn: tuple[object, ...] = ()
    while True:
        # Asked first: what came before the end is still to be shown.
        has_ended = background.has_ended
        while arrived:
            last = arrived.popleft()
            view.add(last)
        if has_ended:
            view.tell("the end; q quits" if keys.active else "the end")
        state = (id(last), has_ended, live.console.size)
        if state != drawn:
            drawn = state
            live.refresh()
        if keys.wait(_TICK) in ("q", "Q"):
            return
        ending = received & _ENDING
        if ending:
            raise SystemExit(128 + min(ending))
        if has_ended and not keys.active:
            return
        if received:
            received.clear()
            _suspend(keys, live)


def _suspend(keys: Keys, live: Live) -> None:
    """Stop as Ctrl-Z wants it, with the terminal in order meanwhile."""
    live.stop()
    keys.leave()
    os.kill(os.getpid(), signal.SIGSTOP)
    keys.enter()
    live.start(refresh=True)


@contextlib.contextmanager
def _signals() -> Iterator[set[int]]:
    """Within the ``with`` block signals that end or stop are noted, and do nothing else."""
    received: set[int] = set()
    numbers = {*_ENDING, *([signal.SIGTSTP] if hasattr(signal, "SIGTSTP") else [])}

    def note(number: int, frame: FrameType | None) -> None:
        received.add(number)

    # What is ignored stays so: nohup wants it.
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    with handled(wanted, note):
        yield received


def print_view(view: View, console: Console, write: Callable[[str], object]) -> None:
    """Print the view once, as long as it is.

    Args:
        view: What is known.
        console: How it looks.
        write: Gets the text.
    """
    with console.capture() as captured:
        console.print(view)
    write(captured.get())
