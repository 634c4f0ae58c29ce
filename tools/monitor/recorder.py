"""Writes samples into a recording, and copes with what can happen meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from dataparallel.tools.monitor import csv_recording
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.recording import FORMAT, VERSION
from dataparallel.tools.monitor.recording_file import RecordingFile
from dataparallel.tools.monitor.units import bytes_text, seconds_text

Format = Literal["jsonl", "csv"]

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
        format: ``"jsonl"`` for JSON lines, or ``"csv"``. Default: ``"jsonl"``.
        max_bytes: Greatest size of a file, then a new one is begun. Default: 100 MB.
        keep: How many older files are kept. Default: 5.
        about: What the header tells beside the format. Default: nothing.
        tell: Called with what a user should know now. Default: nobody is told.
        write: Writes to a file descriptor. Default: ``os.write``.

    Attributes:
        num_samples: How many samples were recorded.
        num_lost: How many were not since there was no room.

    Raises:
        ValueError: What is there is no recording, or somebody else is recording to it.
        RuntimeError: The first line could not be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        format: Format = "jsonl",
        max_bytes: int = 100_000_000,
        keep: int = 5,
        about: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._format = format
        self._tell = tell
        self.num_samples = 0
        self.num_lost = 0
        self._is_failing = False
        self._cost = 0.0
        try:
            self._file = RecordingFile(
                path, _header(format, about or {}), max_bytes=max_bytes, keep=keep, write=write
            )
        except OSError as error:
            why = f"cannot record to {path}: {error.strerror or error}"
            if error.errno in _NO_ROOM:
                raise RuntimeError(f"{why}; make room, or choose a file on another disk") from error
            raise ValueError(f"{why}; choose another file") from error
        if self._file.repaired:
            tell(f"{path} ended within a line; {self._file.repaired} bytes of it are cut off")
        #: Of the last sample that was there: its time and its elapsed.
        self._before = self._last_times()
        self._offset: float | None = None if self._before else 0.0

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def is_regular(self) -> bool:
        """Whether it writes to a file, not to a pipe or a terminal."""
        return self._file.is_regular

    @property
    def written(self) -> int:
        """How many bytes were written."""
        return self._file.written

    def record(self, sample: Sample) -> None:
        """Write a sample; where there is no room it is left out, which is told once.

        Raises:
            ValueError: Somebody else has begun to record to this path.
            RuntimeError: It is a pipe, and nothing can be written to it.
            BrokenPipeError: It is a pipe that nobody reads any more.
        """
        if self._offset is None:
            assert self._before is not None
            last_time, last_elapsed = self._before
            # Where the clock was set back meanwhile, nothing is known but the order.
            self._offset = last_elapsed + max(0.0, sample.time - last_time) - sample.elapsed
        elapsed = sample.elapsed + self._offset
        lines = _lines(dataclasses.replace(sample, elapsed=elapsed), self._format)
        try:
            self._file.write(lines)
        except OSError as error:
            self._fail(error)
            return
        self.num_samples += 1
        self._cost += sample.cost
        if self._is_failing:
            self._is_failing = False
            self._tell(f"there is room again; {samples_text(self.num_lost)} are missing so far")

    def close(self) -> None:
        """Bring all to the disk. A second call does nothing."""
        try:
            self._file.close()
        except OSError as error:
            self._tell(f"the end of {self._path} may not have reached the disk: {error.strerror}")

    def summary(self) -> str:
        """What was recorded, in one line."""
        mean = self._cost / self.num_samples if self.num_samples else None
        files = 1 + self._file.num_rotations
        parts = [
            f"recorded {samples_text(self.num_samples)} to {self._path}",
            bytes_text(self.written) + (f" in {files} files" if files > 1 else ""),
            f"a sample took {seconds_text(mean)}",
        ]
        if self.num_lost:
            parts.append(f"{samples_text(self.num_lost)} could not be written")
        return ", ".join(parts)

    def _fail(self, error: OSError) -> None:
        if not self._file.is_regular:
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

    def _last_times(self) -> tuple[float, float] | None:
        line = self._file.last_line()
        if line is None:
            return None
        text = line.decode(errors="replace")
        try:
            if self._format == "csv":
                time_text, elapsed_text = text.split(",")[:2]
                return float(time_text), float(elapsed_text)
            data = json.loads(text)
            return float(data["time"]), float(data["elapsed"])
        except (ValueError, KeyError, TypeError, RecursionError):
            self._tell(f"the last line of {self._path} is no sample; `elapsed` begins at 0 again")
            return None


def _header(format: Format, about: Mapping[str, Any]) -> bytes:
    if format == "csv":
        return csv_recording.header_line().encode()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "recording": uuid.uuid4().hex,
        "started": time.time(),
        "host": platform.node(),
        **about,
    }
    return (json.dumps(header) + "\n").encode()


def _lines(sample: Sample, format: Format) -> bytes:
    if format == "csv":
        return csv_recording.sample_lines(sample).encode()
    data = sample.to_json()
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return (text + "\n").encode()


def _finite(data: Any) -> Any:
    """The same, with None for numbers that JSON does not have."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def samples_text(number: int) -> str:
    """A number of samples, in words."""
    return "1 sample" if number == 1 else f"{number} samples"
