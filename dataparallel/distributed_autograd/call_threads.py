"""The threads in which one worker runs the calls that it gets.

Note [Nested calls never wait]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A function that calls another worker occupies its thread until the answer is there, and the answer
may need another thread of the same worker: A calls B, which calls A. With a fixed number of threads
that can end with every thread waiting for one that is not free. So a nested call, which is one made
in a thread of a worker, never waits for a thread: it gets a new one, and an error beyond the limit.
Only calls from outside queue, while as many of them run as may. Those end without
waiting for the queue, so the queue moves on.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

from dataparallel.comm import interpreter_end
from dataparallel.threads.context import ThreadContext

#: What runs in a thread. It gets a function to call once its work is done but for telling so.
Task = Callable[[Callable[[], None]], None]

#: Seconds that closing waits for each thread to end.
_JOIN_TIMEOUT = 1.0

_thread = threading.local()


def is_nested() -> bool:
    """Whether this code runs in a thread of a worker."""
    return getattr(_thread, "serves", False)


class CallThreads:
    """The threads of one worker, started when they are needed and used again.

    Args:
        name: The name of the worker.
        device: Its device, which is the current one in the threads; None leaves torch's default.
        limit: How many calls may run at the same time.
    """

    def __init__(self, name: str, device: torch.device | None, limit: int) -> None:
        self._name = name
        self._device = device or torch.device("cpu")
        self._limit = limit
        # Half for calls from outside, which leaves the other half for what those call.
        self._outer_limit = max(1, limit // 2)
        # Reentrant: a finalizer may close these threads wherever Python collects garbage.
        self._lock = threading.RLock()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = self._running = self._outer = 0
        self._process = os.getpid()
        self.closed = False

    def check_process(self) -> None:
        """Raise a RuntimeError in a process that was forked from the one that has the threads.

        Nothing is locked for it: a thread that does not exist there may have held the lock.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                f"worker '{self._name}' belongs to the process {self._process}, and this one "
                f"({os.getpid()}) was forked from it: make LocalWorkers here"
            )

    def submit(self, task: Task) -> None:
        """Run a task in one of the threads.

        Raises:
            RuntimeError: The threads were closed, or the task is nested and the limit is reached.
        """
        self.check_process()
        nested = is_nested()
        with self._lock:
            if self.closed:
                raise RuntimeError(f"worker '{self._name}' was closed")
            if not nested and not self._room_for_outer():
                self._waiting.append(task)
                return
            if self._running >= self._limit:
                raise RuntimeError(
                    f"worker '{self._name}' runs {self._running} calls, which is its limit, and a "
                    f"call from within a call cannot wait for one of them: give LocalWorkers a "
                    f"higher max_calls than {self._limit}, or nest calls less deeply"
                )
            self._start(task, nested)

    def _release(self, nested: bool) -> None:
        with self._lock:
            self._running -= 1
            self._outer -= not nested
            if self._waiting and self._room_for_outer():
                self._start(self._waiting.popleft(), nested=False)

    def close(self) -> None:
        """End the threads. Those that still run a function end after it."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._waiting.clear()
            threads = list(self._threads)
            for _ in threads:
                self._inbox.put(None)
        # After a fork the threads exist in the parent only.
        if self._process == os.getpid():
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join(_JOIN_TIMEOUT)

    def _room_for_outer(self) -> bool:
        return self._outer < self._outer_limit and self._running < self._limit

    def _start(self, task: Task, nested: bool) -> None:
        self._running += 1
        self._outer += not nested
        self._inbox.put(functools.partial(task, functools.partial(self._release, nested)))
        if self._idle > 0:
            self._idle -= 1
            return
        name = f"dataparallel-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        _thread.serves = True
        # As a fresh thread has it, so that no call sees what another one has set.
        fresh = ThreadContext.capture((self._device,))
        while (entry := self._inbox.get()) is not None:
            interpreter_end.start()
            fresh.run(0, entry)
            # A thread that waits holds no call.
            del entry
            interpreter_end.stop()
            with self._lock:
                self._idle += 1
