"""The meeting point of the replicas of one call."""

from __future__ import annotations

import contextlib
import threading
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


def test_there_is_none_outside_of_replicas() -> None:
    assert current_rendezvous() is None


def test_values_come_in_replica_order_and_each_gets_its_own_result() -> None:
    def combine(values: list[Any]) -> list[Any]:
        return [(i, tuple(values)) for i in range(len(values))]

    def call() -> Any:
        # The last replica comes first.
        time.sleep(0.02 * (2 - index()))
        return meet("key", f"value {index()}", combine)

    values = ("value 0", "value 1", "value 2")
    assert replicas(call, call, call) == [(i, values) for i in range(3)]


def test_combine_runs_once_in_the_thread_of_replica_0() -> None:
    ran: list[Any] = []

    def combine(values: list[Any]) -> list[Any]:
        ran.append((index(), torch.is_grad_enabled()))
        return values

    def call() -> None:
        if index() != 0:
            with torch.no_grad():
                meet("key", 0, combine)
        else:
            time.sleep(0.02)
            meet("key", 0, combine)

    for _ in range(5):
        replicas(call, call, call)
    assert ran == [(0, True)] * 5


def test_who_waits_for_combine_waits_as_long_as_it_takes() -> None:
    def combine(values: list[Any]) -> list[Any]:
        time.sleep(0.3)
        return values

    def call() -> Any:
        rendezvous = current_rendezvous()
        assert rendezvous is not None
        return rendezvous.exchange("key", index(), combine, timeout=0.1)

    assert replicas(call, call, call) == [0, 1, 2]


def test_one_autograd_node_with_n_inputs_and_outputs() -> None:
    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: torch.Tensor) -> Any:
            mean = sum(values) / len(values)
            return tuple(mean.clone() for _ in values)  # type: ignore[union-attr]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            total = sum(grads) / len(grads)
            return tuple(total for _ in grads)

    leaves = [torch.full((2,), float(i), requires_grad=True) for i in range(3)]

    def call() -> Any:
        i = index()
        return (i + 1) * meet("mean", leaves[i] * 2, lambda values: Mean.apply(*values))

    outputs = replicas(call, call, call)
    torch.autograd.backward([y.sum() for y in outputs])
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, torch.full((2,), 2 * (1 + 2 + 3) / 3))
    assert len({id(y.grad_fn.next_functions[0][0]) for y in outputs}) == 1


def test_a_hundred_meetings_in_one_call() -> None:
    def call() -> Any:
        return [meet(k % 3, (k, index()), lambda values: [values] * 2) for k in range(100)]

    expected = [[(k, 0), (k, 1)] for k in range(100)]
    assert replicas(call, call) == [expected, expected]


def test_a_single_replica_meets_itself() -> None:
    assert replicas(lambda: meet("key", 3, lambda values: [v + 1 for v in values])) == [4]


def test_nested_calls_have_their_own_meeting_point() -> None:
    def inner() -> Any:
        return meet("key", index(), lambda values: [sum(values)] * len(values))

    def outer() -> Any:
        return replicas(inner, inner, inner), meet("key", 10, lambda v: [sum(v)] * len(v))

    assert replicas(outer, outer) == [([3, 3, 3], 20)] * 2


# --- failures: nobody hangs, and the next call works -----------------------------------------


def ended_within(seconds: float, call: Callable[[], Any]) -> None:
    begin = time.monotonic()
    call()
    assert time.monotonic() - begin < seconds, "the waiting replicas were not released"
    assert replicas(lambda: meet("again", 1), lambda: meet("again", 2)) == [1, 2]


