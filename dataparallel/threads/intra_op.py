"""How many intra-op threads the calling thread uses, set for this thread alone.

Note [Intra-op threads of one thread]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.set_num_threads`` has three effects: the OpenMP setting of the calling thread, the default
of threads that start later, and the setting of MKL for the *whole process*. In a replica thread
the last two would change the caller's matrix products and every later thread. So the libraries
that torch has loaded are asked directly, for this thread only: ``omp_set_num_threads`` (by OpenMP's
definition per thread) and MKL's ``MKL_Set_Num_Threads_Local``. ``torch.get_num_threads()`` reads
the OpenMP setting, so it tells the truth in each thread. Where the symbols are not found (another
OpenMP, no OpenMP), replica threads keep the process's setting: right results, more threads than
cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Callable, Iterator

import torch


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    folder = pathlib.Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            # Symbols are looked up in the dependencies too, so this is the OpenMP torch runs on.
            # unsafe-load: a library of torch, which is loaded already
            library = ctypes.CDLL(str(folder / name))
            break
    else:
        return ()
    if not hasattr(library, "omp_set_num_threads"):
        return ()
    found: list[Callable[[int], object]] = []
    for symbol in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(library, symbol):
            function = getattr(library, symbol)
            function.argtypes = [ctypes.c_int]
            function.restype = ctypes.c_int if symbol.startswith("MKL") else None
            found.append(function)
    return tuple(found)


def use_threads(count: int) -> None:
    """Let operations of the calling thread use ``count`` threads, at least 1."""
    # The first query in a thread applies torch's default, which would undo what is set before it.
    if torch.get_num_threads() != count:
        for setter in _setters():
            setter(count)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let element-wise operations of the calling thread use one thread within a ``with`` block.

    For the small copies around a call of CPU replicas. After an operation with several threads,
    OpenMP's threads spin for some milliseconds in case another one follows, and meanwhile they
    would keep replica threads off the cores.
    """
    setters, before = _setters(), torch.get_num_threads()
    if not setters or before == 1:
        yield
        return
    # Not MKL's setting: it is not used here, and setting it back would fix it for this thread.
    try:
        # In here: Ctrl-C may come right after it.
        setters[0](1)
        yield
    finally:
        setters[0](before)
