"""The end of the interpreter while threads of this package are still at work.

Note [Threads at the end]
~~~~~~~~~~~~~~~~~~~~~~~~~
Before Python 3.14, a daemon thread that wants to go on in Python while the interpreter ends is
ended by the C library there and then. If it comes out of an operation of torch, that ends the
process: ``terminate called without an active exception``, exit status 134. So the end waits for our
threads that are at work. A thread that only waits is left alone, and is simply gone with the
process. One that takes longer than ``PATIENCE`` will hardly come out of torch in the remaining
time.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import time
from collections.abc import Callable

#: Greatest number of seconds for which the end of the interpreter is held up.
PATIENCE = 5.0

#: Our threads that are at work.
working: set[threading.Thread] = set()


def run_beside(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that works until it ends."""

    def run() -> None:
        try:
            work()
        finally:
            working.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    working.add(thread)
    start_thread(thread)
    return thread


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that has no context variables of the caller.

    Without the interpreter's lock a thread takes them over, and keeps what is in them for life.
    """
    contextvars.Context().run(thread.start)


@atexit.register
def _wait_for_threads() -> None:
    deadline = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in list(working)) and time.monotonic() < deadline:
        time.sleep(0.002)
