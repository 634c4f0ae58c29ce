"""One writer per directory of checkpoints."""

from __future__ import annotations

import json
import os
import socket
import time

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.file_lock import FileLock, NoLocks
from dataparallel.extras.checkpoint.files import explained, make_directory

_NAME = "writer.lock"
_POLL = 0.05


class DirectoryLock:
    """Keeps a second writer out of a directory, in this process, another or another machine's.

    It ends with the process that holds it, however that ends. Readers need no lock.

    Example::

        with DirectoryLock("checkpoints"):
            writer = GenerationWriter("checkpoints", 12)

    Args:
        directory: Of the checkpoints; made if it is not there.
        timeout: Seconds to wait for another writer to end, at least 0. Default: 0.

    Raises:
        CheckpointError: Another writer holds it, which the message names; or the file system has
            no locks; or the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout: float = 0.0) -> None:
        self._directory = os.path.abspath(os.fspath(directory))
        self._path = os.path.join(self._directory, _NAME)
        deadline = time.monotonic() + timeout
        with explained("locking the directory of checkpoints", self._directory):
            make_directory(self._directory)
            while (refused := self._attempt()) is not None:
                if time.monotonic() >= deadline:
                    raise CheckpointError(refused)
                time.sleep(_POLL)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def holds(self) -> bool:
        """Whether it keeps others out: the file that is locked is still there."""
        return self._lock.is_of(self._path)

    def release(self) -> None:
        """Let others write; again does nothing. The file stays: removing it would be a race."""
        self._lock.release()

    def _attempt(self) -> str | None:
        """Take the lock, or say who has it."""
        # Opened each time: a file that was removed meanwhile keeps nobody out.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(self._path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
        self._lock = FileLock(fd)
        refused = None
        try:
            if not self._take():
                refused = self._held(fd)
            elif not self.holds:
                refused = f"{self._path} was removed while it was locked; do not remove it"
            else:
                self._sign(fd)
        except BaseException:
            self._lock.release()
            raise
        if refused is not None:
            self._lock.release()
        return refused

    def _take(self) -> bool:
        try:
            return self._lock.take()
        except NoLocks as error:
            raise CheckpointError(
                f"{self._path} cannot be locked ({error.strerror}), so two jobs that save here "
                "could not be kept apart; save to a file system with locks (a local disk; NFS with "
                "its lock service, Lustre mounted with -o flock)"
            ) from None

    def _sign(self, fd: int) -> None:
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder, 0)

    def _held(self, fd: int) -> str:
        try:
            fields = json.loads(os.pread(fd, 1000, 0))
            pid, host = int(fields["pid"]), str(fields["host"])[:100]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            # Between taking the lock and signing it, or written by somebody else.
            return f"{self._directory} is in use by another writer, which has not given its name"
        if (pid, host) == (os.getpid(), socket.gethostname()):
            who = f"this process ({pid}): save to another directory, or close the other saver first"
        else:
            who = (
                f"process {pid} on {host}: save to another directory, or end that process first "
                "(what it holds ends with it)"
            )
        return f"{self._directory} is in use by another writer, {who}"
