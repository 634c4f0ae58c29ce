"""What happens when a process dies, raises or does not come: how the others learn of it.

Note [Failures across processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
There is no heartbeat: a process that holds the interpreter's lock, is in a debugger, or evaluates
alone for minutes has not failed. A rank that raises, or whose wait fails, writes one record into
the store of the group, unless another rank has been first. *Then* it closes its own links, which
ends the collectives of its neighbors. All waits come in slices, and after each the waiting rank
looks for the record. So all ranks raise within a second, with the text of the first error.

A rank whose wait fails since a connection broke, or since the time is over, does not know which
rank is the cause. The record says so. All that wait write where they are, too: a rank that has
written nothing, or whose process has ended, is the cause.

Note [Generations]
~~~~~~~~~~~~~~~~~~
After a failure ranks may have left collectives at different points. So a failure ends all links
over the group, and the next link belongs to a new generation, which has a record of its own. A
generation has ended when its record is in the store, so all ranks that meet to make a link agree
on the first one that has none. Where processes destroy their group and make it again, the store
may still have what they wrote before; each counts its lives there, and names begin with that.

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

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end

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
# Seconds that a rank waits for the others to write where they are: after a failure, at a timeout.
_GRACE, _GRACE_AT_TIMEOUT = 0.8, 0.4
_POLL = 0.02
# Between two looks at who has come to make a link.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# A traceback travels through a store that is not made for long texts.
_LONGEST = 8000
#: How the descriptions of process groups that this package makes begin.
OWN = "dataparallel/"

_REMEDY = (
    "every process must run the same collectives, and make the same groups, in the same order; "
    "look for an earlier error of the ranks named here, and raise the timeout if they are only slow"
)


# --- what is known of a failure --------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Why a process cannot take part any more, as the other processes see it.

    Attributes:
        rank: Its rank in the default process group.
        host: The name of its machine.
        pid: Its process id there.
        kind: ``"raised"``: it raised an error. ``"late"``: the same, when others may have gone on.
            ``"stuck"``: the same, and new links do not help.
            ``"died"``: the same, and its process ends with it.
            ``"ended"``: its process is no longer there. ``"cut off"``: it cannot reach the store.
            ``"waiting"``, ``"timed out"``: its wait has failed, and another rank is the cause.
        doing: What it was doing, for example ``"forward"`` or a collective; empty if not known.
        message: The type and the text of its exception, or what was seen of it.
        traceback: The traceback of the exception; empty if there is none.
    """

    rank: int
    host: str
    pid: int
    kind: str
    doing: str
    message: str
    traceback: str = ""

    @classmethod
    def of_text(cls, text: bytes) -> Failure:
        """What a process has written into the store as JSON."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            message = f"wrote {text[:60]!r}, so it runs another version of this package"
            return cls(-1, "an unknown machine", 0, "raised", "", message)

    @property
    def is_cause(self) -> bool:
        """Whether this process is why others wait in vain."""
        return self.kind not in ("waiting", "timed out")

    def __str__(self) -> str:
        who = f"rank {self.rank} (process {self.pid} on {self.host})"
        if self.kind == "cut off":
            return f"{who} is cut off from the others: {self.message}"
        if self.kind == "ended":
            return f"{who} {self.message}"
        doing = f" in {self.doing}" if self.doing else ""
        text = f"{who} failed{doing}: {self.message}"
        if not self.traceback:
            return text
        return f"{text}\nTraceback of rank {self.rank}:\n{self.traceback.rstrip()}\n"


class CollectiveFailure(Exception):
    """What the two errors have in common.

    Args:
        message: The text.
        failure: What is known of the process that is the cause; None if no single one is.
    """

    def __init__(self, message: str = "", failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class CollectiveError(CollectiveFailure, RuntimeError):
    """A collective failed: a process ended, a connection broke, or the link was broken before."""


class CollectiveTimeout(CollectiveFailure, TimeoutError):
    """A collective did not complete in time; the message says which rank is missing."""


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _describe_error(error: BaseException) -> tuple[str, str]:
    """The message and the traceback of an exception, short enough to be sent."""
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return message[:_LONGEST], trace if len(trace) <= _LONGEST else f"... {trace[-_LONGEST:]}"


# --- processes and their store ---------------------------------------------------------------


def _space() -> str:
    """One start of one machine, and one container on it; empty where that is not known."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(pid: int, space: str) -> bool:
    """Whether a process is no longer there; False where nobody here can know."""
    if not space or space != _space():
        return False
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        # Some systems hide the processes of other users.
        return False
    # The name before it, which may have any character in it, is in parentheses. A zombie is a
    # process whose parent has not taken note of its end.
    return text.rpartition(")")[2].split()[0] in "ZX"