def test_a_replica_that_raises_releases_the_others_and_its_error_is_raised() -> None:
    seen: list[BaseException] = []

    def waits() -> None:
        try:
            meet("statistics", 0)
        except RendezvousError as error:
            seen.append(error)
            raise

    def fails() -> None:
        time.sleep(0.05)
        raise KeyError("broken")

    def call() -> None:
        with pytest.raises(KeyError, match=r"(?s)broken.*in replica 2 on device cpu"):
            replicas(waits, waits, fails)

    ended_within(10, call)
    assert len(seen) == 2
    assert all("'statistics'" in str(e) and "replica 2 failed" in str(e) for e in seen)


def test_a_replica_that_returns_without_coming_is_named() -> None:
    def call() -> None:
        with pytest.raises(RendezvousError, match="'key' needs all 3 replicas, but replica 1 ret"):
            replicas(lambda: meet("key", 0), int, lambda: meet("key", 0))

    ended_within(10, call)


def test_a_replica_that_comes_after_another_has_left_fails_at_once() -> None:
    def late() -> None:
        time.sleep(0.05)
        meet("key", 0)

    def call() -> None:
        with pytest.raises(RendezvousError, match="replica 0 returned without coming"):
            replicas(int, late)

    ended_within(10, call)


def test_different_keys_at_the_same_time_are_both_named() -> None:
    def call() -> None:
        with pytest.raises(RuntimeError, match="came to the meeting") as caught:
            replicas(lambda: meet("first", 0), lambda: meet("second", 0), lambda: meet("first", 0))
        assert "'first'" in str(caught.value)
        assert "'second'" in str(caught.value)

    ended_within(10, call)


def test_a_replica_that_does_not_come_in_time_is_named() -> None:
    ready = threading.Event()

    def call() -> None:
        with pytest.raises(
            TimeoutError, match=r"meeting for 'key': replica 1 did not come within 0.2 s"
        ):
            replicas(lambda: meet("key", 0, timeout=0.2), lambda: ready.wait(1.0))

    ended_within(10, call)


def test_replica_0_that_does_not_come_in_time_is_named() -> None:
    def call() -> None:
        with pytest.raises(TimeoutError, match="replicas 0, 2 did not come"):
            replicas(
                lambda: time.sleep(0.8),
                lambda: meet("key", 0, timeout=0.2),
                lambda: time.sleep(0.8),
            )

    ended_within(10, call)


def test_an_error_in_combine_is_raised_in_all() -> None:
    seen: list[str] = []

    def combine(values: list[Any]) -> list[Any]:
        raise ArithmeticError("no result")

    def waits() -> None:
        try:
            meet("key", 0, combine)
        except BaseException as error:
            seen.append(f"{type(error).__name__}: {error}")
            raise

    def call() -> None:
        with pytest.raises(ArithmeticError, match="no result\nin replica 0 on device cpu"):
            replicas(waits, waits, waits)

    ended_within(10, call)
    assert sorted(seen) == [
        "ArithmeticError: no result",
        "RendezvousError: combine for 'key' failed",
        "RendezvousError: combine for 'key' failed",
    ]


def test_closing_releases_who_waits_and_who_comes_later() -> None:
    found: list[Rendezvous | None] = []

    def aborts() -> None:
        time.sleep(0.05)
        rendezvous = current_rendezvous()
        found.append(rendezvous)
        assert rendezvous is not None
        rendezvous.close("the call was interrupted")
        with pytest.raises(RendezvousError, match="the call was interrupted"):
            meet("key", 0)

    def waits() -> None:
        with pytest.raises(RendezvousError, match="the call was interrupted"):
            meet("key", 0)

    ended_within(10, lambda: replicas(waits, aborts))


def test_a_caught_failure_leaves_no_meeting_open() -> None:
    def call() -> Any:
        with contextlib.suppress(RuntimeError):
            meet(("different", index()), 0)
        return meet("same", index(), lambda values: [sum(values)] * 2)

    assert replicas(call, call) == [1, 1]


def test_exchange_outside_of_the_call_is_an_error() -> None:
    with pytest.raises(AssertionError, match="replicas of one call meet"):
        Rendezvous(2).exchange("key", 0, list)
