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
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from dataparallel.threads.compile import untraced
from dataparallel.threads.workers import SecondaryError

V = TypeVar("V")
R = TypeVar("R")

#: Makes what a replica is within while it waits, from its index.
Waiting: TypeAlias = Callable[[int], AbstractContextManager[object]]

DEFAULT_TIMEOUT = 300.0


class RendezvousError(SecondaryError):
    """The replicas of a call did not all come to the same meeting."""


class RendezvousKeyError(RuntimeError):
    """Replicas came to different meetings at the same time."""


class RendezvousTimeout(TimeoutError):
    """A replica did not come in time."""


class _Round:
    """One meeting: who has come, with what, and what came of it."""

    __slots__ = ("failure", "key", "results", "values")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.values: dict[int, Any] = {}
        self.results: Sequence[Any] | None = None
        self.failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        """Raise this in all that have come, or come later."""
        self.failure = failure

    def end(self, results: Sequence[Any]) -> None:
        """Give each replica its part."""
        self.results = results
        self.values.clear()


class Rendezvous:
    """Meeting point of the replicas of a call; each is within ``waiting(index)`` while it waits."""

    def __init__(
        self,
        num_replicas: int,
        timeout: float = DEFAULT_TIMEOUT,
        concurrent: bool = True,
        waiting: Waiting | None = None,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        self.num_replicas = num_replicas
        self.timeout = timeout
        self._concurrent = concurrent or num_replicas == 1
        self._waiting = waiting
        self._changed = threading.Condition(threading.Lock())
        self._round: _Round | None = None
        self._sequence = 0
        self._left: dict[int, str] = {}
        self._aborted: BaseException | None = None

    # Replicas meet in Python's own locks, which the compiler cannot follow.
    @untraced
    def exchange(
        self,
        key: Hashable,
        value: V,
        combine: Callable[[list[V]], Sequence[R]],
        *,
        timeout: float | None = None,
    ) -> R:
        """Bring ``value``, wait for the other replicas, and take this replica's part.

        ``combine`` makes the results from the values, both in replica order, in the thread of
        replica 0; what it raises is raised there, and a RendezvousError in the others.
        """
        index = _index_in(self)
        if not self._concurrent:
            raise RuntimeError(
                f"replica {index} came to the meeting {key!r}, but under torch.jit.trace and "
                "functorch transforms the replicas run one after another and cannot meet; "
                "transform the module instead of the parallel call"
            )
        with self._changed:
            meeting = self._join(index, key, value)
            waits = index > 0 or len(meeting.values) < self.num_replicas
        if waits:
            with nullcontext() if self._waiting is None else self._waiting(index):
                self._await(meeting, index, self.timeout if timeout is None else timeout)
        if index == 0 and meeting.failure is None:
            self._combine(meeting, combine)
        if meeting.failure is not None:
            # One object raised in several threads would collect the tracebacks of all.
            raise type(meeting.failure)(*meeting.failure.args)
        assert meeting.results is not None
        result: R = meeting.results[index]
        return result

    def leave(self, index: int, *, failed: bool) -> None:
        """Tell that a replica will not come any more: it returned, or it failed."""
        with self._changed:
            self._left[index] = "failed" if failed else "returned"
            if self._round is not None and index not in self._round.values:
                self._fail(self._round, self._missing(self._round.key, [index]))

    def abort(self) -> None:
        """Release every replica that waits, with an error; later meetings fail at once."""
        with self._changed:
            self._aborted = RendezvousError("the call was interrupted")
            if self._round is not None:
                self._fail(self._round, self._aborted)

    def _join(self, index: int, key: Hashable, value: Any) -> _Round:
        if self._aborted is not None:
            raise RendezvousError(*self._aborted.args)
        if self._left:
            raise self._missing(key, sorted(self._left))
        if self._round is None:
            self._round = _Round(key)
            self._sequence += 1
        meeting = self._round
        assert index not in meeting.values, "a replica waits in its own thread"
        if meeting.key != key:
            waiting = _replicas(sorted(meeting.values))
            self._fail(
                meeting,
                RendezvousKeyError(
                    f"replica {index} came to the meeting {key!r} while {waiting} came to "
                    f"{meeting.key!r}; every replica must come to the same meetings in the same "
                    "order"
                ),
            )
        meeting.values[index] = value
        if len(meeting.values) == self.num_replicas:
            self._changed.notify_all()
        return meeting

    def _fail(self, meeting: _Round, failure: BaseException) -> None:
        meeting.fail(failure)
        if self._round is meeting:
            self._round = None
        self._changed.notify_all()

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
            meeting.end(results)
            if self._round is meeting:
                self._round = None
            self._changed.notify_all()

    def _await(self, meeting: _Round, index: int, seconds: float) -> None:
        """Wait until all have come; for what replica 0 combines then, as long as it takes."""

        def all_came() -> bool:
            return self._round is not meeting or len(meeting.values) == self.num_replicas

        with self._changed:
            if not self._changed.wait_for(all_came, min(seconds, threading.TIMEOUT_MAX)):
                absent = [i for i in range(self.num_replicas) if i not in meeting.values]
                text = (
                    f"meeting {self._sequence} for {meeting.key!r}: {_replicas(absent)} did not "
                    f"come within {seconds:.3g} s; every replica must come to the same meetings in "
                    "the same order"
                )
                self._fail(meeting, RendezvousTimeout(text))
            while index and self._round is meeting:
                self._changed.wait()

    def _missing(self, key: Hashable, absent: Sequence[int]) -> RendezvousError:
        # What failed after somebody had left most likely failed because of that.
        first = next(iter(self._left))
        causes = [i for i in absent if i == first or self._left[i] != "failed"] or list(absent)
        who = "; ".join(f"replica {i} {self._left[i]}" for i in causes)
        return RendezvousError(
            f"the meeting for {key!r} needs all {self.num_replicas} replicas, but {who} without "
            "coming; every replica must come to the same meetings in the same order"
        )


def _replicas(indices: Sequence[int]) -> str:
    names = ", ".join(str(i) for i in indices)
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
