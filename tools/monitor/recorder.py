"""The writer of samples into a recording; it waits for a full disk, and does not give up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from dataparallel.monitor.findings import counted
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.tools.monitor.recording import FORMAT, VERSION, older_parts, read_header
from dataparallel.tools.monitor.units import seconds_text


class SampleRecorder:
    """A writer of samples into files of capped size; see Note [Format of a recording].

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
        keep: int = 15,
        about: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        # Other links lead to the same file.
        self._file = Path(os.path.realpath(path))
        self._max_bytes = max_bytes
        self._keep = keep
        self._tell = tell
        self._is_failing = False
        self._cost = 0.0
        self.num_samples = 0
        self.num_lost = 0
        self._packing: threading.Thread | None = None
        self._stream: FileIO | None = None
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(self._file))
                self._header = (json.dumps(_header_of(self._file, about or {})) + "\n").encode()
                self._stream = self._open()
            except OSError as error:
                why = error.strerror or error
                raise ValueError(f"cannot record to {path}: {why}; choose another file") from error
            self._lock = stack.pop_all()

    def __enter__(self) -> SampleRecorder:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def record(self, sample: Sample) -> None:
        """Write a sample; while that fails it is left out, which a message says once."""
        rest = f"{json_text(sample.to_json())}\n".encode()
        try:
            stream = self._ready(len(rest))
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            self._lose(error)
            return
        self.num_samples += 1
        self._cost += sample.cost
        if self._is_failing:
            self._is_failing = False
            self._tell(f"it works again; {counted(self.num_lost, 'sample')} are missing so far")

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        self._close_stream()
        if self._packing is not None:
            self._packing.join()
        self._lock.close()

    def summary(self) -> str:
        """Summarize the recording in one line."""
        told = f"recorded {counted(self.num_samples, 'sample')} to {self._path}"
        if self.num_samples:
            told += f", a sample took {seconds_text(self._cost / self.num_samples)}"
        if self.num_lost:
            told += f", {counted(self.num_lost, 'sample')} could not be written"
        return told

    def _ready(self, size: int) -> FileIO:
        """Return the file to write to, a new one if this one has no room for so many bytes."""
        stream = self._stream
        if stream is not None and self._is_elsewhere(stream.fileno()):
            self._close_stream()
        stream = self._stream = self._stream or self._open()
        if len(self._header) < stream.tell() > self._max_bytes - size:
            self._close_stream()
            self._rotate()
            stream = self._stream = self._open()
        return stream

    def _rotate(self) -> None:
        """Rename the file and the older ones, the oldest of which go; compress it meanwhile."""
        if self._packing is not None:
            self._packing.join()
        for number, part in older_parts(self._file).items():
            if number < self._keep:
                suffix = ".gz" if part.suffix == ".gz" else ""
                part.rename(f"{self._file}.{number + 1}{suffix}")
            else:
                part.unlink()
                self._tell(
                    f"{self._keep} older files are kept, so the oldest one is dropped, with "
                    f"what {self._path} tells of its time; --keep keeps more"
                )
        newest = Path(f"{self._file}.1")
        self._file.rename(newest)
        # It takes seconds.
        self._packing = threading.Thread(target=_pack, args=(newest,), daemon=True)
        self._packing.start()

    def _open(self) -> FileIO:
        """Open the file to append; a new one gets the header, of an old one the last line ends."""
        stream = FileIO(self._file, "ab")
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

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _is_elsewhere(self, file: int) -> bool:
        """True if somebody has removed the file, or renamed it: nobody would find the samples."""
        try:
            there = self._file.stat()
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(file))

    def _lose(self, error: OSError) -> None:
        self.num_lost += 1
        # The next line opens it again, behind what may be half a line.
        self._close_stream()
        if not self._is_failing:
            self._is_failing = True
            self._tell(
                f"cannot write to {self._path}: {error.strerror}; make room on the disk. What was "
                "recorded is kept, and samples are left out until it works again"
            )


def _pack(part: Path) -> None:
    """Compress a file; where that fails, as on a full disk, it stays as it is."""
    packed = Path(f"{part}.gz")
    unfinished = Path(f"{packed}.new")
    try:
        with part.open("rb") as source, gzip.open(unfinished, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        unfinished.rename(packed)
        part.unlink()
    except OSError:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep others from recording to the same file as long as this process lives."""
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"cannot record to {path}: it is no file, or its folder does not exist; choose another "
            "one, or write samples into a pipe with `dataparallel monitor top --json`"
        )
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"somebody else is recording to {path} now; end that, or choose another file"
                ) from None
            # The one who held it may have removed it since it was opened.
            if lock.exists() and os.path.samefile(lock, file.fileno()):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return


def _header_of(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of the recording that is there, or of a new one."""
    older = older_parts(path)
    # An empty file is one for whose first line a full disk had no room.
    is_empty = path.exists() and not path.stat().st_size
    is_continued = path.exists() and (not is_empty or bool(older))
    for part in (*older.values(), *([path] if is_continued and not is_empty else [])):
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
