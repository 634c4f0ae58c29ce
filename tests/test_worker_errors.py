"""Errors of replicas come back as themselves, tell where they happened, and leave no cycles."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.errors import locate
from dataparallel.threads.workers import WorkerPools

LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    return pools.run(tasks, LABELS.__getitem__, **options)


def wait_until(predicate: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.005)
    return predicate()


def notes(error: BaseException) -> list[str]:
    found: list[str] = vars(error)["__notes__"]
    return found


class WithTwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class WithoutArguments(Exception):
    pass


class WithOwnText(Exception):
    def __str__(self) -> str:
        return "always the same"


def raises(error: BaseException) -> Callable[[], None]:
    def deep_inside() -> None:
        raise error

    return deep_inside


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        ValueError(),
        KeyError("missing"),
        KeyError(3),
        WithoutArguments(),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte"),
        StopIteration("end"),
        torch.OutOfMemoryError("too big"),
        AssertionError("no"),
        SystemExit("bye"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_itself_and_tells_where(error: BaseException) -> None:
    pools = WorkerPools()
    finished: list[int] = []
    original = type(error)

    def slow() -> None:
        time.sleep(0.05)
        finished.append(1)

    with pytest.raises(original, match="in replica 1 on device cpu") as caught:
        run(pools, slow, raises(error), slow)
    assert caught.value is error
    assert type(error) is original
    assert finished == [1, 1], "the other replicas are let finish"
    assert "deep_inside" in "".join(traceback.format_exception(error))
    assert run(pools, int, int, int) == [0, 0, 0]
    pools.close()


@pytest.mark.parametrize(
    "error", [WithTwoArguments(3, "why"), WithOwnText("x")], ids=lambda error: type(error).__name__
)
def test_an_error_with_its_own_text_tells_where_in_a_note(error: Exception) -> None:
    pools = WorkerPools()
    text = str(error)
    with pytest.raises(type(error)) as caught:
        run(pools, int, raises(error))
    assert caught.value is error
    assert str(error) == text
    assert "in replica 1 on device cpu" in notes(error)
    pools.close()


def test_of_several_errors_the_lowest_index_is_raised_and_the_others_are_notes() -> None:
    pools = WorkerPools()
    with pytest.raises(ValueError, match="first\nin replica 1 on device cpu") as caught:
        run(pools, int, raises(ValueError("first")), raises(KeyError("second")))
    assert notes(caught.value) == [
        "in replica 2 on device cpu also failed: KeyError: 'second'",
    ]
    pools.close()


def test_an_error_raised_again_and_again_keeps_one_location() -> None:
    pools = WorkerPools()
    error = ValueError("kept")
    for _ in range(3):
        with pytest.raises(ValueError, match="in replica 0"):
            run(pools, raises(error), int)
    assert str(error) == "kept\nin replica 0 on device cpu"
    pools.close()


def test_a_nested_error_names_both_places() -> None:
    error = ValueError("inner")
    locate(error, "in replica 1 on device cpu")
    locate(error, "in replica 0 on device virtual:2")
    assert str(error) == "inner\nin replica 1 on device cpu\nin replica 0 on device virtual:2"


def test_errors_leave_no_reference_cycles() -> None:
    class Payload:
        pass

    def fail() -> None:
        payload = Payload()
        references.append(weakref.ref(payload))
        raise ValueError("with a frame that holds the payload")

    references: list[weakref.ref[Payload]] = []
    pools = WorkerPools()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with contextlib.suppress(ValueError):
                run(pools, fail, fail)
        assert len(references) == 10
        assert wait_until(lambda: all(reference() is None for reference in references), 2.0)
    finally:
        gc.enable()
    pools.close()
