"""Where the current code runs, and the meeting point of the replicas of one call.

Synchronized batch norm needs the statistics of every replica in the middle of forward. The
replicas meet here: each brings its value, replica 0 combines all values, each takes its part.

Note [Meeting in forward, never in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A replica that waits inside backward for another one deadlocks when one thread runs the backward of
both. So what the replicas compute together in forward must be ONE autograd node with one input and
one output per replica, built by ``combine``; its backward then waits for nobody.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dataparallel.threads.compile import untraced
from dataparallel.threads.workers import SecondaryError

V = TypeVar("V")
R = TypeVar("R")

DEFAULT_TIMEOUT = 300.0
_SAME = "every replica must come to the same meetings in the same order"


class RendezvousError(SecondaryError):
    """The replicas of a call did not all come to the same meeting."""


class RendezvousKeyError(RuntimeError):
    """Replicas came to different meetings at the same time."""


class RendezvousTimeout(TimeoutError):
    """A replica did not come in time."""


@dataclass(frozen=True, eq=False)
class _Round:
    """One meeting: who has come, with what, and what came of it."""

    key: Hashable
    values: dict[int, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)


class Rendezvous:
    """Meeting point of the replicas of a call; each is within ``waiting(index)`` while it waits."""

    def __init__(
        self,
        num_replicas: int,
        waiting: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.num_replicas = num_replicas
        self._waiting = waiting
        self._changed = threading.Condition(threading.Lock())
        self._round: _Round | None = None
        self._left: dict[int, str] = {}
        self._aborted = False

    # Replicas meet in Python's own locks, which the compiler cannot follow.
    @untraced
    def exchange(
        self,
        key: Hashable,
        value: V,
        combine: Callable[[list[V]], Sequence[R]],
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> R:
        """Bring ``value``, wait for the other replicas, and take this replica's part.

        ``combine`` makes the results from the values, both in replica order, in the thread of
        replica 0; what it raises is raised there, and a RendezvousError in the others.
        """
        index = _index_in(self)
        with self._changed:
            meeting = self._join(index, key, value)
            waits = index > 0 or len(meeting.values) < self.num_replicas
        with self._waiting(index) if waits else nullcontext():
            self._await(meeting, index, timeout)
        if index == 0 and not meeting.failures:
            self._combine(meeting, combine)
        for failure in meeting.failures:
            # One object raised in several threads would collect the tracebacks of all.
            raise type(failure)(*failure.args)
        result: R = meeting.results[index]
        return result

    def leave(self, index: int, *, failed: bool) -> None:
        """Tell that a replica will not come any more: it returned, or it failed."""
        with self._changed:
            self._left[index] = "failed" if failed else "returned"
            if self._round is not None and index not in self._round.values:
                self._fail(self._round, self._missing(self._round.key))

    def abort(self) -> None:
        """Release every replica that waits, with an error; later meetings fail at once."""
        with self._changed:
            self._aborted = True
            if self._round is not None:
                self._fail(self._round, RendezvousError("the call was interrupted"))

    def _join(self, index: int, key: Hashable, value: Any) -> _Round:
        if self._aborted:
            raise RendezvousError("the call was interrupted")
        if self._left:
            raise self._missing(key)
        if self._round is None:
            self._round = _Round(key)
        meeting = self._round
        assert index not in meeting.values, "a replica waits in its own thread"
        if meeting.key != key:
            text = f"came to the meeting {key!r} while {_replicas(sorted(meeting.values))} came to"
            error = RendezvousKeyError(f"replica {index} {text} {meeting.key!r}; {_SAME}")
            self._fail(meeting, error)
        meeting.values[index] = value
        self._changed.notify_all()
        return meeting

    def _await(self, meeting: _Round, index: int, seconds: float) -> None:
        """Wait until all have come; for what replica 0 combines then, as long as it takes."""

        def all_came() -> bool:
            return self._round is not meeting or len(meeting.values) == self.num_replicas

        with self._changed:
            if not self._changed.wait_for(all_came, min(seconds, threading.TIMEOUT_MAX)):
                absent = [i for i in range(self.num_replicas) if i not in meeting.values]
                text = f"{_replicas(absent)} did not come within {seconds:.3g} s; {_SAME}"
                self._fail(meeting, RendezvousTimeout(f"meeting for {meeting.key!r}: {text}"))
            while index and self._round is meeting:
                self._changed.wait()

    def _combine(self, meeting: _Round, combine: Callable[[list[V]], Sequence[R]]) -> None:
        try:
            results = combine([meeting.values[i] for i in range(self.num_replicas)])
            if len(results) != self.num_replicas:
                raise ValueError(
                    f"combine for {meeting.key!r} returned {len(results)} results, "
                    f"but there are {self.num_replicas} replicas; return one per replica"
                )
        except BaseException as error:
            text = f"combine for {meeting.key!r} raised {type(error).__name__}: {error}"
            with self._changed:
                self._fail(meeting, RendezvousError(text))
            raise
        with self._changed:
            meeting.values.clear()
            meeting.results.extend(results)
            self._end(meeting)

    def _fail(self, meeting: _Round, failure: BaseException) -> None:
        meeting.failures.append(failure)
        self._end(meeting)

    def _end(self, meeting: _Round) -> None:
        if self._round is meeting:
            self._round = None
        self._changed.notify_all()

    def _missing(self, key: Hashable) -> RendezvousError:
        # What failed after somebody had left most likely failed because of that.
        index, how = next(iter(self._left.items()))
        return RendezvousError(
            f"the meeting for {key!r} needs all {self.num_replicas} replicas, but replica {index} "
            f"{how} without coming; {_SAME}"
        )


def _replicas(indices: Sequence[int]) -> str:
    names = ", ".join(map(str, indices))
    return f"replica {names}" if len(indices) == 1 else f"replicas {names}"


# --- where the current code runs -------------------------------------------------------------


@dataclass(frozen=True)
class Replica:
    """Where the current code runs.

    Attributes:
        index: Index of the replica within the process, from 0.
        device: The device of the replica.
        num_replicas: How many replicas the call has. An uneven or small batch may have fewer than
            there are device slots.
    """

    index: int
    device: torch.device
    num_replicas: int


#: The replica in which this code runs, and its meeting point.
here: contextvars.ContextVar[tuple[Replica, Rendezvous] | None] = contextvars.ContextVar(
    "dataparallel_replica", default=None
)


def current_replica() -> Replica | None:
    """The replica in which this code runs, or ``None`` outside of replicas.

    In nested parallel calls it is the innermost one. Backward does not run in the replicas' calls,
    so it is ``None`` in a gradient hook.

    Example::

        def forward(self, x):
            replica = dataparallel.current_replica()
            if replica is None or replica.index == 0:
                self.log(x)
    """
    entry = here.get()
    return None if entry is None else entry[0]


def current_rendezvous() -> Rendezvous | None:
    """The meeting point of the call in which this replica runs; ``None`` outside of replicas."""
    entry = here.get()
    return None if entry is None else entry[1]


def _index_in(rendezvous: Rendezvous) -> int:
    entry = here.get()
    if entry is None or entry[1] is not rendezvous:
        raise RuntimeError(
            "exchange() was called outside of the replicas of its call; use current_rendezvous() "
            "in the forward of the module"
        )
    return entry[0].index
