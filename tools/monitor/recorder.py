"""The writer of samples into a recording; it waits for a full disk, and does not give up."""

from __future__ import annotations

import errno
import json
import logging.handlers
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataparallel.errors import needs_extra
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.tools.monitor.recording import FORMAT, VERSION, older_parts, read_header
from dataparallel.tools.monitor.units import seconds_text


class SampleRecorder(logging.handlers.RotatingFileHandler):
    """A writer of samples into files of capped size, which the standard library renames when full.

    A recording that is there is continued. ``about`` goes into the header of a new one, and
    ``tell`` is called with what a user should know now.

    Attributes:
        num_samples: How many samples were recorded.
        num_lost: How many were not since they could not be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 100_000_000,
        keep: int = 5,
        about: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        self._tell = tell
        self._is_failing = False
        self._cost = 0.0
        self.num_samples = 0
        self.num_lost = 0
        self._file_lock = _locked(path)
        try:
            self._header = (json.dumps(_header_of(path, about or {})) + "\n").encode()
            super().__init__(path, maxBytes=max_bytes, backupCount=keep)
        except OSError as error:
            self._file_lock.release()
            why = error.strerror or error
            raise ValueError(f"cannot record to {path}: {why}; choose another file") from error
        except BaseException:
            self._file_lock.release()
            raise

    def __enter__(self) -> SampleRecorder:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def record(self, sample: Sample) -> None:
        """Write a sample; while that fails it is left out, which a message says once."""
        text = json_text(sample.to_json())
        try:
            if self.stream is not None and self._is_elsewhere(self.stream.fileno()):
                self.stream.close()
                self.stream = None
            if self.shouldRollover(logging.makeLogRecord({"msg": text})):
                self.doRollover()
            stream: Any = self.stream
            rest = f"{text}\n".encode()
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            self._lose(error)
            return
        self.num_samples += 1
        self._cost += sample.cost
        if self._is_failing:
            self._is_failing = False
            self._tell(f"it works again; {samples_text(self.num_lost)} are missing so far")

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        super().close()
        self._file_lock.release()

    def summary(self) -> str:
        """Summarize the recording in one line."""
        told = f"recorded {samples_text(self.num_samples)} to {self._path}"
        if self.num_samples:
            told += f", a sample took {seconds_text(self._cost / self.num_samples)}"
        if self.num_lost:
            told += f", {samples_text(self.num_lost)} could not be written"
        return told

    def _open(self) -> Any:
        """Open the file to append; a new one gets the header, of an old one the last line ends."""
        stream = open(self.baseFilename, "ab", buffering=0)  # noqa: SIM115
        try:
            first = b"\n" if stream.tell() else self._header
            if stream.write(first) < len(first):
                # A file without a whole first line is no recording.
                stream.truncate(0)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            stream.close()
            raise
        return stream

    def _is_elsewhere(self, file: int) -> bool:
        """True if somebody has removed the file, or renamed it: nobody would find the samples."""
        try:
            there = os.stat(self.baseFilename)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(file))

    def _lose(self, error: OSError) -> None:
        self.num_lost += 1
        if self.stream is not None:
            # The next line opens it again, behind what may be half a line.
            self.stream.close()
            self.stream = None
        if not self._is_failing:
            self._is_failing = True
            self._tell(
                f"cannot write to {self._path}: {error.strerror}; make room on the disk. What was "
                "recorded is kept, and samples are left out until it works again"
            )


def _locked(path: Path) -> Any:
    """Keep others from recording to the same file as long as this process lives."""
    with needs_extra("monitor"):
        import filelock

    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"cannot record to {path}: it is no file, or its folder does not exist; choose another "
            "one, or write samples into a pipe with `dataparallel monitor top --json`"
        )
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(
            f"somebody else is recording to {path} now; end that, or choose another file"
        ) from None
    return lock


def _header_of(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of the recording that is there, or of a new one."""
    older = older_parts(path)
    # An empty file is one for whose first line a full disk had no room.
    is_empty = path.exists() and not path.stat().st_size
    is_continued = path.exists() and (not is_empty or bool(older))
    for part in (*older, *([path] if is_continued and not is_empty else [])):
        try:
            header = read_header(part)
        except ValueError as error:
            raise ValueError(f"{error}; choose another file, or move it away") from error
    if is_continued:
        return header
    return {
        "format": FORMAT,
        "version": VERSION,
        "recording": uuid.uuid4().hex,
        "started": time.time(),
        "host": platform.node(),
        **about,
    }


def samples_text(number: int) -> str:
    """Return a number of samples, in words."""
    return "1 sample" if number == 1 else f"{number} samples"
