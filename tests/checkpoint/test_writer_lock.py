"""One writer per directory, also after a fork, and when somebody removes the lock."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataparallel import checkpoint
from dataparallel.extras.checkpoint import saver, saving_calls
from dataparallel.extras.checkpoint.directory_lock import DirectoryLock
from dataparallel.extras.checkpoint.file_lock import FileLock
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from tests.checkpoint.forked import Fork, succeed

Say = Callable[[int], None]


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(saver, "_LOCK_TIMEOUT", 0.0)
    yield
    checkpoint.close()


def numbers(directory: pathlib.Path) -> list[int]:
    return [info.number for info in checkpoint.generations(directory)]


# --- forks ---------------------------------------------------------------------------------------


def test_a_fork_is_another_writer(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=1)
    parent = os.getpid()

    def run(say: Say) -> None:
        with pytest.raises(checkpoint.CheckpointError, match=f"another writer, process {parent}"):
            checkpoint.save(tmp_path, step=2)
        checkpoint.close()
        checkpoint.save(tmp_path / "own", step=2)

    succeed(run)
    # What the fork did took nothing from its parent.
    checkpoint.save(tmp_path, step=3)
    assert numbers(tmp_path) == [0, 1] and numbers(tmp_path / "own") == [0]


def test_a_fork_during_a_save_waits_for_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, original = threading.Event(), GenerationWriter.write

    def write(*args: Any, **options: Any) -> Any:
        assert opened.wait(30)
        return original(*args, **options)

    def run(say: Say) -> None:
        opened.set()
        with pytest.raises(checkpoint.CheckpointError, match=r"forked from it .*wait there"):
            saving.wait()
        with pytest.raises(checkpoint.CheckpointError, match="in use by another writer"):
            checkpoint.save(tmp_path, step=2)
        checkpoint.close()

    monkeypatch.setattr(GenerationWriter, "write", write)
    saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
    # As if another thread were about to save.
    with saving_calls._lock, Fork(run) as child:
        assert child.rest() == []
        assert child.wait() == 0
    opened.set()
    assert saving.wait(30) == 0


# --- a lock that is removed ----------------------------------------------------------------------


def save_and_stay(say: Say, directory: pathlib.Path) -> None:
    say(checkpoint.save(directory, step=5).wait())
    signal.pause()


def test_who_lost_the_lock_to_another_writer_is_told(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=1)
    (tmp_path / "writer.lock").unlink()
    with Fork(save_and_stay, tmp_path) as child:
        assert child.hear() == 1
        who = f"in use by another writer, process {child.pid} on"
        with pytest.raises(checkpoint.CheckpointError, match=who):
            checkpoint.save(tmp_path, step=2)
        child.kill()
    checkpoint.save(tmp_path, step=2)
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_directory_that_was_removed_is_locked_again(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    checkpoint.save(directory, step=1)
    shutil.rmtree(directory)
    assert checkpoint.save(directory, step=2).wait() == 0

    def run(say: Say) -> None:
        with pytest.raises(checkpoint.CheckpointError, match="in use by another writer"):
            checkpoint.save(directory, step=3)

    succeed(run)


def test_a_lock_that_is_removed_during_a_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GenerationWriter.write

    def write(*args: Any, **options: Any) -> Any:
        (tmp_path / "writer.lock").unlink()
        return original(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(GenerationWriter, "write", write)
        with pytest.raises(checkpoint.CheckpointError, match=r"lock of .* was removed or replaced"):
            checkpoint.save(tmp_path, step=1)
    # It was not committed, and what another writer may have begun was left alone.
    assert [info.complete for info in checkpoint.generations(tmp_path)] == [False]
    checkpoint.save(tmp_path, step=2)
    assert numbers(tmp_path) == [1]


def test_a_lock_that_is_removed_while_it_is_taken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = FileLock.take, []

    def slow(lock: FileLock) -> bool:
        taken.append(take(lock))
        if len(taken) == 1:
            (tmp_path / "writer.lock").unlink()
        return taken[-1]

    monkeypatch.setattr(FileLock, "take", slow)
    with DirectoryLock(tmp_path, timeout=20) as lock:
        assert taken == [True, True] and lock.holds
        (tmp_path / "writer.lock").unlink()
        assert not lock.holds
