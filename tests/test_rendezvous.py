"""The meeting point of the replicas of one call; test_collectives_misuse.py has more failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dataparallel.threads.apply import apply_replicas, current_replica
from dataparallel.threads.meeting import (
    Rendezvous,
    RendezvousError,
    current_rendezvous,
)

CPU = torch.device("cpu")


def replicas(*calls: Callable[[], Any]) -> list[Any]:
    return apply_replicas(calls, [CPU] * len(calls))


def index() -> int:
    replica = current_replica()
    assert replica is not None
    return replica.index


def meet(
    key: Any,
    value: Any,
    combine: Callable[[list[Any]], Sequence[Any]] = list,
    *,
    timeout: float = 30.0,
) -> Any:
    rendezvous = current_rendezvous()
    assert rendezvous is not None
    return rendezvous.exchange(key, value, combine, timeout=timeout)


def test_combine_runs_once_in_replica_order_in_the_thread_of_replica_0() -> None:
    ran: list[Any] = []

    def combine(values: list[Any]) -> list[Any]:
        ran.append((index(), torch.is_grad_enabled()))
        # Who waits for it waits as long as it takes.
        time.sleep(0.1)
        return [(i, tuple(values)) for i in range(len(values))]

    def call() -> Any:
        # The last replica comes first.
        time.sleep(0.01 * (2 - index()))
        with torch.set_grad_enabled(index() == 0):
            return meet("key", f"value {index()}", combine, timeout=0.08)

    for _ in range(3):
        values = ("value 0", "value 1", "value 2")
        assert replicas(call, call, call) == [(i, values) for i in range(3)]
    assert ran == [(0, True)] * 3


def test_nested_calls_and_meetings_that_failed() -> None:
    def inner() -> Any:
        return meet("key", index(), lambda values: [sum(values)] * len(values))

    def call() -> Any:
        with contextlib.suppress(RuntimeError):
            meet(("different", index()), 0)
        return replicas(inner, inner, inner), meet("key", 10, lambda v: [sum(v)] * 2)

    assert replicas(call, call) == [([3, 3, 3], 20)] * 2
    assert current_rendezvous() is None
    with pytest.raises(AssertionError, match="replicas of one call meet"):
        Rendezvous(2).exchange("key", 0, list)


# --- failures: nobody hangs, and the next call works -----------------------------------------


def comes(**options: Any) -> Callable[[], None]:
    return lambda: meet("key", 0, **options)


def is_slow() -> None:
    time.sleep(0.3)


def no_result(values: list[Any]) -> list[Any]:
    raise ArithmeticError("no result")


def closes() -> None:
    time.sleep(0.05)
    rendezvous = current_rendezvous()
    assert rendezvous is not None
    rendezvous.close("the call was interrupted")
    meet("key", 0)


FAILURES: dict[str, tuple[list[Callable[[], Any]], type[BaseException], str]] = {
    "replica 0 too late": (
        [is_slow, comes(timeout=0.1), is_slow],
        TimeoutError,
        "replicas 0, 2 did not come",
    ),
    "combine": (
        [comes(combine=no_result)] * 3,
        ArithmeticError,
        "no result\nin replica 0 on device cpu",
    ),
    "closed": ([comes(), closes], RendezvousError, "the call was interrupted"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_raised_and_releases_all(failure: str) -> None:
    calls, kind, message = FAILURES[failure]
    begin = time.monotonic()
    with pytest.raises(kind, match=message):
        replicas(*calls)
    assert time.monotonic() - begin < 10, "the waiting replicas were not released"
    assert replicas(lambda: meet("again", 1), lambda: meet("again", 2)) == [1, 2]
