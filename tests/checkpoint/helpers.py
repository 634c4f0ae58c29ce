"""What a save does to files: held up, counted, and failing; and forks, which may be killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import forkserver

# Names in ``os`` of what is done to files.
_CALLS = ("mkdir", "fsync", "replace", "unlink", "rmdir")
# Tests count what else is written.
_write = os.write


class Gate:
    """Holds writers up until it is opened: each file is synchronized with the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        fsync = os.fsync

        def held(fd: int) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", held)


def fail(monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
    """Let writes fail, with one error after the other."""
    coming = iter(errors)

    def fsync(fd: int) -> None:
        raise next(coming)

    monkeypatch.setattr(os, "fsync", fsync)


@contextlib.contextmanager
def at_call(number: int, act: Callable[[str, Any], None]) -> Iterator[list[str]]:
    """In a fork: call ``act`` before the n-th thing that is done to files; gives what was done."""
    done: list[str] = []
    originals = {name: getattr(os, name) for name in _CALLS}

    def replaced(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) == number:
                act(name, args)
            return originals[name](*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, replaced(name))
    try:
        yield done
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    """Where a generation is."""
    return directory / f"generation-{number:08d}"


def spoil(directory: pathlib.Path, number: int) -> None:
    """Change one bit of each file of tensors of a generation."""
    for path in folder(directory, number).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)


class Fork:
    """A child that runs ``function(say, *args)``, where ``say(number)`` tells the test a number.

    Args:
        function: What it runs. It must not compute with several threads of torch.
        args: What it is given.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._read, write = os.pipe()
        self._rest = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = forkserver.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                function(lambda number: _write(write, b"%d\n" % number), *args)
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        os.close(write)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        os.close(self._read)

    def hear(self, timeout: float = 20.0) -> int | None:
        """The next number that it says; None at its end."""
        while b"\n" not in self._rest:
            assert select.select([self._read], [], [], timeout)[0], "the child says nothing"
            got = os.read(self._read, 4096)
            if not got:
                return None
            self._rest += got
        line, self._rest = self._rest.split(b"\n", 1)
        return int(line)

    def rest(self) -> list[int]:
        """The numbers that it said since, up to its end."""
        numbers = []
        while (number := self.hear()) is not None:
            numbers.append(number)
        return numbers

    def kill(self) -> None:
        """End it at once, if it lives."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Wait for its end; its exit code, or the negative number of the signal that ended it."""
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def succeed(function: Callable[..., None], *args: Any) -> None:
    """Run a function in a fork and assert that it raises nothing."""
    with Fork(function, *args) as child:
        child.rest()
        assert child.wait() == 0
