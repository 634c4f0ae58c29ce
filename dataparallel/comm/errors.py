"""The failure of a process, as all others see it, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """The reason why a process cannot take part any more, as the other processes see it.

    Attributes:
        rank: Its rank in the default process group.
        host: The name of its machine.
        pid: Its process id there.
        kind: ``"raised"``: it raised an error. ``"late"``: the same, of a round that is over.
            ``"skipped"``: it has left out the backward of a step.
            ``"ended"``: its process is no longer there. ``"cut off"``: it cannot reach the store.
            ``"waiting"``, ``"timed out"``: its wait has failed, and another rank is the cause.
        doing: Its work at that time, for example ``"forward"`` or a collective; empty if not known.
        message: The type and the text of its exception, or what was seen of it.
        traceback: The traceback of the exception; empty if there is none.
        rounds: The rounds of reduction that the rank which tells of it had delivered, by wrapper.
    """

    rank: int
    host: str
    pid: int
    kind: str
    doing: str
    message: str
    traceback: str = ""
    rounds: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def is_cause(self) -> bool:
        """True if this process is why others wait in vain."""
        return self.kind not in ("waiting", "timed out")

    @property
    def is_final(self) -> bool:
        """True if it cannot take part in new links, either."""
        return self.kind in ("ended", "cut off")

    def __str__(self) -> str:
        text = f"rank {self.rank} (process {self.pid} on {self.host}) "
        text += f"failed in {self.doing}: {self.message}" if self.doing else self.message
        if self.is_final:
            text += "; start all processes again"
        if self.traceback:
            text += f"\nTraceback of rank {self.rank}:\n{self.traceback.rstrip()}\n"
        return text


class CollectiveFailure(Exception):
    """The common base of the two errors.

    Args:
        message: The text.
        failure: The failure of the process that is the cause; None if no single one is.
    """

    def __init__(self, message: str = "", failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class CollectiveError(CollectiveFailure, RuntimeError):
    """A collective failed: a process ended, a connection broke, or the link was broken before."""


class RanksParted(CollectiveError):
    """Another process has left out a step that others have taken; all know, and none has failed."""


class CollectiveTimeout(CollectiveFailure, TimeoutError):
    """A collective did not complete in time; the message says which rank is missing."""


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
