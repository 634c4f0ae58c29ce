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

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveTimeout,
    Reminder,
    name_ranks,
)
from dataparallel.comm.store_requests import ask

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

T = TypeVar("T")

_LONGEST_POLL = 0.05


class Meeting:
    """One attempt of the processes of a group to meet, which listens for failures meanwhile.

    Args:
        store: The part of the group's store in which everything of this package is.
        purpose: What the new group is for, in one word.
        ranks: The number that each process has in the default group.
        rank: This process, as an index of ``ranks``.
        channel: What is known of failures.
        timeout: Seconds to wait.

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
        timeout: float,
    ) -> None:
        self._store = store
        self._purpose = purpose
        self._ranks = ranks
        self._rank = rank
        self._channel = channel
        self._timeout = timeout
        self._number = 0
        self._never_seen = set(range(len(ranks)))
        self._failure: Failure | None = None
        self._moving = threading.Lock()
        self._has_left = False
        # Before the first meeting nobody has anything to recover from: who fails does not come.
        # Later one that has failed is expected here. What was known before has been heard of.
        known = [
            sys.maxsize if channel.meetings else channel.told_number(i) for i in range(len(ranks))
        ]
        self.known: Mapping[int, int] = dict(enumerate(known))

    @property
    def name(self) -> str:
        """The name of the new group."""
        return f"{self._purpose}/{self._number}"

    def hear(self, failure: Failure) -> None:
        """A process has failed."""
        self._failure = self._failure or failure

    def place(self) -> str:
        """Where this process waits."""
        return f"the making of the process group {self.name!r}"

    def meet(self) -> str:
        """Wait until every process wants this group, so that connecting cannot wait for one.

        Returns:
            The name of the new group.

        Raises:
            CollectiveTimeout: A process did not come; the message says which.
            CollectiveError: A process has failed, or the store does not answer.
        """
        deadline = time.monotonic() + self._timeout
        pause = 0.001
        reminder = Reminder(self._timeout)
        try:
            self._ask(lambda: self._want(self._last_wanted(self._rank) + 1))
            while missing := self._ask(self._advance):
                if self._failure is not None:
                    raise self._given_up(self._failure)
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(self._too_late(missing))
                reminder.look(functools.partial(self._waits_for, missing))
                # A wait of the store itself could not be interrupted.
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
        except BaseException as error:
            # A store that did not answer would be asked in vain once more.
            if self._failure is not None or not isinstance(error, CollectiveError):
                with contextlib.suppress(CollectiveError):
                    self._ask(self._leave_for_good)
            raise
        finally:
            self._channel.meetings += 1
        self.known = self._ask(self._see_all)
        return self.name

    def _ask(self, request: Callable[[], T]) -> T:
        purpose = f"makes a process group for {self._purpose!r} over {name_ranks(self._ranks)}"
        return ask(request, self._channel, self._timeout + 1.0, purpose)

    # --- requests to the store -------------------------------------------------------------------

    def _advance(self) -> list[int]:
        """The processes that have not come to where this one is."""
        missing = self._missing()
        if missing:
            highest = max(self._last_wanted(rank) for rank in range(len(self._ranks)))
            # One that wants the next group already may have met us meanwhile.
            if highest > self._number and (missing := self._missing()):
                self._want(highest)
        return missing

    def _want(self, number: int) -> None:
        mark = {
            "told": self._channel.number,
            "channel": self._channel.name,
            "process": asdict(self._channel.identity),
        }
        with self._moving:
            if self._has_left:
                return
            self._leave()
            self._number = number
            self._store.set(self._wanted(self._rank), str(number))
            self._store.set(self._mark(self._rank), json.dumps(mark))

    def _leave(self) -> None:
        if self._number:
            self._store.delete_key(self._mark(self._rank))

    def _leave_for_good(self) -> None:
        # A request that was interrupted may still be under way.
        with self._moving:
            self._has_left = True
            self._leave()

    def _missing(self) -> list[int]:
        ranks = range(len(self._ranks))
        missing = [rank for rank in ranks if not self._store.check([self._mark(rank)])]
        self._never_seen &= set(missing)
        return missing

    def _see_all(self) -> dict[int, int]:
        """What the processes have told of failures before."""
        known = {}
        for rank in range(len(self._ranks)):
            mark: dict[str, Any] = json.loads(self._store.get(self._mark(rank)))
            self._channel.expect(rank, mark["channel"], mark["process"])
            known[rank] = int(mark["told"])
        return known

    def _last_wanted(self, rank: int) -> int:
        key = self._wanted(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _wanted(self, rank: int) -> str:
        return f"wanted/{self._purpose}/{rank}"

    def _mark(self, rank: int) -> str:
        return f"{self.name}/arrived/{rank}"

    # --- errors ----------------------------------------------------------------------------------

    def _given_up(self, failure: Failure) -> CollectiveError:
        error = CollectiveError(
            f"rank {self._ranks[self._rank]} makes the process group {self.name!r} over "
            f"{name_ranks(self._ranks)}, but {failure}; start all processes again"
        )
        error.failure = failure
        return error

    def _waits_for(self, missing: Sequence[int]) -> str:
        ranks = name_ranks([self._ranks[i] for i in missing])
        return f"rank {self._ranks[self._rank]} waits for {ranks} in {self.place()}"

    def _too_late(self, missing: Sequence[int]) -> str:
        # Who has come and given up is not why.
        missing = sorted(self._never_seen) or missing
        notes = [
            f"rank {self._ranks[rank]} is {state}"
            for rank in missing
            if (state := self._channel.describe(rank))
        ]
        told = [failure for rank in missing if (failure := self._channel.told(rank)) is not None]
        notes += [f"rank {failure.rank} has told of {failure.message}" for failure in told]
        return (
            f"rank {self._ranks[self._rank]} makes the process group {self.name!r} over "
            f"{name_ranks(self._ranks)}, but {name_ranks([self._ranks[i] for i in missing])} did "
            f"not come within {self._timeout:.3g} s{''.join(f'; {note}' for note in notes)}; every "
            "process must make the same groups in the same order; look for an earlier error there, "
            "and raise the timeout if it is only slow"
        )
