"""Persistent worker threads, one per replica.

Note [Who holds whom]
~~~~~~~~~~~~~~~~~~~~~
A worker thread holds its inbox and nothing else: not the pool, and between two calls no task and
no result. So a pool that nobody uses is collected, and its finalizer ends the threads. The threads
are daemons: a replica that never returns cannot keep the interpreter from exiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch.utils.checkpoint

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.errors import add_note, locate
from dataparallel.threads import intra_op

T = TypeVar("T")

# Seconds that an interrupted call waits for its replicas to notice, and after which they are
# interrupted again.
_INTERRUPT_GRACE, _AGAIN = 0.7, 0.2
# Seconds that closing waits for each idle thread to end.
_JOIN_TIMEOUT = 1.0
# Seconds between two looks at Ctrl-C. On Windows a wait for a lock cannot be interrupted by it, and
# elsewhere a signal that comes just before the wait begins does not end it.
_WAIT = 0.2


class Interrupted(BaseException):
    """Raised inside a replica whose call was interrupted, at its next Python instruction."""


class SecondaryError(RuntimeError):
    """A replica failed only because another one did; the other's error is the one to report."""


class _Latch:
    """Opens when every task of one call has been dealt with."""

    __slots__ = ("_count", "_guard", "_open", "cancelled")

    def __init__(self, count: int) -> None:
        self._count = count
        self._guard = threading.Lock()
        self._open = threading.Lock()
        self._open.acquire()
        self.cancelled = False

    def count_down(self) -> None:
        with self._guard:
            self._count -= 1
            last = self._count == 0
        if last:
            self._open.release()

    def wait(self, seconds: float) -> bool:
        """Whether it has opened within so many seconds; only the caller waits."""
        return self._open.acquire(timeout=seconds)


class _Job(Generic[T]):
    """One task, and what became of it."""

    __slots__ = ("_latch", "_task", "_threads", "error", "finished", "result")

    def __init__(self, task: Callable[[], T], latch: _Latch, threads: int | None) -> None:
        self._task: Callable[[], T] | None = task
        self._latch = latch
        self._threads = threads
        self.result: T | None = None
        self.error: BaseException | None = None
        self.finished = False

    def execute(self) -> None:
        try:
            if not self._latch.cancelled:
                if self._threads is not None:
                    intra_op.use_threads(self._threads)
                assert self._task is not None
                self.result = self._task()
        except BaseException as error:
            # Without this frame, which holds the job, which holds the error.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            self.error = error
            _leave_checkpoints(error)
        finally:
            self._task = None
            self.finished = True
            self._latch.count_down()


def _leave_checkpoints(error: BaseException) -> None:
    """Leave the activation checkpoints through which an error came, in this thread.

    Up to torch 2.11 they are left when the last reference to the error goes, and by then their
    saved-tensor hooks would have acted on whatever this thread ran next.
    """
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__context__
    frames = [f for each in chain for f, _ in traceback.walk_tb(each.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, types.GeneratorType):
                    try:
                        value.close()
                    except Exception as another:
                        what = "leaving an activation checkpoint failed as well"
                        add_note(error, f"{what}: {another!r}")


# --- a pool ----------------------------------------------------------------------------------

_Inbox: TypeAlias = "queue.SimpleQueue[_Job[Any] | None]"


def _serve(inbox: _Inbox, index: int) -> None:
    if torch_internals.set_thread_name is not None:
        # The name that profilers and `top -H` show; the system cuts it after 15 characters.
        torch_internals.set_thread_name(f"replica-{index}")
    # An interrupt that comes when the task has just ended has nothing left to stop.
    with contextlib.suppress(Interrupted):
        while True:
            job = inbox.get()
            if job is None:
                return
            interpreter_end.start()
            job.execute()
            del job
            interpreter_end.stop()


def _close(
    threads: list[threading.Thread], inboxes: list[_Inbox], process: int, join: bool = True
) -> None:
    if process != os.getpid():
        # After a fork the threads exist in the parent only.
        return
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if join and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)


