"""Writes samples into a recording, and copes with what can happen meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.reading import Sample, json_text
from dataparallel.tools.monitor.recording import (
    FORMAT,
    VERSION,
    is_begun_header,
    older_parts,
    read_header,
)
from dataparallel.tools.monitor.units import bytes_text, seconds_text

#: What there may be room for later.
_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


class Recorder:
    """Writes samples into a file; a disk that is full is waited for, not given up.

    Example::

        with Recorder(Path("run.jsonl")) as recorder:
            for sample in sampler.samples():
                recorder.record(sample)

    Args:
        path: Where to record; a recording that is there is continued.
        max_bytes: Greatest size of a file, then a new one is begun. Default: 100 MB.
        keep: How many older files are kept, at least 1. Default: 5.
        about: What the header tells beside the format. Default: nothing.
        tell: Called with what a user should know now. Default: nobody is told.
        write: Writes to a file descriptor. Default: ``os.write``.

    Attributes:
        num_samples: How many samples were recorded.
        num_lost: How many were not since there was no room.
        is_regular: Whether it writes to a file, not to a pipe or a terminal.

    Raises:
        ValueError: What is there is no recording, or somebody else is recording to it.
        RuntimeError: The first line could not be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 100_000_000,
        keep: int = 5,
        about: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._tell = tell
        self.num_samples = 0
        self.num_lost = 0
        self._is_failing = False
        self._cost = 0.0
        self.is_regular = not path.exists() or path.is_file()
        try:
            self._lines = _Lines(path, _header(about or {}), max_bytes, keep, write)
        except OSError as error:
            why = f"cannot record to {path}: {error.strerror or error}"
            if error.errno in _NO_ROOM:
                raise RuntimeError(f"{why}; make room, or choose a file on another disk") from error
            raise ValueError(f"{why}; choose another file") from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def written(self) -> int:
        """How many bytes were written."""
        return self._lines.written

    def record(self, sample: Sample) -> None:
        """Write a sample; where there is no room it is left out, which is told once.

        Raises:
            RuntimeError: It is a pipe, and nothing can be written to it.
            BrokenPipeError: It is a pipe that nobody reads any more.
        """
        try:
            self._lines.write(f"{json_text(sample.to_json())}\n".encode())
        except OSError as error:
            self._fail(error)
            return
        self.num_samples += 1
        self._cost += sample.cost
        if self._is_failing:
            self._is_failing = False
            self._tell(f"there is room again; {samples_text(self.num_lost)} are missing so far")

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        self._lines.close()

    def summary(self) -> str:
        """What was recorded, in one line."""
        mean = self._cost / self.num_samples if self.num_samples else None
        files = 1 + self._lines.num_rotations
        parts = [
            f"recorded {samples_text(self.num_samples)} to {self._path}",
            bytes_text(self.written) + (f" in {files} files" if files > 1 else ""),
            f"a sample took {seconds_text(mean)}",
        ]
        if self.num_lost:
            parts.append(f"{samples_text(self.num_lost)} could not be written")
        return ", ".join(parts)

    def _fail(self, error: OSError) -> None:
        if not self.is_regular:
            if isinstance(error, BrokenPipeError):
                raise error
            raise RuntimeError(f"cannot write to {self._path}: {error.strerror}") from error
        self.num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            remedy = "make room on the disk" if error.errno in _NO_ROOM else "look at the disk"
            self._tell(
                f"cannot write to {self._path}: {error.strerror}; {remedy}. What was recorded is "
                "kept, and samples are left out until it works again"
            )


class _Lines(logging.handlers.RotatingFileHandler):
    """Lines in files of capped size, which the standard library renames when they are full.

    A line that could be written in part only is ended by the next one, and readers pass over it.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        max_bytes: int,
        keep: int,
        write: Callable[[int, bytes], int],
    ) -> None:
        self.written = 0
        self.num_rotations = 0
        self._header = header
        self._write = write
        # A pipe has no beginning to look at, and nobody else's notes to spare.
        self._is_regular = not path.exists() or path.is_file()
        self._is_torn = False
        self._lock: Any = None
        super().__init__(path, maxBytes=max_bytes, backupCount=keep, delay=True)
        self.stream = self._open()
        try:
            if self._is_regular:
                self._lock = _locked(path)
                if _is_continued(path):
                    self._continue(path)
            if not self._is_regular or not self._size():
                self._append(b"")
        except BaseException:
            self.close()
            raise

    def write(self, line: bytes) -> None:
        """Write a line, into a new file if this one is full."""
        record = logging.makeLogRecord({"msg": line.decode()})
        has_begun = self._is_regular and self.stream is not None and self._size() > 0
        if has_begun and self.shouldRollover(record):
            self.doRollover()
            self.num_rotations += 1
        if self.stream is None:
            # The standard library has closed the file that was full.
            self.stream = self._open()
        self._append(line)

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.release()

    def _continue(self, path: Path) -> None:
        """Take over the header, since parts of one recording have one."""
        with path.open("rb") as file:
            self._header = file.readline()
            file.seek(-1, os.SEEK_END)
            self._is_torn = file.read() != b"\n"

    def _open(self) -> Any:
        return open(self.baseFilename, "ab", buffering=0)

    def _descriptor(self) -> int:
        assert self.stream is not None
        return self.stream.fileno()

    def _size(self) -> int:
        return os.fstat(self._descriptor()).st_size

    def _append(self, line: bytes) -> None:
        is_new = self._size() == 0 if self._is_regular else not self.written
        rest = (b"\n" if self._is_torn else b"") + (self._header if is_new else b"") + line
        try:
            while rest:
                count = self._write(self._descriptor(), rest)
                self.written += count
                self._is_torn = rest[count - 1 : count] != b"\n"
                rest = rest[count:]
        except BaseException:
            if is_new and self._is_regular:
                # A file without a whole first line is no recording.
                os.ftruncate(self._descriptor(), 0)
                self._is_torn = False
            raise


def _is_continued(path: Path) -> bool:
    """Whether there is a recording to continue; what is none is refused, not one byte changed."""
    for part in older_parts(path).values():
        try:
            read_header(part)
        except ValueError as error:
            raise ValueError(f"an older part is in the way: {error}; move it away") from error
    if not path.exists():
        return False
    if is_begun_header(path):
        os.truncate(path, 0)
        return False
    try:
        read_header(path)
    except ValueError as error:
        raise ValueError(
            f"{error}; it is left as it is: choose another file, or remove it"
        ) from error
    return True


def _locked(path: Path) -> Any:
    """Keep others from recording to the same file as long as this process lives."""
    with needs_extra("monitor"):
        import filelock

    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"somebody else is recording to {path} now; end that, or choose another file"
        ) from None
    return lock


def _header(about: Mapping[str, Any]) -> bytes:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "recording": uuid.uuid4().hex,
        "started": time.time(),
        "host": platform.node(),
        **about,
    }
    return (json.dumps(header) + "\n").encode()


def samples_text(number: int) -> str:
    """A number of samples, in words."""
    return "1 sample" if number == 1 else f"{number} samples"
