"""The meeting point of the replicas of one call; test_collectives_replicas.py has the failures."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch

from dataparallel.threads.apply import apply_replicas, current_replica
from dataparallel.threads.meeting import Rendezvous, current_rendezvous


def replicas(call: Any, count: int) -> list[Any]:
    return apply_replicas([call] * count, [torch.device("cpu")] * count)


def index() -> int:
    replica = current_replica()
    assert replica is not None
    return replica.index


def meet(key: Any, value: Any, combine: Any = list, timeout: float = 30.0) -> Any:
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
        assert replicas(call, 3) == [(i, values) for i in range(3)]
    assert ran == [(0, True)] * 3


def test_nested_calls_and_meetings_that_failed() -> None:
    def no_result(values: list[Any]) -> list[Any]:
        raise ArithmeticError("no result")

    def inner() -> Any:
        return meet("key", index(), lambda values: [sum(values)] * len(values))

    def call() -> Any:
        with contextlib.suppress(RuntimeError):
            meet(("different", index()), 0)
        with pytest.raises((ArithmeticError, RuntimeError), match="no result"):
            meet("no result", 0, no_result)
        return replicas(inner, 3), meet("key", 10, lambda v: [sum(v)] * 2)

    assert replicas(call, 2) == [([3, 3, 3], 20)] * 2
    assert current_rendezvous() is None
    with pytest.raises(AssertionError, match="replicas of one call meet"):
        Rendezvous(2).exchange("key", 0, list)
