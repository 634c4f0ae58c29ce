"""Who runs together, and who runs alone, in this process.

Note [Together and alone]
~~~~~~~~~~~~~~~~~~~~~~~~~
While one thread compiles with ``torch.compile``, process-wide state of torch is not as usual: a
flag of ``torch.fx`` makes compiled functions that other threads call raise, methods of
``nn.Module`` are patched, and ``torch.compiler.is_compiling()`` is true for everybody. So replicas
run *together*, and what compiles runs *alone*: it waits until no replica runs, and none starts or
goes on before it has ended.

A replica that wants to be alone no longer runs together with the others, so two that want it do not
wait for each other. Neither does a replica run while it waits for others (in a meeting, or for
nested replicas): it has *paused*. Who waits to be alone does not keep others from starting, since
a replica that still runs may wait for just these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

# Seconds that a thread waits to be alone, while the others do not stop.
DEFAULT_TIMEOUT = 300.0
# Seconds that a new call lets those go first who wait to be alone.
_COURTESY = 10.0
# Seconds between two looks around: whether a thread has died, or this one was interrupted.
LOOK = 0.2


class TurnTimeout(TimeoutError):
    """A thread that wants to be alone waited in vain for the others to stop."""


class _Standing(threading.local):
    """How this thread runs: how often it entered each, and what to tell when it pauses."""

    together = 0
    alone = 0
    on_pause: Callable[[], None] | None = None


class Turns:
    """Keeps apart what runs alone from what runs together. See Note [Together and alone].

    Example::

        with turns.together():      # in the thread of a replica
            output = replica(x)
        with turns.alone():         # in a thread that compiles
            compile()

    Args:
        timeout: Seconds to wait for the others before :meth:`alone` raises. The time in which
            somebody else is alone does not count.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        self._standing = _Standing()
        self._after_fork()

    def _after_fork(self) -> None:
        self._changed = threading.Condition()
        self._running: set[threading.Thread] = set()
        self._owner: threading.Thread | None = None
        self._waiting = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run together with other threads that do so; what is alone comes first or afterwards."""
        self.enter_together()
        try:
            yield
        finally:
            self.leave_together()

    def enter_together(self) -> None:
        """Begin what :meth:`together` does, where that is too slow."""
        standing = self._standing
        if not standing.together and not standing.alone:
            self._join()
        standing.together += 1

    def leave_together(self) -> None:
        """End what :meth:`enter_together` began."""
        standing = self._standing
        standing.together -= 1
        if not standing.together and not standing.alone:
            self._leave()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run while no other thread is in :meth:`together` or :meth:`alone`.

        May be nested, and entered from within :meth:`together`.

        Raises:
            TurnTimeout: Some thread did not stop in time; the message names it.
        """
        standing = self._standing
        if not standing.alone:
            if standing.together:
                self._leave()
            self._take()
        standing.alone += 1
        try:
            yield
        finally:
            standing.alone -= 1
            if not standing.alone:
                self._give_back(runs_on=standing.together > 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let others run alone within a ``with`` block, in which this thread only waits."""
        standing = self._standing
        together, alone, told = standing.together, standing.alone, standing.on_pause
        if told is not None:
            told()
        if alone:
            self._give_back(runs_on=False)
        elif together:
            self._leave()
        standing.together = standing.alone = 0
        try:
            yield
        finally:
            try:
                if alone:
                    self._take()
                elif together:
                    self._join()
            finally:
                standing.together, standing.alone = together, alone

    def let_pass(self) -> None:
        """Before a call that nobody waits for: let those go first who wait to be alone.

        Not for ever, since it might be that somebody waits for it after all.
        """
        if self._waiting:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting, _COURTESY)

    @contextlib.contextmanager
    def telling(self, on_pause: Callable[[], None]) -> Iterator[None]:
        """Call ``on_pause`` whenever this thread pauses within a ``with`` block."""
        before, self._standing.on_pause = self._standing.on_pause, on_pause
        try:
            yield
        finally:
            self._standing.on_pause = before

    def _join(self) -> None:
        with self._changed:
            while self._owner is not None:
                self._changed.wait(LOOK)
                self._forget_the_dead()
            self._running.add(threading.current_thread())

    def _leave(self) -> None:
        with self._changed:
            # Not there any more if it waited in vain to be alone.
            self._running.discard(threading.current_thread())
            self._changed.notify_all()

    def _take(self) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._wait_for_all()
                self._owner = threading.current_thread()
            finally:
                self._waiting -= 1

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self.timeout
        while self._owner is not None or self._running:
            if self._owner is not None:
                deadline = time.monotonic() + self.timeout
            elif time.monotonic() > deadline:
                names = ", ".join(sorted(thread.name for thread in self._running))
                raise TurnTimeout(
                    f"torch.compile has to compile, and nothing may run meanwhile, but within "
                    f"{self.timeout:.3g} s these threads did not stop: {names}; replicas that "
                    "wait for each other must do so through current_rendezvous()"
                )
            self._changed.wait(LOOK)
            self._forget_the_dead()

    def _give_back(self, *, runs_on: bool) -> None:
        with self._changed:
            # Not this thread's any more if it waited in vain after a pause.
            if self._owner is threading.current_thread():
                self._owner = None
                if runs_on:
                    self._running.add(threading.current_thread())
            self._changed.notify_all()

    def _forget_the_dead(self) -> None:
        """An interrupt may come at any instruction, also just before what gives back."""
        self._running = {thread for thread in self._running if thread.is_alive()}
        if self._owner is not None and not self._owner.is_alive():
            self._owner = None


#: Of this process.
turns = Turns()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=turns._after_fork)
