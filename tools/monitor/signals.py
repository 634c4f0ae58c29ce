"""Signals that commands take note of while they run, and the end that nothing holds up."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TextIO

#: So many seconds a process has to end by itself, once it is asked for that.
_PATIENCE = 1.5
#: The way from mouse, pasting, keys and the second screen back to what a shell expects.
_RESTORED = b"\x1b[?1000;1003;1004;1006;2004;2048l\x1b[<u\x1b[?1049l\x1b[?25h"


@contextlib.contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Within the ``with`` block signals call a function; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class TimelyEnd:
    """A thread that ends the process if a signal, or the loss of its terminal, has not done so.

    Whoever draws on a terminal that is gone may wait for ever, and a driver that hangs as well. The
    second signal ends the process at once.

    Attributes:
        received: The signals that came; SIGHUP also stands for a terminal that is gone.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.received: list[int] = []
        self._terminal = terminal.fileno()
        self._modes = termios.tcgetattr(terminal)
        self._is_over = threading.Event()

    def __enter__(self) -> TimelyEnd:
        threading.Thread(target=self._watch, name="dataparallel-end", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received.append(number)
        if len(self.received) > 1:
            self._end()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._terminal, 0)
        while not self.received and not self._is_over.wait(0.1):
            # A shell, a container or `trap` may have kept the signal from this process.
            if any(event & select.POLLHUP for _, event in poll.poll(0)):
                self.received.append(signal.SIGHUP)
        if not self._is_over.wait(_PATIENCE):
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._modes)
            # Nobody may read what is written.
            os.set_blocking(self._terminal, False)
            try:
                os.write(self._terminal, _RESTORED)
            finally:
                os.set_blocking(self._terminal, True)
        os._exit(128 + self.received[0])
