"""Recordings: what they look like, and how they are read.

Note [Format of a recording]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A recording in JSON lines begins with a header, one line with ``"format"``, ``"version"`` and what
is known of the recorder; each further line is one :meth:`Sample.to_json`.

When a file has its greatest size it becomes ``FILE.1``, what was ``FILE.1`` becomes ``FILE.2``,
and ``FILE`` begins anew. So higher numbers are older. The header's ``"recording"`` tells parts of
one recording from those of another. Where a recording is continued, ``elapsed`` begins at 0 again.

A line counts when its line feed is there. What a crash leaves behind the last one is passed over,
and told, when the recording is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from dataparallel.tools.monitor.reading import Sample

FORMAT = "dataparallel monitor recording"
VERSION = 1

#: So many faults are told one by one.
_MAX_PROBLEMS = 20
#: A first line that is longer is no header.
_LONGEST_HEADER = 1 << 16
#: So many zeros may be left of a file whose first block never reached the disk.
_LONGEST_GAP = 4096


@dataclass(frozen=True)
class Recording:
    """What was recorded.

    Attributes:
        header: What is known of the recorder.
        samples: The oldest first.
        problems: What could not be read, in words, with the number of the line.
    """

    header: Mapping[str, Any]
    samples: tuple[Sample, ...]
    problems: tuple[str, ...] = ()


def read_recording(path: str | PathLike[str]) -> Recording:
    """Read a recording with all its parts. See Note [Format of a recording].

    Example::

        recording = read_recording("run.jsonl")
        print(len(recording.samples), recording.problems)

    Args:
        path: The file, without the number of a part.

    Returns:
        The samples that are whole; what is not is told in ``problems``.

    Raises:
        ValueError: There is no such file, it is no recording, or one of a newer version.
    """
    reader = RecordingReader(path)
    samples = tuple(reader)
    return Recording(reader.header, samples, tuple(reader.problems))


class RecordingReader:
    """Reads a recording sample by sample; each iteration begins anew.

    Example::

        for sample in RecordingReader("run.jsonl"):
            print(sample.elapsed)

    Args:
        path: As for :func:`read_recording`.

    Attributes:
        header: What is known of the recorder.
        problems: What could not be read so far.

    Raises:
        ValueError: As for :func:`read_recording`.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._parts = parts(Path(path))
        self.header = read_header(self._parts[-1])
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Sample]:
        self.problems = []
        self._num_problems = 0
        for part in self._parts:
            header = self.header if part == self._parts[-1] else read_header(part)
            if header.get("recording") != self.header.get("recording"):
                self._tell(f"{part} belongs to another recording; it is left out")
                continue
            yield from _read_samples(self._lines(part), self._tell)
        if self._num_problems > _MAX_PROBLEMS:
            self.problems.append(f"and {self._num_problems - _MAX_PROBLEMS} more like these")

    def _lines(self, part: Path) -> Iterator[tuple[str, str]]:
        """The whole lines of a part: where each is, in words, and its text."""
        with part.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{part}:{number}"
                if not line.endswith(b"\n"):
                    self._tell(f"{where}: the last line is cut off; it is left out")
                else:
                    yield where, line.decode(errors="replace").rstrip("\r\n")

    def _tell(self, problem: str) -> None:
        self._num_problems += 1
        if self._num_problems <= _MAX_PROBLEMS:
            self.problems.append(problem)

    _num_problems = 0


def _read_samples(lines: Iterable[tuple[str, str]], tell: Any) -> Iterator[Sample]:
    is_first = True
    for where, line in lines:
        if not is_first:
            try:
                yield Sample.from_json(json.loads(line))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                tell(f"{where}: this is no sample, it is left out: {str(error)[:120]}")
        is_first = False


def parts(path: Path) -> list[Path]:
    """The files of a recording, the oldest first.

    Args:
        path: The file, without the number of a part.

    Raises:
        ValueError: There is none.
    """
    older = list(older_parts(path).values())
    # A crash, or a full disk, may come between two parts.
    is_begun = path.exists() and not (older and path.is_file() and not path.stat().st_size)
    found = [*older, *([path] if is_begun else [])]
    if not found:
        raise ValueError(f"there is no file {path}; `dataparallel monitor record {path}` makes it")
    return found


def older_parts(path: Path) -> dict[int, Path]:
    """The older files of a recording by their number, the oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.([1-9]\d*)")
    try:
        names = {entry: pattern.fullmatch(entry.name) for entry in path.parent.iterdir()}
    except OSError:
        return {}
    numbers = {int(match[1]): entry for entry, match in names.items() if match}
    return {number: numbers[number] for number in sorted(numbers, reverse=True)}


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file.

    Raises:
        ValueError: The file is no recording, or one of a newer version.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not line:
        raise ValueError(
            f"{path} is empty, but a recording begins with a line that says what it is"
        )
    text = line.decode(errors="replace").rstrip("\r\n")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if header is None and not line.endswith(b"\n") and _is_begun(text):
        raise ValueError(
            f"{path} ends within its first line: it was stopped before the first sample, and there "
            "is nothing to read; record again"
        )
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a recording of `dataparallel monitor record`: its first line should be "
            f'{{"format": "{FORMAT}", ...}}, but it is {text[:80]!r}'
        )
    version = header.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(
            f"{path} has version {version!r} of the format, but this dataparallel reads versions "
            f"up to {VERSION}; read it with a newer dataparallel"
        )
    return header


def is_begun_header(path: Path) -> bool:
    """Whether a file holds nothing but what a crash leaves of a header."""
    with path.open("rb") as file:
        content = file.read(_LONGEST_HEADER)
    if not content.strip(b"\0"):
        return len(content) < _LONGEST_GAP
    # A shorter beginning may be somebody's own.
    return len(content) >= 16 and b"\n" not in content and _is_begun(content.decode("latin1"))


def _is_begun(text: str) -> bool:
    """Whether this is the beginning of a header."""
    whole = json.dumps({"format": FORMAT})[:-1]
    return len(text) > 1 and text.startswith(whole[: len(text)])
