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
from dataparallel.comm_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import SMALL, batch, keep_group, net

#: Torch's types do not tell that this is the default group.
ALL: Any = None


class HookError(Exception):
    pass


def raises(bucket: Any) -> Future[Tensor]:
    raise HookError("no")


def fails_later(bucket: Any) -> Future[Tensor]:
    def fail(done: Any) -> Tensor:
        raise HookError("no")

    future: Future[Tensor] = allreduce_hook(ALL, bucket).then(fail)
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
    "never completes": (never_completes, TimeoutError, "the future of the communication hook "),
    "returns less": (returns_less, ValueError, "bucket 1 ("),
}


def recovers(
    rank: int, world_size: int, name: str, replicas: int, ranks: tuple[int, ...], index: int = 1
) -> tuple[str, float, list[Tensor]]:
    """A hook fails once, in the second step and on some ranks, by default in the second bucket."""
    keep_group()
    failure, kind, _ = FAILURES[name]
    if rank not in ranks:
        kind = RuntimeError
    state = {"step": 0, "failed": 0}

    def hook(state: dict[str, int], bucket: Any) -> Future[Tensor]:
        now = state["step"] == 1 and bucket.index() == index and not state["failed"]
        if now and rank in ranks:
            state["failed"] = 1
            return failure(bucket)
        return allreduce_hook(ALL, bucket)

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
    for rank, (text, took, results) in enumerate(cluster.run(recovers, 2, name, replicas, (0, 1))):
        assert FAILURES[name][2] in text
        assert took < 10
        torch.testing.assert_close(results, expected[rank], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_hook_that_raises_on_one_rank(cluster: Cluster, index: int, replicas: int) -> None:
    """In any bucket: the last one is sent nevertheless, since the others wait for it."""
    expected = cluster.run(without_second_step, 2)
    first, second = cluster.run(recovers, 2, "raises", replicas, (1,), index)
    assert "rank 1" in first[0], "the others are not told who has failed"
    assert f"no\nin the communication hook for bucket {index} (" in second[0]
    assert max(first[1], second[1]) < 10
    torch.testing.assert_close([first[2], second[2]], expected, rtol=2e-5, atol=2e-5)


def _fails_for_good(rank: int, world_size: int, kind: type[BaseException]) -> list[str]:
    """What each of four steps ends with, where a hook fails on rank 1 in the first."""
    keep_group()
    step = 0

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        if rank == 1 and step == 0:
            raise kind("no")
        return allreduce_hook(ALL, bucket)

    model = DistributedDataParallel(nn.Linear(3, 2, bias=False), ["cpu"], timeout=30.0)
    model.register_comm_hook(None, hook)
    found = []
    for step in range(4):
        if step == 3:
            # What is made anew is not forgotten.
            model.close()
        model.zero_grad()
        began = time.monotonic()
        try:
            model(torch.full((1, 3), 10.0**step)).sum().backward()
        except (Exception, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error}")
            # Before the time limit of a collective, and of the hook.
            assert time.monotonic() - began < 5.0
        else:
            (gradient,) = (p.grad for p in model.parameters())
            assert gradient is not None
            found.append(str(gradient[0, 0].item()))
    model.close()
    return found


@pytest.mark.parametrize("kind", [HookError, KeyboardInterrupt])
def test_a_hook_that_sends_no_zeros_either(cluster: Cluster, kind: type[BaseException]) -> None:
    """Rank 0 has begun a collective, and rank 1 has none for it: nothing may be matched with it."""
    first, second = cluster.run(_fails_for_good, 2, kind, timeout=120)
    for texts in (first, second):
        assert len(texts) == 4
        assert all(": " in text for text in texts), "results of different steps were added"
        for text in texts[1:]:
            assert text.startswith("CollectiveError: ")
            assert "s: rank 1 (" in text and "collectives of a communication hook that no" in text
            assert "; start all processes again" in text
    assert "CollectiveError" in first[0] and "rank 1" in first[0]
    assert f"{kind.__name__}: no" in first[0] and f"{kind.__name__}: no" in second[0]
