"""The end of the interpreter while other threads are still at work.

Note [Threads at the end]
~~~~~~~~~~~~~~~~~~~~~~~~~
Before Python 3.14, a daemon thread that wants to go on in Python while the interpreter ends is
ended by the C library there and then; where it comes out of an operation of torch, that ends the
process: ``terminate called without an active exception``, exit status 134. A thread that only waits
is left alone, and simply gone with the process.

So at the end of the interpreter, the threads that call this package wait in the next place where
they come by (:func:`come_by`), for ever; replicas and workers end what they do. The end waits for
that, as long as such a thread is inside of torch or of this package. It does not wait longer than
``PATIENCE``: what takes so long will hardly come out of torch in the short time that is left.
"""

from __future__ import annotations

import atexit
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

# The threads that work, and for each the function of ours in which it rests, if it has one.
_working: dict[int, CodeType | None] = {}
_ending = False
_registered = False


def come_by() -> None:
    """Tell that this thread works, and wait for ever if the interpreter ends.

    The main thread may go on: it is the one that runs what others have registered for the end.
    """
    thread = threading.get_ident()
    if thread not in _working:
        start()
    if _ending and thread != threading.main_thread().ident:
        del _working[thread]
        gate = threading.Lock()
        gate.acquire()
        gate.acquire()


def start(rests_in: CodeType | None = None) -> None:
    """Tell that this thread works: the end waits while it is inside of torch or of this package."""
    if not _registered:
        _register()
    _working[threading.get_ident()] = rests_in


def stop() -> None:
    """Tell that this thread works no longer: another one may get its number."""
    _working.pop(threading.get_ident(), None)


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


def _register() -> None:
    # At the first use: what was registered before, by this package for one, comes after it.
    global _registered
    _registered = True
    # Finalizers run at the end, too; their one entry there is made with the first of them.
    weakref.finalize(_wait_for_threads, int).detach()
    atexit.register(_wait_for_threads)


def come_first() -> None:
    """Run before whatever has just been registered for the end of the interpreter."""
    atexit.unregister(_wait_for_threads)
    _register()


def _wait_for_threads() -> None:
    global _ending
    _ending = True
    deadline = time.monotonic() + PATIENCE
    idle_looks = 0
    # One look may meet a thread between two calls.
    while idle_looks < 3 and time.monotonic() < deadline:
        idle_looks = 0 if _is_any_inside() else idle_looks + 1
        time.sleep(_LOOK)


def _is_any_inside() -> bool:
    frames = sys._current_frames()
    for thread, rests_in in list(_working.items()):
        frame = frames.get(thread)
        # One that has ended has no frame.
        rests = frame is None or frame.f_code is rests_in or thread == threading.get_ident()
        while frame is not None and not rests:
            if frame.f_code.co_filename.startswith(_OURS):
                return True
            frame = frame.f_back
    return False


if hasattr(os, "register_at_fork"):
    # The other threads exist in the parent alone.
    os.register_at_fork(after_in_child=_working.clear)
