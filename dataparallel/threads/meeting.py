"""Meeting point of the replicas of one call.

Synchronized batch norm needs the statistics of every replica in the middle of forward. The
replicas meet here: each brings its value, one of them combines all values, each takes its part.

Note [Meeting in forward, never in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A replica that waits inside backward for another one deadlocks when one thread runs the backward of
both. So what the replicas compute together in forward must be ONE autograd node with one input and
one output per replica, built by ``combine``; its backward then waits for nobody.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from dataparallel.threads.workers import SecondaryError

V = TypeVar("V")
R = TypeVar("R")

Waiting: TypeAlias = Callable[[int], AbstractContextManager[object]]

DEFAULT_TIMEOUT = 300.0
#: What :meth:`Rendezvous.leave` is told of a replica that raised.
FAILED = "failed"


class RendezvousError(SecondaryError):
    """The replicas of a call did not all come to the same meeting."""


class RendezvousKeyError(RuntimeError):
    """Replicas came to different meetings at the same time."""


class RendezvousTimeout(TimeoutError):
    """A replica did not come in time."""


class _Meetings:
    count = 0


class _Thread(threading.local):
    """Of each thread, the meetings in the calls that it makes; the replicas count them."""

    def __init__(self) -> None:
        self.meetings = _Meetings()


_thread = _Thread()


def count_meetings() -> int:
    """How many meetings there have been in the calls that this thread made."""
    return _thread.meetings.count


class _Round:
    """One meeting: who has come, with what, and what came of it."""

    __slots__ = ("combiner", "failure", "gates", "key", "results", "values")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.values: dict[int, Any] = {}
        self.results: Sequence[Any] = ()
        self.failure: BaseException | None = None
        # Who combines, once all have come.
        self.combiner: int | None = None
        # Per replica that waits, a lock that is free once there is something to wake up for. An
        # Event would do the same with three times the work in Python.
        self.gates: dict[int, threading.Lock] = {}

    def close_gate(self, index: int) -> threading.Lock:
        gate = self.gates[index] = threading.Lock()
        gate.acquire()
        return gate

    def open_gate(self, index: int) -> None:
        # Whoever takes a gate out of the table opens it, so nobody does so twice.
        gate = self.gates.pop(index, None)
        if gate is not None:
            gate.release()

    def open_gates(self) -> None:
        for index in list(self.gates):
            self.open_gate(index)

    def fail(self, failure: BaseException) -> None:
        self.failure = failure
        self.open_gates()


class Rendezvous:
    """Meeting point of the ``num_replicas`` replicas of one call.

    Args:
        num_replicas: How many replicas the call has.
        timeout: Seconds that a replica waits for the others before it raises.
        concurrent: Whether the replicas run at the same time. If they run one after another, a
            meeting of several is an error at once.
        waiting: Makes what a replica is within while it waits, from its index. Default: nothing.
    """

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
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._sequence = 0
        self._left: dict[int, str] = {}
        self._aborted: BaseException | None = None
        self._caller = _thread.meetings

    def exchange(
        self,
        key: Hashable,
        value: V,
        combine: Callable[[list[V]], Sequence[R]],
        *,
        timeout: float | None = None,
        by_last: bool = False,
    ) -> R:
        """Bring ``value``, wait for the other replicas, and take this replica's part.

        Example::

            def combine(counts):                       # one per replica, in replica order
                return [sum(counts)] * len(counts)

            total = current_rendezvous().exchange("count", x.shape[0], combine)

        Args:
            key: Names the meeting; all replicas must come with an equal one.
            value: What this replica contributes.
            combine: Turns the list of values, in replica order, into one result per replica. Runs
                once, in the thread of replica 0, so in its grad mode, autocast and device. See
                Note [Meeting in forward, never in backward].
            timeout: Seconds to wait for the others. Default: that of the rendezvous.
            by_last: Whether ``combine`` runs in the thread of the replica that comes last instead,
                where nobody has to be woken for it; for a ``combine`` that does the same in the
                thread of any replica. The same at all replicas. Default: False.

        Returns:
            The result of this replica.

        Raises:
            RendezvousError: Another replica failed, or returned without coming.
            RendezvousKeyError: Another replica came with another key.
            RendezvousTimeout: A replica did not come in time; the message says which.
            RuntimeError: Not called from a replica of this call, or the replicas run one after
                another.
            Exception: What ``combine`` raised, in the replica that ran it; the others raise
                RendezvousError.
        """
        index = _index_in(self)
        if not self._concurrent:
            raise RuntimeError(
                f"replica {index} came to the meeting {key!r}, but under torch.jit.trace and "
                "functorch transforms the replicas run one after another and cannot meet; "
                "transform the module instead of the parallel call"
            )
        meeting, gate = self._join(index, key, value, by_last)
        if gate is not None:
            with contextlib.nullcontext() if self._waiting is None else self._waiting(index):
                self._await(meeting, gate, index, self.timeout if timeout is None else timeout)
        if meeting.failure is None and meeting.combiner == index:
            self._combine(meeting, combine)
        if meeting.failure is not None:
            raise _copy_of(meeting.failure)
        result: R = meeting.results[index]
        return result

    def leave(self, index: int, why: str = "returned") -> None:
        """Tell that a replica will not come any more: it returned, or it failed."""
        with self._lock:
            self._left[index] = why
            if self._round is not None and index not in self._round.values:
                self._round.fail(self._missing(self._round.key, [index]))
                self._round = None

    def abort(self, reason: BaseException | None = None) -> None:
        """Release every replica that waits, with an error; later meetings fail at once."""
        with self._lock:
            self._aborted = RendezvousError(
                "the call was interrupted" if reason is None else f"the call ended: {reason}"
            )
            if self._round is not None:
                self._round.fail(self._aborted)
                self._round = None

    def _join(
        self, index: int, key: Hashable, value: Any, by_last: bool
    ) -> tuple[_Round, threading.Lock | None]:
        """The meeting, and what to wait for."""
        with self._lock:
            if self._aborted is not None:
                raise _copy_of(self._aborted)
            if self._left:
                raise self._missing(key, sorted(self._left))
            if self._round is None:
                self._round = _Round(key)
                self._sequence += 1
            meeting = self._round
            assert index not in meeting.values, "a replica waits in its own thread"
            if meeting.key != key:
                meeting.fail(self._other_key(index, key, meeting))
                self._round = None
                return meeting, None
            meeting.values[index] = value
            if len(meeting.values) < self.num_replicas:
                return meeting, meeting.close_gate(index)
            self._round = None
            combiner = index if by_last else 0
            gate = None if combiner == index else meeting.close_gate(index)
            meeting.combiner = combiner
            meeting.open_gate(combiner)
            return meeting, gate

    def _combine(self, meeting: _Round, combine: Callable[[list[V]], Sequence[R]]) -> None:
        try:
            values = [meeting.values[i] for i in range(self.num_replicas)]
            results = combine(values)
            if len(results) != self.num_replicas:
                raise ValueError(
                    f"combine for {meeting.key!r} returned {len(results)} results, "
                    f"but there are {self.num_replicas} replicas; return one per replica"
                )
        except BaseException as error:
            meeting.fail(
                RendezvousError(
                    f"combine for {meeting.key!r} raised {type(error).__name__}: {error}"
                )
            )
            raise
        meeting.results = results
        meeting.values.clear()
        self._caller.count += 1
        meeting.open_gates()

    def _await(self, meeting: _Round, gate: threading.Lock, index: int, seconds: float) -> None:
        begin = time.monotonic()
        if gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return
        with self._lock:
            if index not in meeting.gates:
                return
            if meeting.combiner is not None:
                what = f"replica {meeting.combiner} has not finished combining"
            else:
                what = f"{_replicas(self._absent(meeting))} did not come"
            waited = time.monotonic() - begin
            meeting.fail(
                RendezvousTimeout(
                    f"meeting {self._sequence} for {meeting.key!r}: {what} within {waited:.3g} s "
                    f"(timeout {seconds:.3g} s); every replica must come to the same meetings in "
                    "the same order"
                )
            )
            if self._round is meeting:
                self._round = None

    def _absent(self, meeting: _Round) -> list[int]:
        return [i for i in range(self.num_replicas) if i not in meeting.values]

    def _missing(self, key: Hashable, absent: Sequence[int]) -> RendezvousError:
        # What failed after somebody had left most likely failed because of that.
        first = next(iter(self._left))
        causes = [i for i in absent if i == first or self._left[i] != FAILED] or list(absent)
        who = "; ".join(f"replica {i} {self._left[i]}" for i in causes)
        return RendezvousError(
            f"the meeting for {key!r} needs all {self.num_replicas} replicas, but {who} without "
            "coming; every replica must come to the same meetings in the same order"
        )

    def _other_key(self, index: int, key: Hashable, meeting: _Round) -> RendezvousKeyError:
        waiting = _replicas(sorted(meeting.values))
        return RendezvousKeyError(
            f"replica {index} came to the meeting {key!r} while {waiting} came to "
            f"{meeting.key!r}; every replica must come to the same meetings in the same order"
        )


def _replicas(indices: Sequence[int]) -> str:
    names = ", ".join(str(i) for i in indices)
    return f"replica {names}" if len(indices) == 1 else f"replicas {names}"


def _copy_of(failure: BaseException) -> BaseException:
    # One object raised in several threads would collect the tracebacks of all.
    return type(failure)(*failure.args)


_current: contextvars.ContextVar[tuple[Rendezvous, int] | None] = contextvars.ContextVar(
    "dataparallel_rendezvous", default=None
)


def current_rendezvous() -> Rendezvous | None:
    """The meeting point of the call in which this replica runs; ``None`` outside of replicas."""
    entry = _current.get()
    return None if entry is None else entry[0]


def _index_in(rendezvous: Rendezvous) -> int:
    entry = _current.get()
    if entry is None or entry[0] is not rendezvous:
        raise RuntimeError(
            "exchange() was called outside of the replicas of its call; use current_rendezvous() "
            "in the forward of the module"
        )
    return entry[1]
