"""Errors of collectives across processes, and how the processes tell each other where they are."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import UNREACHABLE, FailureChannel

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store


class CollectiveError(RuntimeError):
    """A collective failed: a process ended, a connection broke, or the link was broken before.

    Attributes:
        place: The collective that failed; None if there was none.
        failure: What is known of the process that is the cause; None if no single one is.
    """

    place: Place | None = None
    failure: Failure | None = None


class CollectiveTimeout(TimeoutError):
    """A collective did not complete in time; the message says which rank is missing.

    Attributes:
        place, failure: As in :class:`CollectiveError`.
    """

    place: Place | None = None
    failure: Failure | None = None


# Seconds that a rank whose collective failed waits for the reports of the others.
GRACE = 1.0
# The same after a timeout, when the others have had time enough.
_LATE_GRACE = 0.3
# Seconds after which a store that does not answer counts as lost.
_STORE_TIMEOUT = 2.0
# The same where it has not answered for a while already.
_AWAY = 0.2
_POLL = 0.02

#: Seconds that a process waits for others at its start before it says so.
PATIENCE = 60.0

_logger = logging.getLogger(__name__)

_REMEDY = (
    "every process must run the same collectives in the same order; look for an earlier error of "
    "the ranks named here, and raise the timeout if they are only slow"
)


@dataclass(frozen=True)
class Place:
    """Where a rank is in the sequence of collectives of one link."""

    sequence: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.what} (collective {self.sequence})"


@dataclass(frozen=True)
class Report:
    """What a rank tells the others after a collective failed there.

    Attributes:
        link: In which link, or group.
        place: Where.
        timed_out: Whether the time was over.
        name: What tells it from a later one of the same rank.
    """

    link: str
    place: Place
    timed_out: bool
    name: str


# Names of reports that were read, by channel. A group of the user may fail more than once.
_read_before: weakref.WeakKeyDictionary[FailureChannel, set[str]] = weakref.WeakKeyDictionary()


class Reports:
    """The reports of the ranks of one link, in the store of its process group.

    Nothing is written before a collective fails: each rank then tells where it is, and reads where
    the others are. One that waits in another link over the same processes is found too.

    Args:
        store: Shared by all links over the same processes.
        link: Name of the link, the same in all its processes and unlike that of any other.
        rank: This rank, from 0 to ``world_size - 1``.
        world_size: How many ranks the link has.
        channel: What is known of failures.
    """

    def __init__(
        self, store: Store, link: str, rank: int, world_size: int, channel: FailureChannel
    ) -> None:
        self.channel = channel
        self._store = store
        self._link = link
        self._rank = rank
        self._world_size = world_size

    def exchange(self, place: Place, timed_out: bool) -> dict[int, Report] | str:
        """Tell where this rank is and learn where the others are, within a few seconds.

        Args:
            place: The collective that failed here.
            timed_out: Whether it failed because the time was over.

        Returns:
            The reports of the other ranks, without those that sent none; or why the store could
            not be asked.
        """
        answers: list[dict[int, Report] | str] = []

        def ask() -> None:
            try:
                self._tell(Report(self._link, place, timed_out, uuid.uuid4().hex))
                answers.append(self._hear(_LATE_GRACE if timed_out else GRACE))
            except Exception as error:
                answers.append(str(error).splitlines()[0])

        # A call of the store has no time limit of its own.
        thread = threading.Thread(target=ask, name="dataparallel-reports", daemon=True)
        thread.start()
        lost = self.channel.unanswered()
        patience = _AWAY if lost > UNREACHABLE else GRACE + _STORE_TIMEOUT
        thread.join(patience)
        return answers[0] if answers else f"no answer within {lost + patience:.2g} s"

    def clear(self) -> None:
        """Take back what this rank told about earlier links; all ranks have met again since."""
        self._store.delete_key(f"latest/{self._rank}")

    def _tell(self, report: Report) -> None:
        text = json.dumps(asdict(report))
        self._store.set(f"{self._link}/report/{self._rank}", text)
        self._store.set(f"latest/{self._rank}", text)

    def _hear(self, grace: float) -> dict[int, Report]:
        others = {rank for rank in range(self._world_size) if rank != self._rank}
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + grace
        while True:
            reports.update(self._read(f"{self._link}/report", others - reports.keys()))
            silent = others - reports.keys()
            if not silent:
                return reports
            self.channel.look(_POLL)
            # Nobody waits for the report of a process that is gone.
            if all(self.channel.failure_of(rank) is not None for rank in silent):
                return reports
            if time.monotonic() > deadline:
                return reports | self._read("latest", others - reports.keys())
            time.sleep(_POLL)

    def _read(self, folder: str, ranks: set[int]) -> dict[int, Report]:
        found = {}
        before = _read_before.setdefault(self.channel, set())
        for rank in sorted(ranks):
            if self._store.check([f"{folder}/{rank}"]):
                fields = json.loads(self._store.get(f"{folder}/{rank}"))
                report = Report(**{**fields, "place": Place(**fields["place"])})
                if report.link != self._link or report.name not in before:
                    found[rank] = report
        before.update(report.name for report in found.values())
        return found


def failure(
    place: Place,
    link: str,
    ranks: Sequence[int],
    rank: int,
    reports: Mapping[int, Report] | str,
    channel: FailureChannel | None,
    seconds: float,
    timed_out: bool,
    reason: str | None,
) -> CollectiveError | CollectiveTimeout:
    """The error for a collective that failed.

    Args:
        place: The collective.
        link: Name of the link, as in the reports.
        ranks: The number that each rank of the link has in the default group.
        rank: This rank, as an index of ``ranks``.
        reports: What :meth:`Reports.exchange` returned.
        channel: What is known of failures; None if the group is gone.
        seconds: How long this rank had waited.
        timed_out: Whether the time was over here.
        reason: What the backend said, if that is more than that the time was over.

    Returns:
        A :class:`CollectiveTimeout` if the time was over here, or for another rank of the link
        (whose leaving is then the reason why this one failed), else a :class:`CollectiveError`.
    """
    head = f"rank {ranks[rank]}: {place} over {len(ranks)} processes for {purpose_of(link)!r}"
    event = "did not complete within" if timed_out else "failed after"
    who = _who(place, link, ranks, rank, reports, channel)
    text = f"{head} {event} {seconds:.3g} s: {who}; {_REMEDY}"
    if reason is not None:
        text = f"{text}. The backend said: {reason}"
    here = [] if isinstance(reports, str) else reports.values()
    late = timed_out or any(report.timed_out for report in here if report.link == link)
    error = CollectiveTimeout(text) if late else CollectiveError(text)
    error.place = place
    lost = _lost(ranks, rank, reports, channel)
    error.failure = next(iter(lost.values()), None)
    return error


def given_up(
    place: Place, link: str, ranks: Sequence[int], rank: int, cause: Failure, seconds: float
) -> CollectiveError:
    """The error for a collective that is waited for no more, because a process has failed."""
    error = CollectiveError(
        f"rank {ranks[rank]}: {place} over {len(ranks)} processes for {purpose_of(link)!r} was "
        f"given up after {seconds:.3g} s: {cause}"
    )
    error.place, error.failure = place, cause
    return error


def _lost(
    ranks: Sequence[int],
    rank: int,
    reports: Mapping[int, Report] | str,
    channel: FailureChannel | None,
) -> dict[int, Failure]:
    """The ranks that have failed, and how."""
    if channel is None:
        return {}
    told = {} if isinstance(reports, str) else reports
    found = {i: channel.failure_of(i) for i in range(len(ranks)) if i != rank and i not in told}
    return {i: failure for i, failure in found.items() if failure is not None}


def _who(
    place: Place,
    link: str,
    ranks: Sequence[int],
    rank: int,
    reports: Mapping[int, Report] | str,
    channel: FailureChannel | None,
) -> str:
    """What the other ranks do instead."""
    lost = _lost(ranks, rank, reports, channel)
    parts = [str(failure) for failure in dict.fromkeys(lost.values())]
    if isinstance(reports, str):
        if parts:
            return "; ".join(parts)
        return (
            "nobody knows which rank is missing, because the store of the process group did not "
            f"answer ({reports}); the process that holds it, mostly that of rank 0, may have ended"
        )
    for i in range(len(ranks)):
        if i != rank and i not in reports and i not in lost:
            state = channel.describe(i) if channel is not None else ""
            note = f" ({state})" if state else ", or ended"
            parts.append(f"rank {ranks[i]} did not come{note}")
    for i, report in sorted(reports.items()):
        if report.link != link:
            parts.append(f"rank {ranks[i]} waits in another link, {report.link}: {report.place}")
        elif report.place != place:
            parts.append(f"rank {ranks[i]} is at {report.place}")
        elif report.timed_out:
            parts.append(f"rank {ranks[i]} came and gave up waiting")
        else:
            parts.append(f"rank {ranks[i]} came and failed too")
    return "; ".join(parts)


class Reminder:
    """Says once in the log for whom a process waits, when it has done so for a minute.

    Args:
        limit: Seconds for which it waits at most.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._due = time.monotonic() + PATIENCE

    def look(self, describe: Callable[[], str]) -> None:
        """Called now and then by who waits.

        Args:
            describe: Returns who waits for whom.
        """
        if time.monotonic() > self._due:
            self._due = float("inf")
            _logger.warning(
                "%s, since %.3g s and for at most %.4g s", describe(), PATIENCE, self._limit
            )


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def purpose_of(link: str) -> str:
    """What a link is for, out of its name."""
    return link.rsplit("/", 1)[0]
