"""How processes meet to make one more process group, and agree on its name.

Note [Names of process groups]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes find each other under the name of their group in the store, so a name must be the same in
all of them and may never be used twice. The names that ``torch.distributed.new_group`` invents are
neither: with ``use_local_synchronization=True`` (without it, processes outside of the group have
to take part) they contain the number of groups that this process has at the moment. A group made
after another was destroyed gets the old name, finds the old addresses in the store, and connects to
nobody; and a process with one more group never meets the others.

Here a process that wants a group writes the next number that it has not used for this purpose. One
that has tried in vain, since the others were late, has used up more numbers than they have: so all
take the highest number that anyone wants. Whoever gives up takes its mark back, so that nobody
meets one who has gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataparallel.comm.failure_channel import FailureChannel
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, name_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LONGEST_POLL = 0.05


class Meeting:
    """One attempt of the processes of a group to meet.

    Args:
        store: The part of the group's store in which everything of this package is.
        purpose: What the new group is for, in one word.
        ranks: The number that each process has in the default group.
        rank: This process, as an index of ``ranks``.
        channel: What is known of failures.

    Attributes:
        known: Per rank, the number of what it has told of failures, when it came.
    """

    def __init__(
        self,
        store: Store,
        purpose: str,
        ranks: Sequence[int],
        rank: int,
        channel: FailureChannel,
    ) -> None:
        self._store = store
        self._purpose = purpose
        self._ranks = ranks
        self._rank = rank
        self._channel = channel
        self._number = 0
        self._never_seen = set(range(len(ranks)))
        self.known: dict[int, int] = {}

    @property
    def name(self) -> str:
        """The name of the new group."""
        return f"{self._purpose}/{self._number}"

    def meet(self, timeout: float) -> str:
        """Wait until every process wants this group, so that connecting cannot wait for one.

        Args:
            timeout: Seconds to wait.

        Returns:
            The name of the new group.

        Raises:
            CollectiveTimeout: A process did not come; the message says which.
            CollectiveError: A process has ended.
        """
        self._want(self._last_wanted(self._rank) + 1)
        deadline = time.monotonic() + timeout
        pause = 0.001
        try:
            while missing := self._missing():
                highest = max(self._last_wanted(rank) for rank in range(len(self._ranks)))
                if highest > self._number:
                    # One that wants the next group already may have met us meanwhile.
                    if self._missing():
                        self._want(highest)
                    continue
                self._check_ended(missing)
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(self._too_late(missing, timeout))
                # A wait of the store itself could not be interrupted.
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
        except BaseException:
            self._leave()
            raise
        for rank in range(len(self._ranks)):
            self.known[rank] = int(self._store.get(self._mark(rank)))
        return self.name

    def _want(self, number: int) -> None:
        if self._number:
            self._leave()
        self._number = number
        self._store.set(self._wanted(self._rank), str(number))
        self._store.set(self._mark(self._rank), str(self._channel.number))

    def _leave(self) -> None:
        self._store.delete_key(self._mark(self._rank))

    def _missing(self) -> list[int]:
        ranks = range(len(self._ranks))
        missing = [rank for rank in ranks if not self._store.check([self._mark(rank)])]
        self._never_seen &= set(missing)
        return missing

    def _last_wanted(self, rank: int) -> int:
        key = self._wanted(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _wanted(self, rank: int) -> str:
        return f"wanted/{self._purpose}/{rank}"

    def _mark(self, rank: int) -> str:
        return f"{self.name}/arrived/{rank}"

    def _check_ended(self, missing: Sequence[int]) -> None:
        for rank in missing:
            failure = self._channel.failure_of(rank, known=self._channel.told_number(rank))
            if failure is not None:
                error = CollectiveError(
                    f"rank {self._ranks[self._rank]} makes the process group {self.name!r} over "
                    f"{name_ranks(self._ranks)}, but {failure}; start all processes again"
                )
                error.failure = failure
                raise error

    def _too_late(self, missing: Sequence[int], timeout: float) -> str:
        # Who has come and given up is not why.
        missing = sorted(self._never_seen) or missing
        notes = [
            f"rank {self._ranks[rank]} is {state}"
            for rank in missing
            if (state := self._channel.describe(rank))
        ]
        return (
            f"rank {self._ranks[self._rank]} makes the process group {self.name!r} over "
            f"{name_ranks(self._ranks)}, but {name_ranks([self._ranks[i] for i in missing])} did "
            f"not come within {timeout:.3g} s{''.join(f'; {note}' for note in notes)}; every "
            "process must make the same groups in the same order; look for an earlier error there, "
            "and raise the timeout if it is only slow"
        )
