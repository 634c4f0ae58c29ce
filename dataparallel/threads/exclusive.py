"""Work that one replica of the process does while all others stand still.

Note [State of the process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Torch keeps some state once for the whole process: the level of forward-mode derivatives, the
switches of attention, the default dtype and others. See ``torch_internals``. A forward may change
it and set it back, and so do all replicas at once. Each would compute with what another one has
set, and the last one would leave the process as it found it: changed.

So running replicas share a lock, and whoever changes such state holds it alone until all is as it
was before, or the replica ends. Others stop where they want the lock too, wait for each other, or
end; those that start wait. A replica that holds the lock cannot wait for others, which raises an
error. The replicas of a wrapper that it calls run in its own thread.

Backward may run a part of forward again in threads of autograd's engine. These take the lock one
after another, but stop nobody: a replica may wait for that very backward. So they take it only for
levels of derivatives, and for blocks of torch's that set back what they find. A default dtype that
such a part sets by itself is not its own, where several devices run such parts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from dataparallel import torch_internals

T = TypeVar("T")

# Seconds that a replica waits for one that wants the lock alone; that one may wait for it, too.
_PATIENCE = 2.0
# Seconds between two looks around: whether a thread has died, or this one was interrupted.
_LOOK = 0.2
_REMEDY = "replicas that wait for each other must do so through current_rendezvous()"


class ExclusiveLock:
    """A lock that running replicas share, and that one thread holds alone."""

    def __init__(self) -> None:
        #: Seconds to wait for the replicas to stop, not counting the time in which others compile.
        self.timeout = 300.0
        self.reset()

    def reset(self) -> None:
        """Forget all threads, as in a forked child, where they are gone."""
        self._changed = threading.Condition()
        #: The work of each thread that shares the lock.
        self._running: dict[threading.Thread, object] = {}
        # The thread that holds the lock, or waits only for replicas. Then its reason, its depth,
        # how long others may wait for it, and its work before.
        self._owner: threading.Thread | None = None
        self._reason = ""
        self._depth = 0
        self._limit = 0.0
        self._stopped: object = None
        #: The state of the process that the owner has changed, as it was before.
        self._before: dict[Hashable, Any] = {}

    # --- sharing ---------------------------------------------------------------------------------

    def share(self, work: object) -> object:
        """Share the lock while this thread runs something, until told of None.

        Returns what it ran before. It waits for a thread that holds the lock alone.
        """
        thread = threading.current_thread()
        before = self._running.pop(thread, None)
        if work is not None:
            self._running[thread] = work
        # A thread that wants the lock says so first, and then looks which threads run. Both look
        # into one dict, whose operations come one after another in all threads.
        if self._owner is not None and self._owner is not thread:
            self._make_way(thread, work)
        return before

    def begin(self, work: object) -> tuple[object, int]:
        """Begin a replica in this thread; return the facts that :meth:`end` needs."""
        return self.share(work), self._depth if self._owner is threading.current_thread() else 0

    def end(self, begun: tuple[object, int]) -> None:
        """End the replica: state that it has not set back stays, as without replicas."""
        before, depth = begun
        if self._owner is not None:
            self.lower(depth)
        self.share(before)

    def _make_way(self, thread: threading.Thread, work: object) -> None:
        patience = time.monotonic() + _PATIENCE
        with self._changed:
            self._running.pop(thread, None)
            self._changed.notify_all()
            if work is not None:
                while self.is_held() or (self._is_wanted() and time.monotonic() < patience):
                    self._changed.wait(_LOOK)
                self._running[thread] = work

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within a ``with`` block this thread only waits for others, which may hold the lock."""
        before = self.share(None)
        try:
            yield
        finally:
            self.share(before)

    # --- alone -----------------------------------------------------------------------------------

    def is_held(self) -> bool:
        """True if some thread has the lock alone: it waits for no replica any more."""
        return self._is_wanted() and not self._sharing()

    def depth(self) -> int:
        """Return the number of times that this thread holds the lock."""
        return self._depth if self._owner is threading.current_thread() else 0

    @contextlib.contextmanager
    def alone(self, reason: str) -> Iterator[object]:
        """Hold the lock within a ``with`` block, for as long as it takes; may be nested.

        Yields what the thread ran before.
        """
        depth = self.depth()
        # An interrupt may come anywhere; the block ends all the same.
        try:
            yield self._take(reason, math.inf)
        finally:
            self.lower(depth)

    def lower(self, depth: int) -> None:
        """Hold the lock no more often than that; 0 gives it back."""
        if self.depth() <= depth:
            return
        self._depth = depth
        if not depth:
            stopped = self._stopped
            self._free(threading.current_thread())
            if stopped is not None:
                self.share(stopped)

    def _free(self, owner: threading.Thread) -> None:
        with self._changed:
            if self._owner is owner:
                self._owner = self._stopped = None
                self._changed.notify_all()

    def _take(self, reason: str, limit: float, *, stops: bool = True) -> object:
        thread = threading.current_thread()
        if self._owner is thread:
            self._depth += 1
            return None
        before = self._running.pop(thread, None)
        try:
            with self._changed:
                self._changed.notify_all()
                self._wait_for_owner(reason)
                self._owner, self._reason, self._depth, self._limit = thread, reason, 1, limit
                self._before, self._stopped = {}, before
                if stops:
                    self._stop_replicas()
        except BaseException:
            self._stopped = None if self._owner is thread else self._stopped
            self.lower(0)
            self.share(before)
            raise
        return before

    def _wait_for_owner(self, reason: str) -> None:
        owner, since = None, time.monotonic()
        while self._is_wanted():
            if owner is not self._owner:
                owner, since = self._owner, time.monotonic()
            if time.monotonic() - since > self._limit:
                name = "" if owner is None else owner.name
                raise TimeoutError(
                    f"{reason} belongs to the whole process, and {name} has changed "
                    f"{self._reason} and not set it back within {self.timeout:.3g} s; {_REMEDY}"
                )
            self._changed.wait(_LOOK)

    def _stop_replicas(self) -> None:
        deadline = time.monotonic() + self.timeout
        while running := self._sharing():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._reason} belongs to the whole process, so no replica may run "
                    f"meanwhile, but within {self.timeout:.3g} s these threads did not stop: "
                    f"{', '.join(running)}; {_REMEDY}"
                )
            self._changed.wait(_LOOK)

    # A thread may have died of an interrupt.

    def _is_wanted(self) -> bool:
        # It is given back at any time where this thread does not hold `_changed`.
        owner = self._owner
        return owner is not None and owner.is_alive()

    def _sharing(self) -> list[str]:
        threads = [thread for thread in list(self._running) if thread is not self._owner]
        return sorted(thread.name for thread in threads if thread.is_alive())

    # --- state of the process --------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Within a ``with`` block in a backward, nobody else in one changes state of the process.

        Replicas need none: they stand still while another one has changed it.
        """
        depth = self.depth()
        try:
            if torch_internals.current_graph_task_id() != -1 and not self._runs():
                self._take(name, self.timeout, stops=False)
            yield
        finally:
            self.lower(depth)

    def change(
        self,
        name: str,
        key: Hashable,
        read: Callable[[], Any],
        wanted: Any,
        put: Callable[[], T],
        *,
        in_backward: bool,
    ) -> T:
        """Change state of the process; in a replica as the only one, until it is as it was.

        ``in_backward``: whether it is so in a backward, too; then its setter does not read it.
        """
        runs = self._runs()
        if not (runs or (in_backward and torch_internals.current_graph_task_id() != -1)):
            return put()
        if not (self.depth() and self._before):
            if read() == wanted:
                return put()
            self._take(name, self.timeout, stops=runs)
            if not runs:
                free = functools.partial(self._free, threading.current_thread())
                torch_internals.when_backward_ends(free)
        before = self._before
        if key not in before:
            before[key] = read()
        try:
            return put()
        finally:
            if read() == before[key]:
                del before[key]
                if not before:
                    self.lower(self._depth - 1)

    def _runs(self) -> bool:
        """True if this thread is that of a replica."""
        thread = threading.current_thread()
        return thread in self._running or (self._owner is thread and self._stopped is not None)

    def refuse(self, what: str) -> None:
        """Raise a RuntimeError if this thread holds the lock, so that nobody can come to it."""
        if self.depth():
            raise RuntimeError(
                f"{what} needs the other replicas, but this one has changed {self._reason}, which "
                "belongs to the whole process, so no other replica runs until it is set back: set "
                "it back before, or set it around the call of the wrapper"
            )


def run_once(function: Callable[[], T]) -> Callable[[], T]:
    """Let a function run once: threads that come meanwhile wait, later ones find the result.

    ``functools.cache`` alone calls it in each thread that comes before the first one is done.
    """
    first, turn = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def alone() -> T:
        with turn:
            return first()

    # Without Python code once the result is there.
    return functools.cache(alone)


#: The lock of this process.
lock = ExclusiveLock()


@run_once
def watch_process_state() -> None:
    """Let replicas change what is one for the process through the lock, from now on."""
    torch_internals.watch_process_state(lock.change, lock.changing)
    torch_internals.cache_parametrizations_by_replica()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lock.reset)
