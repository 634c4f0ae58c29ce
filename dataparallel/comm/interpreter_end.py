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
from types import FrameType

import torch

#: Greatest number of seconds for which the end of the interpreter is held up.
PATIENCE = 5.0
# Between two looks at what the threads do.
_LOOK = 0.002

_OURS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), torch.__file__)
)

_working: set[int] = set()
_parked: set[int] = set()
_ending = False
_registered = False


def come_by() -> None:
    """Tell that this thread works, and wait for ever if the interpreter ends.

    The main thread may go on: it is the one that runs what others have registered for the end.

    Example::

        def forward(self, x):
            come_by()
            ...
    """
    start()
    thread = threading.get_ident()
    if _ending and thread != threading.main_thread().ident:
        _parked.add(thread)
        gate = threading.Lock()
        gate.acquire()
        gate.acquire()


def start() -> None:
    """Tell that this thread works: the end waits while it is inside of torch or of this package."""
    if not _registered:
        _register()
    thread = threading.get_ident()
    if thread not in _working and thread != threading.main_thread().ident:
        _working.add(thread)


def stop() -> None:
    """Tell that this thread works no longer."""
    _working.discard(threading.get_ident())


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
    threads = _working - _parked - {threading.get_ident()}
    return any(_is_inside(frames.get(thread)) for thread in threads)


def _is_inside(frame: FrameType | None) -> bool:
    """Whether a thread is in a call of torch or of this package; not one that has ended."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _after_fork() -> None:
    # The other threads exist in the parent alone.
    _working.clear()
    _parked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
