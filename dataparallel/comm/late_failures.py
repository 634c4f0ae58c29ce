"""Collectives on accelerators, whose failure is known after the wait for them.

Note [Late failures]
~~~~~~~~~~~~~~~~~~~~
The wait for a collective on an accelerator orders streams, and the host goes on. If the backend
fails then, nobody waits any more, and what is in the tensor is not the result. So what was launched
there is remembered until it has ended. Whoever launches the next collective over the same
processes, on whatever link, or begins a forward, looks at what has ended since, and raises the
error of what has failed. So does whoever finds that a link was given up while its collectives were
under way: their results will never come.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, Place

if TYPE_CHECKING:
    from dataparallel.comm.failure_channel import FailureChannel

# Of a collective, in torch's ``WorkResult``.
_SUCCESS = 0
# How many collectives are remembered, should a backend not tell that they have ended. After a
# failure the later ones fail as well.
_KEPT = 256


class Owner(Protocol):
    """Who has launched collectives, and knows what their failure means."""

    def is_given_up(self) -> bool:
        """Whether nobody can expect results any more, although none has failed here."""

    def late_failure(
        self, place: Place, started: float, reason: str | None
    ) -> CollectiveError | CollectiveTimeout | None:
        """The error of a collective that has failed; None if one was raised before.

        Args:
            place: The collective.
            started: When it was launched.
            reason: What the backend said; None if the collective is still under way.
        """


class _Launched(NamedTuple):
    owner: Owner
    place: Place
    started: float
    work: dist.Work


class LateFailures:
    """What was launched on accelerators over the processes of one group, in the order of launch."""

    def __init__(self) -> None:
        self._launched: deque[_Launched] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def remember(self, owner: Owner, place: Place, started: float, work: dist.Work) -> None:
        """A collective was launched."""
        with self._lock:
            self._launched.append(_Launched(owner, place, started, work))

    def look(self) -> None:
        """Raise the error of a collective that has failed; see Note [Late failures].

        Raises:
            CollectiveError, CollectiveTimeout: It has failed, or its link was given up.
        """
        while self._launched:
            with self._lock:
                if not self._launched:
                    return
                owner, place, started, work = self._launched[0]
                ended = _has_ended(work)
                if not ended and not owner.is_given_up():
                    return
                self._launched.popleft()
            reason = _failure_of(work) if ended else None
            if ended and reason is None:
                continue
            error = owner.late_failure(place, started, reason)
            if error is not None:
                with self._lock:
                    # Whatever else it has launched has no result, either.
                    rest = [each for each in self._launched if each.owner is not owner]
                    self._launched = deque(rest, maxlen=_KEPT)
                raise error


def _result_of(work: dist.Work) -> torch.futures.Future[int] | None:
    """Where a backend whose wait does not block says how a collective ended; None for others."""
    # Torch's types lack it.
    untyped: Any = work
    try:
        result: torch.futures.Future[int] = untyped.get_future_result()
    except RuntimeError:
        return None
    return result


def _has_ended(work: dist.Work) -> bool:
    result = _result_of(work)
    return bool(work.is_completed()) if result is None else bool(result.done())


def _failure_of(work: dist.Work) -> str | None:
    """Why a collective that has ended has failed; None if it has not."""
    result = _result_of(work)
    if result is None:
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
        return None
    return None if result.value() == _SUCCESS else _text_of(work)


def _text_of(work: dist.Work) -> str:
    # Torch warns that it is deprecated, and has nothing else that tells why.
    try:
        return str(work.exception())
    except TypeError:
        return f"torch {torch.__version__} hands no error of the backend to Python"


_all: weakref.WeakKeyDictionary[FailureChannel, LateFailures] = weakref.WeakKeyDictionary()


def late_failures(channel: FailureChannel) -> LateFailures:
    """What was launched over the processes that a channel has."""
    return _all.setdefault(channel, LateFailures())
