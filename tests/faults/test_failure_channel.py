"""A process that fails is known to the others, and they go on once it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from tests.cluster import Cluster
from tests.faults.harness import Figures

Found = dict[str, Any]


class Sometimes(nn.Module):
    """A layer whose forward raises an error when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ZeroDivisionError("a bad batch")
        return torch.as_tensor(self.linear(x))


def step(model: Any, rank: int) -> torch.Tensor:
    """One step; the gradient of the weight."""
    model.zero_grad()
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    gradient: torch.Tensor = model.module.linear.weight.grad.clone()
    return gradient


def caught(model: Any, rank: int) -> Found:
    """What a step raised, and after how many seconds."""
    begin = time.monotonic()
    try:
        step(model, rank)
    except (CollectiveError, CollectiveTimeout) as error:
        place = None if error.place is None else (error.place.operation, error.place.what)
        seconds = time.monotonic() - begin
        return {"text": str(error), "failure": error.failure, "place": place, "seconds": seconds}
    return {}


def raise_in_forward(rank: int, world_size: int, where: str, repeats: int) -> list[Found]:
    model = dataparallel.DistributedDataParallel(Sometimes(), ["cpu"], timeout=30.0)
    found = []
    for _ in range(repeats):
        good = step(model, rank)
        if rank == 1:
            model.module.fails = where == "forward"
            with contextlib.suppress(ZeroDivisionError), dataparallel.telling_failures("a test"):
                output = model(torch.ones(2, 4))
                raise ZeroDivisionError(f"no loss of {tuple(output.shape)}")
            model.module.fails = False
            answer: Found = {}
        else:
            answer = caught(model, rank)
        # All meet at the next forward, and the step is right.
        answer["equal"] = torch.equal(step(model, rank), good)
        found.append(answer)
    model.close()
    return found


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_rank_that_raised_and_lives(
    cluster: Cluster, where: str, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=2, long=50)
    results = cluster.run(raise_in_forward, 3, where, count, timeout=600.0)
    assert all(one["equal"] for found in results for one in found)
    message = "a bad batch" if where == "forward" else "no loss of (2, 3)"
    for rank in (0, 2):
        for one in results[rank]:
            failure = one["failure"]
            assert failure.rank == 1 and failure.kind == "raised"
            assert failure.message.startswith(f"ZeroDivisionError: {message}")
            assert failure.doing == ("forward" if where == "forward" else "a test")
            assert "raise ZeroDivisionError(" in failure.traceback
            assert failure.pid and failure.host and message in one["text"]
            assert one["place"] is not None
    worst = max(one["seconds"] for rank in (0, 2) for one in results[rank])
    figures.record(
        goal=6,
        what=f"a rank that raised in {where} and lives: others have its error, p100",
        value=worst,
        unit="s",
        limit=2.0,
        repeats=count,
        baseline="the whole timeout",
    )


def kill_a_rank(rank: int, world_size: int) -> Found:
    model = dataparallel.DistributedDataParallel(Sometimes(), ["cpu"], timeout=30.0)
    step(model, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(model, rank)


def test_a_rank_that_is_killed(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=2, long=100)
    worst = 0.0
    for _ in range(count):
        results = cluster.run(kill_a_rank, 3, timeout=60.0, expect_errors=True)
        for rank in (0, 2):
            found = results[rank]
            assert isinstance(found, dict), found
            assert (found["failure"].rank, found["failure"].kind) == (1, "ended"), found["text"]
            worst = max(worst, found["seconds"])
    figures.record(
        goal=4,
        what="a killed rank: each survivor has an error that names it, p100",
        value=worst,
        unit="s",
        limit=1.0,
        repeats=count,
        baseline="0.03 s, unnamed",
    )


def stop_a_rank(rank: int, world_size: int, timeout: float) -> Found:
    model = dataparallel.DistributedDataParallel(Sometimes(), ["cpu"], timeout=timeout)
    step(model, rank)
    stopped = torch.tensor([os.getpid()])
    torch.distributed.broadcast(stopped, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    try:
        return caught(model, rank)
    finally:
        os.kill(int(stopped), signal.SIGCONT)


def test_a_rank_that_is_stopped(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures
) -> None:
    timeout = 3.0
    count = repeats(quick=1, long=10)
    worst = 0.0
    for _ in range(count):
        found = cluster.run(stop_a_rank, 2, timeout)[0]
        assert "rank 1 did not come (no sign of life for " in found["text"], found["text"]
        assert "bucket 0 (linear.bias .. linear.weight)" in found["text"]
        assert "(collective " in found["text"]
        worst = max(worst, found["seconds"] - timeout)
    figures.record(
        goal=5,
        what="a stopped rank: time beyond the timeout until it is named with bucket and number",
        value=worst,
        unit="s",
        limit=0.5,
        repeats=count,
        baseline="0 s beyond 1800 s, unnamed",
    )
