"""Processes of a user's group that have failed, for whom nobody should wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import channel_of, patience
from dataparallel.comm.process_group import shared_store

# Seconds that collectives are taken to last at most: groups of torch have half an hour, which says
# nothing about for how long a process may give no sign of life.
_TIMEOUT = 60.0


class GroupFailures:
    """What is known of the other processes of a group, while this one waits for them.

    Signs of life go through the default group, so that many groups need no more of them. A process
    that has raised an error may go on; what it told before the last collective that it took part
    in, or before it made new links, is forgotten.

    Args:
        group: The group.
    """

    #: Raised errors are looked up instead, see :meth:`find`.
    known: Mapping[int, int] = {}

    def __init__(self, group: dist.ProcessGroup) -> None:
        world: Any = dist.group.WORLD
        self.patience = patience(_TIMEOUT)
        self._ranks = frozenset(dist.get_process_group_ranks(group)) - {world.rank()}
        self._channel = channel_of(world, shared_store(world))
        self._lost: Failure | None = None
        self._was_told = False
        self._forgotten: dict[int, int] = {}
        self._waiting: str | None = None
        self._channel.add(self)

    def hear(self, failure: Failure) -> None:
        """Take note of what the channel says."""
        if failure.kind == "raised":
            self._was_told = True
        elif failure.kind == "cut off" or failure.rank in self._ranks:
            self._lost = failure

    def place(self) -> str | None:
        """Where this process waits; None if it does not."""
        return self._waiting

    def find(self, place: str) -> Failure | None:
        """Why nobody should wait any more; None if nothing speaks against it.

        Args:
            place: What is waited for, for the others to read.
        """
        self._waiting = place
        self._channel.check(self)
        if self._lost is not None:
            return self._lost
        for rank in self._ranks:
            known = max(self._forgotten.get(rank, 0), self._channel.forgiven(rank))
            failure = self._channel.failure_of(rank, known)
            if failure is not None:
                return failure
        return None

    def completed(self) -> None:
        """Take note that all processes took part in a collective."""
        self._waiting = self._lost = None
        if self._was_told:
            self._forgotten = {rank: self._channel.told_number(rank) for rank in self._ranks}
