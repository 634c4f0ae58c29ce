"""Who listens for failures of other processes, and when a silent one counts as lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dataparallel.comm.failure import Failure


class Listener(Protocol):
    """Who wants to know of failures."""

    #: Seconds without a sign of life after which a rank counts as lost.
    patience: float
    #: Per rank of the group, the number of what it told that is forgotten.
    known: Mapping[int, int]

    def hear(self, failure: Failure) -> None:
        """A rank has failed; called in the thread of the channel, perhaps again and again."""

    def place(self) -> str | None:
        """Where this process waits at the moment; None if it does not."""


def patience(timeout: float) -> float:
    """Seconds of silence after which a rank counts as lost, for a time limit of collectives.

    Example::

        assert patience(60.0) == 15.0
    """
    return max(5.0, timeout / 4)
