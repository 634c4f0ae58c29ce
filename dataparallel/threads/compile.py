"""Replicas in which something is compiled with ``torch.compile``.

Note [Compiling alone]
~~~~~~~~~~~~~~~~~~~~~~
While one thread compiles, a flag of ``torch.fx`` makes compiled functions that other threads call
raise, methods of ``nn.Module`` are patched, and ``torch.compiler.is_compiling()`` is true for
everybody. So the threads of replicas share a lock that whoever compiles holds alone. It stands in
the place of torch's own, which only keeps two threads from compiling at the same time. A thread
that wants the lock alone, or waits for other replicas, gives up its share meanwhile.

Whoever compiles in the thread of a replica gets torch's own random generators, since the compiler
draws from them and restores their states. Backward is compiled together with forward: the threads
of several devices may come to it at the same time.

Note [Compiled one after another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If all replicas came to compile at the same time, each would compile the same thing for itself. So
in the first calls of a kind (types of the modules, modes of torch) the replicas run one after
another: replica 0 compiles, and the others find it done. They run at the same time after a call
that compiled nothing: then all is compiled, or what was compiled takes any size. A replica that
compiles even so does it alone, and the next call starts over.

The order only saves work: a replica starts anyway if the one before it waits for others, or takes
long. A forward that is itself the first in the process to call ``torch.compile`` has none of this.
But what was compiled with CUDA graphs (``mode="reduce-overhead"``) has one set of them for each
device, so replicas that share a device run one after another for good.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.threads import random as replica_random

# Seconds that a replica waits for those that want to compile; they may wait for it themselves.
_PATIENCE = 2.0
# Seconds between two looks around: whether a thread has died, or this one was interrupted.
_LOOK = 0.2
# The compiler looks for gradients of parameters, which those of a clone do not have themselves.
_GRAD_OF_ALIAS = "The .grad attribute of a Tensor that is not a leaf"


# --- the lock --------------------------------------------------------------------------------


class CompileLock:
    """The lock that replicas share and compilers hold alone. See Note [Compiling alone]."""

    def __init__(self) -> None:
        #: Seconds to wait for the replicas to stop, not counting the time in which others compile.
        self.timeout = 300.0
        #: Torch's own, once this stands in its place.
        self.torchs: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget all threads, as in a forked child, where they are gone."""
        self._changed = threading.Condition()
        #: The call of each thread that shares the lock.
        self._running: dict[threading.Thread, ParallelCall] = {}
        # Who compiles, or waits only for replicas, and what ends each of its compilations.
        self._owner: threading.Thread | None = None
        self._ends: list[AbstractContextManager[None]] = []

    def install(self) -> None:
        """Stand in the place of torch's lock."""
        with self._changed:
            if self.torchs is None:
                torch_internals.keep_guard_of_compiler()
                torch_internals.move_entries_of_compiler(False)
                torch_internals.hand_on_contexts_for_any_thread()
                self.torchs = torch_internals.replace_compile_lock(self)
        # Whoever compiles now ends that first.
        with self.torchs:
            pass

    def is_held(self) -> bool:
        """Whether some thread compiles now: it waits for no replica any more."""
        return self._is_wanted() and not self._sharing()

    @contextlib.contextmanager
    def shared(self, call: ParallelCall | None) -> Iterator[ParallelCall | None]:
        """Share the lock within a ``with`` block, in which this thread runs a replica of a call.

        With None the thread only waits for others, which may compile. Yields what it did before.
        """
        before = self._share(call)
        try:
            yield before
        finally:
            self._share(before)

    def _share(self, call: ParallelCall | None) -> ParallelCall | None:
        patience = time.monotonic() + _PATIENCE
        with self._changed:
            before = self._running.pop(threading.current_thread(), None)
            self._changed.notify_all()
            if call is not None:
                while self.is_held() or (self._is_wanted() and time.monotonic() < patience):
                    self._changed.wait(_LOOK)
                self._running[threading.current_thread()] = call
            return before

    def __enter__(self) -> None:
        """Take the lock alone, to compile; may be nested."""
        alone = self._alone()
        alone.__enter__()
        self._ends.append(alone)

    def __exit__(self, *_: object) -> None:
        self._ends.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        # An interrupt may come anywhere; each of these blocks ends all the same.
        with self.shared(None) as call, self.torchs:
            before = self._owner
            try:
                self._stop_replicas()
                with contextlib.nullcontext() if call is None else call.compiling():
                    yield
            finally:
                with self._changed:
                    self._owner = before
                    self._changed.notify_all()

    def _stop_replicas(self) -> None:
        deadline = time.monotonic() + self.timeout
        with self._changed:
            self._owner = threading.current_thread()
            while running := self._sharing():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "torch.compile has to compile, and nothing may run meanwhile, but "
                        f"within {self.timeout:.3g} s these threads did not stop: "
                        f"{', '.join(running)}; replicas that wait for each other must do so "
                        "through current_rendezvous()"
                    )
                self._changed.wait(_LOOK)

    # A thread may have died of an interrupt.

    def _is_wanted(self) -> bool:
        return self._owner is not None and self._owner.is_alive()

    def _sharing(self) -> list[str]:
        return sorted(thread.name for thread in list(self._running) if thread.is_alive())


#: Of this process.
lock = CompileLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lock.reset)

# --- calls in which something is compiled ----------------------------------------------------


@dataclass(eq=False)
class ParallelCall:
    """One call of several replicas in which compiled code may be called."""

    num_devices: int
    #: Whether the replicas are to run one after another.
    in_turn: bool
    #: The CUDA graphs of the calling thread, which its replicas use.
    graphs: dict[str, Any]
    #: Whether a replica came to compile.
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
    """One call of the replicas, which run at the same time if they are ``concurrent``.

    ``quiet`` has the kinds of calls that compile nothing; see Note [Compiled one after another].
    """
    if lock.torchs is None:
        lock.install()
    kind = _kind_of(calls[0]) if concurrent else None
    graphs = torch_internals.graphs_of_compiler() if concurrent else {}
    one_by_one = kind not in quiet or (any(graphs.values()) and num_devices < len(calls))
    call = ParallelCall(num_devices, kind is not None and one_by_one, graphs)
    with torch_internals.settings_of_calls_kept(), lock.shared(None):
        yield call
    if call.has_compiled:
        quiet.discard(kind)
    else:
        quiet.add(kind)


def _kind_of(call: Callable[[], Any]) -> Hashable:
    """What a call has in common with others; None where nothing in it can be compiled."""
    parts = (call.func, *call.args) if isinstance(call, functools.partial) else ()
    modules = tuple((type(m), m.training) for m in parts if isinstance(m, nn.Module))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (modules, *modes) if modules else None
