"""The meeting point of the replicas of one call."""

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


def test_nested_calls_have_their_own_meeting_point() -> None:
    def inner() -> Any:
        return meet("key", index(), lambda values: [sum(values)] * len(values))

    def outer() -> Any:
        return replicas(inner, inner, inner), meet("key", 10, lambda v: [sum(v)] * len(v))

    assert replicas(outer, outer) == [([3, 3, 3], 20)] * 2


# --- failures: nobody hangs, and the next call works -----------------------------------------


def raises(error: BaseException, seconds: float = 0.05) -> Callable[[], None]:
    def call() -> None:
        time.sleep(seconds)
        raise error

    return call


def comes(key: str = "key", **options: Any) -> Callable[[], None]:
    return lambda: meet(key, 0, **options)


def comes_late() -> None:
    time.sleep(0.05)
    meet("key", 0)


def no_result(values: list[Any]) -> list[Any]:
    raise ArithmeticError("no result")


def closes() -> None:
    time.sleep(0.05)
    rendezvous = current_rendezvous()
    assert rendezvous is not None
    rendezvous.close("the call was interrupted")
    meet("key", 0)


FAILURES: dict[str, tuple[list[Callable[[], Any]], type[BaseException], str]] = {
    "raised": (
        [comes(), comes(), raises(KeyError("broken"))],
        KeyError,
        r"(?s)broken.*in replica 2 on device cpu",
    ),
    "returned": ([comes(), int, comes()], RendezvousError, "'key' needs all 3 .*replica 1 ret"),
    "came late": (
        [int, comes_late],
        RendezvousError,
        "replica 0 returned without coming",
    ),
    "other keys": (
        [comes("first"), comes("second"), comes("first")],
        RuntimeError,
        "(?s)(?=.*'first')(?=.*'second').*came to the meeting",
    ),
    "too late": (
        [comes(timeout=0.2), lambda: time.sleep(0.6)],
        TimeoutError,
        r"meeting for 'key': replica 1 did not come within 0.2 s",
    ),
    "replica 0 too late": (
        [lambda: time.sleep(0.6), comes(timeout=0.2), lambda: time.sleep(0.6)],
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


def test_who_waits_is_told_which_replica_failed() -> None:
    seen: list[BaseException] = []

    def waits() -> None:
        try:
            meet("statistics", 0)
        except RendezvousError as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="broken"):
        replicas(waits, waits, raises(KeyError("broken")))
    assert len(seen) == 2
    assert all("'statistics'" in str(e) and "replica 2 failed" in str(e) for e in seen)


def test_a_caught_failure_leaves_no_meeting_open() -> None:
    def call() -> Any:
        with contextlib.suppress(RuntimeError):
            meet(("different", index()), 0)
        return meet("same", index(), lambda values: [sum(values)] * 2)

    assert replicas(call, call) == [1, 1]


def test_outside_of_a_call_there_is_none() -> None:
    assert current_rendezvous() is None
    with pytest.raises(AssertionError, match="replicas of one call meet"):
        Rendezvous(2).exchange("key", 0, list)
