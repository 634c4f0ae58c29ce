"""A load beside a process that saves and removes generations finds what is there."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataparallel import checkpoint
from dataparallel.extras.checkpoint import generation, generation_folders
from dataparallel.extras.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.extras.checkpoint.generation import Generation, read_generation
from tests.checkpoint.generations import folder, save


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def after_a_listing(
    monkeypatch: pytest.MonkeyPatch, *writers: Callable[[], None]
) -> Callable[[], int]:
    """Let another process do something after each of the first looks at what there is."""
    original: Any = generation_folders.numbers
    waiting, looks = list(writers), [0]

    def numbers(directory: Any) -> list[int]:
        found: list[int] = original(directory)
        looks[0] += 1
        if waiting:
            # What the writer itself looks for is no look of the reader's.
            monkeypatch.setattr(generation_folders, "numbers", original)
            waiting.pop(0)()
            monkeypatch.setattr(generation_folders, "numbers", numbers)
        return found

    monkeypatch.setattr(generation_folders, "numbers", numbers)
    return lambda: looks[0]


@pytest.mark.parametrize("missing_ok", [True, False])
def test_what_was_listed_is_gone(
    missing_ok: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, step=1, keep=1)
    after_a_listing(monkeypatch, lambda: void(checkpoint.save(tmp_path, step=2, keep=1)))
    loaded = checkpoint.load(tmp_path, missing_ok=missing_ok)
    assert (loaded.step, loaded.rejected) == (2, ())


def test_what_is_half_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    manifest = folder(tmp_path, 2) / "manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()

    def finish() -> None:
        # The folders are the same: the second is finished, and the first has lost its manifest.
        manifest.write_bytes(text)
        (folder(tmp_path, 1) / "manifest.json").unlink()

    found: list[int] = []
    original: Any = generation._open

    def open_it(path: str, number: int, *rest: Any) -> Generation:
        found.append(number)
        try:
            opened: Generation = original(path, number, *rest)
            return opened
        finally:
            if found == [2]:
                finish()

    monkeypatch.setattr(generation, "_open", open_it)
    assert read_generation(tmp_path).number == 2
    assert found == [2, 1, 2]


def test_what_is_removed_while_it_is_read(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1)
    tried: list[int] = []

    def accept(found: Generation) -> None:
        tried.append(found.number)
        if found.number == 1:
            save(tmp_path, 2, keep=1)
        found.tensors("rank-0")

    assert read_generation(tmp_path, accept=accept).number == 2
    assert tried == [1, 2]


def test_nothing_is_said_of_a_directory_that_changes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = after_a_listing(monkeypatch, lambda: save(tmp_path, 5))
    assert read_generation(tmp_path).number == 5
    assert looks() == 2
    monkeypatch.undo()
    with pytest.raises(NoCheckpoint):
        read_generation(tmp_path / "other")

    def change() -> None:
        number = generation_folders.next_number(tmp_path)
        save(tmp_path, number, keep=1)

    monkeypatch.setattr(generation, "_MAX_LISTINGS", 2)
    looks = after_a_listing(monkeypatch, *[change] * 9)
    with pytest.raises(CheckpointError, match="removed sooner than they were read, 2 times"):
        read_generation(tmp_path)
    assert looks() == 3


def void(_: object) -> None:
    """Nothing: for functions whose result is of no interest."""
