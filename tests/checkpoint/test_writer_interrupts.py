"""What interrupts a save ends it: the next one neither waits for ever nor hides what failed."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from dataparallel import checkpoint
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.saver import _Job


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run."""


def interrupt(*_: Any, **__: Any) -> Any:
    raise Interrupted


class State:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, int]:
        raise Interrupted

    def load_state_dict(self, state: Any) -> None:
        """Never called."""


def refuse_threads(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dataparallel-checkpoint":
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def ends(function: Callable[[], Any]) -> Any:
    """The result of a function that could wait for ever; an error of it is the result too."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert results, "it waits for ever"
    return results[0]


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    ends(checkpoint.close)


def assert_usable(directory: pathlib.Path, number: int) -> None:
    saving = ends(lambda: checkpoint.save(directory, step=7))
    assert isinstance(saving, checkpoint.Saving), saving
    assert saving.wait(0) == number
    ends(lambda: checkpoint.close(directory))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_while_the_state_is_taken(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    with pytest.raises(Interrupted):
        checkpoint.save(tmp_path, step=1, states={"o": State()}, asynchronous=asynchronous)
    assert_usable(tmp_path, 0)


@pytest.mark.parametrize("where", [(GenerationWriter, "write"), (_Job, "run")])
def test_an_interrupt_while_it_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*where, interrupt)
        with pytest.raises(Interrupted):
            checkpoint.save(tmp_path, step=1)
    # What was begun is removed, so the number is free.
    assert_usable(tmp_path, 0)


def test_a_second_interrupt_while_it_is_cleared_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(GenerationWriter, "write", interrupt)
        patched.setattr(GenerationWriter, "discard", interrupt)
        with pytest.raises(Interrupted):
            checkpoint.save(tmp_path, step=1)
    assert_usable(tmp_path, 1)


def test_an_interrupt_while_the_thread_is_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        refuse_threads(patched, Interrupted())
        with pytest.raises(Interrupted):
            checkpoint.save(tmp_path, step=1, asynchronous=True)
    assert_usable(tmp_path, 0)


def test_without_a_thread_the_training_waits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "dataparallel"):
        refuse_threads(patched, RuntimeError("can't start new thread"))
        saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
    assert saving.done() and saving.wait() == 0
    assert "the training waits for the checkpoint to be written: can't start" in caplog.text
    assert_usable(tmp_path, 1)


# --- what is told --------------------------------------------------------------------------------


def fail_unseen(directory: pathlib.Path, patched: pytest.MonkeyPatch) -> None:
    """Let writers fail, and one save in the background, for which nobody waits."""
    reasons = iter(["the first reason", "the second reason"])

    def write(*_: Any, **__: Any) -> Any:
        raise OSError(5, next(reasons))

    patched.setattr(GenerationWriter, "write", write)
    checkpoint.save(directory, step=1, asynchronous=True).wait_for_end()


def test_a_save_that_failed_says_so_and_mentions_an_earlier_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fail_unseen(tmp_path, patched)
        message = (
            r"nothing was saved .*the second reason; an earlier save had failed too, and nobody "
            r"waited for it: nothing was saved .*the first reason"
        )
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.save(tmp_path, step=2)
    # Both are told, and neither a second time.
    assert_usable(tmp_path, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_value_that_cannot_be_saved_does_not_hide_an_earlier_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    with monkeypatch.context() as patched:
        fail_unseen(tmp_path, patched)
    with pytest.raises(TypeError, match="object"):
        checkpoint.save(tmp_path, step=2, user=object(), asynchronous=asynchronous)
    message = "an earlier save failed, and nobody waited for it; .*the first reason"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(tmp_path, nn.Linear(1, 1), step=3)
    assert_usable(tmp_path, 1)
