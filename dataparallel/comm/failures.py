"""Failures of processes that die, raise or do not come, and how the others learn of them.

There is no heartbeat: a process that holds the interpreter's lock, is in a debugger, or evaluates
alone for minutes has not failed. A rank that raises, or whose wait fails, writes one record into
the store of the group, unless another rank has been first. *Then* it closes its own links, which
ends the collectives of its neighbors. All waits come in slices, and after each the waiting rank
looks for the record. So all ranks raise within a second, with the text of the first error.

A rank whose wait fails since a connection broke, or since the time is over, does not know which
rank is the cause. The record says so. All that wait write where they are, too: a rank that has
written nothing, or whose process has ended, is the cause.

After a failure ranks may have left collectives at different points. So a failure ends all links
over the group, and the next link belongs to a new generation, which has a record of its own. A
generation has ended when its record is in the store, so all ranks that meet to make a link agree
on the first one that has none. A rank that fails again before it has new links ends one more, and
each rank raises once for each: when they meet, all have left out the same steps. An error carries
which generation of which group it has ended, so it ends one however often it is told. Once there
are new links, whatever is raised ends those, even while the earlier error is still being handled.
If processes destroy their group and make it again, the store may still have their old entries. Each
counts its lives there, and names begin with that.

Processes that connect find each other under a name in the store, which must be the same in all of
them and may never be used twice. ``torch.distributed.new_group`` counts the groups that a process
has at the moment. One made after another was destroyed finds the old addresses, and a process with
one more group never meets the others. A link is named by its purpose, its generation, and its
number among those for that purpose.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.errors import (
    CollectiveError,
    CollectiveFailure,
    CollectiveTimeout,
    Failure,
    RanksParted,
)

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

T = TypeVar("T")

#: Seconds between two looks at the record, and at Ctrl-C.
SLICE = 0.2
# Seconds that a store may take to answer: after a failure, and where links are made.
_ANSWER, _STARTING = 1.0, 15.0
# Seconds that a rank waits for the others to write where they are.
_GRACE = 0.8
# Between two looks at who has come or written.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# A traceback travels through a store that is not made for long texts.
_LONGEST = 8000
#: The first part of the description of each process group that this package makes.
OWN = "dataparallel/"

_REMEDY = (
    "every process must run the same collectives, and make the same groups, in the same order; "
    "look for an earlier error of the ranks named here, and raise the timeout if they are only slow"
)


# --- processes and their store ---------------------------------------------------------------


def namespace(kind: str) -> str:
    """Return a key of this start of this machine, and its "pid" or "net"; empty if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return ""


def _has_ended(pid: int) -> bool:
    """True if a process of this space is no longer there."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        # Some systems hide the processes of other users.
        return not isinstance(error, PermissionError)
    # The name before it, which may have any character in it, is in parentheses. A zombie is a
    # process whose parent has not taken note of its end.
    return text.rpartition(")")[2].split()[0] in "ZX"


def shared_store(group: dist.ProcessGroup) -> Store:
    """Return the part of the group's store that belongs to this package."""
    return torch_internals.PrefixStore("dataparallel", group.get_group_store())


def _read(store: Store, keys: Sequence[str]) -> list[Any]:
    """Return the values at some places of a store, and None for those that are not there yet."""
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


# --- one process group -----------------------------------------------------------------------


class Link(Protocol):
    """A link over the group, which the end of its generation closes."""

    @property
    def failure(self) -> Failure | None: ...
    def give_up(self) -> None: ...
    def check_late(self) -> None: ...


