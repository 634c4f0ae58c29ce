"""Persistent worker threads, one per replica.

A worker thread holds its inbox and a weak reference to the pool, and between two calls no task and
no result. So a pool that nobody uses is collected, which ends its threads. The threads are daemons:
a replica that never returns cannot keep the interpreter from exiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.errors import add_note, locate

T = TypeVar("T")

# An interrupted call looks every 0.01 s whether its replicas have ended. It looks this many times
# at most, and after so many looks it interrupts them again.
_LOOKS, _AGAIN = 70, 20
# Seconds that closing waits for each idle thread to end.
_JOIN_TIMEOUT = 1.0
# Seconds between two looks at Ctrl-C. On Windows a wait for a lock cannot be interrupted by it.
# Elsewhere a signal that comes just before the wait begins does not end it.
_WAIT = 0.2
# Seconds that a replica waits for the one whose turn it is.
_PATIENCE = 2.0


class Interrupted(BaseException):
    """Raised inside a replica whose call was interrupted, at its next Python instruction."""


class SecondaryError(RuntimeError):
    """A replica failed only because another one did; the other's error is the one to report."""


class Turns:
    """The turns of a call's replicas: each runs until it ends or waits for others."""

    def __init__(self, num_replicas: int) -> None:
        # One event per replica, set when the replica after it may start.
        self._passed = [threading.Event() for _ in range(num_replicas)]

    def wait(self, index: int, is_busy: Callable[[], bool]) -> None:
        """Wait for the replica before this one, though not for long unless somebody is busy."""
        # It may wait for this one in a way of its own.
        deadline = time.monotonic() + _PATIENCE
        while index and not self._passed[index - 1].wait(_WAIT) and time.monotonic() < deadline:
            if is_busy():
                deadline = time.monotonic() + _PATIENCE

    def end(self, index: int) -> None:
        """Let the replica after this one start."""
        self._passed[index].set()


class _Call:
    """The tasks of one call, and what became of them."""

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self._tasks: list[Callable[[], Any] | None] = list(tasks)
        self._results: list[Any] = [None] * len(tasks)
        #: By the index of the task; they hold the frames that hold this.
        self.errors: dict[int, BaseException] = {}
        self.ended: set[int] = set()
        self.all_ended = threading.Event()

    def execute(self, index: int) -> None:
        """Run one task, in its thread."""
        thread = threading.current_thread()
        interpreter_end.working.add(thread)
        try:
            task = self._tasks[index]
            assert task is not None, "a task runs once"
            self._results[index] = task()
        except BaseException as error:
            # Without this frame, which holds the call, which holds the error.
            error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            self.errors[index] = error
        finally:
            self._tasks[index] = task = None
            self.ended.add(index)
            if len(self.ended) == len(self._tasks):
                self.all_ended.set()
            interpreter_end.working.discard(thread)

    def take(self, label: Callable[[int], str]) -> list[Any]:
        """Return the results once, or raise the error of the lowest index with others as notes."""
        # A worker may hold the call a moment longer; the results are the caller's alone.
        results, self._results = self._results, []
        if not self.errors:
            return results
        errors, self.errors = self.errors, {}
        first, error = min(
            errors.items(), key=lambda entry: (isinstance(entry[1], SecondaryError), entry[0])
        )
        locate(error, label(first))
        for i, other in sorted(errors.items()):
            if i != first and not isinstance(other, SecondaryError):
                add_note(error, f"{label(i)} also failed: {type(other).__name__}: {other}")
        try:
            raise error
        finally:
            # The traceback holds this frame, which would hold the errors.
            del error, errors


# --- a pool ----------------------------------------------------------------------------------

# Anything but a call ends the thread.
_Inbox: TypeAlias = "queue.SimpleQueue[_Call | weakref.ref[Workers] | None]"


def _serve(inbox: _Inbox, index: int, _: weakref.ref[Workers]) -> None:
    # The system cuts it after 15 characters.
    torch_internals.set_thread_name(f"replica-{index}")
    # An interrupt that comes when the task has just ended has nothing left to stop.
    with contextlib.suppress(Interrupted):
        while isinstance(call := inbox.get(), _Call):
            call.execute(index)
            del call


class Workers:
    """Worker threads, one per replica index, which run one call at a time; kept until collected."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._inboxes: list[_Inbox] = []

    def close(self, *, join: bool = True) -> None:
        """End the threads, and wait for them unless told not to; a second call does nothing."""
        threads, self._threads = self._threads, []
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in threads:
            if join and thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT)

    def start(self, call: _Call, num_tasks: int) -> None:
        """Let each thread run its task."""
        for index in range(len(self._threads), num_tasks):
            inbox: _Inbox = queue.SimpleQueue()
            # No finalizer in Python: a pool may be collected in a replica that is interrupted.
            args = (inbox, index, weakref.ref(self, inbox.put))
            name = f"dataparallel-replica-{index}"
            thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
            # First of all, so that a thread is told to end even if an interrupt comes right now.
            self._inboxes.append(inbox)
            interpreter_end.start_thread(thread)
            self._threads.append(thread)
        for inbox in self._inboxes[:num_tasks]:
            inbox.put(call)

    def interrupt(self, call: _Call, num_tasks: int) -> None:
        """Stop what still runs, or leave it behind after a grace time; the pool is given up."""
        threads = self._threads[:num_tasks]
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        try:
            for look in range(_LOOKS):
                pairs = enumerate(threads)
                running = [t for i, t in pairs if i not in call.ended and t.is_alive()]
                if not running:
                    break
                # More than once: what is raised in a finalizer, or is caught, ends no replica. And
                # not at each look: one that was met on its way out of a task counts itself first.
                for thread in running if look % _AGAIN == 0 else ():
                    raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted))
                time.sleep(0.01)
        finally:
            self.close(join=False)
            call.errors.clear()


# --- pools of one owner ----------------------------------------------------------------------


class WorkerPools:
    """The idle pools of one owner; each call borrows one, or makes one if all are busy."""

    def __init__(self) -> None:
        self._idle: list[Workers] = []
        self._process = os.getpid()

    def run(
        self,
        tasks: Sequence[Callable[[], T]],
        label: Callable[[int], str],
        *,
        on_interrupt: Callable[[], None] | None = None,
    ) -> list[T]:
        """Run ``tasks[i]`` in thread ``i``; errors get a label, ``on_interrupt`` releases waits."""
        if self._process != os.getpid():
            # In a forked child the threads do not exist.
            self._idle, self._process = [], os.getpid()
        try:
            workers = self._idle.pop()
        except IndexError:
            workers = Workers()
        call = _Call(tasks)
        try:
            workers.start(call, len(tasks))
            while not call.all_ended.wait(_WAIT):
                pass
        except BaseException:
            try:
                if on_interrupt is not None:
                    on_interrupt()
            finally:
                workers.interrupt(call, len(tasks))
            raise
        try:
            results = call.take(label)
        except BaseException:
            # Closing the threads also removes what a task has left in its own.
            workers.close()
            raise
        self._idle.append(workers)
        return results

    def close(self) -> None:
        """End the threads of all idle pools. A later call starts new ones."""
        # One at a time, since a call may take one meanwhile.
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def __reduce__(self) -> tuple[type[WorkerPools], tuple[()]]:
        # Threads are not copied: the copy starts its own when it needs them.
        return (WorkerPools, ())
