"""Replicas in which something is compiled with ``torch.compile``.

Note [Compiling alone]
~~~~~~~~~~~~~~~~~~~~~~
While one thread compiles, the state of torch is not as usual for the whole process: a flag of
``torch.fx`` makes compiled functions that other threads call raise, methods of ``nn.Module`` are
patched, and ``torch.compiler.is_compiling()`` is true for everybody. So the threads of replicas
share a lock that whoever compiles holds alone. It stands in the place of torch's own compile lock,
which only keeps two threads from compiling at the same time. A thread that wants the lock alone
gives up its share, so two of them do not wait for each other. So does a thread that waits for
other replicas, in a meeting or in a parallel call of its own.

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

The order only saves work. A replica starts anyway if the one before it waits for others, or
neither ends nor compiles for some seconds. A forward that is the first in the process to import the
compiler has none of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.threads import random as replica_random
from dataparallel.threads.workers import SecondaryError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Standing: TypeAlias = Literal["shared", "alone"] | None

# Seconds that a new call lets those go first who wait to compile.
_COURTESY = 10.0
# Seconds after which a replica no longer waits for the one before it.
_PATIENCE = 2.0
# Seconds between two looks around: whether a thread has died, or this one was interrupted.
_LOOK = 0.2
# The compiler looks for gradients of parameters, which those of a clone do not have themselves.
_GRAD_OF_ALIAS = "The .grad attribute of a Tensor that is not a leaf"


def untraced(function: FunctionT) -> FunctionT:
    """Keep the compiler out of a function and all that it calls, without importing the compiler.

    In something bigger that is compiled, the compiled code ends before the call and begins again
    after it, as with ``torch.compiler.disable``, which imports the compiler and costs at each call.
    """
    why = "replicas run in threads, which cannot be compiled"
    return torch_internals.mark_untraced(function, why)


class CompileTimeout(TimeoutError):
    """A thread that wants to compile waited in vain for the replicas to stop."""


# --- the lock --------------------------------------------------------------------------------


class _Local(threading.local):
    standing: Standing = None
    depth = 0
    #: The replica that this thread runs.
    call: ParallelCall | None = None
    index = 0
    exits: contextlib.ExitStack | None = None


class CompileLock:
    """The lock that replicas share and compilers hold alone. See Note [Compiling alone]."""

    def __init__(self) -> None:
        #: Seconds to wait for the replicas to stop, not counting the time in which others compile.
        self.timeout = 300.0
        self._torchs: Any = None
        self._local = _Local()
        self._write_back: Callable[[], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all threads, as in a forked child."""
        self._changed = threading.Condition()
        self._running: set[threading.Thread] = set()
        self._owner: threading.Thread | None = None
        self._num_waiting = self._num_calls = 0

    def install(self) -> bool:
        """Stand in the place of torch's lock; False as long as nobody has imported the compiler."""
        if self._torchs is None:
            torchs = torch_internals.compile_lock()
            if torchs is None:
                return False
            # Whoever compiles now ends that first.
            with torchs, self._changed:
                if self._torchs is None:
                    torch_internals.keep_guard_of_compiler()
                    torch_internals.keep_compiled_entries_in_place()
                    torch_internals.hand_on_contexts_for_any_thread()
                    self._torchs = torchs
                    torch_internals.replace_compile_lock(lambda _: self)
        return True

    @property
    def held(self) -> bool:
        """Whether some thread compiles now."""
        return self._owner is not None

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Around a parallel call, while its caller waits for the replicas.

        Each call of compiled code changes variables of the process and restores what it found,
        which is wrong for calls that overlap. So what the first of them found is restored at the
        end of the last.
        """
        with self._changed:
            if self._num_waiting and self._local.standing is None:
                # Not for ever, as one of them may wait for this thread.
                self._changed.wait_for(lambda: not self._num_waiting, _COURTESY)
            if not self._num_calls:
                self._write_back = torch_internals.state_of_compiled_calls()
            self._num_calls += 1
        try:
            with self.paused():
                yield
        finally:
            with self._changed:
                self._num_calls -= 1
                if not self._num_calls and self._write_back is not None:
                    self._write_back()

    def enter(self, call: ParallelCall, index: int) -> None:
        """Share the lock: this thread begins to run a replica of a call."""
        self._local.call, self._local.index = call, index
        self._become("shared")

    def leave(self) -> None:
        """Give up the share."""
        self._local.call = None
        self._become(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let others compile within a ``with`` block, in which this thread only waits."""
        local = self._local
        standing, call, index = local.standing, local.call, local.index
        if standing is None:
            yield
            return
        if call is not None:
            call.pass_on(index)
        self._become(None)
        try:
            yield
        finally:
            local.call, local.index = call, index
            self._become(standing)

    def acquire(self) -> bool:
        """Take the lock alone, to compile; may be nested."""
        local = self._local
        if local.depth == 0:
            with contextlib.ExitStack() as stack:
                stack.callback(self._become, local.standing)
                self._become("alone")
                stack.enter_context(self._torchs)
                if local.call is not None:
                    local.call.num_compiled += 1
                    _enter_settings(stack, local.call.num_devices)
                local.exits = stack.pop_all()
        local.depth += 1
        return True

    def release(self) -> None:
        """Give it back."""
        local = self._local
        local.depth -= 1
        if local.depth == 0:
            exits, local.exits = local.exits, None
            assert exits is not None
            exits.close()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _become(self, standing: Standing) -> None:
        """Give up what this thread holds, and take the lock in another way."""
        thread = threading.current_thread()
        with self._changed:
            self._local.standing = None
            self._running.discard(thread)
            if self._owner is thread:
                self._owner = None
            self._changed.notify_all()
            if standing == "shared":
                # The thread that compiles may have died of an interrupt.
                while self._owner is not None and self._owner.is_alive():
                    self._changed.wait(_LOOK)
                self._running.add(thread)
            elif standing == "alone":
                self._num_waiting += 1
                try:
                    self._wait_for_all()
                    self._owner = thread
                finally:
                    self._num_waiting -= 1
            self._local.standing = standing

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            self._running = {thread for thread in self._running if thread.is_alive()}
            if self._owner is not None and self._owner.is_alive():
                deadline = time.monotonic() + self.timeout
            elif not self._running:
                return
            elif time.monotonic() > deadline:
                names = ", ".join(sorted(thread.name for thread in self._running))
                raise CompileTimeout(
                    f"torch.compile has to compile, and nothing may run meanwhile, but within "
                    f"{self.timeout:.3g} s these threads did not stop: {names}; replicas that "
                    "wait for each other must do so through current_rendezvous()"
                )
            self._changed.wait(_LOOK)


