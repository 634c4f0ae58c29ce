"""A command with a limit: its last words, and nothing that stays behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Seconds between two signs of life.
_TICK = 15.0

#: How much of an output is kept.
_KEPT = 200_000


@dataclass(frozen=True)
class Ended:
    """What became of a command.

    Attributes:
        status: As processes end: 0 is success, below 0 is a signal. None: it ran past its limit.
        seconds: How long it ran.
        output: The end of what it has printed.
    """

    status: int | None
    seconds: float
    output: str


def run(
    command: Sequence[str],
    *,
    folder: pathlib.Path,
    environment: Mapping[str, str],
    limit: float,
    tell: Callable[[float, str], None] = lambda seconds, line: None,
    tick: float = _TICK,
) -> Ended:
    """Run a command in a folder until it ends, or for so many seconds.

    It leads a session of its own, and all of that ends with it.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        environment: All of its variables.
        limit: Seconds.
        tell: Told now and then how long it has run, and the last line that it has printed.
        tick: Seconds between two calls of ``tell``.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            while (left := begin + limit - time.monotonic()) > 0:
                try:
                    status = process.wait(min(tick, left))
                    break
                except subprocess.TimeoutExpired:
                    lines = _end_of(output.fileno()).splitlines()
                    tell(time.monotonic() - begin, lines[-1] if lines else "")
        finally:
            _end(process)
        return Ended(status, time.monotonic() - begin, _end_of(output.fileno()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    # All of them may have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _KEPT, max(0, size - _KEPT)).decode(errors="replace")
