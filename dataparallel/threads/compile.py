"""Replicas in which something is compiled with ``torch.compile``.

Note [Compiling alone]
~~~~~~~~~~~~~~~~~~~~~~
While one thread compiles, a flag of ``torch.fx`` makes compiled functions raise that other threads
call. Methods of ``nn.Module`` are patched, and ``torch.compiler.is_compiling()`` is true for
everybody. So whoever compiles holds the lock alone that running replicas share, see Note [State of
the process] in ``threads/exclusive.py``. The lock here stands in the place of torch's own lock,
which only keeps two threads from compiling at the same time.

Whoever compiles in the thread of a replica gets torch's own random generators, since the compiler
draws from them and restores their states. Backward is compiled together with forward: the threads
of several devices may come to it at the same time.

Note [Compiled one after another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If all replicas came to compile at the same time, each would compile the same thing for itself. So
in the first calls of a kind (types of the modules, modes of torch) the replicas run one after
another. Replica 0 compiles, and the others find it done. They run at the same time after a call
that compiled nothing: then all is compiled, or what was compiled takes any size. A replica that
compiles even so does it alone, and the next call starts over.

The order only saves work: a replica starts anyway if the one before it waits for others, or takes
long. A forward that is itself the first in the process to call ``torch.compile`` has none of this.
But functions that were compiled with CUDA graphs (``mode="reduce-overhead"``) have one set of them
for each device. So replicas that share a device run one after another for good.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.threads import exclusive
from dataparallel.threads import random as replica_random

# The reason for which a thread holds the lock.
_REASON = "what torch.compile sets while it compiles"
# The compiler looks for gradients of parameters, which those of a clone do not have themselves.
_GRAD_OF_ALIAS = "The .grad attribute of a Tensor that is not a leaf"


# --- the lock --------------------------------------------------------------------------------


class CompileLock:
    """Torch's lock of its compiler, held together with the lock that replicas share.

    See Note [Compiling alone].
    """

    def __init__(self) -> None:
        #: Torch's own, once this stands in its place.
        self.torchs: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget what other threads compile, as in a forked child, where they are gone."""
        self._installing = threading.Lock()
        # The contexts that end each compilation of the owner.
        self._ends: list[AbstractContextManager[None]] = []

    def install(self) -> None:
        """Stand in the place of torch's lock."""
        with self._installing:
            if self.torchs is None:
                torch_internals.keep_guard_of_compiler()
                torch_internals.move_entries_of_compiler(False)
                torch_internals.hand_on_contexts_for_any_thread()
                self.torchs = torch_internals.replace_compile_lock(self)
        # A thread that compiles now ends that first.
        with self.torchs:
            pass

    def __enter__(self) -> None:
        """Take the lock alone, to compile; may be nested."""
        alone = self._alone()
        alone.__enter__()
        self._ends.append(alone)

    def __exit__(self, *_: object) -> None:
        self._ends.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (
            exclusive.lock.alone(_REASON) as work,
            self.torchs,
            work.compiling() if isinstance(work, ParallelCall) else contextlib.nullcontext(),
        ):
            yield


#: The lock of this process.
lock = CompileLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lock.reset)

# --- calls in which something is compiled ----------------------------------------------------


@dataclass(eq=False)
class ParallelCall:
    """One call of several replicas in which compiled code may be called."""

    num_devices: int
    #: True if the replicas are to run one after another.
    in_turn: bool
    #: The CUDA graphs of the calling thread, which its replicas use.
    graphs: dict[str, Any]
    #: True if a replica came to compile.
    has_compiled: bool = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """While a replica compiles."""
        self.has_compiled = True
        with (
            # The key of the generators stays, as compiled code asks which keys are switched on.
            replica_random.drawing.using(lambda device: None),
            torch_internals.settings_of_compiler(self.num_devices),
            torch_internals.first_calls_without_search(),
            torch_internals.kernels_beside_others(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", _GRAD_OF_ALIAS)
            yield


@contextlib.contextmanager
def compiled_call(
    calls: Sequence[Callable[[], Any]], num_devices: int, quiet: set[Hashable], *, concurrent: bool
) -> Iterator[ParallelCall]:
    """Run one call of the replicas, at the same time if they are ``concurrent``.

    ``quiet`` has the kinds of calls that compile nothing; see Note [Compiled one after another].
    """
    if lock.torchs is None:
        lock.install()
    kind = _kind_of(calls[0]) if concurrent else None
    graphs = torch_internals.graphs_of_compiler() if concurrent else {}
    one_by_one = kind not in quiet or (any(graphs.values()) and num_devices < len(calls))
    call = ParallelCall(num_devices, kind is not None and one_by_one, graphs)
    with torch_internals.settings_of_calls_kept():
        yield call
    if call.has_compiled:
        quiet.discard(kind)
    else:
        quiet.add(kind)


def _kind_of(call: Callable[[], Any]) -> Hashable:
    """Return what makes calls alike; None if nothing in the call can be compiled."""
    parts = (call.func, *call.args) if isinstance(call, functools.partial) else ()
    modules = tuple((type(m), m.training) for m in parts if isinstance(m, nn.Module))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (modules, *modes) if modules else None
