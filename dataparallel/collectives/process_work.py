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

from dataparallel.collectives.process_checks import checks_of
from dataparallel.comm.failures import (
    SLICE,
    CollectiveError,
    CollectiveFailure,
    CollectiveTimeout,
)
from dataparallel.comm.link import wait_briefly
from dataparallel.devices import (
    current_stream,
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
        "_checks",
        "_device",
        "_finish",
        "_generation",
        "_group",
        "_operation",
        "_sent_on",
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
        self._sent_on = sent.device
        self._finish = finish
        # Holds what the backend reads and writes.
        self._start: Start | None = start
        self._checks = checks_of(group)
        self._sequence = self._checks.number
        # Who has failed before may go on nevertheless, and is expected here.
        self._generation = self._checks.failures.generation
        self._started = time.monotonic()
        try:
            work = start(async_op=True)
        except RuntimeError as error:
            raise self._error(str(error)) from error
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
        if self._stream is None:
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
        failures = self._checks.failures
        try:
            while not wait_briefly(self._work, self._sent_on, SLICE):
                if self._generation in failures.ends or failures.while_waiting() is not None:
                    error = self._error(None)
                    self._checks.give_up(error)
                    raise error
        except CollectiveFailure:
            raise
        except RuntimeError as error:
            raise self._error(str(error)) from error

    def _was_interrupted(self) -> None:
        raise RuntimeError(
            f"{self._where()} was interrupted while its result was written; it is lost"
        )

    def _where(self) -> str:
        dtype, shape = self._shape
        what = f"a tensor {tuple(shape)} of {str(dtype).removeprefix('torch.')}"
        name = f"process group {self._group.group_name}"
        return f"{self._operation} of {what} (collective {self._sequence}) for {name!r}"

    def _error(self, reason: str | None) -> CollectiveError | CollectiveTimeout:
        return self._checks.failures.explain(self._where(), self._started, self._generation, reason)
