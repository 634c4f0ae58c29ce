"""Processes of a user's group that have failed, for whom nobody should wait."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel, channel_of
from dataparallel.comm.process_errors import CollectiveError
from dataparallel.comm.process_group import shared_store
from dataparallel.comm.store_requests import ask
from dataparallel.comm.watch import Watch

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

# Seconds that the store gets for an answer.
_STORE_TIMEOUT = 2.0


class GroupFailures:
    """What is known of the other processes of a group, while this one waits for them.

    Signs of life go through the default group, so that many groups need no more of them. A process
    that has told of an error may go on nevertheless. When it launches the next collective, it lets
    the others of the group know how often it has told of something before: that is forgotten, as
    is what it told before it made new links. What is told of a process outside of the group ends
    nothing: the members may do without it.

    Args:
        group: The group.
    """

    #: What is told is looked up instead, see :meth:`find`.
    known: Mapping[int, int] = {}

    def __init__(self, group: dist.ProcessGroup) -> None:
        world: Any = dist.group.WORLD
        self._rank: int = world.rank()
        self._members = frozenset(dist.get_process_group_ranks(group))
        self._others = self._members - {self._rank}
        self._channel = channel_of(world, shared_store(world))
        self._place: tuple[Store, str] | None = None
        # How often this process, and each of the others, had told of something when it came.
        self._number = 0
        self._numbers: dict[int, int] = {}
        self._channel.add(self)

    def hear(self, failure: Failure) -> None:
        """Nothing: it is looked up in a wait."""

    def place(self) -> str | None:
        """None: the wait itself says where it is."""
        return None

    # --- who comes -------------------------------------------------------------------------------

    def introduce(self, store: Store, name: str) -> None:
        """Let the other members know this process, which comes to the first collective.

        Args:
            store: Of the group, under a prefix of this package.
            name: That of the group; never used before in this store.
        """
        self._place, self._number = (store, name), self._channel.number
        self._write()

    def come(self) -> None:
        """Let the other members know that this process comes to a collective."""
        number = self._channel.number
        if number != self._number and self._place is not None:
            # Once: a store that is gone would be waited for at every launch.
            self._number = number
            _try(self._write, self._channel)

    def _write(self) -> None:
        assert self._place is not None
        channel, (store, name) = self._channel, self._place
        told, identity = self._number, asdict(channel.identity)
        mine = {"told": told, "channel": channel.name, "process": identity}
        store.set(f"{name}/came/{self._rank}", json.dumps(mine))

    def meet(self) -> None:
        """Learn who has come; what they tell from then on is believed."""
        number = self._channel.told_number
        told = self._numbers
        asked = [rank for rank in self._others if rank not in told or number(rank) > told[rank]]
        if asked and self._place is not None:
            _try(lambda: self._read(asked), self._channel)

    def _read(self, ranks: Sequence[int]) -> None:
        assert self._place is not None
        store, name = self._place
        for rank in ranks:
            key = f"{name}/came/{rank}"
            if store.check([key]):
                came: dict[str, Any] = json.loads(store.get(key))
                self._channel.expect(rank, came["channel"], came["process"])
                self._numbers[rank] = int(came["told"])

    # --- who does not ----------------------------------------------------------------------------

    def watch(self, place: str) -> Watch:
        """Let the others know what this process waits for.

        Args:
            place: What is waited for, for the others to read.
        """
        return Watch(self._channel, self._members, self.known, place)

    def find(self, watch: Watch) -> Failure | None:
        """Why nobody should wait any more; None if nothing speaks against it.

        Args:
            watch: That of this wait.
        """
        gone = watch.look()
        if gone is not None:
            return gone
        self.meet()
        for rank in self._others:
            failure = self._channel.failure_of(rank, self._known(rank))
            if failure is not None:
                return failure
        return None

    def _known(self, rank: int) -> int:
        told, number = self._channel.told(rank), self._channel.told_number(rank)
        if told is not None and told.rank not in self._members:
            return number
        return max(self._numbers.get(rank, 0), self._channel.forgiven(rank))

    def give_up(self, failure: Failure) -> None:
        """Let the others know that this process waits no more, and because of whom.

        Args:
            failure: What was found. If it was told, they know it.
        """
        if failure.kind != "raised":
            self._channel.tell(failure)


def _try(request: Callable[[], object], channel: FailureChannel) -> None:
    # If the store is gone, the channel says so.
    with contextlib.suppress(CollectiveError):
        ask(request, channel, _STORE_TIMEOUT, "comes to a collective")
