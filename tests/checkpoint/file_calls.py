"""What a save does to files, counted; any of it can fail."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from tests.checkpoint.forked import Fork
from tests.checkpoint.generations import save

# Names in ``os`` of what is done to files.
_CALLS = ("mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir", "close")


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


@contextlib.contextmanager
def in_memory() -> Iterator[pathlib.Path]:
    """A directory in memory, where there is one: hundreds of waits for a disk take long."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        yield pathlib.Path(path)


def two_generations(directory: pathlib.Path) -> None:
    """Save generations 0 and 1."""
    save(directory, 0)
    save(directory, 1, keep=2)


def count_calls(directory: pathlib.Path) -> int:
    """How many things the third save does to files, with those that remove the first one."""
    two_generations(directory)

    def run(say: Callable[[int], None]) -> None:
        with at_call(0, lambda *args: None) as done:
            save(directory, 3, keep=2)
        say(len(done))

    with Fork(run) as child:
        calls = child.hear()
    assert calls is not None and calls > 20
    return calls
