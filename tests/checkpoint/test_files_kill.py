"""A process that is killed during a save loses nothing that was committed."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import (
    UNFINISHED,
    generations,
    next_number,
    prune,
    sweep,
)
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.manifest import FileEntry
from tests.checkpoint import file_calls
from tests.checkpoint.file_calls import at_call, count_calls, two_generations
from tests.checkpoint.forked import Fork
from tests.checkpoint.generations import PARTS, check, folder, save, values
from tests.faults.harness import Figures

Say = Callable[[int], None]


def kill(name: str, args: Any) -> None:
    """End this process; of what it was about to write, half is written."""
    if name == "write" and len(args[1]) > 1:
        os.pwrite(args[0], args[1][: len(args[1]) // 2], os.lseek(args[0], 0, 1))
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_be_killed(say: Say, at: int, directory: pathlib.Path) -> None:
    with at_call(at, kill):
        sweep(str(directory), 3)
        with GenerationWriter(directory, 3) as writer:
            entries = [writer.write(part, values(3), {"of": part, "n": 3}) for part in PARTS]
            writer.commit(entries, {"step": 3})
            say(3)
        prune(directory, 2)


@pytest.fixture
def in_memory() -> Iterator[pathlib.Path]:
    with file_calls.in_memory() as path:
        yield path


def test_killed_before_everything_that_is_done_to_a_file(in_memory: pathlib.Path) -> None:
    outcomes = set()
    for number in range(1, count_calls(in_memory / "count") + 1):
        directory = in_memory / str(number)
        two_generations(directory)
        with Fork(save_and_be_killed, number, directory) as child:
            said = child.rest()
            assert child.wait() == -signal.SIGKILL
        with read_generation(directory) as generation:
            check(generation)
        outcomes.add(generation.number)
        # None is half removed: readers begin no generation that is about to go.
        assert {info.reason for info in generations(directory)} <= {None, UNFINISHED}
        assert not said or generation.number == 3, "a committed generation was lost"
        # The next save works, and nothing of the killed one stays.
        save(directory, 4, keep=2)
        with read_generation(directory) as generation:
            check(generation)
        assert all(info.complete for info in generations(directory))
        assert not list(directory.rglob(".*"))
    assert outcomes == {1, 3}


def test_killed_at_random_while_it_saves(
    tmp_path: pathlib.Path, repeats: Callable[..., int], figures: Figures
) -> None:
    kills, lost, during, size = repeats(quick=15, long=1000), 0, 0, 2**16

    def run(say: Say) -> None:
        number = next_number(tmp_path)
        while True:
            save(tmp_path, number, size, keep=2)
            say(number)
            number += 1

    chance = random.Random(0)
    for _ in range(kills):
        with Fork(run) as child:
            last = child.hear()
            # The moment of the kill: anywhere in one of the next saves.
            time.sleep(chance.random() * 0.02)
            child.kill()
            last = max([last or 0, *child.rest()])
        during += not all(info.complete for info in generations(tmp_path))
        try:
            with read_generation(tmp_path) as generation:
                check(generation, size)
                lost += generation.number < last
        except CheckpointError:
            lost += 1
    assert during > kills / 4, "the kills did not hit saves"
    figures.record(
        goal=15,
        what="kill -9 during a save: runs without the last committed generation",
        value=lost,
        unit="runs",
        limit=0,
        repeats=kills,
        baseline="19 of 20 (torch.save)",
        details=f"{during} left an unfinished generation",
    )


def test_a_save_costs_little_more_than_a_plain_one(
    tmp_path: pathlib.Path, repeats: Callable[..., int], figures: Figures
) -> None:
    tensors = {f"layer.{i}": torch.randn(2**18) for i in range(4)}
    plain, ours = [], []
    for number in range(repeats(quick=10, long=200)):
        begin = time.perf_counter()
        with open(tmp_path / "plain.pt", "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        plain.append(time.perf_counter() - begin)
        os.unlink(tmp_path / "plain.pt")
        begin = time.perf_counter()
        with GenerationWriter(tmp_path / "ours", number) as writer:
            writer.commit([writer.write("model", tensors)], {"step": number})
        ours.append(time.perf_counter() - begin)
        prune(tmp_path / "ours", 1)
    figures.record(
        goal=15,
        what="time of a save of 4 MB beside torch.save and fsync, ratio of the medians",
        value=statistics.median(ours) / statistics.median(plain),
        unit="x",
        limit=1.2,
        repeats=len(ours),
        baseline=f"{1e3 * statistics.median(plain):.1f} ms",
    )


def test_everything_is_on_the_disk_before_it_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    synced: set[int] = set()
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)
        events.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def recorded_replace(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        inode = os.stat(source, dir_fd=src_dir_fd).st_ino
        assert inode in synced, f"{target} is renamed before it is on the disk"
        replace(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        events.append(("replace", target))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save(tmp_path, 1)
    renamed = [name for call, name in events if call == "replace"]
    assert renamed == ["rank-0.safetensors", "rank-1.safetensors", "manifest.json"]
    after = events[events.index(("replace", "manifest.json")) + 1 :]
    assert after == [("fsync", folder(tmp_path, 1).name), ("fsync", tmp_path.name)]


def write_second_part(say: Say, directory: pathlib.Path) -> None:
    with GenerationWriter(directory, 0) as writer:
        entry = writer.write("rank-1", values(0), {"of": "rank-1", "n": 0})
        say(entry.bytes)
        say(int(entry.sha256, 16))


def test_processes_write_one_generation_together(tmp_path: pathlib.Path) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        mine = writer.write("rank-0", values(0), {"of": "rank-0", "n": 0})
        with Fork(write_second_part, tmp_path) as child:
            size, digest = child.rest()
        theirs = FileEntry("rank-1", size, f"{digest:064x}")
        writer.commit([mine, theirs], {"step": 0})
    check(read_generation(tmp_path))


def test_what_is_removed_is_no_generation_from_the_first_moment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        with GenerationWriter(tmp_path, number) as writer:
            writer.commit([writer.write("a", {})])
    unlink, removed = os.unlink, []

    def recorded(name: str, **options: Any) -> None:
        removed.append(name)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", recorded)
    assert prune(tmp_path, 1) == [0]
    assert removed[:2] == ["manifest.json", "a.safetensors"]
