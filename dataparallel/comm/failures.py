"""How the processes of a group learn that one of them has failed, and which.

Note [Failures across processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
There is no heartbeat: a process that holds the interpreter's lock, is in a debugger, or evaluates
alone for minutes has not failed. A rank that raises, or whose wait fails, writes one record into
the store of the group, unless another rank has been first. *Then* it closes its own links, which
ends the collectives of its neighbors. All waits come in slices, and after each the waiting rank
looks for the record. So all ranks raise within a second, with the text of the first error.

A rank whose wait fails since a connection broke, or since the time is over, does not know which
rank is the cause. It says so in the record, and where it is. All that wait report where they are,
too. A rank whose process has ended, or that has sent no report, is the cause. Nobody looks for
processes that have ended before a wait has failed.

Note [Generations]
~~~~~~~~~~~~~~~~~~
After a failure ranks may have left collectives at different points. So a failure ends all links
over the group. The next link belongs to a new generation, which has a record of its own. Each rank
writes into the store which generation it is in, and those that meet to make a link all take the
highest one. Each begins above the last number that it has written itself: where processes destroy
their group and make it again, the store may still have what they wrote before.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveTimeout,
    Failure,
    Place,
    Process,
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
# Seconds that a rank waits for the reports of the others.
_GRACE = 0.8
_POLL = 0.02
# On an exception: that the others know it.
_REPORTED = "_dataparallel_reported"
# On the hook for uncaught exceptions: the one that was there before.
_BEFORE = "_dataparallel_before"

_REMEDY = (
    "every process must run the same collectives in the same order; look for an earlier error of "
    "the ranks named here, and raise the timeout if they are only slow"
)


class Link(Protocol):
    """What is closed when a generation ends."""

    def give_up(self) -> None:
        """Close all connections, and wait for nothing."""


@dataclass(frozen=True)
class Report:
    """Where a rank was when a collective failed, there or elsewhere."""

    link: str
    place: Place
    timed_out: bool


class OwnStore:
    """A store with a connection of its own, whose requests are limited in time."""

    def __init__(self, store: Store) -> None:
        self._original = store
        self._own: Store | None = None
        self._turn = threading.Lock()
        # That of a request which nobody waits for any more.
        self._given_up = threading.Event()
        self._given_up.set()

    def ask(self, request: Callable[[Store], T], seconds: float) -> T:
        """What ``request`` returns. Can be interrupted."""
        answers: list[T] = []
        refusals: list[Exception] = []
        over = threading.Event()

        def run() -> None:
            interpreter_end.start()
            try:
                with self._turn:
                    answers.append(request(self._connected()))
            except Exception as error:
                refusals.append(error)
            finally:
                interpreter_end.stop()
                over.set()

        threading.Thread(target=run, name="dataparallel-request", daemon=True).start()
        if seconds <= _WRITE and not self._given_up.is_set():
            # It is still behind one without an answer, and comes to its turn later.
            seconds = SLICE
        deadline = time.monotonic() + seconds
        while not over.wait(min(SLICE, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                self._given_up = over
                raise TimeoutError(f"no answer within {seconds:.2g} s")
        if refusals:
            reason = str(refusals[0]).strip().partition("\n")[0]
            raise RuntimeError(reason) from refusals[0]
        return answers[0]

    def _connected(self) -> Store:
        own = self._own
        if own is None:
            # Torch's types lack it.
            untyped: Any = self._original
            self._own = own = untyped.clone()
            with contextlib.suppress(RuntimeError):
                own.set_timeout(timedelta(seconds=30))
        return own


def shared_store(group: dist.ProcessGroup) -> Store:
    """The part of the group's store in which everything of this package is."""
    return torch_internals.PrefixStore("dataparallel", group.get_group_store())


