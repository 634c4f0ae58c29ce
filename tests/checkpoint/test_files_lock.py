"""Two writers are kept apart, and a lock ends with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from dataparallel.extras.checkpoint.directory_lock import DirectoryLock
from dataparallel.extras.checkpoint.errors import CheckpointError
from tests.checkpoint.forked import Fork
from tests.checkpoint.generations import save

Say = Callable[[int], None]


def hold(say: Say, directory: pathlib.Path) -> None:
    lock = DirectoryLock(directory)
    say(1)
    signal.pause()
    lock.release()


def test_another_process_is_named(tmp_path: pathlib.Path) -> None:
    with Fork(hold, tmp_path) as child:
        assert child.hear() == 1
        who = f"in use by another writer, process {child.pid} on {socket.gethostname()}: save to"
        with pytest.raises(CheckpointError, match=who):
            DirectoryLock(tmp_path)
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match=who):
            DirectoryLock(tmp_path, timeout=0.2)
        assert 0.2 <= time.monotonic() - begin < 5
        child.kill()
    DirectoryLock(tmp_path).release()


def test_it_waits_for_a_holder_that_ends(tmp_path: pathlib.Path) -> None:
    lock = DirectoryLock(tmp_path)

    def wait(say: Say) -> None:
        say(1)
        with DirectoryLock(tmp_path, timeout=20):
            say(2)

    with Fork(wait) as child:
        assert child.hear() == 1
        lock.release()
        assert child.hear() == 2
        assert child.wait() == 0


def test_one_process_has_one_writer(tmp_path: pathlib.Path) -> None:
    with DirectoryLock(tmp_path / "new") as lock:
        with pytest.raises(
            CheckpointError, match=rf"this process \({os.getpid()}\): save to anoth"
        ):
            DirectoryLock(tmp_path / "new")
        lock.release()
        lock.release()
        DirectoryLock(tmp_path / "new").release()


def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path: pathlib.Path) -> None:
    def parent(say: Say) -> None:
        lock = DirectoryLock(tmp_path)
        with Fork(lambda tell: signal.pause()) as grandchild:
            say(grandchild.pid)
            # Leaves it alive, as a kill would.
            os._exit(0)
        lock.release()

    with Fork(parent) as child:
        grandchild = child.hear()
        assert grandchild is not None and child.wait() == 0
        try:
            os.kill(grandchild, 0)
            DirectoryLock(tmp_path).release()
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_readers_and_savers_of_generations_need_no_lock(tmp_path: pathlib.Path) -> None:
    with DirectoryLock(tmp_path):
        save(tmp_path, 0)


def test_a_lock_that_nobody_signed(tmp_path: pathlib.Path) -> None:
    for content in ("", "{", "[1]", '{"pid":"x","host":1}', "[" * 900):
        with DirectoryLock(tmp_path):
            (tmp_path / "writer.lock").write_text(content)
            with pytest.raises(CheckpointError, match="which has not given its name"):
                DirectoryLock(tmp_path)


def test_a_file_system_without_locks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(
            CheckpointError, match=r"No locks available.*save to a file system with"
        ):
            DirectoryLock(tmp_path)
        # Writing a generation needs none.
        save(tmp_path, 0)
        save(tmp_path, 1)
    DirectoryLock(tmp_path).release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "writer.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="locking the directory of checkpoints failed"):
        DirectoryLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"
