"""Communication hooks that fail in a training: who is told, and that the next step is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from dataparallel.reducer.builtin_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import keep_group
from tests.comm_hook_training_cases import SMALL, batch, net


class HookError(Exception):
    pass


def raises(bucket: Any) -> Future[Tensor]:
    raise HookError("no")


def fails_later(bucket: Any) -> Future[Tensor]:
    def fail(done: Any) -> Tensor:
        raise HookError("no")

    future: Future[Tensor] = allreduce_hook(None, bucket).then(fail)
    return future


def never_completes(bucket: Any) -> Future[Tensor]:
    return Future()


def returns_less(bucket: Any) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer()[1:])
    return future


FAILURES: dict[str, tuple[Callable[[Any], Future[Tensor]], type[Exception], str]] = {
    "raises": (raises, HookError, "no\nin the communication hook for bucket 1 ("),
    "fails later": (fails_later, RuntimeError, "HookError: no"),
    "never completes": (never_completes, TimeoutError, "did not finish bucket 1 ("),
    "returns less": (returns_less, ValueError, "bucket 1 ("),
}


def recovers(
    rank: int, world_size: int, name: str, replicas: int, *ranks: int
) -> tuple[str, float, list[Tensor]]:
    """A hook fails once, in the second step and the second bucket, on some ranks."""
    keep_group()
    failure, kind, _ = FAILURES[name]
    if rank not in ranks:
        kind = RuntimeError
    state = {"step": 0, "failed": 0}

    def hook(state: dict[str, int], bucket: Any) -> Future[Tensor]:
        now = state["step"] == 1 and bucket.index() == 1 and not state["failed"]
        if now and rank in ranks:
            state["failed"] = 1
            return failure(bucket)
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(
        net(), ["cpu"] * replicas, bucket_cap_mb=SMALL, timeout=1.0 if "never" in name else 20.0
    )
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text, took = "", 0.0
    for step in range(4):
        state["step"] = step
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        begin = time.monotonic()
        try:
            loss.backward()
        except kind as error:
            assert step == 1
            text, took = str(error), time.monotonic() - begin
            continue
        optimizer.step()
    model.close()
    return text, took, [p.detach().clone() for p in model.parameters()]


def without_second_step(rank: int, world_size: int) -> list[Tensor]:
    model = TorchsDDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_the_step_after_a_failure_is_right(cluster: Cluster, name: str, replicas: int) -> None:
    expected = cluster.run(without_second_step, 2)
    for rank, (text, took, results) in enumerate(cluster.run(recovers, 2, name, replicas, 0, 1)):
        assert FAILURES[name][2] in text
        assert took < 10
        torch.testing.assert_close(results, expected[rank], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_that_raises_on_one_rank(cluster: Cluster, replicas: int) -> None:
    expected = cluster.run(without_second_step, 2)
    first, second = cluster.run(recovers, 2, "raises", replicas, 1)
    assert "rank 1" in first[0], "the others are not told who has failed"
    assert FAILURES["raises"][2] in second[0]
    assert max(first[1], second[1]) < 10
    torch.testing.assert_close([first[2], second[2]], expected, rtol=2e-5, atol=2e-5)