class Failures:
    """This process's knowledge of failures in one process group. See the notes of this module."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = group.rank()
        #: The reasons why generations have ended: all before the present one.
        self.ends: dict[int, Failure] = {}
        #: Errors that were raised here because they have ended, by generation.
        self.num_errors: Counter[int] = Counter()
        #: Calls of communication hooks here, which begin collectives in groups that stay.
        self.num_hook_calls = 0
        #: Rounds of reduction that were delivered here, by the name of their wrapper.
        self.num_rounds: Counter[str] = Counter()
        # The newest generation in which this process has met the others; 0 before.
        self._met = 0
        self._links: tuple[weakref.ref[Link], ...] = ()
        self._num_made: Counter[str] = Counter()
        # Torch's types lack that it can be cloned.
        self._store: Any = shared_store(group)
        # A connection of our own: beside a blocked wait, one on the same connection takes seconds.
        self._own: Store | None = None
        self._turn = threading.Lock()
        # Held while links and errors are counted.
        self._noting = threading.Lock()
        self._process = socket.gethostname(), os.getpid(), namespace("pid")
        self._processes: dict[int, tuple[str, int, str]] = {}

        def begin(store: Store) -> int:
            life = store.add(f"life/{self.rank}", 1)
            store.set(f"process/{life}/{self.rank}", json.dumps(self._process))
            return life

        self._life = self.ask(begin)
        self._name = f"{group.group_name}/{self._life}"

    @property
    def generation(self) -> int:
        """Return the generation of the links which are made now, as far as it is known here."""
        return len(self.ends) + 1

    def ask(self, request: Callable[[Store], T], seconds: float = _STARTING) -> T:
        """Return the answer of the store to a request. The wait for it can be interrupted."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            # Behind one that gets no answer there is no need to ask any more.
            if self._turn.acquire(timeout=seconds):
                try:
                    self._own = self._own or self._store.clone()
                    answer.set_result(request(self._own))
                except Exception as error:
                    answer.set_exception(error)
                finally:
                    self._turn.release()

        interpreter_end.run_beside(run, "dataparallel-request")
        try:
            return answer.result(seconds)
        except (RuntimeError, concurrent.futures.TimeoutError) as error:
            is_silent = isinstance(error, concurrent.futures.TimeoutError)
            kind = CollectiveTimeout if is_silent else CollectiveError
            seen = f"no answer within {seconds:.2g} s" if is_silent else str(error).strip()
            reason = seen.partition("\n")[0]
            text = (
                "is cut off from the others: the store of the process group did not answer "
                f"({reason}); the network is down, or the process that holds the store, mostly "
                "that of rank 0 or torchrun's agent, has ended"
            )
            failure = self._here("cut off", "", text)
            raise kind(str(failure), failure) from error

    def _here(self, kind: str, doing: str, message: str, trace: str = "") -> Failure:
        host, pid, _ = self._process
        return Failure(self.ranks[self.rank], host, pid, kind, doing, message, trace)

    def of(self, rank: int, kind: str, message: str) -> Failure:
        """Describe the failure of another rank of the group."""
        host, pid, _ = self._processes.get(rank, ("", 0, ""))
        return Failure(self.ranks[rank], host, pid, kind, "", message)

    def _key(self, kind: str, generation: int) -> str:
        return f"{kind}/{self._life}.{generation}"

    # --- links -----------------------------------------------------------------------------------

    def meet(self, purpose: str, timeout: float) -> tuple[str, int, int]:
        """Wait until every rank wants a link; returns its name, its generation and its number.

        Connecting then waits for nobody.
        """
        where = f"the making of the process group {purpose!r}"
        started, pause, generation = time.monotonic(), _SHORTEST_PAUSE, 0
        known = set(self.ends)
        while True:
            if self._gone() is not None:
                raise self.explain(where, started, self.generation)
            self.while_waiting()
            for ended, failure in list(self.ends.items()):
                # A connection may break because this rank has closed a link, to make a new one.
                concerns = failure.is_cause or (generation and failure.kind == "timed out")
                if failure.is_final or (concerns and ended not in known):
                    raise self.explain(where, started, ended)
            known.update(self.ends)
            if generation != self.generation:
                generation = self.generation
                key = self._key(purpose, generation)
                with self._noting:
                    self._num_made[key] += 1
                    number = self._num_made[key]
                name = f"{key}.{number}"
            if self.ask(functools.partial(self._come, name)):
                # Remembers all processes, for when the store may be gone.
                self._gone()
                self._met = generation
                return name, generation, number
            if time.monotonic() - started > timeout:
                raise self.explain(where, started, generation, timed_out=True)
            # A wait of the store itself could not be interrupted.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _come(self, name: str, store: Store) -> bool:
        """Tell that this process is here for a link; returns whether all are."""
        store.set(f"{name}/{self.rank}", "here")
        return store.check([f"{name}/{i}" for i in range(len(self.ranks))])

    def add(self, link: Link) -> None:
        """Close a link when its generation ends."""
        with self._noting:
            self._links = (*(ref for ref in self._links if ref() is not None), weakref.ref(link))

    def check_late(self) -> None:
        """Raise the error of a collective, over whatever link, that has failed unnoticed."""
        for reference in self._links:
            if (link := reference()) is not None:
                link.check_late()

    def _end(self, generation: int, failure: Failure) -> None:
        """End a generation: close its links, which ends the waits of the neighbors."""
        is_news = generation not in self.ends
        self.ends[generation] = failure
        for reference in self._links if is_news else ():
            if (link := reference()) is not None and link.failure is not None:
                link.give_up()

    # --- looking ---------------------------------------------------------------------------------

    def while_waiting(self) -> Failure | None:
        """Called in each pause of a wait: what has ended this generation; None if nothing has.

        The next call looks for what has ended the next one.
        """
        if len(self.ranks) == 1:
            return None
        # Another thread may have entered the next generation before the answer comes.
        generation = self.generation
        key = self._key("failed", generation)
        # Without a store the wait goes on until its own time is over, or a connection breaks.
        with contextlib.suppress(CollectiveFailure):
            (record,) = self.ask(lambda store: _read(store, [key]), SLICE)
            if record is not None:
                self._end(generation, Failure(**record))
        return self.ends.get(generation)

    def has_lost_another(self) -> bool:
        """True if another rank has failed, as far as it can be seen now."""
        return self.while_waiting() is not None or self._gone() is not None

    def _gone(self) -> Failure | None:
        """Another rank of the group whose process is no longer there."""
        unknown = [i for i in range(len(self.ranks)) if i not in self._processes]
        if unknown:
            keys = [f"process/{self._life}/{i}" for i in unknown]
            # The store may be gone, too.
            with contextlib.suppress(CollectiveFailure):
                found = self.ask(lambda store: _read(store, keys), _ANSWER)
                pairs = zip(unknown, found, strict=True)
                known = {i: process for i, process in pairs if process is not None}
                # Another one, since other threads may be going over it.
                self._processes = self._processes | known
        for i, (host, pid, space) in self._processes.items():
            if i != self.rank and space and space == self._process[2] and _has_ended(pid):
                return Failure(self.ranks[i], host, pid, "ended", "", "has ended")
        return None

    # --- telling ---------------------------------------------------------------------------------

    def note_rounds(self, name: str, number: int) -> None:
        """Note how many rounds of a wrapper were delivered."""
        self.num_rounds[name] = number

    def withdraw(self, generation: int) -> None:
        """Note that an error was not raised in the end."""
        with self._noting:
            self.num_errors[generation] -= 1

    def count_hook_call(self) -> None:
        """Note that a communication hook has run, and not raised an error."""
        with self._noting:
            self.num_hook_calls += 1

    def report(
        self,
        error: BaseException,
        doing: str,
        *,
        kind: str = "raised",
        generation: int | None = None,
        handled: BaseException | None = None,
    ) -> None:
        """Let all ranks raise because of an error here. Returns within seconds in any case.

        ``generation`` is that in which the error arose; the current one if there are no links yet.
        """
        generation = self.generation if generation is None else generation
        if (
            self.note_error(error, generation, handled)
            or generation in self.ends
            or len(self.ranks) == 1
        ):
            return
        failure = error.failure if isinstance(error, CollectiveFailure) else None
        if failure is None:
            message = "".join(traceback.format_exception_only(error)).strip()
            trace = "".join(traceback.format_exception(error))
            short = trace if len(trace) <= _LONGEST else f"... {trace[-_LONGEST:]}"
            failure = self._here(kind, doing, message[:_LONGEST], short)
        with contextlib.suppress(CollectiveFailure):
            failure = self.ask(self._record(failure, generation), _ANSWER)
        self._end(generation, failure)

    def note_error(
        self, error: BaseException, generation: int, handled: BaseException | None = None
    ) -> bool:
        """Note which generation an error ends; returns whether it has ended the newest links.

        It has if an error from which it came has; what was ``handled`` when it arose is none.
        """
        chain = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            if cause is handled or cause in chain:
                break
            chain.append(cause)
        ended = [vars(each).get("dataparallel_ended", {}).get(self._name, 0) for each in chain]
        told: bool = max(ended) >= max(self._met, 1)
        if not told:
            with self._noting:
                self.num_errors[generation] += 1
            # Python's own errors take no weak references, and one that is kept keeps tensors.
            vars(error).setdefault("dataparallel_ended", {})[self._name] = generation
        return told

    def _record(self, failure: Failure, generation: int) -> Callable[[Store], Failure]:
        """Writes why a generation ends, unless another rank was first; answers what is there."""
        failure = replace(failure, rounds=dict(self.num_rounds))
        key, text = self._key("failed", generation), json.dumps(asdict(failure))
        return lambda store: Failure(**json.loads(store.compare_set(key, "", text)))

    # --- a wait that has failed ------------------------------------------------------------------

    def explain(
        self,
        where: str,
        started: float,
        generation: int,
        reason: str | None = None,
        *,
        timed_out: bool = False,
    ) -> CollectiveError | CollectiveTimeout:
        """Return the error for a wait that has failed, or was given up. All ranks raise then.

        ``reason`` is what the backend says.
        """
        seconds = time.monotonic() - started
        if reason is not None and ("timed out" in reason.lower() or "timeout" in reason.lower()):
            # Nothing but its time limit was reached.
            reason, timed_out = None, True
        cause, others = self.end(where, generation, reason, timed_out=timed_out)
        head = f"rank {self.ranks[self.rank]}: {where} over {len(self.ranks)} processes"
        error: CollectiveError | CollectiveTimeout
        if cause.is_cause:
            error = CollectiveError(f"{head} was given up after {seconds:.3g} s: {cause}", cause)
        else:
            is_late = any(other.kind == "timed out" for other in others.values())
            event = "did not complete within" if is_late else "failed after"
            found = []
            for i, rank in enumerate(self.ranks):
                if i not in others:
                    found.append(f"rank {rank} did not come")
                elif others[i].doing != where:
                    found.append(f"rank {rank} is at {others[i].doing}")
                elif i != self.rank:
                    found.append(f"rank {rank} came and gave up, too")
            text = f"{head} {event} {seconds:.3g} s: {'; '.join(found)}; {_REMEDY}"
            text += "" if reason is None else f". The backend said: {reason}"
            before = self.ends.get(generation - 1)
            text += "" if before is None else f". Before that, {before}"
            error = (CollectiveTimeout if is_late else CollectiveError)(text)
        self.note_error(error, generation)
        # The same rank may have ended the links over other groups: they are made anew, too.
        for failures in _all_known():
            if failures is not self and failures.while_waiting() is not None:
                failures.note_error(error, failures.generation - 1)
        return error

    def end(
        self, where: str, generation: int, reason: str | None = None, *, timed_out: bool = False
    ) -> tuple[Failure, dict[int, Failure]]:
        """Write where this rank is, and the record; returns the cause, and where all ranks are."""
        kind = "timed out" if timed_out else "waiting"
        mine = self._here(kind, where, reason or "another did not come")
        key, text = self._key("report", generation), json.dumps(asdict(mine))
        keys = [f"{key}/{i}" for i in range(len(self.ranks))]
        cause, found = self.ends.get(generation) or self._gone() or mine, {self.rank: mine}
        try:
            self.ask(lambda store: store.set(keys[self.rank], text), _ANSWER)
            cause = self.ask(self._record(cause, generation), _ANSWER)
            self._end(generation, cause)
            deadline = time.monotonic() + _GRACE
            while not cause.is_cause and len(found) < len(keys) and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE)
                texts = enumerate(self.ask(lambda store: _read(store, keys), _ANSWER))
                found |= {i: Failure(**text) for i, text in texts if text is not None}
                # A process closes its connections before it has ended.
                cause = self._gone() or cause
        except CollectiveFailure as error:
            assert error.failure is not None, "the store does not answer"
            text = f"{cause.message}; rank {mine.rank} {error.failure.message}"
            cause = replace(cause, message=text) if cause.is_cause else error.failure
        # A later question about the links gets this cause as the answer.
        self._end(generation, cause)
        return cause, found


