"""A rank that fails is named to all others within a second, wherever it was."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import collectives
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout, Failures
from tests.cluster import Cluster, RankDied
from tests.process_groups import new_group

RANKS = 4
FAILS = 2
# A second, and what a busy machine takes besides.
LIMIT = 4.0
PLACES = ("forward", "backward", "a collective", "between steps")


class Found(NamedTuple):
    """What a rank that survives has caught."""

    text: str
    rank: int | None
    kind: str
    seconds: float


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
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            fail(self.how)
        output: torch.Tensor = self.linear(x)
        if self.where == "backward":
            output.register_hook(lambda _: fail(self.how))
        return output


def step(model: Any, rank: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """One step, with a collective of the user's if there is a group for it; the gradient."""
    model.zero_grad()
    loss = model(torch.full((2, 4), float(rank + 1))).sum()
    if group is not None:
        if model.module.where == "a collective":
            fail(model.module.how)
        loss = loss * collectives.all_reduce(torch.ones(()), "avg", group)
    loss.backward()
    gradient: torch.Tensor = model.module.linear.weight.grad.clone()
    return gradient


def train(rank: int, world_size: int, where: str, how: str) -> Found | bool:
    """Whether the step after the failure is right, in the rank that fails; what others catch."""
    model = dp.DistributedDataParallel(Fails(), ["cpu"], timeout=60.0)
    # Gloo ends what is left in a group of the user's only when the time of that group is over.
    short = new_group(timeout=datetime.timedelta(seconds=2 * LIMIT))
    group = short if where == "a collective" else None
    good = step(model, rank, group)
    # Nobody is still in the good step.
    dist.barrier()
    found = None
    started = time.monotonic()
    if rank == FAILS:
        model.module.where, model.module.how = where, how
        with contextlib.suppress(ZeroDivisionError), dp.telling_failures("a test"):
            if where == "between steps":
                fail(how)
            step(model, rank, group)
        model.module.where = ""
    else:
        try:
            step(model, rank, group)
            raise AssertionError("the step has ended")
        except (CollectiveError, CollectiveTimeout, RuntimeError) as error:
            failure = getattr(error, "failure", None)
            seconds = time.monotonic() - started
            found = Found(
                str(error),
                None if failure is None else failure.rank,
                "" if failure is None else failure.kind,
                seconds,
            )
    if how == "raised":
        again = torch.equal(step(model, rank), good)
        assert again, "the step after it is right"
        if found is None:
            return True
    assert found is not None
    return found


@pytest.mark.parametrize("how", ["raised", "killed"])
@pytest.mark.parametrize("where", PLACES)
def test_every_survivor_names_the_rank_at_once(cluster: Cluster, where: str, how: str) -> None:
    results: list[Any]
    if how == "raised":
        results = [*cluster.run(train, RANKS, where, how, timeout=30.0)]
    else:
        results = [*cluster.run(train, RANKS, where, how, timeout=30.0, expect_errors=True)]
    for rank, found in enumerate(results):
        if rank == FAILS:
            assert found is True if how == "raised" else isinstance(found, RankDied), found
            continue
        assert isinstance(found, Found), str(found)
        assert found.seconds < LIMIT, found
        assert f"rank {FAILS}" in found.text, found.text
        if how == "killed":
            assert (found.rank, found.kind) == (FAILS, "ended"), found
        else:
            assert "ZeroDivisionError: a bad batch" in found.text, found.text


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
    text, seconds = cluster.run(stop_a_rank, 2, 2.0)[0]
    assert "rank 1 did not come" in text
    assert "all_reduce of bucket 0 (bias .. weight) (collective " in text
    assert 1.9 < seconds < 2.0 + LIMIT


def count_requests(rank: int, world_size: int) -> int:
    """How often a training asks the store once its first steps are over."""
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
    """What a rank catches when rank 1 has raised, and then another one ends."""
    model = dp.DistributedDataParallel(Fails(), ["cpu"], timeout=60.0)
    step(model, rank)
    model.module.where = "forward" if rank == 1 else ""
    with contextlib.suppress(ZeroDivisionError, CollectiveError):
        step(model, rank)
    model.module.where = ""
    if rank == FAILS:
        fail("killed")
    # So that it has ended before anybody wants new links.
    time.sleep(1.0)
    texts = []
    for _ in range(2):
        with pytest.raises(CollectiveError) as caught:
            step(model, rank)
        texts.append(str(caught.value))
    return texts


def test_a_rank_that_ends_is_named_although_another_had_raised(cluster: Cluster) -> None:
    results = cluster.run(fails_twice, RANKS, timeout=30.0, expect_errors=True)
    assert isinstance(results.pop(FAILS), RankDied)
    for texts in results:
        assert isinstance(texts, list), str(texts)
        assert all(f"rank {FAILS} (" in text and "has ended" in text for text in texts), texts


def gradient_of(model: Any) -> float:
    """The first number of the gradient of its weight."""
    first: float = model.module.linear.weight.grad[0, 0].item()
    return first


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
            model.module.where, model.module.how = "forward" if "forward" in how else "", "raised"
            try:
                with dp.telling_failures("a test"):
                    if "between steps" in how:
                        fail("raised")
                    if "backward" in how:
                        model.module.where = "backward"
                    arguments = () if "arguments" in how else (torch.full((1, 4), float(number)),)
                    model.zero_grad()
                    model(*arguments).sum().backward()
                    other(torch.ones(1, 4)).sum().backward()
            except (ZeroDivisionError, CollectiveError, TypeError, ValueError):
                if handling:
                    make_steps(numbers)
                continue
            found[number] = gradient_of(model)

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


def swap_wrappers(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """What is caught when rank 1 takes another wrapper first; then the gradients of both."""
    models = [dp.DistributedDataParallel(Fails(), ["cpu"], timeout=5.0) for _ in range(2)]
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    models[0].module.where, models[0].module.how = "forward" if rank == 0 else "", "raised"
    with contextlib.suppress(ZeroDivisionError, CollectiveError):
        models[0](torch.ones(1, 4)).sum().backward()
    models[0].module.where = ""
    texts, sums = [], []
    with pytest.raises(RuntimeError, match="different wrappers") as caught:
        models[rank](torch.ones(1, 4)).sum().backward()
    texts.append(str(caught.value))
    for number, model in enumerate(models, start=1):
        model.zero_grad()
        model(torch.full((1, 4), float(number))).sum().backward()
        sums.append(gradient_of(model))
    return texts, sums


def test_two_wrappers_do_not_meet_in_another_order_after_a_failure(cluster: Cluster) -> None:
    for texts, sums in cluster.run(swap_wrappers, 2, timeout=30.0):
        assert "rank 0 with control/1.1.1; rank 1 with control/1.1.2" in texts[0]
        assert sums == [1.0, 2.0]
