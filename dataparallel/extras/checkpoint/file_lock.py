"""Locks on files that end with the process that holds them.

Note [Locks that end with their holder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``flock`` locks an open file: the system takes the lock back when the last descriptor of it is
closed, so a process that is killed leaves none behind. A child that was forked meanwhile has such
a descriptor too, and would keep the lock of a parent that is gone; so it closes what it inherited.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref

try:
    import fcntl
except ImportError:  # pragma: no cover
    # Windows: whoever asks for a lock is told.
    fcntl = None  # type: ignore[assignment]

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class NoLocks(OSError):
    """The file system, or the operating system, has no locks."""


class FileLock:
    """A lock on an open file.

    Args:
        fd: Of the file; closed by :meth:`release`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _open_locks.add(self)

    def take(self) -> bool:
        """Take the lock if nobody has it.

        Returns:
            Whether it is held now.

        Raises:
            NoLocks: There are no locks here.
            OSError: It failed otherwise.
        """
        if fcntl is None:  # pragma: no cover
            raise NoLocks(errno.ENOSYS, "this operating system has no flock")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise NoLocks(error.errno, error.strerror) from None
            raise
        return True

    def is_of(self, path: str) -> bool:
        """Whether the file is still the one that others find under a path, and is open."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path, follow_symlinks=False))
        except OSError:
            return False

    def release(self) -> None:
        """Give the lock back and close the file; again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # The system gives it back whatever it says.
            with contextlib.suppress(OSError):
                os.close(fd)


_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_open_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
