"""What happens when a process dies, raises or does not come: how the others learn of it.

Note [Failures across processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
There is no heartbeat: a process that holds the interpreter's lock, is in a debugger, or evaluates
alone for minutes has not failed. A rank that raises, or whose wait fails, writes one record into
the store of the group, unless another rank has been first. *Then* it closes its own links, which
ends the collectives of its neighbors. All waits come in slices, and after each the waiting rank
looks for the record. So all ranks raise within a second, with the text of the first error.

A rank whose wait fails since a connection broke, or since the time is over, does not know which
rank is the cause. The record says so. All that wait write where they are, too: a rank whose process
has ended, or that has written nothing, is the cause. Nobody looks for processes that have ended
before a wait has failed.

Note [Generations]
~~~~~~~~~~~~~~~~~~
After a failure ranks may have left collectives at different points. So a failure ends all links
over the group. The next link belongs to a new generation, which has a record of its own. Each rank
writes into the store which generation it is in, and those that meet to make a link all take the
highest one. Each begins above the last number that it has written itself: where processes destroy
their group and make it again, the store may still have what they wrote before.

Note [Names of links]
~~~~~~~~~~~~~~~~~~~~~
Processes that connect find each other under a name in the store, which must be the same in all of
them and may never be used twice. ``torch.distributed.new_group`` counts the groups that a process
has at the moment (or waits for processes outside of the group): a group made after another was
destroyed finds the old addresses, and a process with one more group never meets the others. A link
is named by its purpose, its generation, and how many links for that purpose were made in it.
Whoever gives up ends the generation, so that nobody meets one who has gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveFailure,
    CollectiveTimeout,
    Failure,
    Place,
    Process,
    Reminder,
    describe_error,
    name_ranks,
    purpose_of,
)

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

T = TypeVar("T")

#: Seconds between two looks at the record, and at Ctrl-C.
SLICE = 0.2
# Seconds that a store may take to answer a look, to take a record, and at the start.
_LOOK, _WRITE, _STARTING = 1.0, 2.0, 15.0
# Seconds for which a store has to refuse until its process counts as ended.
_REFUSING = 0.5
# Seconds in which a process whose connections have just broken may turn out to have ended.
_ENDING = 0.1
# Seconds that a rank waits for the others to write where they are.
_GRACE = 0.8
_POLL = 0.02
# Between two looks at who has come to make a link.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# On an exception: that the others know it.
_REPORTED = "_dataparallel_reported"
#: How the descriptions of process groups that this package makes begin.
OWN = "dataparallel/"

_REMEDY = (
    "every process must run the same collectives in the same order; look for an earlier error of "
    "the ranks named here, and raise the timeout if they are only slow"
)


class Link(Protocol):
    """What belongs to a generation, and is closed when that ends."""

    def give_up(self) -> None:
        """Close all connections, and wait for nothing."""

    def check_late(self) -> None:
        """Raise the error of a collective that has failed when nobody waited any more."""


class OwnStore:
    """A store with a connection of its own, whose requests are limited in time."""

    def __init__(self, store: Store) -> None:
        self._original = store
        self._own: Store | None = None
        self._turn = threading.Lock()
        # Of a request which nobody waits for any more.
        self._given_up: threading.Thread | None = None

    def ask(self, request: Callable[[Store], T], seconds: float) -> T:
        """What ``request`` returns. Can be interrupted."""
        answers: list[T] = []
        refusals: list[Exception] = []

        def run() -> None:
            try:
                with self._turn:
                    answers.append(request(self._connected()))
            except Exception as error:
                refusals.append(error)

        thread = interpreter_end.run_beside(run, "dataparallel-request")
        if seconds <= _WRITE and self._given_up is not None and self._given_up.is_alive():
            # It is still behind one without an answer, and comes to its turn later.
            seconds = SLICE
        deadline = time.monotonic() + seconds
        while thread.is_alive():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._given_up = thread
                raise TimeoutError(f"no answer within {seconds:.2g} s")
            thread.join(min(SLICE, remaining))
        if refusals:
            reason = str(refusals[0]).strip().partition("\n")[0]
            raise RuntimeError(reason) from refusals[0]
        return answers[0]

    def _connected(self) -> Store:
        if self._own is None:
            # Torch's types lack it.
            untyped: Any = self._original
            own: Store = untyped.clone()
            with contextlib.suppress(RuntimeError):
                own.set_timeout(timedelta(seconds=30))
            self._own = own
        return self._own


def shared_store(group: dist.ProcessGroup) -> Store:
    """The part of the group's store in which everything of this package is."""
    return torch_internals.PrefixStore("dataparallel", group.get_group_store())


