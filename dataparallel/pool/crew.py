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
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.threads.workers import Interrupted

# An interrupt within a finalizer, or one that is caught, ends no item: so many tries, and the
# seconds between two.
_TRIES, _PAUSE = 5, 0.1


def refuse_to_wait(is_here: bool) -> None:
    """Raise a RuntimeError in a thread of the pool, which is needed for the items themselves."""
    if is_here:
        raise RuntimeError(
            "an item of a pool waits for other items of the same pool, which may wait for it; "
            "use another pool, or call the module itself"
        )


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
    """The work that no thread has taken yet; see Note [What the leader alone touches].

    Note [What the leader alone touches]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Work comes in a queue of C, which finalizers may use, wherever they interrupt a thread. The
    leader sorts it by key, so that what goes together is found at once, however long the line is.
    """

    def __init__(self) -> None:
        # None wakes the leader.
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._leading = threading.Lock()
        #: The threads that take work.
        self.serving: set[threading.Thread] = set()
        # In the order in which they came: all, and those of each key.
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._alike: dict[Hashable, OrderedDict[int, Job]] = {}
        self._lock = threading.Lock()
        # The work that each thread begins now, by its slot.
        self._current: dict[int, Sequence[Job]] = {}
        self._is_closed = False
        #: True if nobody waits for work that has not begun.
        self.is_given_up = False

    def is_here(self) -> bool:
        """True if the calling thread is one of those that take this work."""
        return threading.current_thread() in self.serving

    def put(self, job: Job) -> None:
        if self._is_closed:
            raise RuntimeError("the pool is closed; make another one, or leave its block later")
        self._inbox.put(job)

    def close(self) -> None:
        self._is_closed = True
        self._inbox.put(None)

    def give_up(self) -> None:
        self.is_given_up = True

    def take(self, slot: int, *, waits: bool) -> Sequence[Job] | None:
        """Return jobs that go together; none if nothing lies ready, None after the last."""
        if not self._leading.acquire(blocking=waits):
            return ()
        try:
            while True:
                is_last = self._is_closed
                self._receive(0)
                if self._jobs:
                    taken = self._gather(waits=waits)
                    with self._lock:
                        self._current[slot] = taken
                    return taken
                if is_last or not waits:
                    return None if is_last else ()
                self._receive(None)
        finally:
            self._leading.release()

    def _receive(self, seconds: float | None) -> None:
        """Sort what has come; wait so long, or for any time, if that is nothing."""
        with contextlib.suppress(queue.Empty):
            job = self._inbox.get(timeout=seconds) if seconds != 0 else self._inbox.get_nowait()
            while True:
                if job is not None:
                    self._jobs[id(job)] = job
                    self._alike.setdefault(job.key, OrderedDict())[id(job)] = job
                job = self._inbox.get_nowait()

    def _gather(self, *, waits: bool) -> Sequence[Job]:
        first = next(iter(self._jobs.values()))
        while True:
            taken, is_full = self._going_with(first)
            left = first.deadline - time.monotonic()
            if is_full or left <= 0 or self._is_closed:
                break
            if not waits:
                return ()
            self._receive(left)
        for job in taken:
            del self._jobs[id(job)]
            del self._alike[job.key][id(job)]
        if not self._alike[first.key]:
            del self._alike[first.key]
        return taken

    def _going_with(self, first: Job) -> tuple[Sequence[Job], bool]:
        """Return a job and those that go with it; and whether there is no need to wait for more."""
        if first.key is None or first.is_over():
            return [first], True
        taken, size = list[Job](), 0
        for job in self._alike[first.key].values():
            if taken and size + job.size > first.most:
                return taken, True
            taken.append(job)
            size += job.size
        return taken, size >= first.most

    def done(self, slot: int) -> Sequence[Job]:
        """Forget the work that a thread begins, and return it."""
        with self._lock:
            return self._current.pop(slot, ())

    def interrupt(self, jobs: Iterable[Job] | None, threads: Sequence[threading.Thread]) -> bool:
        """Stop threads, at their next Python instruction, that work on nothing but these jobs.

        Default: all threads. True if there were any.
        """
        gone, is_any = None if jobs is None else set(map(id, jobs)), False
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        with self._lock:
            for slot, taken in self._current.items():
                if taken and (gone is None or gone.issuperset(map(id, taken))):
                    is_any = True
                    ident = ctypes.c_ulong(threads[slot].ident or 0)
                    raise_in(ident, ctypes.py_object(Interrupted))
        return is_any


def _serve(line: _Line, slot: int) -> None:
    torch_internals.set_thread_name(f"pool-{slot}")
    line.serving.add(threading.current_thread())
    begun: deque[tuple[Sequence[Job], Callable[[], None]]] = deque()
    goes_on = True
    while goes_on:
        with contextlib.suppress(Interrupted):
            # One that came just before the work began, or when it had just ended.
            _fail(line.done(slot), Interrupted())
            goes_on = _step(line, slot, begun)
    line.serving.discard(threading.current_thread())


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
                if line.is_given_up:
                    for job in taken:
                        job.cancel()
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
        self._is_closed = False
        self._make()

    def _make(self) -> None:
        self._process, self._line = os.getpid(), _Line()
        self._threads: list[threading.Thread] = []
        # The threads do the work that is left, and hold the line alone.
        self._finalizer = weakref.finalize(self, self._line.close)
        self._finalizer.atexit = False

    def put(self, job: Job) -> None:
        """Have some work done."""
        with self._lock:
            if self._process != os.getpid() and not self._is_closed:
                # In a forked child the threads do not exist.
                self._make()
            for slot in range(len(self._threads), self._num_slots):
                name = f"dataparallel-pool-{slot}"
                thread = threading.Thread(
                    target=_serve, args=(self._line, slot), name=name, daemon=True
                )
                interpreter_end.start_thread(thread)
                self._threads.append(thread)
            self._line.put(job)

    def interrupt(self, jobs: Sequence[Job] | None = None) -> None:
        """Stop what is being done of some work that was given up; of all by default."""
        for _ in range(_TRIES):
            if not self._line.interrupt(jobs, self._threads):
                return
            time.sleep(_PAUSE)

    @property
    def is_here(self) -> Callable[[], bool]:
        """A function that is true in these threads, and does not hold the crew."""
        return self._line.is_here

    def give_up(self) -> None:
        """Cancel what nobody has begun."""
        self._line.give_up()

    def close(self) -> None:
        """Do the work that is left, and end the threads; a second call does nothing.

        It waits for the threads unless one of them calls it.
        """
        with self._lock:
            self._is_closed = True
            self._line.close()
        if not self.is_here() and self._process == os.getpid():
            for thread in self._threads:
                thread.join()