class OwnStore:
    """A store with a connection of its own, whose requests are limited in time."""

    def __init__(self, store: Store) -> None:
        self._original = store
        self._own: Store | None = None
        self._turn = threading.Lock()
        self._is_silent = False

    def ask(self, request: Callable[[Store], T], seconds: float) -> T:
        """What ``request`` returns; a TimeoutError if that takes longer. Can be interrupted."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            # Behind one that gets no answer there is no need to ask any more.
            if self._turn.acquire(timeout=seconds):
                try:
                    answer.set_result(request(self._connected()))
                    self._is_silent = False
                except Exception as error:
                    answer.set_exception(error)
                finally:
                    self._turn.release()

        if self._is_silent and seconds <= _WRITE:
            # Who asks again does not wait for as long again.
            seconds = SLICE
        interpreter_end.run_beside(run, "dataparallel-request")
        try:
            return answer.result(seconds)
        except concurrent.futures.TimeoutError:
            self._is_silent = True
            raise TimeoutError(f"no answer within {seconds:.2g} s") from None

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


def _read(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """What is at some places of a store; to get what is not there would be to wait for it."""
    return [store.get(key) if store.check([key]) else None for key in keys]


# --- one process group -----------------------------------------------------------------------


class Link(Protocol):
    """What belongs to a generation, and is closed when that ends."""

    def give_up(self, failure: Failure) -> None:
        """Close all connections, and wait for nothing."""

    def check_late(self) -> None:
        """Raise the error of a collective that has failed when nobody waited any more."""


class Failures:
    """What this process knows of failures in one process group. See the notes of this module."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = OwnStore(shared_store(group))
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = group.rank()
        #: The number of the generation, and why it has ended.
        self.generation, self.failure = 1, None  # type: int, Failure | None
        self._num_made: Counter[str] = Counter()
        self._links: tuple[weakref.ref[Link], ...] = ()
        self._process = socket.gethostname(), os.getpid(), _space()
        self._processes: dict[int, tuple[str, int, str]] = {}
        self._refusing_since: float | None = None
        self._failing = threading.Lock()

        def begin(store: Store) -> int:
            life = store.add(f"life/{self.rank}", 1)
            store.set(f"process/{life}/{self.rank}", json.dumps(self._process))
            return life

        self._life = self.ask(begin, f"joins {name_ranks(self.ranks)}")

    def ask(self, request: Callable[[Store], T], doing: str) -> T:
        """What a request of the store returns."""
        try:
            return self.store.ask(request, _STARTING)
        except (RuntimeError, TimeoutError) as error:
            raise self._cannot(doing, self._cut_off(error)) from error

    def _cannot(self, doing: str, failure: Failure) -> CollectiveError:
        text = f"rank {self.ranks[self.rank]} {doing}, but {failure}; start all processes again"
        return CollectiveError(text, failure)

    # --- making links ----------------------------------------------------------------------------

    def meet(self, purpose: str, timeout: float) -> str:
        """Wait until every rank wants a link, so that connecting waits for none; returns its name.

        Enters a new generation if this one has ended.
        """
        doing = f"makes the process group {purpose!r} over {name_ranks(self.ranks)}"
        started, pause, name = time.monotonic(), _SHORTEST_PAUSE, ""
        never = set(range(len(self.ranks)))
        while True:
            if self._renew(doing) or not name:
                name = self._next_name(purpose)
            if not (missing := self.ask(functools.partial(self._come, name), doing)):
                # Remembers all processes, for when the store may be gone.
                self._ended()
                return name
            interpreter_end.come_by()
            # Who has come and given up, in an earlier generation, is not why.
            never.intersection_update(missing)
            seconds = time.monotonic() - started
            if seconds > timeout:
                where = f"the making of the process group {purpose!r}"
                raise self.explain(where, seconds, None, timed_out=True, missing=never or missing)
            # A wait of the store itself could not be interrupted.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _next_name(self, purpose: str) -> str:
        self._num_made[purpose] += 1
        return f"{purpose}/{self._life}.{self.generation}.{self._num_made[purpose]}"

    def _come(self, name: str, store: Store) -> list[int]:
        """Tell that this process is here for a link; returns the processes that are not."""
        store.set(f"{name}/{self.rank}", "here")
        return [i for i in range(len(self.ranks)) if not store.check([f"{name}/{i}"])]

    def _renew(self, doing: str) -> bool:
        """Enter the first generation that has not ended, unless who ended this one cannot come."""
        if gone := self._ended():
            raise self._cannot(doing, gone)
        before, is_known = self.generation, self.failure is not None
        while (failure := self.look()) is not None:
            elsewhere = failure.rank != self.ranks[self.rank]
            is_news = failure.is_cause and not is_known
            is_final = failure.kind in ("cut off", "stuck")
            if is_final or (elsewhere and (failure.kind == "died" or is_news)):
                raise self._cannot(doing, failure)
            # All others have to leave it, too.
            self.ask(self._write_record(failure), doing)
            self.generation, self.failure, is_known = self.generation + 1, None, False
            self._num_made.clear()
        return self.generation != before

    def add(self, link: Link) -> None:
        """Close a link when this generation ends."""
        self._links = (*(ref for ref in self._links if ref() is not None), weakref.ref(link))
        if self.failure is not None:
            link.give_up(self.failure)

    def check_late(self) -> None:
        """Raise the error of a collective, over whatever link, that has failed unnoticed."""
        for reference in self._links:
            if (link := reference()) is not None:
                link.check_late()

    def _end(self, failure: Failure) -> None:
        """This generation has ended: close all links, which ends the waits of the neighbors."""
        if self.failure is None:
            self.failure = failure
            for reference in self._links:
                if (link := reference()) is not None:
                    link.give_up(failure)

    # --- looking ---------------------------------------------------------------------------------

    def while_waiting(self) -> Failure | None:
        """Called in each pause of a wait: why nobody should wait any more; None if all is well."""
        interpreter_end.come_by()
        return self.look()

    def look(self) -> Failure | None:
        """The record of this generation, if there is one; or that the store is gone."""
        if self.failure is not None:
            return self.failure
        keys = [self._key("failed")]
        try:
            (text,) = self.store.ask(lambda store: _read(store, keys), _LOOK)
        except TimeoutError:
            # Silence is no failure: the wait goes on until its own time is over.
            return None
        except RuntimeError as error:
            # Those that wait for others than rank 0 can go on without a store.
            now = time.monotonic()
            self._refusing_since = self._refusing_since or now
            gone = 0 in self.ranks and now - self._refusing_since > _REFUSING
            return self._cut_off(error) if gone else None
        self._refusing_since = None
        # Another thread may have entered the next generation meanwhile.
        if text is not None and keys == [self._key("failed")]:
            self._end(Failure.of_text(text))
        return self.failure

    def _ended(self) -> Failure | None:
        """Another rank of the group whose process is no longer there."""
        unknown = [i for i in range(len(self.ranks)) if i not in self._processes]
        keys = [f"process/{self._life}/{i}" for i in unknown]
        # The store may be gone, too.
        with contextlib.suppress(RuntimeError, TimeoutError):
            texts = self.store.ask(lambda store: _read(store, keys), _LOOK) if unknown else []
            known = {i: text for i, text in zip(unknown, texts, strict=True) if text is not None}
            self._processes |= {i: json.loads(text) for i, text in known.items()}
        for i, (host, pid, space) in self._processes.items():
            if i != self.rank and _has_ended(pid, space):
                return Failure(self.ranks[i], host, pid, "ended", "", "has ended")
        return None

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._life}.{self.generation}"

    def _cut_off(self, error: Exception) -> Failure:
        reason = str(error).strip().partition("\n")[0]
        text = (
            f"the store of the process group did not answer ({reason}); the network is down, or "
            "the process that holds the store, mostly that of rank 0 or torchrun's agent, has ended"
        )
        return self._here("cut off", "", text)

    def _here(self, kind: str, doing: str, message: str, trace: str = "") -> Failure:
        host, pid, _ = self._process
        return Failure(self.ranks[self.rank], host, pid, kind, doing, message, trace)

    # --- telling ---------------------------------------------------------------------------------

    def report(self, error: BaseException, doing: str, *, kind: str = "raised") -> None:
        """Let all ranks raise because of an error here. Returns within seconds in any case."""
        if self.failure is not None and kind != "died":
            return
        known = error.failure if isinstance(error, CollectiveFailure) else None
        mine = known or self._here(kind, doing, *_describe_error(error))
        with contextlib.suppress(RuntimeError, TimeoutError):
            mine = self.store.ask(self._write_record(mine), _WRITE)
        self._end(mine)

    def _write_record(self, mine: Failure) -> Callable[[Store], Failure]:
        """Writes the record, unless another rank was first; its answer is what is there."""
        key, text = self._key("failed"), json.dumps(asdict(mine))

        def write(store: Store) -> Failure:
            first = Failure.of_text(store.compare_set(key, "", text))
            if mine.kind == "died" and first.rank == mine.rank:
                store.set(key, text)
            return first

        return write

    # --- a wait that has failed ------------------------------------------------------------------

    def explain(
        self,
        where: str,
        seconds: float,
        reason: str | None,
        *,
        timed_out: bool,
        missing: Collection[int] | None = None,
    ) -> CollectiveError | CollectiveTimeout:
        """The error for a wait that has failed, or was given up. All ranks raise then.

        ``reason`` is what the backend says. ``missing`` has the processes that are known not to
        have come; otherwise all may be the cause.
        """
        with self._failing:
            if reason is not None and self.look() is None:
                # A process closes its connections before it has ended.
                time.sleep(_ENDING)
            message = reason or "another did not come"
            mine = self._here("timed out" if timed_out else "waiting", where, message)
            first, others = self._exchange(mine, self.look() or self._ended() or mine)
        # The same rank may have ended the links over other groups: they are made anew, too.
        for failures in list(_known.values()):
            failures.look()
        head = f"rank {mine.rank}: {where} over {len(self.ranks)} processes"
        late = timed_out or any(other.kind == "timed out" for other in others.values())
        if first.is_cause:
            text = f"{head} was given up after {seconds:.3g} s: {first}"
            kind = CollectiveTimeout if late and first.kind == "cut off" else CollectiveError
            return kind(text, first)
        ranks = range(len(self.ranks)) if missing is None else missing
        who = "; ".join(self._about(i, mine, others.get(i)) for i in ranks if i != self.rank)
        event = "did not complete within" if timed_out else "failed after"
        text = f"{head} {event} {seconds:.3g} s: {who}; {_REMEDY}"
        if reason is not None:
            text = f"{text}. The backend said: {reason}"
        return (CollectiveTimeout if late else CollectiveError)(text)

    def _exchange(self, mine: Failure, cause: Failure) -> tuple[Failure, dict[int, Failure]]:
        """Write where this rank is, and the record; returns why, and where the others are."""
        key, text = self._key("report"), json.dumps(asdict(mine))
        others: dict[int, Failure] = {}
        try:
            self.store.ask(lambda store: store.set(f"{key}/{self.rank}", text), _WRITE)
            first = self.store.ask(self._write_record(cause), _WRITE)
            self._end(first)
            if not first.is_cause:
                others = self._hear(key, _GRACE_AT_TIMEOUT if mine.kind == "timed out" else _GRACE)
        except (RuntimeError, TimeoutError) as error:
            self._end(cause)
            first = self._cut_off(error)
            if cause.is_cause:
                first = replace(cause, message=f"{cause.message}; {first.message}")
        return first if first.is_cause else self._ended() or first, others

    def _hear(self, key: str, grace: float) -> dict[int, Failure]:
        """Where the other ranks are, without those that write nothing."""
        others = [i for i in range(len(self.ranks)) if i != self.rank]
        keys = [f"{key}/{i}" for i in others]
        deadline = time.monotonic() + grace
        while True:
            texts = self.store.ask(lambda store: _read(store, keys), _WRITE)
            found = {i: Failure.of_text(t) for i, t in zip(others, texts, strict=True) if t}
            if len(found) == len(others) or self._ended() or time.monotonic() > deadline:
                return found
            time.sleep(_POLL)

    def _about(self, i: int, mine: Failure, other: Failure | None) -> str:
        """What another rank does instead."""
        if other is None:
            return f"rank {self.ranks[i]} did not come"
        if other.doing != mine.doing:
            return f"rank {self.ranks[i]} is at {other.doing}"
        event = "gave up waiting" if other.kind == "timed out" else "failed too"
        return f"rank {self.ranks[i]} came and {event}"


