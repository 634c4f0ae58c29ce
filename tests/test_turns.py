"""Threads that run together, and threads that run alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dataparallel.threads.turns import Turns, TurnTimeout


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


class Steps:
    """Events by name: who sets them, and who waits for them at most some seconds."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def reached(self, name: str) -> None:
        self[name].set()

    def expect(self, name: str) -> None:
        assert self[name].wait(5), f"nobody reached {name}"


def test_together_at_the_same_time(pool: ThreadPoolExecutor) -> None:
    turns, barrier = Turns(), threading.Barrier(3)

    def run() -> None:
        with turns.together():
            barrier.wait(5)

    for done in [pool.submit(run) for _ in range(3)]:
        done.result(5)


def test_alone_waits_for_all_and_keeps_them_out(pool: ThreadPoolExecutor) -> None:
    turns, steps = Turns(), Steps()
    order: list[str] = []

    def first() -> None:
        with turns.together():
            steps.reached("first runs")
            steps.expect("alone is wanted")
            time.sleep(0.05)
            order.append("first")

    def alone() -> None:
        steps.expect("first runs")
        steps.reached("alone is wanted")
        with turns.alone(), turns.alone():
            steps.reached("alone")
            time.sleep(0.05)
            order.append("alone")

    def second() -> None:
        steps.expect("alone")
        with turns.together():
            order.append("second")

    for done in [pool.submit(call) for call in (first, alone, second)]:
        done.result(5)
    assert order == ["first", "alone", "second"]


def test_two_that_run_may_both_want_to_be_alone(pool: ThreadPoolExecutor) -> None:
    turns, barrier = Turns(), threading.Barrier(2)
    inside: list[int] = []
    most = 0

    def run() -> None:
        nonlocal most
        with turns.together(), turns.together():
            barrier.wait(5)
            with turns.alone():
                inside.append(1)
                most = max(most, len(inside))
                time.sleep(0.02)
                inside.pop()

    for done in [pool.submit(run) for _ in range(2)]:
        done.result(5)
    assert most == 1


def test_who_was_alone_runs_together_again(pool: ThreadPoolExecutor) -> None:
    turns, steps = Turns(), Steps()

    def first() -> None:
        with turns.together():
            with turns.alone():
                pass
            steps.reached("together again")
            time.sleep(0.05)
            steps.reached("leaves")

    def second() -> None:
        steps.expect("together again")
        with turns.alone():
            assert steps["leaves"].is_set()

    for done in [pool.submit(call) for call in (first, second)]:
        done.result(5)


@pytest.mark.parametrize("how", ["together", "alone"])
def test_who_pauses_lets_others_run_alone(pool: ThreadPoolExecutor, how: str) -> None:
    turns, steps = Turns(), Steps()
    told: list[int] = []

    def pauses() -> None:
        enter: Callable[[], Any] = getattr(turns, how)
        with enter(), turns.telling(lambda: told.append(1)):
            steps.reached("runs")
            with turns.paused():
                steps.expect("alone")
            # Goes on only when the other has ended.
            assert steps["ended"].is_set()

    def alone() -> None:
        steps.expect("runs")
        with turns.alone():
            steps.reached("alone")
            time.sleep(0.05)
            steps.reached("ended")

    for done in [pool.submit(call) for call in (pauses, alone)]:
        done.result(5)
    assert told == [1]


def test_who_does_not_stop_is_named() -> None:
    turns, steps = Turns(timeout=0.3), Steps()

    def stays() -> None:
        with turns.together():
            steps.reached("runs")
            steps.expect("enough")

    thread = threading.Thread(target=stays, name="the one that stays")
    thread.start()
    steps.expect("runs")
    with (
        turns.together(),
        pytest.raises(TurnTimeout, match=r"within 0.3 s.*: the one that stays; .*rendezvous"),
        turns.alone(),
    ):
        pass
    steps.reached("enough")
    thread.join(5)
    with turns.together(), turns.alone():
        pass


def test_the_time_of_others_who_are_alone_does_not_count(pool: ThreadPoolExecutor) -> None:
    turns, steps = Turns(timeout=0.3), Steps()

    def long() -> None:
        with turns.alone():
            steps.reached("alone")
            time.sleep(0.6)

    done = pool.submit(long)
    steps.expect("alone")
    with turns.alone():
        done.result(5)


def test_a_thread_that_died_is_forgotten() -> None:
    turns = Turns(timeout=5)
    for how in ("together", "alone"):
        enter: Callable[[], Any] = getattr(turns, how)
        # As if interrupted between entering and leaving.
        thread = threading.Thread(target=enter().__enter__)
        thread.start()
        thread.join(5)
        with turns.alone():
            pass


def test_an_error_gives_back(pool: ThreadPoolExecutor) -> None:
    turns = Turns(timeout=5)
    for how in ("together", "alone", "paused"):
        enter: Callable[[], Any] = getattr(turns, how)
        with pytest.raises(KeyError, match="x"), turns.together(), enter():
            raise KeyError("x")

    def alone() -> str:
        with turns.alone():
            return "alone"

    assert pool.submit(alone).result(5) == "alone"


def test_new_calls_let_those_pass_who_wait(pool: ThreadPoolExecutor) -> None:
    turns, steps = Turns(), Steps()
    order: list[str] = []

    def runs() -> None:
        with turns.together():
            steps.reached("runs")
            steps.expect("new call")
            time.sleep(0.05)

    def alone() -> None:
        steps.expect("runs")
        with turns.alone():
            order.append("alone")

    def new() -> None:
        steps.expect("runs")
        while not turns._waiting:
            time.sleep(0.001)
        steps.reached("new call")
        turns.let_pass()
        order.append("new")

    for done in [pool.submit(call) for call in (runs, alone, new)]:
        done.result(5)
    assert order == ["alone", "new"]
