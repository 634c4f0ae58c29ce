"""A collective that the backend of a process group is doing.

Note [Whose memory]
~~~~~~~~~~~~~~~~~~~
Memory of an accelerator belongs to the stream on which it was allocated. So what is left to do when
the backend has finished is queued on the stream on which the collective was launched, whoever waits
on whatever stream; the waiter's stream then waits for that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.process_checks import checks_of
from dataparallel.collectives.process_failures import GroupFailures
from dataparallel.comm.checks import LATE_ANSWER
from dataparallel.comm.failure_channel import channel_of
from dataparallel.comm.launcher import SLICE, is_time_limit, wait_briefly
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveTimeout,
    Place,
    Reports,
    failure,
    given_up,
)
from dataparallel.comm.process_group import shared_store
from dataparallel.comm.watch import Watch
from dataparallel.devices import (
    NullStream,
    current_stream,
    is_accelerator,
    use_stream,
    wait_stream,
)

#: Gives a collective to the backend, when called with ``async_op=True``.
Start: TypeAlias = Callable[..., Any]


class ProcessWork:
    """A collective of a process group, from its launch to its result; a ``pending.Work``.

    The backend ends what takes longer than the time limit of the group.

    Args:
        group: Who takes part.
        operation: Its name, for messages.
        given: What this process gives, for messages.
        sent: What the backend computes with.
        device: Where the result will be.
        start: Gives the collective to the backend.
        finish: What remains to be done when the backend has finished.

    Raises:
        CollectiveTimeout, CollectiveError: The backend refused.
    """

    __slots__ = (
        "_blocks",
        "_checks",
        "_device",
        "_finish",
        "_group",
        "_operation",
        "_sequence",
        "_shape",
        "_start",
        "_started",
        "_stream",
        "_work",
    )

    def __init__(
        self,
        group: dist.ProcessGroup,
        operation: str,
        given: Tensor,
        sent: Tensor,
        device: torch.device,
        start: Start,
        finish: Callable[[], object] | None,
    ) -> None:
        self._group = group
        self._operation = operation
        self._shape = (given.dtype, given.shape)
        self._device = device
        self._stream = current_stream(device)
        self._blocks = not is_accelerator(sent.device)
        self._finish = finish
        # Holds what the backend reads and writes.
        self._start: Start | None = start
        self._checks = checks_of(group)
        self._sequence = self._checks.number
        if self._checks.failures is not None:
            self._checks.failures.come()
        self._started = time.monotonic()
        try:
            work = start(async_op=True)
        except RuntimeError as error:
            raise self._error(error) from error
        assert work is not None, "this process is in the group"
        self._work = work

    def done(self) -> bool:
        """Whether a wait would return, or raise, without waiting for another process."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for the result: the host on the CPU, the current stream on an accelerator.

        Raises:
            CollectiveTimeout: Another process did not come in time; the message says which.
            CollectiveError: The collective failed.
        """
        if isinstance(self._stream, NullStream):
            self._complete()
            return
        # See Note [Whose memory].
        with use_stream(self._stream):
            self._complete()
        wait_stream(current_stream(self._device), self._stream)

    def _complete(self) -> None:
        self._wait_for_backend()
        finish, self._finish = self._finish, self._was_interrupted
        if finish is not None:
            finish()
        self._finish = self._start = None

    def _wait_for_backend(self) -> None:
        failures, watch = self._checks.failures, None
        try:
            while not self._wait_a_little():
                self._checks.hear()
                if failures is not None:
                    watch = watch or failures.watch(str(self._place()))
                    self._see_failures(failures, watch)
        except CollectiveError:
            raise
        except RuntimeError as error:
            # Why another process has not come may be known already.
            self._checks.hear(LATE_ANSWER)
            raise self._error(error) from error
        finally:
            if watch is not None:
                watch.close()

    def _see_failures(self, failures: GroupFailures, watch: Watch) -> None:
        cause, group = failures.find(watch), self._group
        if cause is not None:
            ranks = dist.get_process_group_ranks(group)
            seconds = time.monotonic() - self._started
            error = given_up(self._place(), _name_of(group), ranks, group.rank(), cause, seconds)
            self._checks.give_up(error)
            failures.give_up(cause)
            raise error

    def _wait_a_little(self) -> bool:
        if not self._blocks:
            self._work.wait()
            return True
        return wait_briefly(self._work, SLICE)

    def _was_interrupted(self) -> None:
        raise RuntimeError(
            f"{self._place()} was interrupted while its result was written; it is lost"
        )

    def _place(self) -> Place:
        dtype, shape = self._shape
        what = f"a tensor {tuple(shape)} of {str(dtype).removeprefix('torch.')}"
        return Place(self._sequence, self._operation, what)

    def _error(self, error: RuntimeError) -> CollectiveError | CollectiveTimeout:
        seconds = time.monotonic() - self._started
        timed_out = is_time_limit(str(error))
        group, place = self._group, self._place()
        link = _name_of(group)
        ranks = list(range(group.size()))
        reports: object = "the process group was destroyed"
        channel = None
        if _is_alive(group):
            ranks = dist.get_process_group_ranks(group)
            channel = channel_of(group, shared_store(group))
            if self._checks.failures is not None:
                self._checks.failures.meet()
            mine = Reports(shared_store(group), link, group.rank(), group.size(), channel)
            reports = mine.exchange(place, timed_out)
        assert isinstance(reports, (dict, str))
        reason = None if timed_out else str(error)
        return failure(
            place, link, ranks, group.rank(), reports, channel, seconds, timed_out, reason
        )


def _name_of(group: dist.ProcessGroup) -> str:
    return f"process group {group.group_name}/collectives"


def _is_alive(group: dist.ProcessGroup) -> bool:
    return torch_internals.is_registered(group)
