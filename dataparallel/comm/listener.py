"""Who listens for failures of other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dataparallel.comm.failure import Failure


class Listener(Protocol):
    """Who wants to know of failures."""

    #: Per rank of the group, the number of what it told that is forgotten.
    known: Mapping[int, int]

    def hear(self, failure: Failure) -> None:
        """A rank has failed; called in the thread of the channel, perhaps again and again."""

    def place(self) -> str | None:
        """Where this process waits at the moment; None if it does not."""
