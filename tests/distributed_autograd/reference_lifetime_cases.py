"""How long values of other workers live, and many who wait for one."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from dataparallel.distributed_autograd.references import RRef, remote
from tests.distributed_autograd.reference_cases import (
    OTHER,
    THIRD,
    Layer,
    open_gate,
    oracle,
    reset_gate,
    wait_for_gate,
)

#: What functions leave on the worker that they run on.
SEEN: list[Any] = []
KEPT: list[RRef[Any]] = []


def make_watched() -> Layer:
    layer = Layer(1.0)
    SEEN.append(weakref.ref(layer))
    return layer


def watched_alive() -> int:
    gc.collect()
    return sum(each() is not None for each in SEEN)


def value_lives_as_long_as_its_references() -> None:
    rref = remote(OTHER, make_watched)
    kept = rpc_async(THIRD, keep, (rref,))
    kept.wait()
    del rref, kept
    assert rpc_sync(OTHER, watched_alive) == 1
    assert rpc_sync(THIRD, kept_value_is_there)
    rpc_sync(THIRD, forget_kept)
    deadline = time.monotonic() + 10
    while rpc_sync(OTHER, watched_alive):
        assert time.monotonic() < deadline, "the value is still alive"


def keep(rref: RRef[Any]) -> None:
    KEPT.append(rref)


def kept_value_is_there() -> bool:
    return bool(KEPT[0].rpc_sync().forward(torch.ones(3)).shape == (3,))


def forget_kept() -> None:
    KEPT.clear()


def many_waiters_leave_the_owner_its_threads() -> None:
    """More than the owner has threads; then it can still serve the call that lets them go."""
    rpc_sync(OTHER, reset_gate)
    w = torch.randn(3, requires_grad=True)
    with context() as context_id:
        rref = remote(OTHER, wait_for_gate, (w,))
        total = rpc_sync(THIRD, many_sines, (rref, 80))
        backward(context_id, [total.sum()])
        expected = oracle(lambda w: 80 * (3 * w).sin(), w)
        torch.testing.assert_close(get_gradients(context_id)[w], expected[0], rtol=1e-5, atol=1e-5)


def many_sines(rref: RRef[torch.Tensor], count: int) -> torch.Tensor:
    futures = [rref.rpc_async().sin() for _ in range(count)]
    rpc_sync(OTHER, open_gate, timeout=10)
    total: torch.Tensor = sum(future.wait() for future in futures)
    return total


LIFETIME = (
    value_lives_as_long_as_its_references,
    many_waiters_leave_the_owner_its_threads,
)
