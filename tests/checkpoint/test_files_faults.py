"""Where the system refuses, the error says what to do, nothing is lost, and the next save works."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import generations
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from tests.checkpoint import file_calls, forked
from tests.checkpoint.file_calls import at_call, count_calls, two_generations
from tests.checkpoint.generations import check, save

Say = Callable[[int], None]


@pytest.fixture
def in_memory() -> Iterator[pathlib.Path]:
    with file_calls.in_memory() as path:
        yield path


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_system_anywhere(in_memory: pathlib.Path, code: int) -> None:
    calls = count_calls(in_memory / "count")

    def fail(name: str, args: Any) -> None:
        raise OSError(code, os.strerror(code))

    def run(say: Say) -> None:
        for number in range(1, calls + 1):
            directory = in_memory / str(number)
            two_generations(directory)
            with at_call(number, fail):
                try:
                    save(directory, 3, keep=2)
                except CheckpointError as error:
                    say(number)
                    assert os.strerror(code) in str(error), error
                    assert "earlier generations are as they were" in str(error), error
            check(read_generation(directory))
            save(directory, 4, keep=2)
            check(read_generation(directory))
            assert all(info.complete for info in generations(directory))

    with forked.Fork(run) as child:
        told = child.rest()
        assert child.wait() == 0
    # Not all matter: that the removal of what nobody needs fails, for one.
    assert len(told) > calls / 2


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    forked.require_mounts(str(tmp_path))

    def run(say: Say) -> None:
        assert forked.mount_small(str(tmp_path), 1 << 20)
        os.chdir(tmp_path)
        save("checkpoints", 0, size=2**15)
        for number in range(1, 4):
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                save("checkpoints", number, size=2**17 * number)
            assert "bytes are free); make room, or keep fewer generations" in str(caught.value)
            check(read_generation("checkpoints"), 2**15)
            assert not list(tmp_path.rglob(".*"))
        save("checkpoints", 9, size=2**15)
        assert read_generation("checkpoints").number == 9

    forked.succeed(run)


def test_a_file_system_that_became_read_only(tmp_path: pathlib.Path) -> None:
    forked.require_mounts(str(tmp_path))

    def run(say: Say) -> None:
        assert forked.mount_small(str(tmp_path), 1 << 20)
        os.chdir(tmp_path)
        save("checkpoints", 0)
        forked.make_read_only(str(tmp_path))
        with pytest.raises(CheckpointError, match=r"Read-only file system; save to a directory"):
            save("checkpoints", 1)
        check(read_generation("checkpoints"))

    forked.succeed(run)


def test_a_limit_on_the_size_of_files(tmp_path: pathlib.Path) -> None:
    def run(say: Say) -> None:
        save(tmp_path, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        with pytest.raises(CheckpointError, match=r"File too large; a limit .* \(ulimit -f\)"):
            save(tmp_path, 1, size=2**18)
        check(read_generation(tmp_path))
        assert not list(tmp_path.rglob(".*"))
        save(tmp_path, 2)
        assert read_generation(tmp_path).number == 2

    forked.succeed(run)


def test_a_directory_without_permission(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        # Root may write anywhere.
        patched.setattr(os, "mkdir", refuse)
        with pytest.raises(CheckpointError, match="denied; let this user read and write"):
            save(tmp_path, 1)
    check(read_generation(tmp_path))
    save(tmp_path, 1)


def test_a_directory_that_is_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"beginning generation 0 failed in .*file: "):
        GenerationWriter(tmp_path / "file", 0)
    with pytest.raises(CheckpointError, match=r"looking for generations failed in .*file: "):
        read_generation(tmp_path / "file")
