"""Damaged files are refused with the reason, and the last good generation is read instead."""

from __future__ import annotations

import logging
import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable

import pytest

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import UNFINISHED
from tests.checkpoint.file_calls import in_memory
from tests.checkpoint.generations import check, folder, save
from tests.faults.harness import Figures

# Tells what was done to the bytes of a file.
Damage = Callable[[bytearray, random.Random], str]


def flip(content: bytearray, chance: random.Random) -> str:
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} flipped"


def zero(content: bytearray, chance: random.Random) -> str:
    start = chance.randrange(len(content)) // 512 * 512
    block = content[start : start + chance.choice([512, 4096])]
    content[start : start + len(block)] = bytes(len(block))
    return f"{len(block)} bytes at {start} zeroed"


def truncate(content: bytearray, chance: random.Random) -> str:
    length = chance.randrange(len(content))
    del content[length:]
    return f"cut to {length} bytes"


def append(content: bytearray, chance: random.Random) -> str:
    content += bytes(chance.randrange(1, 100))
    return "zeroes appended"


def test_random_damage_is_always_found(
    repeats: Callable[..., int], figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "dataparallel")
    count, accepted, chance = repeats(quick=120, long=1000), [], random.Random(0)
    with in_memory() as directory:
        save(directory, 1)
        save(directory, 2)
        files = sorted(folder(directory, 2).iterdir())
        for _ in range(count):
            path = chance.choice(files)
            whole = path.read_bytes()
            content = bytearray(whole)
            while content == whole:
                what = chance.choice([flip, flip, zero, truncate, append])(content, chance)
            path.write_bytes(content)
            with read_generation(directory) as generation:
                if generation.number != 1 or generation.rejected[0][0] != 2:
                    accepted.append(f"{path.name}: {what}")
                check(generation)
            path.write_bytes(whole)
        check(read_generation(directory, 2))
    figures.record(
        goal=16,
        what="flipped, zeroed, cut and longer files that were loaded, or kept the last good "
        "generation from being loaded",
        value=len(accepted),
        unit="files",
        limit=0,
        repeats=count,
        baseline="flips and zeroes load",
        details="; ".join(accepted[:5]),
    )


def first(directory: pathlib.Path) -> pathlib.Path:
    return folder(directory, 2) / "rank-0.safetensors"


def swap_files(directory: pathlib.Path) -> None:
    other = first(directory).with_name("rank-1.safetensors")
    content = first(directory).read_bytes()
    first(directory).write_bytes(other.read_bytes())
    other.write_bytes(content)


def swap_generations(directory: pathlib.Path) -> None:
    shutil.rmtree(folder(directory, 2))
    shutil.copytree(folder(directory, 1), folder(directory, 2))


def mix_generations(directory: pathlib.Path) -> None:
    shutil.copy(folder(directory, 1) / "rank-0.safetensors", first(directory))


def remove_folder_entry(directory: pathlib.Path) -> None:
    shutil.rmtree(folder(directory, 2))
    folder(directory, 2).write_text("a file")


def put_directory(directory: pathlib.Path) -> None:
    first(directory).unlink()
    first(directory).mkdir()


@pytest.mark.parametrize(
    "damage, reason",
    [
        (swap_files, r"rank-0.safetensors: .*SHA-256 differs"),
        (swap_generations, r"manifest.json: it is of generation 1, in the place of 2"),
        (mix_generations, r"rank-0.safetensors: .*SHA-256 differs"),
        (lambda d: first(d).unlink(), r"rank-0.safetensors: .*No such file"),
        (lambda d: (folder(d, 2) / "manifest.json").unlink(), UNFINISHED),
        (lambda d: (folder(d, 2) / "manifest.json").write_bytes(b""), "does not begin as"),
        (lambda d: first(d).write_bytes(b""), "it has 0 bytes instead of"),
        (remove_folder_entry, "its folder: Not a directory"),
        (put_directory, r"rank-0.safetensors: .*(not an ordinary file|Is a directory)"),
    ],
)
def test_other_damage(
    tmp_path: pathlib.Path,
    damage: Callable[[pathlib.Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path)
    with caplog.at_level(logging.INFO, "dataparallel"), read_generation(tmp_path) as generation:
        check(generation)
    [(number, said)] = generation.rejected
    assert (generation.number, number) == (1, 2) and re.search(reason, said)
    [record] = caplog.records
    assert said in record.getMessage()
    assert record.levelno == (logging.INFO if said == UNFINISHED else logging.WARNING)
    with pytest.raises(CheckpointError, match=rf"generation 2 in .* is not good: .*{reason}"):
        read_generation(tmp_path, 2)


def test_where_all_are_damaged_every_reason_is_told(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    first(tmp_path).write_bytes(b"")
    (folder(tmp_path, 1) / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"(?s)generation 2: rank-0.*generation 1: manifest"):
        read_generation(tmp_path)


def test_a_file_that_cannot_be_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    readv, broken = os.readv, first(tmp_path).stat().st_ino

    def fail(fd: int, buffers: list[memoryview]) -> int:
        if os.fstat(fd).st_ino == broken:
            raise OSError(5, "Input/output error")
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", fail)
    generation = read_generation(tmp_path)
    assert generation.rejected == [(2, "rank-0.safetensors: Input/output error")]
    check(generation)