def read(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """What is at some places of a store; to get what is not there would be to wait for it."""
    return [store.get(key) if store.check([key]) else None for key in keys]


class Failures:
    """What this process knows of failures in one process group. See the notes of this module."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = OwnStore(shared_store(group))
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = group.rank()
        self.failure: Failure | None = None
        self._everyone = range(len(self.ranks))
        self._process = Process.this()
        self._processes: dict[int, Process] = {}
        self._links: tuple[weakref.ref[Link], ...] = ()
        self._num_made: Counter[str] = Counter()
        self._refusing_since: float | None = None
        self._has_met = False
        self._failing = threading.Lock()

        def begin(store: Store) -> int:
            store.set(f"process/{self.rank}", json.dumps(asdict(self._process)))
            return store.add(f"generation/{self.rank}", 1)

        self.generation = self.ask(begin, f"joins {name_ranks(self.ranks)}")

    def ask(self, request: Callable[[Store], T], doing: str) -> T:
        """What a request of the store returns."""
        try:
            return self.store.ask(request, _STARTING)
        except (RuntimeError, TimeoutError) as error:
            raise self._cannot(doing, self._cut_off(str(error))) from error

    def _cannot(self, doing: str, failure: Failure) -> CollectiveError:
        text = f"rank {self.ranks[self.rank]} {doing}, but {failure}; start all processes again"
        return CollectiveError(text, failure=failure)

    # --- making links ----------------------------------------------------------------------------

    def meet(self, purpose: str, timeout: float) -> str:
        """Wait until every rank wants a link, so that connecting waits for none; returns its name.

        Enters a new generation if this one has ended.
        """
        doing = self._making(purpose)
        started, pause, reminder = time.monotonic(), _SHORTEST_PAUSE, Reminder(timeout)
        self._renew(doing)
        name = self._come(purpose)
        has_come: set[int] = set()
        while missing := self._missing(f"{name}/here", doing):
            has_come |= set(self._everyone) - missing
            interpreter_end.come_by()
            if self._follow(doing) or self._renew(doing, waits=True):
                name = self._come(purpose)
                continue
            if time.monotonic() - started > timeout:
                # Who has come and given up is not why.
                raise self._too_late(name, timeout, missing - has_come or missing)
            reminder.look(functools.partial(self._waits_for, doing, missing))
            # A wait of the store itself could not be interrupted.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._has_met = True
        # Remembered for when the store may be gone.
        self._processes.clear()
        self._others()
        return name

    def watch_over(self, link: Link, name: str, timeout: float) -> None:
        """Close a link when this generation ends, and wait until every rank has connected.

        The first may close its own at once.
        """
        self._links = (*(ref for ref in self._links if ref() is not None), weakref.ref(link))
        doing, started = self._making(purpose_of(name)), time.monotonic()
        self._write(f"{name}/connected", doing)
        while missing := self._missing(f"{name}/connected", doing):
            interpreter_end.come_by()
            if (failure := self.look()) is not None:
                raise self._cannot(doing, failure)
            if time.monotonic() - started > timeout:
                raise self._too_late(name, timeout, missing)
            time.sleep(_SHORTEST_PAUSE)

    def check_late(self) -> None:
        """Raise the error of a collective, over whatever link, that has failed unnoticed."""
        for reference in self._links:
            if (link := reference()) is not None:
                link.check_late()

    def _making(self, purpose: str) -> str:
        return f"makes the process group {purpose!r} over {name_ranks(self.ranks)}"

    def _come(self, purpose: str) -> str:
        self._num_made[purpose] += 1
        name = f"{purpose}/{self.generation}.{self._num_made[purpose]}"
        self._write(f"{name}/here", self._making(purpose))
        return name

    def _write(self, place: str, doing: str) -> None:
        self.ask(lambda store: store.set(f"{place}/{self.rank}", "1"), doing)

    def _missing(self, place: str, doing: str) -> set[int]:
        """The processes that have written nothing at a place."""
        keys = [f"{place}/{i}" for i in self._everyone]
        return self.ask(
            lambda store: {i for i, key in enumerate(keys) if not store.check([key])}, doing
        )

    def _waits_for(self, doing: str, missing: set[int]) -> str:
        names = name_ranks([self.ranks[i] for i in sorted(missing)])
        return f"rank {self.ranks[self.rank]} {doing} and waits for {names}"

    def _too_late(self, name: str, timeout: float, missing: set[int]) -> CollectiveTimeout:
        """Give up the making of a link; says where the missing ranks are, if they do."""
        place = Place(0, "the making", f"the process group {purpose_of(name)!r}")
        mine = self._here("timed out", str(place), "another process did not come", link=name)
        _, reports = self._exchange(mine, mine)
        told = [self._about(i, mine, reports[i]) for i in sorted(missing) if i in reports]
        names = name_ranks([self.ranks[i] for i in sorted(missing)])
        return CollectiveTimeout(
            f"rank {self.ranks[self.rank]} {self._making(purpose_of(name))}, but {names} did not "
            f"come within {timeout:.3g} s{''.join(f'; {one}' for one in told)}; every process must "
            "make the same groups in the same order; look for an earlier error there, and raise "
            "the timeout if it is only slow",
            place,
        )

    def _enter(self, generation: int, doing: str) -> None:
        """Begin a new generation, in which nothing has failed yet."""
        key = f"generation/{self.rank}"
        self.ask(lambda store: store.set(key, str(generation)), doing)
        self.generation, self.failure = generation, None
        self._num_made.clear()

    def _follow(self, doing: str) -> bool:
        """Enter the generation in which another process is already; whether there is one."""
        keys = [f"generation/{i}" for i in self._everyone]
        texts = self.ask(lambda store: read(store, keys), doing)
        highest = max(int(text) for text in texts if text is not None and text.isdigit())
        if highest <= self.generation:
            return False
        self._enter(highest, doing)
        return True

    def _renew(self, doing: str, *, waits: bool = False) -> bool:
        """Enter the next generation if this one has ended; whether it had."""
        if gone := self._ended():
            raise self._cannot(doing, gone)
        is_known = self.failure is not None
        failure = self.look()
        if failure is None:
            return False
        elsewhere, died = failure.rank != self.ranks[self.rank], failure.kind == "died"
        # Before the first meeting nobody has anything to recover from: who fails does not come.
        is_news = not is_known and failure.is_cause and (waits or not self._has_met)
        if failure.kind == "cut off" or (elsewhere and (died or is_news)):
            raise self._cannot(doing, failure)
        if not self._follow(doing):
            self._enter(self.generation + 1, doing)
        return True

    # --- looking ---------------------------------------------------------------------------------

    def while_waiting(self) -> Failure | None:
        """Called in each pause of a wait: why nobody should wait any more; None if all is well."""
        interpreter_end.come_by()
        return self.look()

    def look(self) -> Failure | None:
        """The record of this generation, if there is one; or that the store is gone."""
        if self.failure is not None:
            return self.failure
        keys = [self._record()]
        try:
            (text,) = self.store.ask(lambda store: read(store, keys), _LOOK)
        except TimeoutError:
            # Silence is no failure: the wait goes on until its own time is over.
            return None
        except RuntimeError as error:
            # Those that wait for others than rank 0 can go on without a store.
            now = time.monotonic()
            self._refusing_since = self._refusing_since or now
            gone = 0 in self.ranks and now - self._refusing_since > _REFUSING
            return self._cut_off(str(error)) if gone else None
        self._refusing_since = None
        if text is not None:
            self._end(Failure.of_text(text))
        return self.failure

    def _ended(self) -> Failure | None:
        """Another rank of the group whose process is no longer there."""
        for i, process in self._others().items():
            if process.state() == "ended":
                who = self.ranks[i], process.host, process.pid
                return Failure(*who, kind="ended", doing="", message="has ended")
        return None

    def _others(self) -> dict[int, Process]:
        """The other processes that have told who they are."""
        unknown = [i for i in self._everyone if i != self.rank and i not in self._processes]
        if unknown:
            keys = [f"process/{i}" for i in unknown]
            with contextlib.suppress(RuntimeError, TimeoutError, ValueError, TypeError):
                texts = self.store.ask(lambda store: read(store, keys), _LOOK)
                for i, text in zip(unknown, texts, strict=True):
                    if text is not None:
                        self._processes[i] = Process(**json.loads(text))
        return self._processes

    def _record(self) -> str:
        return f"failed/{self.generation}"

    def _cut_off(self, reason: str) -> Failure:
        text = (
            f"the store of the process group did not answer ({reason}); the network is down, or "
            "the process that holds the store, mostly that of rank 0 or torchrun's agent, has ended"
        )
        return self._here("cut off", "", text)

    def _here(
        self, kind: str, doing: str, message: str, trace: str = "", *, link: str = ""
    ) -> Failure:
        process, rank = self._process, self.ranks[self.rank]
        return Failure(rank, process.host, process.pid, kind, doing, message, trace, link=link)

    # --- telling ---------------------------------------------------------------------------------

    def report(self, error: BaseException, doing: str, *, kind: str = "raised") -> None:
        """Let all ranks raise because of an error here. Returns within seconds in any case."""
        if isinstance(error, CollectiveFailure) and error.failure is not None:
            mine = error.failure
        else:
            mine = self._here(kind, doing, *describe_error(error))
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._tell(mine)
        self._end(mine)

    def _tell(self, mine: Failure) -> Failure:
        """Write the record, unless another rank was first; what it says then."""
        key, text = self._record(), json.dumps(asdict(mine))

        def write(store: Store) -> bytes:
            first = store.compare_set(key, "", text)
            if mine.kind == "died" and Failure.of_text(first).rank == mine.rank:
                store.set(key, text)
            return first

        first = Failure.of_text(self.store.ask(write, _WRITE))
        self._end(first)
        return first

    def _end(self, failure: Failure) -> None:
        """This generation has ended: close all links, which ends the waits of the neighbors."""
        if self.failure is None:
            self.failure = failure
            for reference in self._links:
                if (link := reference()) is not None:
                    link.give_up()

    # --- a wait that has failed ------------------------------------------------------------------

    def explain(
        self, place: Place, link: str, seconds: float, reason: str | None, *, timed_out: bool
    ) -> CollectiveError | CollectiveTimeout:
        """The error for a wait that has failed, or was given up. All ranks raise then."""
        head = f"rank {self.ranks[self.rank]}: {place} over {len(self.ranks)} processes for "
        head += repr(purpose_of(link))
        with self._failing:
            cause = self.look()
            if cause is None and reason is not None:
                cause = self._one_that_ends()
            kind = "timed out" if timed_out else "waiting"
            doing, message = f"{place} for {purpose_of(link)!r}", reason or "another did not come"
            mine = self._here(kind, doing, message, link=link)
            first, reports = self._exchange(mine, cause or mine)
        # The same rank may have ended the links over other groups: they are made anew, too.
        groups.look()
        late = timed_out or any(other.kind == "timed out" for other in reports.values())
        if first.is_cause:
            text = f"{head} was given up after {seconds:.3g} s: {first}"
            late = late and first.kind == "cut off"
            return (CollectiveTimeout if late else CollectiveError)(text, place, first)
        others = [i for i in self._everyone if i != self.rank]
        who = "; ".join(self._about(i, mine, reports.get(i)) for i in others)
        event = "did not complete within" if timed_out else "failed after"
        text = f"{head} {event} {seconds:.3g} s: {who}; {_REMEDY}"
        if reason is not None:
            text = f"{text}. The backend said: {reason}"
        return (CollectiveTimeout if late else CollectiveError)(text, place)

    def _one_that_ends(self) -> Failure | None:
        """A process that ends just now, since connections have broken; None if none does."""
        deadline = time.monotonic() + _ENDING
        while time.monotonic() < deadline:
            if (failure := self.look() or self._ended()) is not None:
                return failure
            time.sleep(_POLL)
        return None

    def _exchange(self, mine: Failure, cause: Failure) -> tuple[Failure, dict[int, Failure]]:
        """Write where this rank is, and the record; returns why, and where the others are."""
        key, text = f"report/{self.generation}/{self.rank}", json.dumps(asdict(mine))
        reports: dict[int, Failure] = {}
        try:
            self.store.ask(lambda store: store.set(key, text), _WRITE)
            first = self._tell(cause)
            if not first.is_cause:
                reports = self._hear(0.5 * _GRACE if mine.kind == "timed out" else _GRACE)
        except (RuntimeError, TimeoutError) as error:
            self._end(cause)
            first = cause if cause.is_cause else self._cut_off(str(error))
        return first if first.is_cause else self._ended() or first, reports

    def _hear(self, grace: float) -> dict[int, Failure]:
        """Where the other ranks are, without those that write nothing."""
        others = [i for i in self._everyone if i != self.rank]
        keys = [f"report/{self.generation}/{i}" for i in others]
        deadline = time.monotonic() + grace
        while True:
            texts = self.store.ask(lambda store: read(store, keys), _WRITE)
            said = {i: Failure.of_text(text) for i, text in zip(others, texts, strict=True) if text}
            found = {i: report for i, report in said.items() if not report.is_cause}
            if len(found) == len(others) or self._ended() or time.monotonic() > deadline:
                return found
            time.sleep(_POLL)

    def _about(self, i: int, mine: Failure, other: Failure | None) -> str:
        """What another rank does instead."""
        who = f"rank {self.ranks[i]}"
        if other is None:
            state = self._processes[i].state() if i in self._processes else ""
            return f"{who} did not come{f' (it is {state})' if state else ''}"
        if other.link != mine.link:
            return f"{who} waits in another link: {other.doing}"
        if other.doing != mine.doing:
            return f"{who} is at {other.doing}"
        return f"{who} came and {'gave up waiting' if other.kind == 'timed out' else 'failed too'}"


# --- all groups ------------------------------------------------------------------------------


class _Groups:
    """What is known of failures, by process group."""

    def __init__(self) -> None:
        self._inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._made: weakref.WeakKeyDictionary[dist.ProcessGroup, Failures] = (
            weakref.WeakKeyDictionary()
        )
        self._making = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # A forked child has no part in the groups, and must not speak for its parent.
        self._made.clear()
        self._making = threading.Lock()
        if dist.is_available() and dist.is_initialized():
            self._inherited.update(torch_internals.world().pg_map)

    def of(self, group: dist.ProcessGroup) -> Failures:
        """That of a group, made at the first call."""
        with self._making:
            found = self._made.get(group)
            if found is None:
                found = self._made[group] = Failures(group)
            return found

    def look(self) -> None:
        """Look for records in all groups that are used."""
        for failures in list(self._made.values()):
            failures.look()

    def within(self, group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
        """The groups in which this process is with others, all or those inside of ``group``."""
        if not (dist.is_available() and dist.is_initialized()):
            return []
        ranks = None if group is None else set(dist.get_process_group_ranks(group))
        return [
            each
            for each in list(torch_internals.world().pg_map)
            if each.size() > 1
            and not each.group_desc.startswith(OWN)
            and each not in self._inherited
            and (ranks is None or ranks.issuperset(dist.get_process_group_ranks(each)))
        ]


groups = _Groups()


def failures_of(group: dist.ProcessGroup) -> Failures:
    """What is known of failures in a process group."""
    return groups.of(group)


def report(
    error: BaseException,
    doing: str,
    group: dist.ProcessGroup | None = None,
    *,
    kind: str = "raised",
) -> None:
    """Let all ranks that wait for this one raise. Returns within seconds in any case."""
    if getattr(error, _REPORTED, False) and kind != "died":
        return
    mark_reported(error)
    for each in groups.within(group):
        # Whoever can't be told finds the connections closed.
        with contextlib.suppress(CollectiveError, RuntimeError):
            failures_of(each).report(error, doing, kind=kind)


def mark_reported(error: BaseException) -> None:
    """Note that the others know of an error, however they were told."""
    with contextlib.suppress(AttributeError):
        setattr(error, _REPORTED, True)


@contextlib.contextmanager
def telling_failures(doing: str = "the training loop") -> Iterator[None]:
    """Tell the other processes if an exception leaves the ``with`` block.

    If your own code raises, for example in a loader, and the process lives on, the others wait for
    it. Within the block they raise an error within a second, with the message and the traceback.
    They also learn of an exception that nobody catches, without the block. Processes of
    ``multiprocessing`` and ``torch.multiprocessing.spawn`` catch all exceptions; there the others
    only see, on the same machine, that the process has ended.

    Example::

        with telling_failures():
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        doing: What the block does, for the message. Default: ``"the training loop"``.
    """
    try:
        yield
    except BaseException as error:
        report(error, doing)
        raise


def _report_at_the_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        report(error, "a program that ended with it", kind="died")
    finally:
        _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _report_at_the_end
