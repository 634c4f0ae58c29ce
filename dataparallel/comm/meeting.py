"""How processes meet to make one more process group, and agree on its name.

Note [Names of process groups]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes find each other under the name of their group in the store, so a name must be the same in
all of them and may never be used twice. The names that ``torch.distributed.new_group`` invents are
neither: with ``use_local_synchronization=True`` (without it, processes outside of the group have
to take part) they contain the number of groups that this process has at the moment. A group made
after another was destroyed gets the old name, finds the old addresses in the store, and connects to
nobody; and a process with one more group never meets the others.

Here a name has the generation of the processes, and how many groups were made in it for the same
purpose; see Note [Generations]. Whoever gives up ends the generation, so that nobody meets one who
has gone.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter

from dataparallel.comm import interpreter_end
from dataparallel.comm.failures import Failures
from dataparallel.comm.process_errors import CollectiveTimeout, Place, Reminder, name_ranks

_LONGEST_PAUSE = 0.05

# How many groups were made for each purpose, and in which generation.
_made: weakref.WeakKeyDictionary[Failures, tuple[int, Counter[str]]] = weakref.WeakKeyDictionary()


class Meeting:
    """One attempt of the processes of a group to meet."""

    def __init__(self, failures: Failures, purpose: str, timeout: float) -> None:
        self._failures = failures
        self._purpose = purpose
        self._timeout = timeout
        self._name = ""
        self._has_come: set[int] = set()
        ranks = name_ranks(failures.ranks)
        self._doing = f"makes the process group {purpose!r} over {ranks}"

    def end(self) -> None:
        """Wait until every process has connected: the first may close its link at once."""
        started = time.monotonic()
        self._write("connected")
        while missing := self._missing("connected"):
            interpreter_end.come_by()
            if (failure := self._failures.look()) is not None:
                raise self._failures.cannot(self._doing, failure)
            if time.monotonic() - started > self._timeout:
                raise self._too_late(missing)
            time.sleep(0.001)

    def meet(self) -> str:
        """Wait until every process wants this group, so that connecting cannot wait for one."""
        failures = self._failures
        started, pause, reminder = time.monotonic(), 0.001, Reminder(self._timeout)
        failures.renew(self._doing)
        self._come()
        while missing := self._missing("here"):
            self._has_come |= set(range(len(failures.ranks))) - missing
            interpreter_end.come_by()
            if failures.follow(self._doing) or failures.renew(self._doing, waits=True):
                self._come()
                continue
            if time.monotonic() - started > self._timeout:
                raise self._too_late(missing)
            reminder.look(functools.partial(self._waits_for, missing))
            # A wait of the store itself could not be interrupted.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        failures.meet_others()
        return self._name

    def _come(self) -> None:
        failures = self._failures
        generation, made = _made.get(failures, (0, Counter()))
        if generation != failures.generation:
            made = Counter()
        made[self._purpose] += 1
        _made[failures] = failures.generation, made
        self._name = f"{self._purpose}/{failures.generation}.{made[self._purpose]}"
        self._write("here")

    def _write(self, stage: str) -> None:
        key = f"{self._name}/{stage}/{self._failures.rank}"
        self._failures.ask(lambda store: store.set(key, "1"), self._doing)

    def _missing(self, stage: str) -> set[int]:
        """The processes that have not come so far."""
        ranks = range(len(self._failures.ranks))
        return self._failures.ask(
            lambda store: {i for i in ranks if not store.check([f"{self._name}/{stage}/{i}"])},
            self._doing,
        )

    def _waits_for(self, missing: set[int]) -> str:
        ranks = self._failures.ranks
        names = name_ranks([ranks[i] for i in sorted(missing)])
        return f"rank {ranks[self._failures.rank]} {self._doing} and waits for {names}"

    def _too_late(self, missing: set[int]) -> CollectiveTimeout:
        failures = self._failures
        # Who has come and given up is not why.
        missing = missing - self._has_come or missing
        names = name_ranks([failures.ranks[i] for i in sorted(missing)])
        place = Place(0, "the making", f"the process group {self._purpose!r}")
        where = failures.nobody_came(place, self._name, missing)
        return CollectiveTimeout(
            f"rank {failures.ranks[failures.rank]} {self._doing}, but {names} did not come within "
            f"{self._timeout:.3g} s{''.join(f'; {one}' for one in where)}; every process must make "
            "the same groups in the same order; look for an earlier error there, and raise the "
            "timeout if it is only slow",
            place,
        )
