"""What a save makes and removes in the directory: all that is needed, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from dataparallel import checkpoint
from dataparallel.extras.checkpoint.directory_lock import DirectoryLock
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import generations, next_number, prune
from dataparallel.extras.checkpoint.generation_record import GenerationRecord, record_of
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from tests.checkpoint.generations import PARTS, check, folder, save, values


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def numbers(directory: pathlib.Path) -> list[int]:
    return [info.number for info in generations(directory)]


def damage(directory: pathlib.Path, number: int) -> None:
    """Change the content of a file, and not its size."""
    path = next(folder(directory, number).glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# --- file systems without locks on directories ---------------------------------------------------


def test_processes_of_one_save_do_not_remove_each_others_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each host grants what another one holds.
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with GenerationWriter(tmp_path, 0) as here:
        entries = [here.write(PARTS[0], values(0), {"of": PARTS[0], "n": 0})]
        with GenerationWriter(tmp_path, 0) as there:
            entries.append(there.write(PARTS[1], values(0), {"of": PARTS[1], "n": 0}))
        here.commit(entries, {"step": 0})
    check(read_generation(tmp_path))


def test_what_is_unfinished_goes_where_directories_have_no_locks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def refuse(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in range(3):
        with GenerationWriter(tmp_path, number) as killed:
            killed.write("rank-00000", values(0))
    checkpoint.save(tmp_path, step=1)
    assert numbers(tmp_path) == [3]


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [DirectoryLock, lambda path: GenerationWriter(path, 0)])
def test_new_directories_last(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    fsync, synced = os.fsync, []

    def recorded(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    for _ in range(2):
        with what(tmp_path / "a" / "b" / "run"):
            assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_a_parent_that_may_not_be_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    DirectoryLock(tmp_path / "run").release()
    assert (tmp_path / "run").is_dir()


# --- what goes, and what stays -------------------------------------------------------------------


def test_what_was_loaded_stays_until_enough_newer_ones_are_good(tmp_path: pathlib.Path) -> None:
    for number in range(3):
        checkpoint.save(tmp_path, step=number)
    checkpoint.close()
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    # As another process that goes on from it.
    record = record_of(tmp_path)
    record.keep_only([])
    record.note_loaded(0, rejected=[1, 2])
    found = []
    for step in range(3, 6):
        checkpoint.save(tmp_path, step=step)
        found.append(numbers(tmp_path))
    assert found == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [3, 4, 5]]


def test_going_back_again_and_again_takes_no_more_room(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 0)
    for number in range(1, 9):
        record = GenerationRecord()
        record.note_loaded(0)
        save(tmp_path, number)
        record.note_written(number)
        prune(tmp_path, 2, record)
    assert numbers(tmp_path) == [0, 7, 8]


def test_a_number_that_was_rejected_and_is_written_anew_counts(tmp_path: pathlib.Path) -> None:
    record = GenerationRecord()
    record.note_written(1)
    record.note_loaded(0, rejected=[1])
    assert record.rejected == {1} and record.spares(0, 1) and not record.spares(1, 1)
    record.note_written(1)
    assert record.rejected == set() and not record.spares(0, 1) and record.spares(0, 2)


def test_a_directory_has_one_record(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert record_of(tmp_path / "link") is record_of(str(tmp_path))
    assert record_of(tmp_path / "other") is not record_of(tmp_path)


def test_a_link_in_place_of_a_generation_stops_nothing(tmp_path: pathlib.Path) -> None:
    for number in range(4):
        save(tmp_path, number)
    os.rename(folder(tmp_path, 0), tmp_path / "moved")
    folder(tmp_path, 0).symlink_to("moved")
    assert prune(tmp_path, 1) == [1, 2]
    assert numbers(tmp_path) == [0, 3] and len(os.listdir(tmp_path / "moved")) == 3


def test_what_resists_does_not_keep_others(tmp_path: pathlib.Path) -> None:
    for number in range(4):
        save(tmp_path, number)
    (folder(tmp_path, 0) / "directory").mkdir()
    with pytest.raises(checkpoint.CheckpointError, match="removing old generations failed in"):
        prune(tmp_path, 1)
    assert numbers(tmp_path) == [0, 3]


def test_the_highest_number_of_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation-999999999999999").mkdir()
    message = "generation-999999999999999 in .* has the highest number .*; move it out of the"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        next_number(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(tmp_path, step=1)
