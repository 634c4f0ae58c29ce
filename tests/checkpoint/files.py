"""What a save does to files: held up, counted, and failing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Names in ``os`` of what is done to files.
_CALLS = ("mkdir", "fsync", "replace", "unlink", "rmdir")


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