class Workers:
    """A pool of worker threads, one per replica index, which runs one call at a time.

    The threads start at the first call that needs them, are used again by every later one, and end
    with :meth:`close`, when the pool is collected, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._inboxes: list[_Inbox] = []
        self._finalizer = weakref.finalize(self, _close, self._threads, self._inboxes, os.getpid())
        # Then others may still use it, see Note [Threads at the end].
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the threads have been told to end; the pool cannot run anything then."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the threads and wait for them; a second call does nothing."""
        self._finalizer()

    def start(self, jobs: Sequence[_Job[Any]]) -> None:
        """Let each thread execute its job."""
        for index in range(len(self._threads), len(jobs)):
            inbox: _Inbox = queue.SimpleQueue()
            name = f"dataparallel-replica-{index}"
            thread = threading.Thread(target=_serve, args=(inbox, index), name=name, daemon=True)
            # First of all, so that a thread is told to end even if an interrupt comes right now.
            self._inboxes.append(inbox)
            thread.start()
            self._threads.append(thread)
        for inbox, job in zip(self._inboxes, jobs, strict=False):
            inbox.put(job)

    def interrupt(
        self, jobs: Sequence[_Job[Any]], latch: _Latch, on_interrupt: Callable[[], None] | None
    ) -> None:
        """Stop what still runs. The pool is given up: an asynchronous exception may come late.

        A replica inside a long operation does not notice before that ends; its thread is left
        behind after a grace time and ends on its own.
        """
        latch.cancelled = True
        self._finalizer.detach()
        try:
            if on_interrupt is not None:
                on_interrupt()
            deadline = time.monotonic() + _INTERRUPT_GRACE
            # More than once: what is raised in a finalizer, or is caught, does not end a replica.
            while (unfinished := self._unfinished(jobs)) and time.monotonic() < deadline:
                for thread in unfinished:
                    _raise_in(thread)
                again = time.monotonic() + _AGAIN
                # One that the interrupt met on its way out of a task has not counted itself.
                while self._unfinished(jobs) and time.monotonic() < again:
                    time.sleep(0.01)
        finally:
            _close(self._threads, self._inboxes, os.getpid(), join=False)
            for job in jobs:
                job.error = None

    def _unfinished(self, jobs: Sequence[_Job[Any]]) -> list[threading.Thread]:
        pairs = zip(self._threads, jobs, strict=False)
        return [thread for thread, job in pairs if not job.finished and thread.is_alive()]


def _raise_in(thread: threading.Thread) -> None:
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_error(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted))


def _results(jobs: Sequence[_Job[T]], labels: Sequence[str]) -> list[T]:
    failed = [(i, job.error) for i, job in enumerate(jobs) if job.error is not None]
    if not failed:
        results: list[T] = [job.result for job in jobs]  # type: ignore[misc]
        # A worker may hold its job a moment longer; the result is the caller's alone.
        for job in jobs:
            job.result = None
        return results
    first, error = min(failed, key=lambda item: (isinstance(item[1], SecondaryError), item[0]))
    locate(error, labels[first])
    for i, other in failed:
        if i != first and not isinstance(other, SecondaryError):
            add_note(error, f"{labels[i]} also failed: {type(other).__name__}: {other}")
    for job in jobs:
        job.error = None
    try:
        raise error
    finally:
        # The traceback holds this frame, which would hold the error.
        del error, failed


# --- pools of one owner ----------------------------------------------------------------------

_all_pools: weakref.WeakSet[WorkerPools] = weakref.WeakSet()


class WorkerPools:
    """The idle pools of one owner. A call borrows one, so calls may be nested or come from several
    threads at the same time; another pool is created only when all are busy.
    """

    def __init__(self) -> None:
        self._reset()
        _all_pools.add(self)

    def _reset(self) -> None:
        self._idle: list[Workers] = []
        self._lock = threading.Lock()

    def run(
        self,
        tasks: Sequence[Callable[[], T]],
        labels: Sequence[str],
        *,
        threads: Sequence[int | None] | None = None,
        on_interrupt: Callable[[], None] | None = None,
    ) -> list[T]:
        """Run ``tasks[i]`` in thread ``i``, all at the same time, and return their results.

        What a task raised is raised here: the object itself, with its label added by
        :func:`locate`; of several the one of the lowest index, with the others as notes.

        Args:
            tasks: Functions without arguments.
            labels: Where each task runs, for error messages: ``"in replica 0 on device cpu"``.
            threads: How many intra-op threads each task may use. Default: those of its thread.
            on_interrupt: Called when the wait is interrupted (Ctrl-C), to release tasks that wait
                for each other.
        """
        with self._lock:
            workers = self._idle.pop() if self._idle else Workers()
        process = os.getpid()
        latch = _Latch(len(tasks))
        shares = threads or [None] * len(tasks)
        jobs = [_Job(task, latch, share) for task, share in zip(tasks, shares, strict=True)]
        try:
            workers.start(jobs)
            while not latch.wait(_WAIT):
                interpreter_end.come_by()
            interpreter_end.come_by()
        except BaseException:
            workers.interrupt(jobs, latch, on_interrupt)
            raise
        finally:
            # In a forked child the threads of this pool do not exist.
            if not workers.closed and process == os.getpid():
                with self._lock:
                    self._idle.append(workers)
        return _results(jobs, labels)

    def close(self) -> None:
        """End the threads of all idle pools. A later call starts new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for workers in idle:
            workers.close()

    def __deepcopy__(self, _memo: object) -> WorkerPools:
        # Threads are not copied: the copy starts its own when it needs them.
        return WorkerPools()

    def __reduce__(self) -> tuple[type[WorkerPools], tuple[()]]:
        return (WorkerPools, ())


def _after_fork() -> None:
    for pools in list(_all_pools):
        pools._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