def _enter_settings(stack: contextlib.ExitStack, num_devices: int) -> None:
    stack.enter_context(replica_random.use_default_generators())
    stack.enter_context(torch_internals.settings_of_compiler(num_devices))
    stack.enter_context(torch_internals.first_calls_without_search())
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", _GRAD_OF_ALIAS)


#: Of this process.
lock = CompileLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lock.reset)

# --- calls in which something is compiled ----------------------------------------------------


class ParallelCall:
    """One call of several replicas, which run in turn or at the same time."""

    def __init__(self, num_devices: int, num_in_turn: int) -> None:
        self.num_devices = num_devices
        #: How often its replicas came to compile.
        self.num_compiled = 0
        # That the replica after this one may start.
        self._passed = [threading.Event() for _ in range(num_in_turn)]
        self._failed = False

    def enter(self, index: int) -> None:
        """Begin to run a replica in this thread, when it is its turn."""
        if index and self._passed:
            deadline = time.monotonic() + _PATIENCE
            while not self._passed[index - 1].wait(_LOOK) and time.monotonic() < deadline:
                if lock.held:
                    deadline = time.monotonic() + _PATIENCE
            if self._failed:
                raise SecondaryError("a replica before this one failed")
        lock.enter(self, index)

    def leave(self, index: int, *, failed: bool) -> None:
        """Undo :meth:`enter`."""
        lock.leave()
        self._failed |= failed
        self.pass_on(index)

    def pass_on(self, index: int) -> None:
        """Let the replica after this one start."""
        if self._passed:
            self._passed[index].set()


class CompiledCalls:
    """Which calls of one owner compile nothing. See Note [Compiled one after another]."""

    def __init__(self) -> None:
        self._quiet: set[Hashable] = set()
        self._is_used = False

    @contextlib.contextmanager
    def call(
        self, calls: Sequence[Callable[[], Any]], num_devices: int, *, concurrent: bool
    ) -> Iterator[ParallelCall | None]:
        """One call of the replicas.

        Args:
            calls: One function per replica; ``functools.partial`` of a module and its arguments.
            num_devices: How many devices the replicas are on.
            concurrent: Whether the replicas run at the same time otherwise.
        """
        if not lock.install():
            yield None
            return
        kind = self._kind_of(calls[0]) if concurrent else None
        in_turn = kind is not None and kind not in self._quiet
        call = ParallelCall(num_devices, len(calls) if in_turn else 0)
        with lock.around_call():
            yield call
        if call.num_compiled:
            self._quiet.discard(kind)
        else:
            self._quiet.add(kind)

    def _kind_of(self, call: Callable[[], Any]) -> Hashable:
        """What a call has in common with others; None where nothing in it can be compiled."""
        # Torch keeps a list of the backends for which something was compiled, or is to be.
        self._is_used = self._is_used or any(map(callable, torch_internals.backends_in_use()))
        if not self._is_used or not isinstance(call, functools.partial):
            return None
        modules = [part for part in (call.func, *call.args) if isinstance(part, nn.Module)]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        autocast = torch_internals.is_any_autocast_enabled()
        return (*((type(m), m.training) for m in modules), *modes, autocast) if modules else None
