"""Errors of collectives across processes, and what is known of a process that has failed."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A traceback travels through a store that is not made for long texts.
_LONGEST = 8000
#: Seconds that a process waits for others at its start before it says so.
PATIENCE = 60.0

_logger = logging.getLogger(__name__)


class CollectiveFailure(Exception):
    """What the two errors have in common.

    Args:
        message: The text.
        place: The collective that failed; None if there was none.
        failure: What is known of the process that is the cause; None if no single one is.
    """

    def __init__(
        self, message: str = "", place: Place | None = None, failure: Failure | None = None
    ) -> None:
        super().__init__(message)
        self.place = place
        self.failure = failure


class CollectiveError(CollectiveFailure, RuntimeError):
    """A collective failed: a process ended, a connection broke, or the link was broken before."""


class CollectiveTimeout(CollectiveFailure, TimeoutError):
    """A collective did not complete in time; the message says which rank is missing."""


@dataclass(frozen=True)
class Place:
    """Where a rank is in the sequence of collectives of one link."""

    sequence: int
    operation: str
    what: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.what} (collective {self.sequence})"


@dataclass(frozen=True)
class Process:
    """A process, so that others on its machine can see whether it has ended.

    Attributes:
        host: The name of the machine, for people.
        pid: The number of the process.
        space: One start of one machine, and one container on it; empty where that is not known.
    """

    host: str
    pid: int
    space: str

    @classmethod
    def this(cls) -> Process:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _space())

    def state(self) -> str:
        """``"ended"``, ``"stopped"``, or empty where it runs or nobody can know."""
        if not self.space or self.space != _space():
            return ""
        try:
            text = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "ended"
        except OSError:
            # Some systems hide the processes of other users.
            return ""
        # The name before it, which may have any character in it, is in parentheses. A zombie is a
        # process whose parent has not taken note of its end.
        state = text.rpartition(")")[2].split()[0]
        return {"Z": "ended", "X": "ended", "T": "stopped"}.get(state, "")


def _space() -> str:
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Failure:
    """Why a process cannot take part any more, as the other processes see it.

    Attributes:
        rank: Its rank in the default process group.
        host: The name of its machine.
        pid: Its process id there.
        kind: ``"raised"``: it raised an error. ``"stuck"``: the same, and new links do not help.
            ``"died"``: the same, and its process ends with it.
            ``"ended"``: its process is no longer there. ``"cut off"``: it cannot reach the store.
            ``"waiting"``, ``"timed out"``: its wait has failed, and another rank is the cause.
        doing: What it was doing, for example ``"forward"`` or a collective; empty if not known.
        message: The type and the text of its exception, or what was seen of it.
        traceback: The traceback of the exception; empty if there is none.
        link: In which it waits; empty if it does not.
    """

    rank: int
    host: str
    pid: int
    kind: str
    doing: str
    message: str
    traceback: str = ""
    link: str = ""

    @classmethod
    def of_text(cls, text: bytes) -> Failure:
        """What a process has written into the store as JSON."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            message = f"wrote {text[:60]!r}, so it runs another version of this package"
            return cls(-1, "an unknown machine", 0, "raised", "", message)

    @property
    def is_cause(self) -> bool:
        """Whether this process is why others wait in vain."""
        return self.kind not in ("waiting", "timed out")

    def __str__(self) -> str:
        who = f"rank {self.rank} (process {self.pid} on {self.host})"
        if self.kind == "cut off":
            return f"{who} is cut off from the others: {self.message}"
        if self.kind == "ended":
            return f"{who} {self.message}"
        doing = f" in {self.doing}" if self.doing else ""
        text = f"{who} failed{doing}: {self.message}"
        if not self.traceback:
            return text
        return f"{text}\nTraceback of rank {self.rank}:\n{self.traceback.rstrip()}\n"


def describe_error(error: BaseException) -> tuple[str, str]:
    """The message and the traceback of an exception, short enough to be sent."""
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return message[:_LONGEST], trace if len(trace) <= _LONGEST else f"... {trace[-_LONGEST:]}"


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def purpose_of(link: str) -> str:
    """What a link is for, out of its name."""
    return link.rpartition("/")[0]


class Reminder:
    """Says once in the log for whom a process waits, when it has done so for a minute.

    Args:
        limit: Seconds for which it waits at most.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._due = time.monotonic() + PATIENCE

    def look(self, describe: Callable[[], str]) -> None:
        """Called now and then by whoever waits; ``describe`` says who waits for whom."""
        if time.monotonic() > self._due:
            self._due = float("inf")
            text = "%s, since %.3g s and for at most %.4g s"
            _logger.warning(text, describe(), PATIENCE, self._limit)
