"""Differences of a Python that can run without the interpreter's lock."""

from __future__ import annotations

import gc
import sys

#: True if this Python can run without the interpreter's lock, be that on or off.
FREE_THREADED = "t" in getattr(sys, "abiflags", "")
#: Sizes of the parameters by which peaks of memory are higher, since objects die later.
LATER = 0.25 if FREE_THREADED else 0.0


def settle() -> None:
    """Let objects die that threads have dropped which had not made them.

    A free-threaded Python leaves that to the threads that made them, which may wait for work. Such
    an object may hold another one. Elsewhere this does nothing, and no garbage is collected.
    """
    for _ in range(3 * FREE_THREADED):
        gc.collect()