class Failures:
    """What this process knows of failures in one process group. See the notes of this module."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = OwnStore(shared_store(group))
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = group.rank()
        self.generation = 0
        self.failure: Failure | None = None
        self._process = Process.this()
        self._processes: dict[int, Process] = {}
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._refusing_since: float | None = None
        self._has_met = False
        self._failing = threading.Lock()

        def begin(store: Store) -> int:
            store.set(f"process/{self.rank}", json.dumps(asdict(self._process)))
            return number_at(store, f"generation/{self.rank}")

        doing = f"joins {name_ranks(self.ranks)}"
        self.enter(self.ask(begin, doing) + 1, doing)

    # --- generations -----------------------------------------------------------------------------

    def enter(self, generation: int, doing: str) -> None:
        """Begin a new generation, in which nothing has failed yet."""
        key = f"generation/{self.rank}"
        self.ask(lambda store: store.set(key, str(generation)), doing)
        self.generation, self.failure = generation, None

    def follow(self, doing: str) -> bool:
        """Enter the generation in which another process is already; whether there is one."""
        keys = [f"generation/{i}" for i in range(len(self.ranks))]
        highest = self.ask(lambda store: max(number_at(store, key) for key in keys), doing)
        if highest > self.generation:
            self.enter(highest, doing)
            return True
        return False

    def renew(self, doing: str, *, waits: bool = False) -> bool:
        """Enter the next generation if this one has ended; whether it had."""
        if gone := self.ended():
            raise self.cannot(doing, next(iter(gone.values())))
        is_known = self.failure is not None
        failure = self.look()
        if failure is None:
            return False
        elsewhere = failure.rank != self.ranks[self.rank]
        # Before the first meeting nobody has anything to recover from: who fails does not come.
        is_news = not is_known and failure.kind != "waiting" and (waits or not self._has_met)
        if failure.kind == "cut off" or (elsewhere and (failure.final or is_news)):
            raise self.cannot(doing, failure)
        if not self.follow(doing):
            self.enter(self.generation + 1, doing)
        return True

    def watch_over(self, link: Link) -> None:
        """Close a link when this generation ends."""
        self._links.add(link)

    def ask(self, request: Callable[[Store], T], doing: str, seconds: float = _STARTING) -> T:
        """What a request of the store returns."""
        try:
            return self.store.ask(request, seconds)
        except (RuntimeError, TimeoutError) as error:
            raise self.cannot(doing, self._cut_off(str(error))) from error

    def cannot(self, doing: str, failure: Failure) -> CollectiveError:
        """The error for what this process cannot do because of a failure."""
        text = f"rank {self.ranks[self.rank]} {doing}, but {failure}; start all processes again"
        return CollectiveError(text, failure=failure)

    # --- looking ---------------------------------------------------------------------------------

    def while_waiting(self) -> Failure | None:
        """Called in each pause of a wait: why nobody should wait any more; None if all is well."""
        interpreter_end.come_by()
        return self.look()

    def look(self) -> Failure | None:
        """The record of this generation, if there is one; or that the store is gone."""
        if self.failure is not None:
            return self.failure
        key = self._record()
        try:
            text = self.store.ask(
                lambda store: store.get(key) if store.check([key]) else None, _LOOK
            )
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
            self._end(_failure_from(text))
        return self.failure

    def ended(self) -> dict[int, Failure]:
        """The other ranks of the group whose processes are no longer there."""
        found = {}
        for i, process in self._others().items():
            if process.state() == "ended":
                who = self.ranks[i], process.host, process.pid
                found[i] = Failure(*who, kind="ended", doing="", message="has ended")
        return found

    def _others(self) -> dict[int, Process]:
        """The other processes that have told who they are."""
        unknown = {i for i in range(len(self.ranks)) if i != self.rank} - self._processes.keys()
        if unknown:
            with contextlib.suppress(RuntimeError, TimeoutError, ValueError, TypeError):
                texts = self.store.ask(
                    lambda store: {i: _text_at(store, f"process/{i}") for i in unknown}, _LOOK
                )
                for i, text in texts.items():
                    if text:
                        self._processes[i] = Process(**json.loads(text))
        return self._processes

    def meet_others(self) -> None:
        """All have told who they are: remember it for when the store may be gone."""
        self._has_met = True
        self._processes.clear()
        self._others()

    def _record(self) -> str:
        return f"failed/{self.generation}"

    def _cut_off(self, reason: str) -> Failure:
        text = (
            f"the store of the process group did not answer ({reason}); the network is down, or "
            "the process that holds the store, mostly that of rank 0 or torchrun's agent, has ended"
        )
        return self._here("cut off", "", text)

    def _here(self, kind: str, doing: str, message: str, trace: str = "") -> Failure:
        process, rank = self._process, self.ranks[self.rank]
        return Failure(rank, process.host, process.pid, kind, doing, message, trace)

    # --- telling ---------------------------------------------------------------------------------

    def report(
        self, error: BaseException, doing: str, *, kind: str = "raised", final: bool = False
    ) -> None:
        """Let all ranks raise because of an error here. Returns within seconds in any case."""
        if isinstance(error, (CollectiveError, CollectiveTimeout)) and error.failure is not None:
            mine = error.failure
        else:
            message, trace = describe_error(error)
            mine = replace(self._here(kind, doing, message, trace), final=final)
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._write(mine)
        self._end(mine)

    def _write(self, mine: Failure) -> Failure:
        """Write the record, unless another rank was first; what it says then."""
        key, text = self._record(), json.dumps(asdict(mine))

        def write(store: Store) -> bytes:
            first = store.compare_set(key, "", text)
            if mine.final and _failure_from(first).rank == mine.rank:
                store.set(key, text)
            return first

        first = _failure_from(self.store.ask(write, _WRITE))
        self._end(first)
        return first

    def _end(self, failure: Failure) -> None:
        """This generation has ended: close all links, which ends the waits of the neighbors."""
        if self.failure is None:
            self.failure = failure
            for link in list(self._links):
                link.give_up()
            self._links.clear()

    # --- errors ----------------------------------------------------------------------------------

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
            here = Report(link, place, timed_out)
            said = f"{place} for {purpose_of(link)!r}"
            mine = cause or self._here("waiting", said, reason or f"nothing within {seconds:.3g} s")
            first, reports = self._exchange(here, mine)
        # The same rank may have ended the links over other groups: they are made anew, too.
        groups.look()
        if first.kind != "waiting" and not isinstance(reports, str):
            text = f"{head} was given up after {seconds:.3g} s: {first}"
            return self._error(text, place, first, False)
        ended = self.ended()
        event = "did not complete within" if timed_out else "failed after"
        text = f"{head} {event} {seconds:.3g} s: {self._who(here, reports, ended)}; {_REMEDY}"
        if reason is not None:
            text = f"{text}. The backend said: {reason}"
        heard = [] if isinstance(reports, str) else reports.values()
        late = timed_out or any(other.timed_out for other in heard)
        return self._error(text, place, next(iter(ended.values()), None), late)

    def nobody_came(self, place: Place, link: str, missing: set[int]) -> list[str]:
        """Give up the making of a link; returns where the missing ranks are, if they said so."""
        here = Report(link, place, timed_out=True)
        mine = self._here("waiting", str(place), "another process did not come")
        _, reports = self._exchange(here, mine)
        if isinstance(reports, str):
            return []
        return [self._about(i, here, reports[i]) for i in sorted(missing) if i in reports]

    def _exchange(self, here: Report, mine: Failure) -> tuple[Failure, dict[int, Report] | str]:
        """Write the record, and where this rank is."""
        text, key = json.dumps(asdict(here)), f"report/{self.generation}/{self.rank}"
        try:
            self.store.ask(lambda store: store.set(key, text), _WRITE)
            first = self._write(mine)
            if first.kind != "waiting":
                return first, {}
            return first, self._hear(0.5 * _GRACE if here.timed_out else _GRACE)
        except (RuntimeError, TimeoutError) as error:
            self._end(mine)
            return mine, str(error)

    def _one_that_ends(self) -> Failure | None:
        """A process that ends just now, since connections have broken; None if none does."""
        deadline = time.monotonic() + _ENDING
        while time.monotonic() < deadline:
            if (failure := self.look()) is not None:
                return failure
            if ended := self.ended():
                return next(iter(ended.values()))
            time.sleep(_POLL)
        return None

    def _hear(self, grace: float) -> dict[int, Report]:
        """The reports of the other ranks, without those that sent none."""
        others = [i for i in range(len(self.ranks)) if i != self.rank]
        keys = {i: f"report/{self.generation}/{i}" for i in others}
        deadline = time.monotonic() + grace
        while True:
            texts = self.store.ask(
                lambda store: {i: _text_at(store, key) for i, key in keys.items()}, _WRITE
            )
            reports = {
                i: found for i, text in texts.items() if text and (found := _report_from(text))
            }
            silent = texts.keys() - reports.keys()
            if silent <= self.ended().keys() or time.monotonic() > deadline:
                return reports
            time.sleep(_POLL)

    def _who(
        self, here: Report, reports: dict[int, Report] | str, ended: dict[int, Failure]
    ) -> str:
        """What the other ranks do instead."""
        parts = [str(failure) for failure in ended.values()]
        if isinstance(reports, str):
            if not parts:
                parts.append("nobody knows which rank is missing")
            parts.append(
                f"the store of the process group did not answer ({reports}); the process that "
                "holds it, mostly that of rank 0, may have ended"
            )
            return "; ".join(parts)
        others = [i for i in range(len(self.ranks)) if i != self.rank and i not in ended]
        return "; ".join([*parts, *(self._about(i, here, reports.get(i)) for i in others)])

    def _about(self, i: int, here: Report, report: Report | None) -> str:
        who = f"rank {self.ranks[i]}"
        if report is None:
            process = self._processes.get(i)
            state = process.state() if process is not None else ""
            return f"{who} did not come{f' (it is {state})' if state else ''}"
        if report.link != here.link:
            return f"{who} waits in another link, {purpose_of(report.link)!r}: {report.place}"
        if report.place != here.place:
            return f"{who} is at {report.place}"
        return f"{who} came and {'gave up waiting' if report.timed_out else 'failed too'}"

    def _error(
        self, text: str, place: Place, failure: Failure | None, late: bool
    ) -> CollectiveError | CollectiveTimeout:
        kind = CollectiveTimeout if late else CollectiveError
        return kind(text, place, failure)


def number_at(store: Store, key: str) -> int:
    """The number at a place of a store; 0 if there is nothing, or no number."""
    text = _text_at(store, key) or b""
    return int(text) if text.isdigit() else 0


def texts_at(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """What is at several places of a store; None until something is at each."""
    return [store.get(key) for key in keys] if store.check(list(keys)) else None


def _text_at(store: Store, key: str) -> bytes | None:
    # To get what is not there would be to wait for it.
    return store.get(key) if store.check([key]) else None


def _failure_from(text: bytes) -> Failure:
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        message = f"wrote {text[:60]!r}, so it runs another version of this package"
        return Failure(-1, "an unknown machine", 0, "raised", "", message)


def _report_from(text: bytes) -> Report | None:
    try:
        fields = json.loads(text)
        return Report(fields["link"], Place(**fields["place"]), fields["timed_out"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


# --- all groups ------------------------------------------------------------------------------


class _Groups:
    """What is known of failures, by process group."""

    def __init__(self) -> None:
        self._inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        #: Groups that this package has made for its links.
        self.own: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _forget(self) -> None:
        self._made: weakref.WeakKeyDictionary[dist.ProcessGroup, Failures] = (
            weakref.WeakKeyDictionary()
        )
        self._making = threading.Lock()

    def _after_fork(self) -> None:
        # A forked child has no part in the groups, and must not speak for its parent.
        self._forget()
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
            and each not in self.own
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
    final: bool = False,
) -> None:
    """Let all ranks that wait for this one raise. Returns within seconds in any case."""
    if getattr(error, _REPORTED, False) and not final:
        return
    mark_reported(error)
    for each in groups.within(group):
        # Whoever can't be told finds the connections closed.
        with contextlib.suppress(CollectiveError, RuntimeError):
            failures_of(each).report(error, doing, kind=kind, final=final)


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
        report(error, "a program that ended with it", final=True)
    finally:
        _before(kind, error, trace)


# A module that is loaded once more replaces its own hook.
_before = getattr(sys.excepthook, _BEFORE, sys.excepthook)
setattr(_report_at_the_end, _BEFORE, _before)
sys.excepthook = _report_at_the_end
