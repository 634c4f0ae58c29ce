"""A rank that fails is named to all others within a second, wherever it was."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import collectives
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.failures import Failures
from tests.cluster import Cluster, RankDied
from tests.process_groups import new_group

RANKS = 4
FAILS = 2
# A second, and what a busy machine takes besides.
LIMIT = 4.0


def fail(how: str) -> None:
    """End this process, or raise an error."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("a bad batch")


class Fails(nn.Module):
    """A layer that fails in its forward, or in the backward of its output, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.where = ""
        self.how = "raised"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            fail(self.how)
        output: torch.Tensor = self.linear(x)
        if self.where == "backward":
            output.register_hook(lambda _: fail(self.how))
        return output


def step(model: Any, value: float, group: dist.ProcessGroup | None = None) -> float:
    """Make a step, with a collective of the user if there is a group; return a gradient."""
    model.zero_grad()
    loss = model(torch.full((1, 4), value)).sum()
    if group is not None:
        if model.module.where == "a collective":
            fail(model.module.how)
        loss = loss * collectives.all_reduce(torch.ones(()), "avg", group)
    loss.backward()
    gradient: float = model.module.linear.weight.grad[0, 0].item()
    return gradient


def train(rank: int, world_size: int, where: str, how: str) -> tuple[str, float]:
    """Return the error that a surviving rank catches, and the seconds until then."""
    model = dp.DistributedDataParallel(Fails(), ["cpu"], timeout=60.0)
    # Gloo ends what is left in a group of the user's only when the time of that group is over.
    short = new_group(timeout=datetime.timedelta(seconds=2 * LIMIT))
    group = short if where == "a collective" else None
    step(model, float(rank), group)
    # Nobody is still in the good step.
    dist.barrier()
    started = time.monotonic()
    if rank == FAILS:
        model.module.where, model.module.how = where, how
        with contextlib.suppress(ZeroDivisionError), dp.telling_failures("a test"):
            if where == "between steps":
                fail(how)
            step(model, float(rank), group)
        model.module.where = text = ""
    else:
        with pytest.raises((CollectiveError, CollectiveTimeout, RuntimeError)) as caught:
            step(model, float(rank), group)
        failure: Any = getattr(caught.value, "failure", None)
        assert how == "raised" or (failure.rank, failure.kind) == (FAILS, "ended")
        text = str(caught.value)
    seconds = time.monotonic() - started
    if how == "raised":
        assert step(model, float(rank)) == 1.5, "the step after it is right"
    return text, seconds


@pytest.mark.parametrize("how", ["raised", "killed"])
@pytest.mark.parametrize("where", ["forward", "backward", "a collective", "between steps"])
def test_every_survivor_names_the_rank_at_once(cluster: Cluster, where: str, how: str) -> None:
    results: list[Any] = cluster.run(train, RANKS, where, how, timeout=30.0, expect_errors=True)
    assert isinstance(results.pop(FAILS), RankDied if how == "killed" else tuple)
    for found in results:
        assert isinstance(found, tuple), repr(found)
        text, seconds = found
        assert seconds < LIMIT, found
        assert f"rank {FAILS}" in text
        assert how == "killed" or "ZeroDivisionError: a bad batch" in text
        assert ("start all processes again" in text) == (how == "killed"), text


def stop_a_rank(rank: int, world_size: int, timeout: float) -> tuple[str, float]:
    """Rank 1 is stopped in a step; what rank 0 catches, and when."""
    model = dp.DistributedDataParallel(nn.Linear(4, 3), ["cpu"], timeout=timeout)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    stopped = torch.tensor([os.getpid()])
    dist.broadcast(stopped, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", 0.0
    started = time.monotonic()
    try:
        with pytest.raises(CollectiveTimeout) as caught:
            model(x).sum().backward()
        return str(caught.value), time.monotonic() - started
    finally:
        os.kill(int(stopped), signal.SIGCONT)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_silent_rank_is_named_when_the_time_is_over(cluster: Cluster) -> None:
    text, seconds = cluster.run(stop_a_rank, 2, 1.0)[0]
    assert "rank 1 did not come" in text
    assert "all_reduce of bucket 0 (bias .. weight) (collective " in text
    assert 0.9 < seconds < 1.0 + LIMIT


def count_requests(rank: int, world_size: int) -> int:
    """Count the requests of a training to the store once its first steps are over."""
    model = dp.DistributedDataParallel(nn.Linear(4, 3), ["cpu"])
    x = torch.ones(2, 4)
    for _ in range(4):
        model(x).sum().backward()
    with mock.patch.object(Failures, "ask", side_effect=AssertionError) as ask:
        for _ in range(3):
            model(x).sum().backward()
    return ask.call_count


def test_a_steady_step_asks_no_store(cluster: Cluster) -> None:
    assert cluster.run(count_requests, 2) == [0, 0]


def fails_twice(rank: int, world_size: int) -> list[str]:
    """Return the errors of a rank when rank 1 has raised, and then another one ends."""
    model = dp.DistributedDataParallel(Fails(), ["cpu"], timeout=60.0)
    step(model, 1.0)
    processes = torch.zeros(world_size, dtype=torch.int64)
    processes[rank] = os.getpid()
    dist.all_reduce(processes)
    model.module.where = "forward" if rank == 1 else ""
    with contextlib.suppress(ZeroDivisionError, CollectiveError):
        step(model, 1.0)
    model.module.where = ""
    if rank == FAILS:
        fail("killed")
    # It has ended before anybody wants new links.
    stat = pathlib.Path(f"/proc/{processes[FAILS]}/stat")
    with contextlib.suppress(OSError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    texts = []
    for _ in range(2):
        with pytest.raises(CollectiveError) as caught:
            step(model, 1.0)
        texts.append(str(caught.value))
    return texts


def test_a_rank_that_ends_is_named_although_another_had_raised(cluster: Cluster) -> None:
    results = cluster.run(fails_twice, RANKS, timeout=30.0, expect_errors=True)
    assert isinstance(results.pop(FAILS), RankDied)
    for texts in results:
        assert isinstance(texts, list), str(texts)
        assert all(f"rank {FAILS} (" in text and "has ended" in text for text in texts), texts


def fail_in_steps(
    rank: int, world_size: int, faults: list[tuple[int, int, str]], handling: bool
) -> dict[int, float]:
    """By step, the gradient: the number of the step, where all ranks were in it.

    ``handling``: whether later steps are made while an error of an earlier one is handled.
    """
    model = dp.DistributedDataParallel(Fails(), ["cpu"], timeout=5.0)
    # All failures are told over its group, too, and must be counted once there.
    other = dp.DistributedDataParallel(Fails(), ["cpu"], process_group=new_group(), timeout=5.0)
    found = {}

    def make_steps(numbers: Iterator[int]) -> None:
        for number in numbers:
            how = {place for who, when, place in faults if (who, when) == (rank, number)}
            model.module.where = "forward" if "forward" in how else ""
            try:
                with dp.telling_failures("a test"):
                    if "between steps" in how:
                        fail("raised")
                    if "backward" in how:
                        model.module.where = "backward"
                    if "arguments" in how:
                        model()
                    gradient = step(model, float(number))
                    step(other, 1.0)
            except (ZeroDivisionError, CollectiveError, TypeError, ValueError):
                if handling:
                    make_steps(numbers)
                continue
            found[number] = gradient

    make_steps(iter(range(7)))
    return found


@pytest.mark.parametrize(
    ("faults", "handling"),
    [
        ([(0, 2, "forward"), (0, 3, "between steps")], False),
        ([(0, 2, "backward"), (0, 3, "between steps"), (0, 4, "arguments")], False),
        ([(0, 2, "between steps"), (1, 2, "between steps"), (1, 3, "between steps")], False),
        ([(0, 2, "forward"), (1, 3, "between steps"), (0, 3, "arguments")], False),
        ([(0, 1, "forward"), (0, 2, "forward"), (0, 3, "backward"), (1, 5, "forward")], True),
        ([(0, 1, "forward"), (0, 2, "between steps"), (1, 4, "between steps")], True),
    ],
)
def test_ranks_stay_in_step_when_one_fails_again(
    cluster: Cluster, faults: list[tuple[int, int, str]], handling: bool
) -> None:
    failed = {number for _, number, _ in faults}
    right = {number: float(number) for number in range(7) if number not in failed}
    assert cluster.run(fail_in_steps, 2, faults, handling, timeout=30.0) == [right, right]


def swap_wrappers(rank: int, world_size: int) -> tuple[str, list[float]]:
    """Return the error when rank 1 takes another wrapper first, and then the gradients of both."""
    models = [dp.DistributedDataParallel(Fails(), ["cpu"], timeout=5.0) for _ in range(2)]
    for model in models:
        step(model, 1.0)
    models[0].module.where = "forward" if rank == 0 else ""
    with contextlib.suppress(ZeroDivisionError, CollectiveError):
        step(models[0], 1.0)
    models[0].module.where = ""
    with pytest.raises(RuntimeError, match="different wrappers") as caught:
        step(models[rank], 1.0)
    return str(caught.value), [step(model, i + 1.0) for i, model in enumerate(models)]


def test_two_wrappers_do_not_meet_in_another_order_after_a_failure(cluster: Cluster) -> None:
    for text, sums in cluster.run(swap_wrappers, 2, timeout=30.0):
        assert "rank 0 with control/1.1.1; rank 1 with control/1.1.2" in text
        assert sums == [1.0, 2.0]
