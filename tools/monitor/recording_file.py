"""The file into which a recording is written, so that it can be read whatever happens."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from dataparallel.tools.monitor.recording import older_parts, read_header

_fcntl: ModuleType | None
try:
    import fcntl as _fcntl
except ModuleNotFoundError:  # Windows
    _fcntl = None

#: What is written reaches the disk after so many seconds at most.
SYNC_SECONDS = 5.0
_BLOCK = 1 << 16


class RecordingFile:
    """Lines in a file of capped size that is never left with half a line.

    Every write is one whole line or several, behind what is there already. A write that fails, on a
    full disk for one, is taken back. When the file is full it becomes ``FILE.1``, ``FILE.1``
    becomes ``FILE.2``, and so on; the oldest is removed.

    What is no regular file (a pipe, a terminal) is written to without all that.

    Example::

        with RecordingFile(Path("run.jsonl"), header, max_bytes=10**8, keep=5) as file:
            file.write(line)

    Args:
        path: Where to write. A recording that is there is continued.
        header: The first line of a new file.
        max_bytes: Greatest size of a file. One line alone may be longer.
        keep: How many older files are kept; of each size ``max_bytes``.
        clock: Tells the time in seconds. Default: ``time.monotonic``.
        write: Writes to a file descriptor. Default: ``os.write``.

    Attributes:
        header: The first line of the file.
        repaired: How many bytes of a line that was cut off have been removed.
        is_regular: Whether it is a file that can be continued.

    Raises:
        ValueError: What is there is no recording, or somebody else is writing to it.
        OSError: It cannot be opened or written to.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        *,
        max_bytes: int,
        keep: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        assert header.endswith(b"\n")
        self._path = path
        self.header = header
        self._max_bytes = max_bytes
        self._keep = keep
        self._clock = clock
        self._write = write
        self._size = 0
        self._written = 0
        self._num_rotations = 0
        self.repaired = 0
        self._fd = -1
        self.is_regular = True
        try:
            # Not one byte of it is changed before it is known to be a recording.
            self._open()
            if self.is_regular and self._size:
                self._repair()
            if not self._size:
                self._append(b"")
        except BaseException:
            self._release()
            raise
        self._synced = self._clock()

    def __enter__(self) -> RecordingFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def written(self) -> int:
        """How many bytes were written, with headers."""
        return self._written

    @property
    def num_rotations(self) -> int:
        """How often a new file was begun."""
        return self._num_rotations

    def write(self, lines: bytes) -> None:
        """Write whole lines, behind all others.

        Raises:
            OSError: They could not be written, and are not there; the next ones may be.
            ValueError: Somebody else has begun to write to this path.
        """
        assert lines.endswith(b"\n")
        if self._fd < 0:
            # A new file could not be opened the last time.
            self._open()
        elif self._clock() - self._synced >= SYNC_SECONDS:
            self._sync()
        full = self._size + len(lines) > self._max_bytes
        if self.is_regular and full and self._size > len(self.header):
            self._rotate()
        self._append(lines)

    def last_line(self) -> bytes | None:
        """The last line that is there; None if that is the header."""
        if not self.is_regular or self._size <= len(self.header):
            return None
        begin = self._end_of_lines(self._size - 1)
        return self._read(begin, self._size - begin) if begin else None

    def close(self) -> None:
        """Bring all to the disk and let others write. A second call does nothing.

        Raises:
            OSError: The disk does not take it.
        """
        try:
            if self._fd >= 0:
                self._sync()
        finally:
            self._release()

    # --- opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        flags |= getattr(os, "O_BINARY", 0)
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(self._path.stat().st_mode):
                # A pipe cannot be opened for both.
                flags = os.O_WRONLY
        self._fd = os.open(self._path, flags, 0o644)
        self.is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self.is_regular:
            self._lock()
            self._size = os.fstat(self._fd).st_size
            self._check()

    def _lock(self) -> None:
        if _fcntl is None:
            return
        try:
            _fcntl.flock(self._fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"somebody else is recording to {self._path} now; end that, or choose another file"
            ) from None
        except OSError:
            # Some network file systems know no locks.
            return
        if not self._is_mine():
            raise ValueError(
                f"{self._path} has just been replaced by another recording; choose another file"
            )

    def _is_mine(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    def _check(self) -> None:
        """Whether nothing is in the way; a part of a header is nothing."""
        for part in older_parts(self._path).values():
            try:
                read_header(part)
            except ValueError as error:
                raise ValueError(f"an older part is in the way: {error}; move it away") from error
        begin = self._read(0, len(self.header))
        if self._size <= len(begin) and self._is_crash(begin):
            self.repaired += self._size
            os.ftruncate(self._fd, 0)
            self._size = 0
        if not self._size:
            return
        try:
            header = read_header(self._path)
        except ValueError as error:
            raise ValueError(
                f"{error}; it is left as it is: choose another file, or remove it"
            ) from error
        is_csv = header.get("columns") is not None
        if is_csv == self.header.startswith(b"{"):
            theirs, ours = ("CSV", "JSON lines") if is_csv else ("JSON lines", "CSV")
            raise ValueError(
                f"{self._path} is a recording in {theirs}, which cannot be continued in {ours}; "
                f"choose the same --format, or another file"
            )
        with self._path.open("rb") as file:
            first = file.readline()
        if is_csv and first.rstrip(b"\r\n") != self.header.rstrip(b"\n"):
            raise ValueError(
                f"{self._path} has other columns than this dataparallel writes; choose another file"
            )
        self.header = first

    def _is_crash(self, content: bytes) -> bool:
        """Whether this is what a crash leaves of a first line."""
        if b"\n" in content or not content.strip(b"\0"):
            return b"\n" not in content
        # The beginning that all headers of a kind have in common, and nobody writes by chance.
        common = self.header[:40]
        return len(content) >= 16 and content[:40] == common[: len(content)]

    def _repair(self) -> None:
        whole = self._end_of_lines(self._size)
        if whole < self._size:
            self.repaired += self._size - whole
            os.ftruncate(self._fd, whole)
            self._size = whole

    def _end_of_lines(self, size: int) -> int:
        """Where the last line that is whole, within so many bytes, ends."""
        end = size
        while end:
            begin = max(0, end - _BLOCK)
            found = self._read(begin, end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _read(self, begin: int, count: int) -> bytes:
        os.lseek(self._fd, begin, os.SEEK_SET)
        found = bytearray()
        while len(found) < count:
            part = os.read(self._fd, count - len(found))
            if not part:
                break
            found += part
        return bytes(found)

    # --- writing ---------------------------------------------------------------------------------

    def _append(self, lines: bytes) -> None:
        rest = lines if self._size else self.header + lines
        before = self._size
        try:
            while rest:
                count = self._write(self._fd, rest)
                self._size += count
                rest = rest[count:]
        except BaseException:
            if self.is_regular and self._size > before:
                os.ftruncate(self._fd, before)
                self._size = before
            raise
        self._written += self._size - before

    def _rotate(self) -> None:
        """Make room for a new file, and open it."""
        self._sync()
        older = older_parts(self._path)
        for number, part in older.items():
            if number >= max(1, self._keep):
                part.unlink(missing_ok=True)
            else:
                part.replace(self._part(number + 1))
        if self._keep:
            self._path.replace(self._part(1))
        else:
            self._path.unlink(missing_ok=True)
        self._release()
        self._num_rotations += 1
        header = self.header
        self._open()
        self.header = header

    def _part(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _sync(self) -> None:
        if self.is_regular:
            os.fsync(self._fd)
            if not self._is_mine():
                # Somebody has moved or removed the file: what comes now belongs to its path.
                self._release()
                self._open()
        self._synced = self._clock()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        self._size = 0
        if fd >= 0:
            # The lock goes with it.
            os.close(fd)
