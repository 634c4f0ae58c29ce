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
of several devices may come to it at the same time. And torch's cache has as many times its entries
as there are devices, since what is compiled for one device serves no other.

Note [Compiled one after another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If all replicas came to compile at the same time, each would compile the same thing for itself. So
in the first calls of a kind (types of the modules, modes of torch) the replicas run one after
another: replica 0 compiles, and the others find it done. They run at the same time after a call
that compiled nothing: then all is compiled, or what was compiled takes any size. A replica that
compiles even so does it alone, and the next call starts over.

The order only saves work: a replica starts anyway if the one before it waits for others, or takes
long. A forward that is itself the first in the process to call ``torch.compile`` has none of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
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


class CompileTimeout(TimeoutError):
    """A thread that wants to compile waited in vain for the replicas to stop."""


# --- the lock --------------------------------------------------------------------------------


class CompileLock:
    """The lock that replicas share and compilers hold alone. See Note [Compiling alone]."""

    def __init__(self) -> None:
        #: Seconds to wait for the replicas to stop, not counting the time in which others compile.
        self.timeout = 300.0
        #: Torch's own, once this stands in its place.
        self.torchs: Any = None
        self._owner: threading.Thread | None = None
        # Of the owner: how often it has taken the lock, and how it gives it back.
        self._depth = 0
        self._exits = contextlib.ExitStack()
        self.reset()

    def reset(self) -> None:
        """Forget all other threads, as in a forked child."""
        self._changed = threading.Condition()
        #: The call of each thread that shares the lock.
        self._running: dict[threading.Thread, ParallelCall] = {}
        if self._owner is not threading.current_thread():
            self._owner = None
        self._num_waiting = 0

    def install(self) -> None:
        """Stand in the place of torch's lock."""
        torchs = torch_internals.compile_lock()
        # Whoever compiles now ends that first.
        with torchs, self._changed:
            if self.torchs is None:
                torch_internals.keep_guard_of_compiler()
                torch_internals.move_entries_of_compiler(False)
                torch_internals.hand_on_contexts_for_any_thread()
                torch_internals.replace_compile_lock(self)
                self.torchs = torchs

    def is_held(self) -> bool:
        """Whether some thread compiles now."""
        # One that compiled may have died of an interrupt.
        return self._owner is not None and self._owner.is_alive()

    def share(self, call: ParallelCall) -> None:
        """Share the lock: this thread runs a replica of a call."""
        patience = time.monotonic() + _PATIENCE
        with self._changed:
            while self.is_held() or (self._num_waiting and time.monotonic() < patience):
                self._changed.wait(_LOOK)
            self._running[threading.current_thread()] = call

    def give_up(self) -> ParallelCall | None:
        """Let others have what this thread holds; returns the call for which it shared."""
        thread = threading.current_thread()
        with self._changed:
            if self._owner is thread:
                self._owner = None
            self._changed.notify_all()
            return self._running.pop(thread, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let others compile within a ``with`` block, in which this thread only waits."""
        call = self.give_up() if threading.current_thread() in self._running else None
        try:
            yield
        finally:
            if call is not None:
                self.share(call)

    def __enter__(self) -> None:
        """Take the lock alone, to compile; may be nested."""
        if self._owner is not threading.current_thread():
            with contextlib.ExitStack() as stack:
                call = self.give_up()
                if call is not None:
                    stack.callback(self.share, call)
                stack.callback(self.give_up)
                self._take_alone()
                stack.enter_context(self.torchs)
                if call is not None:
                    stack.enter_context(call.compiling())
                self._exits, self._depth = stack.pop_all(), 0
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._exits.close()

    def _take_alone(self) -> None:
        deadline = time.monotonic() + self.timeout
        with self._changed:
            self._num_waiting += 1
            try:
                while self.is_held() or self._others():
                    if self.is_held():
                        deadline = time.monotonic() + self.timeout
                    elif time.monotonic() > deadline:
                        raise CompileTimeout(
                            "torch.compile has to compile, and nothing may run meanwhile, but "
                            f"within {self.timeout:.3g} s these threads did not stop: "
                            f"{', '.join(self._others())}; replicas that wait for each other must "
                            "do so through current_rendezvous()"
                        )
                    self._changed.wait(_LOOK)
                self._owner = threading.current_thread()
            finally:
                self._num_waiting -= 1

    def _others(self) -> list[str]:
        """The names of the threads that share the lock."""
        self._running = {t: share for t, share in self._running.items() if t.is_alive()}
        return sorted(thread.name for thread in self._running)


#: Of this process.
lock = CompileLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lock.reset)

# --- calls in which something is compiled ----------------------------------------------------


class ParallelCall:
    """One call of several replicas in which compiled code may be called."""

    def __init__(self, num_devices: int, in_turn: bool) -> None:
        self._num_devices = num_devices
        #: Whether the replicas are to run one after another.
        self.in_turn = in_turn
        #: Whether a replica came to compile.
        self.has_compiled = False

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """Around a replica, in its thread."""
        try:
            lock.share(self)
            yield
        finally:
            lock.give_up()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """While a replica compiles."""
        self.has_compiled = True
        drawing = replica_random.drawing
        # The key of the generators stays, as compiled code asks which keys are switched on.
        before = drawing.switch(lambda device: None)
        try:
            with (
                torch_internals.settings_of_compiler(self._num_devices),
                torch_internals.first_calls_without_search(),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", _GRAD_OF_ALIAS)
                yield
        finally:
            drawing.switch(*before)


class CompiledCalls:
    """Which calls of one owner compile nothing. See Note [Compiled one after another]."""

    def __init__(self) -> None:
        self._quiet: set[Hashable] = set()

    @contextlib.contextmanager
    def call(
        self, calls: Sequence[Callable[[], Any]], num_devices: int, *, concurrent: bool
    ) -> Iterator[ParallelCall]:
        """One call of the replicas, which run at the same time if they are ``concurrent``."""
        if lock.torchs is None:
            lock.install()
        kind = _kind_of(calls[0]) if concurrent else None
        call = ParallelCall(num_devices, kind is not None and kind not in self._quiet)
        with torch_internals.settings_of_calls_kept(), lock.paused():
            yield call
        if call.has_compiled:
            self._quiet.discard(kind)
        else:
            self._quiet.add(kind)


def _kind_of(call: Callable[[], Any]) -> Hashable:
    """What a call has in common with others; None where nothing in it can be compiled."""
    parts = (call.func, *call.args) if isinstance(call, functools.partial) else ()
    modules = tuple((type(m), m.training) for m in parts if isinstance(m, nn.Module))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (modules, *modes) if modules else None