# --- all groups ------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Failures] = weakref.WeakKeyDictionary()
# Groups of the process from which this one was forked. It has no part in them, and must not speak
# for its parent.
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_making = threading.Lock()


# The hook that was there before ours; None as long as this process has met no others.
_hook_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = (
    None
)


def _report_at_the_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        report(error, "a program that ended with it")
    finally:
        if _hook_before is not None:
            _hook_before(kind, error, trace)


def _all_known() -> list[Failures]:
    """Return the knowledge of all groups; other threads may add some meanwhile."""
    groups = [reference() for reference in _known.keyrefs()]
    found = [_known.get(group) for group in groups if group is not None]
    return [failures for failures in found if failures is not None]


def failures_of(group: dist.ProcessGroup) -> Failures:
    """Return the knowledge of failures in a process group.

    From the first group on, the others also learn of an exception that nobody catches.
    """
    global _hook_before
    with _making:
        found = _known.get(group)
        if found is None:
            found = _known[group] = Failures(group)
            if _hook_before is None:
                _hook_before, sys.excepthook = sys.excepthook, _report_at_the_end
        return found


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _known.clear()
    if dist.is_available() and dist.is_initialized():
        _inherited.update(torch_internals.world().pg_map)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def report(
    error: BaseException,
    doing: str,
    group: dist.ProcessGroup | None = None,
    handled: BaseException | None = None,
) -> None:
    """Let all ranks that wait for this one raise: in ``group`` and in all groups inside of it.

    Returns within seconds in any case.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    members = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    groups = list(torch_internals.world().pg_map)
    # Whoever drops the last reference to a link's waits for what is under way there.
    groups = [each for each in groups if not each.group_desc.startswith(OWN)]
    for each in groups:
        ours = each.size() == 1 or each in _inherited
        if not ours and members.issuperset(dist.get_process_group_ranks(each)):
            try:
                failures_of(each).report(error, doing, handled=handled)
            except CollectiveFailure:
                # All groups have one store. Whoever can't be told finds the connections closed.
                return
            except RuntimeError:
                continue


@contextlib.contextmanager
def telling_failures(doing: str = "the training loop") -> Iterator[None]:
    """Tell the other processes if an exception leaves the ``with`` block.

    If your own code raises, for example in a loader, and the process lives on, the others wait for
    it. Within the block they raise an error within a second, with the message and the traceback.
    They also learn of an exception that nobody catches, without the block, as soon as this process
    has called :func:`~dataparallel.init_process_group` or made a wrapper. Processes of
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
        doing: The work of the block, for the message. Default: ``"the training loop"``.
    """
    handled = sys.exc_info()[1]
    try:
        yield
    except RanksParted:
        # All know, and whoever goes on is at the same step as the others.
        raise
    except BaseException as error:
        report(error, doing, handled=handled)
        raise
