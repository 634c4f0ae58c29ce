"""Files that are there whole or not at all, also after a kill or a power failure.

Note [Files that are whole]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A file is written beside under a name of its own, synchronized with the disk, and renamed: whoever
opens it by its name finds all of it. The rename itself lasts once the directory is synchronized
too. A process that is killed on the way leaves a file whose name begins with a dot, which readers
never look at and the next writer removes.

Files are opened relative to the open directory and never through a symbolic link, so nobody can
lead a reader or a writer out of the directory by what is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

from dataparallel.extras.checkpoint.errors import CheckpointError

T = TypeVar("T")

# Flags that not every system has; a FIFO in place of a file must not block whoever opens it.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_SAFE = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NOINHERIT", 0)
    | getattr(os, "O_BINARY", 0)
)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_RELATIVE = os.open in os.supports_dir_fd
# What file systems answer that cannot synchronize a directory.
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES}

_UNFINISHED = ".tmp"


class Folder:
    """An open directory: what is done in it stays in it, whoever renames or replaces it meanwhile.

    Args:
        path: Of the directory.
        follow: Whether the last part of the path may be a symbolic link. Default: yes.

    Raises:
        OSError: There is no such directory, or it may not be opened.
        CheckpointError: The operating system cannot do that.
    """

    def __init__(self, path: str, *, follow: bool = True) -> None:
        if not _RELATIVE:
            raise CheckpointError(
                "checkpoints need an operating system that opens files relative to a directory: "
                "Linux or macOS"
            )
        self.path = path
        self.fd = os.open(path, _DIRECTORY | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the directory back; again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # Nothing was written through it that could be lost.
            with contextlib.suppress(OSError):
                os.close(fd)

    def names(self) -> list[str]:
        """The names of all that is in the directory, sorted."""
        return sorted(os.listdir(self.fd))

    def open(self, name: str) -> tuple[int, int]:
        """Open a file for reading.

        Args:
            name: Of a file in this directory.

        Returns:
            Its descriptor, and its size in bytes.

        Raises:
            OSError: It is not there, may not be read, or is not an ordinary file.
        """
        fd = os.open(name, _READ | _SAFE, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is not an ordinary file", name)
        except BaseException:
            os.close(fd)
            raise
        return fd, status.st_size

    def size(self, name: str) -> int:
        """The size in bytes of a file in this directory. Raises OSError as :meth:`open` does."""
        status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not an ordinary file", name)
        return status.st_size

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is as good."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Let the names in this directory last beyond a power failure."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise

    def put(self, name: str, write: Callable[[int], T]) -> T:
        """Write a file under another name, synchronize it with the disk, and rename it.

        Args:
            name: The name at last; a file that has it is replaced.
            write: Called with the descriptor.

        Returns:
            What ``write`` returned.

        Raises:
            OSError: The file could not be written; nothing is left of it.
        """
        beside = f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        fd = os.open(beside, flags, 0o666, dir_fd=self.fd)
        try:
            try:
                result = write(fd)
                _sync(fd)
            finally:
                os.close(fd)
            os.replace(beside, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            # What the removal says is of less use than what went wrong before.
            with contextlib.suppress(OSError):
                self.remove(beside)
            raise
        return result


def make_directory(path: str) -> None:
    """Make a directory and those above it, so that they last beyond a power failure.

    Args:
        path: Of the directory; one that is there is as good.

    Raises:
        OSError: It cannot be made.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:
            # Another process may have been faster.
            if not os.path.isdir(each):
                raise
        # A directory that one may only write to cannot be opened.
        with contextlib.suppress(PermissionError), Folder(os.path.dirname(each)) as parent:
            parent.sync()


def write_all(fd: int, data: memoryview) -> None:
    """Write bytes, however many calls that takes."""
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def explained(what: str, directory: str) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError that says what to do.

    Args:
        what: What is done, for the message.
        directory: Where.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"{what} failed in {directory}: {reason}{_remedy(error.errno, directory)}"
        raise CheckpointError(text) from error


def _sync(fd: int) -> None:
    try:
        import fcntl

        full = getattr(fcntl, "F_FULLFSYNC", None)
    except ImportError:
        full = None
    if full is not None:
        # On macOS fsync leaves the bytes in the cache of the disk.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, full)
            return
    os.fsync(fd)


def _remedy(code: int | None, directory: str) -> str:
    earlier = "earlier generations are as they were, and the next save starts anew"
    if code in (errno.ENOSPC, errno.EDQUOT):
        try:
            status = os.statvfs(directory)
            free = f" ({status.f_bavail * status.f_frsize:,} bytes are free)"
        except OSError:
            free = ""
        return f"{free}; make room, or keep fewer generations; {earlier}"
    if code == errno.EFBIG:
        limit = "a limit on the size of files is set (ulimit -f), or the file system has one"
        return f"; {limit}; {earlier}"
    if code == errno.EROFS:
        return f"; save to a directory that is not read-only; {earlier}"
    if code in (errno.EACCES, errno.EPERM):
        return f"; let this user read and write the directory; {earlier}"
    return f"; {earlier}"
