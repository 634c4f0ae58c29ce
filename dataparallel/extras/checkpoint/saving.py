"""The handle of a save that may still be under way."""

from __future__ import annotations

import logging
import os
import threading
from typing import NamedTuple

from dataparallel.extras.checkpoint.errors import CheckpointError

_log = logging.getLogger("dataparallel")


class Progress(NamedTuple):
    """How far a save has come in this process.

    Attributes:
        written: Bytes written so far.
        total: Bytes that this process writes; 0 until that is known.
    """

    written: int
    total: int


class Saving:
    """A save that may still be under way; see :func:`dataparallel.checkpoint.save`.

    Example::

        saving = save("run", model, optimizer, step=step, asynchronous=True)
        ...                                   # training goes on
        print(saving.progress())              # Progress(written=..., total=...)
        print("saved as generation", saving.wait())
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process = os.getpid()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._written = 0
        self._total = 0
        self._number: int | None = None
        self._error: BaseException | None = None
        self._raised = False

    def __repr__(self) -> str:
        state = f"{self._written} of {self._total} bytes"
        if self._ended.is_set():
            state = "failed" if self._error else f"generation {self._number}"
        return f"Saving({self._directory}, {state})"

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set()

    def progress(self) -> Progress:
        """How many bytes this process has written, and how many there are."""
        with self._lock:
            return Progress(self._written, self._total)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the generation is on the disk in all processes.

        Args:
            timeout: Seconds. Default: without a limit; the save itself waits for the other
                processes no longer than its own ``timeout``.

        Returns:
            The number of the generation.

        Raises:
            CheckpointError: It was not saved; the last good generation is as it was. Or this is a
                fork of the process that saves.
            TimeoutError: The save takes longer than ``timeout``. It goes on.
        """
        if not self._ended.is_set() and self._process != os.getpid():
            # The thread that saves is not in the fork.
            raise CheckpointError(
                f"process {self._process} saves to {self._directory}, and this one ({os.getpid()}) "
                "was forked from it meanwhile; wait there"
            )
        if not self._ended.wait(timeout):
            written, total = self.progress()
            raise TimeoutError(
                f"the save to {self._directory} has written {written} of {total} bytes after "
                f"{timeout} s; it goes on, wait longer"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        assert self._number is not None
        return self._number

    # --- for the writer --------------------------------------------------------------------------

    def expect(self, total: int) -> None:
        """Say how many bytes there are."""
        with self._lock:
            self._total = total

    def add(self, count: int) -> None:
        """Say that some more bytes are written."""
        with self._lock:
            # The header is written, and not counted.
            self._written = min(self._written + count, self._total)

    def succeed(self, number: int) -> None:
        """Say that the generation is on the disk."""
        with self._lock:
            self._written = self._total
        self._number = number
        self._ended.set()

    def fail(self, error: BaseException, *, asynchronous: bool) -> None:
        """Say that it was not saved; does nothing if the save has ended already."""
        if self._ended.is_set():
            return
        self._error = error
        if asynchronous:
            # Nobody may ever wait for it.
            _log.error("the checkpoint was not saved to %s: %s", self._directory, error)
        self._ended.set()

    def is_told(self) -> None:
        """Say that somebody knows of the error, or will in a moment."""
        self._raised = True

    def untold(self) -> BaseException | None:
        """The error of a save that has ended, if nobody has seen it yet; who asks will tell it."""
        if self._raised:
            return None
        self._raised = self._error is not None
        return self._error

    def wait_for_end(self) -> None:
        """Wait until the save has ended, in whatever way."""
        self._ended.wait()
