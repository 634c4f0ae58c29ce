"""How collectives across processes are launched and waited for.

Note [After a failure]
~~~~~~~~~~~~~~~~~~~~~~
When a collective fails, processes may have left it at different points, so later ones would be
matched wrongly. The link is broken from then on, in every process that noticed, and says why.
Collectives that were in flight end by themselves within the timeout: each has it as its own limit,
and the first that runs into it makes gloo close the connections. Who waits for one does not wait so
long if another process has failed, see Note [Signs of life]: gloo has no way to end a collective,
so the wait ends and the collective is left alone, with the memory that it reads and writes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dataparallel import devices as _devices
from dataparallel.comm import interpreter_end
from dataparallel.comm.calls import Call
from dataparallel.comm.checks import LATE_ANSWER, CollectiveChecks, CollectiveMismatch
from dataparallel.comm.failure import SAID, Failure
from dataparallel.comm.late_failures import late_failures
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveTimeout,
    Place,
    Reports,
    failure,
    given_up,
    purpose_of,
)
from dataparallel.comm.staging import Carried
from dataparallel.comm.watch import Watch

# Seconds between two looks at Ctrl-C, which a wait in the backend does not notice.
SLICE = 0.5
# Shorter waits are not possible: for gloo, 0 ms mean forever.
_SHORTEST = 0.001
# Seconds by which the backend's own time limit comes first: it ends the collective, ours only the
# wait for it.
_MARGIN = 0.15

# What backends write when nothing but their time limit was reached.
_TIME_IS_OVER = ("timed out", "timeout")


def wait_briefly(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective for at most so many seconds, and tell whether it has ended.

    Raises:
        RuntimeError: The collective failed.
    """
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # Raises if it was more than the end of this short wait.
        work.wait()
    return True


def is_time_limit(message: str) -> bool:
    """Whether this is what a backend writes when nothing but its time limit was reached."""
    return any(word in message.lower() for word in _TIME_IS_OVER)


class Pending:
    """A collective that was launched. Made by :class:`~dataparallel.comm.processes.ProcessLink`."""

    def __init__(
        self,
        launcher: Launcher,
        place: Place,
        started: float,
        work: dist.Work,
        carried: Carried,
    ) -> None:
        self._launcher = launcher
        self._place = place
        self._started = started
        self._work = work
        self._carried = carried
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Pending({self._place}, done={self.done()})"

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without waiting for another process."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait until the result is in the tensor. May be called again.

        On an accelerator the result is ready on the current stream.

        Raises:
            CollectiveTimeout: The other processes did not come in time.
            CollectiveError: The collective failed, or the link was broken before it ended.
        """
        self.wait_for_backend()
        self._deliver()

    def wait_for_backend(self) -> None:
        """Wait until what was sent has its result, without bringing that to the tensor."""
        if _devices.is_accelerator(self._carried.sent.device):
            # Orders the current stream, or blocks up to the time limit of the group.
            self._launcher.wait(self._place, self._started, lambda _: bool(self._work.wait()))
            self._launcher.late.look()
        else:
            self._launcher.wait(self._place, self._started, self._wait_briefly)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the list of the one tensor, as ``Work.get_future`` of torch has it.

        An error in it is the backend's own. Wait for it with
        :meth:`~dataparallel.comm.processes.ProcessLink.wait_for`, which is limited in time and says
        who is missing.
        """
        inner: torch.futures.Future[list[torch.Tensor]] = self._work.get_future()
        if not self._carried.is_substitute:
            return inner
        outer: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def finish(inner: torch.futures.Future[list[torch.Tensor]]) -> None:
            try:
                inner.wait()
                self._deliver()
                # Whoever takes the tensor out of the future may do so on any stream.
                _devices.current_stream(self._carried.tensor.device).synchronize()
            except Exception as error:
                set_exception: Any = outer.set_exception
                set_exception(error)
            else:
                outer.set_result([self._carried.tensor])

        inner.add_done_callback(finish)
        return outer

    def _wait_briefly(self, seconds: float) -> bool:
        return wait_briefly(self._work, seconds)

    def _deliver(self) -> None:
        # The future is completed in a thread of the backend.
        with self._lock:
            self._carried.deliver()


