"""What `monitor record` does: write samples into a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.opening import SOURCES, open_sampler
from dataparallel.tools.monitor.recorder import Recorder, samples_text
from dataparallel.tools.monitor.recording import older_parts, parts
from dataparallel.tools.monitor.signals import handled
from dataparallel.tools.monitor.units import bytes_text

if TYPE_CHECKING:
    from dataparallel.tools.monitor.reading import Sample
    from dataparallel.tools.monitor.sampler import Sampler

#: Writes to a file descriptor.
write = os.write

#: A shorter recording shows no progress, in seconds.
_SHORT = 3.0


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.file.suffix.lower() == ".csv":
        raise ValueError(
            f"{arguments.file}: a recording is JSON lines; record to FILE.jsonl, and make a table "
            "of it with `dataparallel monitor report FILE.jsonl --csv FILE.csv`"
        )
    _check_target(arguments.file, arguments.source)
    with open_sampler(arguments) as sampler:
        recorder = Recorder(
            arguments.file,
            max_bytes=arguments.max_size,
            keep=arguments.keep,
            about={"interval": sampler.interval, "source": arguments.source},
            tell=_tell,
            write=write,
        )
        with recorder, _stopped_by_signals(sampler):
            _record(sampler, recorder, arguments)
        # A pipe's reader wants the recording alone.
        print(recorder.summary(), file=sys.stdout if recorder.is_regular else sys.stderr)
    return 1 if recorder.num_lost else 0


def _check_target(file: Path, source: str) -> None:
    """Whether what is read would be what is written, for ever."""
    if source in SOURCES or not Path(source).is_file():
        return
    written = {_identity(part): part for part in (*older_parts(file).values(), file)}
    for part in parts(Path(source)):
        found = written.get(_identity(part))
        if found is not None:
            raise ValueError(
                f"--source {source} reads {part}, and recording to {file} writes {found}, which is "
                "the same file: it would never end; record to another file"
            )


def _identity(path: Path) -> tuple[int, int] | Path:
    """The same for two paths of one file."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


def _record(sampler: Sampler, recorder: Recorder, arguments: argparse.Namespace) -> None:
    told: set[str] = set()
    with (
        contextlib.suppress(BrokenPipeError),
        _progress(arguments.file, arguments.duration) as advance,
    ):
        begin: float | None = None
        for sample in sampler.samples():
            begin = sample.elapsed if begin is None else begin
            for note in sample.notes:
                if note not in told:
                    told.add(note)
                    _tell(note)
            recorder.record(sample)
            advance(sample, recorder)
            # Half of an interval, since no sample comes at its time exactly.
            if (
                arguments.duration is not None
                and sample.elapsed - begin + sampler.interval / 2 > arguments.duration
            ):
                return
            if sampler.is_over:
                return


@contextlib.contextmanager
def _stopped_by_signals(sampler: Sampler) -> Iterator[None]:
    """Ctrl-C and a polite kill end the recording between two samples; a second Ctrl-C at once."""

    def stop(number: int, frame: object) -> None:
        sampler.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with handled([signal.SIGINT, signal.SIGTERM], stop):
        yield


@contextlib.contextmanager
def _progress(file: Path, seconds: float | None) -> Iterator[Callable[[Sample, Recorder], None]]:
    """What to call after each sample; it shows on a terminal how far the recording is."""
    if not sys.stderr.isatty() or (seconds is not None and seconds <= _SHORT):
        yield lambda sample, recorder: None
        return
    with needs_extra("monitor"):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("recording {task.fields[file]}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        hint = "; Ctrl-C ends it" if seconds is None else ""
        task = progress.add_task("", total=seconds, file=file.name, state="")

        def advance(sample: Sample, recorder: Recorder) -> None:
            state = f"{samples_text(recorder.num_samples)}, {bytes_text(recorder.written)}{hint}"
            progress.update(task, completed=sample.elapsed, state=state)

        yield advance


def _tell(text: str) -> None:
    print(f"dataparallel: {text}", file=sys.stderr)
