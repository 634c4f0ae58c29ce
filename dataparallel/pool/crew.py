"""The threads of a pool, one per device slot, which take work out of one line.

Note [One leader]
~~~~~~~~~~~~~~~~~
Idle threads wait in turn: one of them, the leader, waits for a job and for those that go with it,
and then lets the next one lead. So requests that come within a moment meet in one batch, although
several devices are free. A thread whose device still computes takes what lies ready, if no thread
with a free device leads, and otherwise ends what it has begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.threads.workers import Interrupted

# An interrupt within a finalizer, or one that is caught, ends no item: so many tries, and the
# seconds between two.
_TRIES, _PAUSE = 5, 0.1


class Job(Protocol):
    """A piece of work that one device does as a whole."""

    #: Jobs whose keys are equal may be done together; None: this one is done alone.
    key: Hashable
    #: The number of samples, of which at most so many go together.
    size: int
    most: int
    #: The time until which the job waits for others, by ``time.monotonic()``.
    deadline: float

    def start(self, slot: int, others: Sequence[Job]) -> Callable[[], None] | None:
        """Begin the work together with that of others; returns what ends it, if it is not done."""

    def is_over(self) -> bool:
        """True if nobody waits for it any more."""

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits, unless the work is done."""

    def cancel(self) -> None:
        """Give up what nobody has begun."""


class _Line:
    """The work that no thread has taken yet."""

    def __init__(self) -> None:
        # Entered itself: Ctrl-C may come within the Python code of a condition.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leading = threading.Lock()
        self._jobs: deque[Job] = deque()
        #: The work that each thread begins now, by its slot.
        self.current: dict[int, Sequence[Job]] = {}
        self.is_closed = False

    def put(self, jobs: Iterable[Job]) -> None:
        with self._lock:
            if self.is_closed:
                raise RuntimeError("the pool is closed; make another one, or leave its block later")
            self._jobs.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    def take(self, slot: int, *, waits: bool) -> Sequence[Job] | None:
        """Return jobs that go together; none if nothing lies ready, None after the last."""
        if not self._leading.acquire(blocking=waits):
            return ()
        try:
            with self._lock:
                while not self._jobs:
                    if self.is_closed:
                        return None
                    if not waits:
                        return ()
                    self._changed.wait()
                taken = self._gather(waits=waits)
                self.current[slot] = taken
                return taken
        finally:
            self._leading.release()

    def _gather(self, *, waits: bool) -> Sequence[Job]:
        first = self._jobs.popleft()
        taken, size = [first], first.size
        while first.key is not None and not first.is_over():
            is_full = False
            for job in [job for job in self._jobs if job.key == first.key]:
                is_full = size + job.size > first.most
                if is_full:
                    break
                self._jobs.remove(job)
                taken.append(job)
                size += job.size
            left = first.deadline - time.monotonic()
            if is_full or size >= first.most or left <= 0 or self.is_closed:
                break
            if not waits:
                self._jobs.extendleft(reversed(taken))
                return ()
            self._changed.wait(left)
        return taken

    def done(self, slot: int) -> None:
        with self._lock:
            self.current.pop(slot, None)

    def drop(self, jobs: Sequence[Job] | None) -> Sequence[Job]:
        """Forget some jobs, or all, that nobody has taken; returns those that were meant."""
        with self._lock:
            jobs = list(self._jobs) if jobs is None else jobs
            gone = set(map(id, jobs))
            self._jobs = deque(job for job in self._jobs if id(job) not in gone)
        return jobs

    def interrupt(self, jobs: Iterable[Job], threads: Sequence[threading.Thread]) -> bool:
        """Stop the threads that work on some jobs, at their next Python instruction, if any do."""
        gone, is_any = set(map(id, jobs)), False
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        with self._lock:
            for slot, taken in self.current.items():
                if gone & set(map(id, taken)):
                    is_any = True
                    ident = ctypes.c_ulong(threads[slot].ident or 0)
                    raise_in(ident, ctypes.py_object(Interrupted))
        return is_any


class _Here(threading.local):
    line: _Line | None = None


_here = _Here()


def _serve(line: _Line, slot: int) -> None:
    torch_internals.set_thread_name(f"pool-{slot}")
    _here.line = line
    begun: deque[tuple[Sequence[Job], Callable[[], None]]] = deque()
    goes_on = True
    while goes_on:
        try:
            goes_on = _step(line, slot, begun)
        except Interrupted as error:
            # It came just before the work began, or when it had just ended.
            _fail(line.current.get(slot, ()), error)
            line.done(slot)


def _step(line: _Line, slot: int, begun: deque[tuple[Sequence[Job], Callable[[], None]]]) -> bool:
    """Begin the next work and end what was begun before; False if there will be no more."""
    number = len(begun)
    taken = line.take(slot, waits=not begun)
    if taken is None and not begun:
        return False
    thread = threading.current_thread()
    interpreter_end.working.add(thread)
    try:
        if taken:
            try:
                # The device computes what was begun before meanwhile.
                end = taken[0].start(slot, taken[1:])
            except BaseException as error:
                _fail(taken, error)
            else:
                if end is not None:
                    begun.append((taken, end))
            line.done(slot)
        for _ in range(number):
            _end(*begun.popleft())
    finally:
        interpreter_end.working.discard(thread)
    return True


def _end(jobs: Sequence[Job], end: Callable[[], None]) -> None:
    try:
        end()
    except BaseException as error:
        _fail(jobs, error)


def _fail(jobs: Sequence[Job], error: BaseException) -> None:
    with contextlib.suppress(Interrupted):
        for job in jobs:
            job.fail(error)


class Crew:
    """The threads of a pool, which start with the first work; they end when it is collected."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._make()

    def _make(self) -> None:
        self._process, self._line = os.getpid(), _Line()
        self._threads: list[threading.Thread] = []
        # The threads do the work that is left, and hold the line alone.
        self._finalizer = weakref.finalize(self, self._line.close)
        self._finalizer.atexit = False

    def put(self, jobs: Iterable[Job]) -> None:
        """Have some work done."""
        with self._lock:
            if self._process != os.getpid() and not self._line.is_closed:
                # In a forked child the threads do not exist.
                self._make()
            for slot in range(len(self._threads), self._num_slots):
                name = f"dataparallel-pool-{slot}"
                thread = threading.Thread(
                    target=_serve, args=(self._line, slot), name=name, daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._line.put(jobs)

    def cancel(self, jobs: Sequence[Job] | None = None) -> None:
        """Give up some work, or all, that nobody has begun."""
        for job in self._line.drop(jobs):
            job.cancel()

    def interrupt(self, jobs: Sequence[Job]) -> None:
        """Give up some work, and stop what is being done of it."""
        self.cancel(jobs)
        for _ in range(_TRIES):
            if not self._line.interrupt(jobs, self._threads):
                return
            time.sleep(_PAUSE)

    def is_here(self) -> bool:
        """True if the calling thread is one of these."""
        return _here.line is self._line

    def close(self) -> None:
        """Do the work that is left, and end the threads; a second call does nothing."""
        self._line.close()
        for thread in self._threads:
            if thread is not threading.current_thread() and self._process == os.getpid():
                thread.join()