class Launcher:
    """Launches the collectives of one link in order, waits for them, and explains failures.

    Args:
        name: Name of the link, as in the reports.
        ranks: The number that each process of the link has in the default group.
        rank: This process, as an index of ``ranks``.
        timeout: Seconds that a wait may take.
        reports: How the processes tell each other where they are.
        known: Per rank, the number of what it had told of failures when the link was made.
        checks: Counts collectives, and compares them with those of the others.

    Attributes:
        known: See :class:`~dataparallel.comm.listener.Listener`.
        launched: How many collectives were launched so far, by operation.
        broken: Why nothing can be launched any more; ``None`` if it can.
        late: Knows of collectives that have failed when nobody waited any more.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        reports: Reports,
        known: Mapping[int, int],
        checks: CollectiveChecks,
    ) -> None:
        self.launched: Counter[str] = Counter()
        self.broken: str | None = None
        self._name = name
        self._ranks = ranks
        self._rank = rank
        self._timeout = timeout
        self._reports = reports
        self._checks = checks
        self.known = known
        self.late = late_failures(reports.channel)
        self._cause: Failure | None = None
        self._launching = threading.Lock()
        self._failing = threading.Lock()

    def launch(
        self,
        operation: str,
        what: str,
        carried: Carried,
        start: Callable[[], dist.Work | None],
        option: str = "",
        parcels: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Pending:
        """Launch a collective. All of them come here.

        Args:
            operation: Its name, for messages and counts.
            what: What it is about, for messages.
            carried: What is sent.
            start: Gives it to the backend.
            option: With what it reduces, or from which process it comes. Default: neither.
            parcels: How much goes to each process, and comes from each. Default: nobody chooses.

        Returns:
            What to wait for.

        Raises:
            CollectiveMismatch: The processes come with different collectives.
            CollectiveError: The link is broken, or the backend refused.
        """
        with self._launching:
            self.late.look()
            self.check()
            shape = carried.tensor.shape if parcels is None else ()
            dtype = carried.tensor.dtype
            call = Call(operation, option, dtype, shape, what, *(parcels or ((), ())))
            coming = Place(self._checks.sequence + 1, operation, what)
            check = functools.partial(self.check, coming, time.monotonic())
            with self._breaking():
                self._checks.before(call, check)
            self.launched[operation] += 1
            place = Place(self._checks.sequence, operation, what)
            started = time.monotonic()
            try:
                work = start()
            except RuntimeError as error:
                raise self._failed(place, started, str(error)) from error
        assert work is not None, "only processes outside of the group get nothing"
        if _devices.is_accelerator(carried.sent.device):
            self.late.remember(self, place, started, work)
        return Pending(self, place, started, work, carried)

    def wait(self, place: Place, started: float, wait: Callable[[float], bool]) -> None:
        """Wait for a collective. All waits come here.

        Args:
            place: What is waited for.
            started: When it was launched.
            wait: Waits for at most so many seconds, and tells whether there is nothing left to wait
                for. A RuntimeError in it is a failure of the backend.

        Raises:
            CollectiveTimeout: The other processes did not come in time.
            CollectiveError: The collective failed, or the link was broken before it ended.
        """
        deadline = time.monotonic() + self._timeout + _MARGIN
        watch: Watch | None = None
        try:
            while True:
                remaining = deadline - time.monotonic()
                try:
                    if wait(max(_SHORTEST, min(SLICE, remaining))):
                        return
                except RuntimeError as error:
                    # That others came with something else may be the reason.
                    self._hear(LATE_ANSWER)
                    raise self._failed(place, started, str(error)) from error
                self._hear()
                if watch is None and len(self._ranks) > 1:
                    watch = self._watch(place)
                interpreter_end.come_by()
                self.check(place, started, None if watch is None else watch.look())
                if remaining <= 0:
                    raise self._failed(place, started, None)
        finally:
            if watch is not None:
                watch.close()

    def _watch(self, place: Place) -> Watch:
        text = f"{place} for {purpose_of(self._name)!r}"
        return Watch(self._reports.channel, self._ranks, self.known, text)

    def _hear(self, seconds: float = 0.0) -> None:
        """Raise a CollectiveMismatch that was found after a launch."""
        with self._breaking():
            self._checks.hear(seconds)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except CollectiveMismatch as error:
            if not error.usable:
                self.broken = self.broken or str(error)
            raise

    def wait_for_future(self, future: torch.futures.Future[Any], what: str) -> None:
        """Like :meth:`wait`, for something that is no collective of the link."""
        ready = threading.Event()
        future.add_done_callback(lambda _: ready.set())
        self.wait(Place(self._checks.sequence, "future", what), time.monotonic(), ready.wait)

    def hear(self, failure: Failure) -> None:
        """Take note that a process of the link has failed; whoever waits is released."""
        self._cause = self._cause or failure

    @property
    def cause(self) -> str | None:
        """What is known of a process of the link that has failed; None if none has."""
        return None if self._cause is None else str(self._cause)

    @property
    def failure(self) -> Failure | None:
        """The failure of a process of the link, if one is known."""
        return self._cause

    def place(self) -> str | None:
        """None: the wait itself says where it is."""
        return None

    def check(
        self, place: Place | None = None, started: float = 0.0, gone: Failure | None = None
    ) -> None:
        """Raise a CollectiveError if the link is broken, or a process of it has failed.

        Args:
            place: What is waited for. Default: nothing yet.
            started: When it was launched.
            gone: That the store of the processes is gone. Default: it is not.
        """
        cause = self._cause or gone
        if cause is not None and not self.broken:
            place = place or Place(self._checks.sequence + 1, "the next collective", "this link")
            seconds = time.monotonic() - started if started else 0.0
            raise self._given_up(place, seconds, cause)
        if self.broken:
            raise self._broken_error()

    def is_given_up(self) -> bool:
        """Whether a process of the link has failed, or a collective."""
        return bool(self._cause or self.broken)

    def late_failure(
        self, place: Place, started: float, reason: str | None
    ) -> CollectiveError | CollectiveTimeout | None:
        """The error of a collective for which nobody waits; the other processes get to know."""
        if self.broken:
            return None
        if reason is None and self._cause is not None:
            return self._given_up(place, time.monotonic() - started, self._cause)
        error = self._failed(place, started, reason)
        if len(self._ranks) > 1:
            self._reports.channel.tell(error, str(place))
        return error

    def _given_up(self, place: Place, seconds: float, cause: Failure) -> CollectiveError:
        error = given_up(place, self._name, self._ranks, self._rank, cause, seconds)
        self.broken, self._cause = str(error), cause
        if cause.kind not in SAID:
            # Others may not see it, as those on another machine, or as long as this one is cut off.
            self._reports.channel.tell(cause)
        return error

    def _failed(
        self, place: Place, started: float, reason: str | None
    ) -> CollectiveError | CollectiveTimeout:
        """The error for a collective that failed; from now on the link is broken."""
        seconds = time.monotonic() - started
        if reason is not None and is_time_limit(reason):
            reason = None
        timed_out = reason is None or seconds >= self._timeout
        with self._failing:
            if self.broken:
                return self._broken_error()
            reports = self._reports.exchange(place, timed_out)
            error = failure(
                place,
                self._name,
                self._ranks,
                self._rank,
                reports,
                self._reports.channel,
                seconds,
                timed_out,
                reason,
            )
            self.broken, self._cause = str(error), error.failure
        return error

    def _broken_error(self) -> CollectiveError:
        error = CollectiveError(
            f"the link for {purpose_of(self._name)!r} is broken, because its processes may be at "
            "different collectives since one failed; close it and make a new one in every process, "
            f"or start the processes again. What failed: {self.broken}"
        )
        error.failure = self._cause
        return error
