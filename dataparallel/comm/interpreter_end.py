"""The end of the interpreter while other threads are still at work.

Note [Threads at the end]
~~~~~~~~~~~~~~~~~~~~~~~~~
Before Python 3.14, a daemon thread that wants to go on in Python while the interpreter ends is
ended by the C library there and then. Where it comes out of an operation of torch, that ends the
process: ``terminate called without an active exception``, exit status 134. A thread that only waits
is left alone, and is simply gone with the process.

So the end of the interpreter waits as long as a thread that has called this package is inside of
torch or of this package. Replicas end what they do, and callers stop for ever when they next come
by. What takes longer than ``PATIENCE`` will hardly come out of torch in the time that is left.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType

import torch

#: Greatest number of seconds for which the end of the interpreter is held up.
PATIENCE = 5.0
# Between two looks at what the threads do.
_LOOK = 0.002

_OURS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), torch.__file__)
)

#: The threads that work, and for each the function of ours in which it rests, if it has one.
working: dict[int, CodeType | None] = {}
#: Whether the interpreter ends.
is_ending = False


def come_by() -> None:
    """Tell that this thread works, and wait for ever if the interpreter ends.

    The main thread may go on: it is the one that runs what others have registered for the end.
    """
    if not is_ending:
        start()
    elif threading.current_thread() is not threading.main_thread():
        gate = threading.Lock()
        gate.acquire()
        gate.acquire()


def start(rests_in: CodeType | None = None) -> None:
    """Tell that this thread works: the end waits while it is inside of torch or of this package."""
    _register()
    working[threading.get_ident()] = rests_in


def stop() -> None:
    """Tell that this thread works no longer: another one may get its number."""
    working.pop(threading.get_ident(), None)


def run_beside(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that works."""

    def run() -> None:
        start()
        try:
            work()
        finally:
            stop()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@functools.cache
def _register() -> None:
    # At the first use: what was registered before, by this package for one, comes after it. So do
    # finalizers, whose one entry is made with the first of them.
    weakref.finalize(wait_for_threads, int).detach()
    atexit.register(wait_for_threads)


def wait_for_threads() -> None:
    """Wait until no other thread is inside of torch or of this package, but not for long."""
    global is_ending
    is_ending = True
    deadline = time.monotonic() + PATIENCE
    idle_looks = 0
    # One look may meet a thread between two calls.
    while idle_looks < 3 and time.monotonic() < deadline:
        idle_looks = 0 if _is_any_inside() else idle_looks + 1
        time.sleep(_LOOK)


def _is_any_inside() -> bool:
    frames = sys._current_frames()
    for thread, rests_in in list(working.items()):
        frame = frames.get(thread)
        # One that has ended has no frame.
        rests = frame is None or frame.f_code in (rests_in, come_by.__code__)
        while frame is not None and not rests and thread != threading.get_ident():
            if frame.f_code.co_filename.startswith(_OURS):
                return True
            frame = frame.f_back
    return False


if hasattr(os, "register_at_fork"):
    # The other threads exist in the parent alone.
    os.register_at_fork(after_in_child=working.clear)