# --- all groups ------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Failures] = weakref.WeakKeyDictionary()
# Groups of the process from which this one was forked. It has no part in them, and must not speak
# for its parent.
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_making = threading.Lock()


def failures_of(group: dist.ProcessGroup) -> Failures:
    """What is known of failures in a process group."""
    with _making:
        found = _known.get(group)
        if found is None:
            found = _known[group] = Failures(group)
        return found


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _known.clear()
    if dist.is_available() and dist.is_initialized():
        _inherited.update(torch_internals.world().pg_map)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _groups_within(group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """The groups in which this process is with others, all or those inside of ``group``."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    ranks = None if group is None else set(dist.get_process_group_ranks(group))
    return [
        each
        for each in list(torch_internals.world().pg_map)
        if each.size() > 1
        and not each.group_desc.startswith(OWN)
        and each not in _inherited
        and (ranks is None or ranks.issuperset(dist.get_process_group_ranks(each)))
    ]


def report(
    error: BaseException,
    doing: str,
    group: dist.ProcessGroup | None = None,
    *,
    kind: str = "raised",
) -> None:
    """Let all ranks that wait for this one raise. Returns within seconds in any case."""
    for each in _groups_within(group):
        # Whoever can't be told finds the connections closed.
        with contextlib.suppress(CollectiveError, RuntimeError):
            failures_of(each).report(error, doing, kind=kind)


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
