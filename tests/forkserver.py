"""Processes that start in a moment: forked from one that has imported torch, and has done nothing.

To start a process anew and to import torch takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from multiprocessing.context import ForkServerContext, SpawnContext

# The imports of the functions of most tests. An optimizer imports the compiler; that alone takes
# longer than all the others.
_IMPORTED = ["tests.cluster", "tests.kernels.host_backend", "torch._dynamo", "hypothesis", "pytest"]


def context() -> ForkServerContext | SpawnContext:
    """Return the maker of processes in a test: a server, or new ones if a fork is not safe."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_IMPORTED)
    return made


def fork() -> int:
    """``os.fork()``, of which Python 3.12 warns where other threads run.

    The child of a test uses none of their locks, or is there to show that this is no harm.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        return os.fork()
