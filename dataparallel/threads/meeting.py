"""The place where the current code runs, and the meeting point of the replicas of one call.

Synchronized batch norm needs the statistics of every replica in the middle of forward. The
replicas meet here: each brings its value, replica 0 combines all values, each takes its part.

A replica that waits inside backward for another one deadlocks when one thread runs the backward of
both. So the common work of the replicas in forward must be ONE autograd node with one input and one
output per replica, built by ``combine``. Its backward then waits for nobody.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dataparallel.threads import exclusive
from dataparallel.threads.workers import SecondaryError
from dataparallel.torch_internals import untraced

V = TypeVar("V")
R = TypeVar("R")

DEFAULT_TIMEOUT = 300.0
_SAME = "every replica must come to the same meetings in the same order"


class RendezvousError(SecondaryError):
    """The replicas of a call did not all come to the same meeting."""


class _Meeting:
    """A meeting: the members that have come, their values, and a result for each or its absence."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.values: dict[int, Any] = {}
        self.outcome: Any = None


class Rendezvous:
    """Meeting point of the replicas of a call; each is within ``waiting(index)`` while it waits."""

    def __init__(
        self,
        num_replicas: int,
        waiting: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.num_replicas = num_replicas
        self._waiting = waiting
        self._changed = threading.Condition()
        self._meeting: _Meeting | None = None
        # The reason why no meeting takes place any more.
        self._over: str | None = None

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
        replica 0. Its error is raised there, and a RendezvousError in the others.
        """
        entry = here.get()
        assert entry is not None and entry[1] is self, "replicas of one call meet"
        index = entry[0].index
        exclusive.lock.refuse(f"the meeting for {key!r}")
        with self._changed:
            meeting = self._join(index, key, value)
            waits = index > 0 or len(meeting.values) < self.num_replicas
        with self._waiting(index) if waits else nullcontext(), self._changed:
            if not self._changed.wait_for(
                lambda: meeting.outcome is not None or len(meeting.values) == self.num_replicas,
                min(timeout, threading.TIMEOUT_MAX),
            ):
                absent = set(range(self.num_replicas)) - set(meeting.values)
                text = f"{_replicas(absent)} did not come within {timeout:.3g} s; {_SAME}"
                self._end(meeting, TimeoutError(f"meeting for {key!r}: {text}"))
            # Combining may take as long as it takes.
            self._changed.wait_for(lambda: index == 0 or meeting.outcome is not None)
        if meeting.outcome is None:
            outcome: Sequence[R] | Exception = RendezvousError(f"combine for {key!r} failed")
            try:
                outcome = combine([meeting.values[i] for i in range(self.num_replicas)])
            finally:
                with self._changed:
                    self._end(meeting, outcome)
        if isinstance(meeting.outcome, Exception):
            # One object raised in several threads would collect the tracebacks of all.
            raise type(meeting.outcome)(*meeting.outcome.args)
        result: R = meeting.outcome[index]
        return result

    def close(self, why: str) -> None:
        """Release every replica that waits, with an error; later meetings fail at once."""
        with self._changed:
            # A later error most likely follows from a replica that had left.
            self._over = self._over or why
            if self._meeting is not None:
                self._end(self._meeting, self._missed(self._meeting.key))

    def _join(self, index: int, key: Hashable, value: Any) -> _Meeting:
        if self._over is not None:
            raise self._missed(key)
        meeting = self._meeting = self._meeting or _Meeting(key)
        assert index not in meeting.values, "a replica waits in its own thread"
        if meeting.key != key:
            text = f"came to the meeting {key!r} while {_replicas(meeting.values)} came to"
            error = RuntimeError(f"replica {index} {text} {meeting.key!r}; {_SAME}")
            self._end(meeting, error)
        meeting.values[index] = value
        self._changed.notify_all()
        return meeting

    def _end(self, meeting: _Meeting, outcome: Sequence[Any] | Exception) -> None:
        meeting.outcome = outcome
        self._meeting = None
        self._changed.notify_all()

    def _missed(self, key: Hashable) -> RendezvousError:
        return RendezvousError(
            f"the meeting for {key!r} needs all {self.num_replicas} replicas, but {self._over}; "
            f"{_SAME}"
        )


def _replicas(indices: Iterable[int]) -> str:
    names = ", ".join(map(str, sorted(indices)))
    return f"replicas {names}" if "," in names else f"replica {names}"


# --- where the current code runs -------------------------------------------------------------


@dataclass(frozen=True)
class Replica:
    """The place where the current code runs.

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
    """Return the replica in which this code runs, or ``None`` outside of replicas.

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
    """Return the meeting point of this replica's call; ``None`` outside of replicas."""
    entry = here.get()
    return None if entry is None else entry[1]
