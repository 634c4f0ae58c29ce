"""What is known of a process that cannot go on: which, where, doing what, and why."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: ``raised``: it said so itself. ``ended``: it is no longer there. ``cut off``: this process
#: itself cannot reach the others. ``stuck``: as raised, and new links do not help.
FailureKind = Literal["raised", "ended", "cut off", "stuck"]
#: What a process says itself.
SAID: tuple[FailureKind, ...] = ("raised", "stuck")

# A traceback travels through a store that is not made for long texts.
_LONGEST = 8000


@dataclass(frozen=True)
class Failure:
    """Why a process cannot take part any more, as the other processes see it.

    Attributes:
        rank: Its rank in the default process group.
        host: The name of its machine.
        pid: Its process id there.
        kind: See :data:`FailureKind`.
        doing: What it was doing, for example ``"forward"`` or a collective; empty if not known.
        message: The type and the text of its exception, or what was seen of it.
        traceback: The traceback of the exception; empty if there is none.
    """

    rank: int
    host: str
    pid: int
    kind: FailureKind
    doing: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        if self.kind == "cut off":
            return f"rank {self.rank} ({self._place()}) is cut off from the others: {self.message}"
        doing = f", last seen in {self.doing}" if self.doing else ""
        if self.kind in SAID:
            doing = f" in {self.doing}" if self.doing else ""
            text = f"rank {self.rank} ({self._place()}) failed{doing}: {self.message}"
            return f"{text}\nTraceback of rank {self.rank}:\n{self.traceback.rstrip()}\n"
        return f"rank {self.rank} ({self._place()}) {self.message}{doing}"

    def _place(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def describe_error(error: BaseException) -> tuple[str, str]:
    """The message and the traceback of an exception, short enough to be sent.

    Example::

        message, trace = describe_error(ValueError("no such layer"))
        assert message == "ValueError: no such layer"

    Args:
        error: The exception; its traceback may be missing.

    Returns:
        The type and text, and the whole traceback, of a long one the last part.
    """
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return message[:_LONGEST], trace if len(trace) <= _LONGEST else f"... {trace[-_LONGEST:]}"


def cut_off(rank: int, host: str, pid: int, seconds: float, reason: str = "") -> Failure:
    """That a process can't reach the others.

    Example::

        failure = cut_off(1, "node2", 4711, 15.2)
        assert "has not answered for 15.2 s" in str(failure)

    Args:
        rank, host, pid: The process, as in :class:`Failure`.
        seconds: Since when.
        reason: What the store said. Default: nothing.
    """
    event = f"has not answered for {seconds:.1f} s"
    if reason:
        event = f"has failed {seconds:.1f} s ago ({reason})"
    text = (
        f"the store of the process group {event}; the network is down, or the process that holds "
        "the store, mostly that of rank 0 or torchrun's agent, has ended or is stopped"
    )
    return Failure(rank, host, pid, "cut off", "", text)
