"""Recordings: their format, and how they are read.

Note [Format of a recording]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first line of a file is a header in JSON: ``"format"``, ``"version"`` and what is known of the
recorder. Each further line is one :meth:`Sample.to_json`.

When a file has its greatest size the recorder renames ``FILE.1.gz`` to ``FILE.2.gz`` and ``FILE``
to ``FILE.1``, which it compresses to ``FILE.1.gz``, and begins ``FILE`` anew. So higher numbers are
older. Parts of one recording have the same ``"recording"`` in their headers. If a recorder has
continued a recording, an empty line ends a line that may be cut off before it. Then ``elapsed``
begins at 0 again.

The reader passes over a line that is no sample, such as one that a crash has cut off, and tells it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

from dataparallel.monitor.from_json import clean
from dataparallel.monitor.sample import Sample

FORMAT = "dataparallel monitor recording"
VERSION = 3

#: A first line that is longer is no header.
_LONGEST_HEADER = 1 << 16
#: The errors of reading a file; those of a compressed one, too.
_DAMAGED = (OSError, EOFError, zlib.error)
#: A pause that is so many times the usual interval is a gap: nothing is known of the time within.
_GAP = 3.0


@dataclass(frozen=True)
class Recording:
    """The content of a recording, the oldest sample first."""

    #: The facts about the recorder.
    header: Mapping[str, Any]
    samples: tuple[Sample, ...]
    #: The parts that could not be read, in words, with the number of the line.
    problems: tuple[str, ...] = ()


def read_recording(path: str | PathLike[str]) -> Recording:
    """Read a recording with all its parts. See Note [Format of a recording].

    Raises:
        ValueError: There is no such file, it is no recording, or one of another version.
    """
    reader = RecordingReader(path)
    samples = tuple(reader)
    return Recording(reader.header, samples, tuple(reader.problems))


def check_different(recordings: Sequence[Recording]) -> None:
    """ValueError if one of them is given twice."""
    names = [one.header["recording"] for one in recordings if "recording" in one.header]
    if len(set(names)) < len(names):
        raise ValueError("the same recording is given twice; give one recording of each machine")


class RecordingReader:
    """A reader of a recording, sample by sample, as :func:`read_recording`, with its problems."""

    def __init__(self, path: str | PathLike[str]) -> None:
        path = Path(os.path.realpath(path))
        self._parts = [*older_parts(path).values()]
        # A full disk may come between the end of one part and the first line of the next.
        if path.exists() and not (self._parts and not path.stat().st_size):
            self._parts.append(path)
        if not self._parts:
            raise ValueError(
                f"there is no file {path}; `dataparallel monitor record {path}` makes it"
            )
        self.header = read_header(self._parts[-1])
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Sample]:
        self.problems = []
        for part in self._parts:
            if read_header(part).get("recording") != self.header.get("recording"):
                self.problems.append(f"{part} belongs to another recording; it is left out")
                continue
            try:
                with _opened(part) as file:
                    yield from self._samples_in(part, file)
            except _DAMAGED as error:
                self.problems.append(f"{part} is damaged; its end is left out: {error!s:.120}")

    def _samples_in(self, part: Path, file: IO[bytes]) -> Iterator[Sample]:
        for number, line in enumerate(file, start=1):
            if number == 1 or line == b"\n":
                continue
            try:
                yield Sample.from_json(json.loads(line))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                self.problems.append(
                    f"{part}:{number}: this is no sample, it is left out: {error!s:.120}"
                )


def older_parts(path: Path) -> dict[int, Path]:
    """Return the older files of a recording by their numbers, the oldest first."""
    found: dict[int, Path] = {}
    for part in path.parent.glob("*"):
        match = re.fullmatch(rf"{re.escape(path.name)}\.([1-9][0-9]*)(\.gz)?", part.name)
        # One that is compressed just now is there twice.
        if match and (match[2] or int(match[1]) not in found):
            found[int(match[1])] = part
    return dict(sorted(found.items(), reverse=True))


def _opened(part: Path) -> IO[bytes]:
    if part.suffix == ".gz":
        return cast(IO[bytes], gzip.open(part))
    return part.open("rb")


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a file; ValueError if it is no recording, or one of another version."""
    try:
        with _opened(path) as file:
            line = file.readline(_LONGEST_HEADER)
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        # NaN is not even equal to itself.
        header = json.loads(line, parse_constant=str)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a recording of `dataparallel monitor record`: its first line should be "
            f'{{"format": "{FORMAT}", ...}}, but it is {line.decode(errors="replace")[:80]!r}'
        )
    version = header.get("version")
    if version != VERSION:
        age = "an older" if version in range(VERSION) else "a newer"
        raise ValueError(
            f"{path} has version {version!r} of the format, but this dataparallel reads version "
            f"{VERSION}; read it with {age} dataparallel"
        )
    texts = {key: clean(one) for key, one in header.items() if isinstance(one, str)}
    return texts | {key: one for key, one in header.items() if isinstance(one, (int, float))}


def times_of(samples: Sequence[Sample]) -> list[float]:
    """Seconds from the first sample to each, on an axis that never goes backwards.

    If a recording was continued and ``elapsed`` begins anew, the clock on the wall tells; if that
    was set back, no time passes.
    """
    found = [0.0] * len(samples)
    for i, (before, now) in enumerate(itertools.pairwise(samples)):
        passed = now.elapsed - before.elapsed
        found[i + 1] = found[i] + (passed if passed >= 0 else max(0.0, now.time - before.time))
    return found


def longest_step(times: Sequence[float]) -> float:
    """Between samples that are farther apart lies a gap."""
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return _GAP * statistics.median(steps) if steps else 0.0
