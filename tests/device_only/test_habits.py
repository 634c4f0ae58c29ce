"""Habits of NCCL that a process has to live with: waits without end, a watchdog, one order."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import collectives
from dataparallel.comm import link
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.link import ProcessLink
from dataparallel.reducer.verify import ReplicaMismatch
from tests.cluster import Cluster
from tests.device_only.backend import set_habits, take_records
from tests.device_only.cases import make_net, mean_loss, optimizer_of, share, steps, wrap

LOST = (CollectiveError, CollectiveTimeout)

# --- the stand-in itself --------------------------------------------------------------------------


def launch_different(rank: int, size: int) -> str:
    here = f"virtual:{rank}"
    dist.all_reduce(torch.ones(2, device=here))
    tensor = torch.ones(2 + rank, device=here)
    work = (
        dist.all_reduce(tensor, async_op=True) if rank else dist.broadcast(tensor, 0, async_op=True)
    )
    assert work is not None
    while not work.is_completed():
        time.sleep(0.01)
    return str(work.exception())


def test_different_collectives_are_named(cluster: Cluster) -> None:
    for text in cluster.run(launch_different, 2, virtual=True, backend="vccl"):
        assert "number 1 of '0'" in text
        assert "BROADCAST from rank 0 of Float [2]" in text and "ALLREDUCE" in text


def launch_in_two_orders(rank: int, size: int, alike: bool) -> None:
    here = f"virtual:{rank}"
    # Torch declares that a process may be no member.
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device=here), group=group)
    for group in groups if rank == 0 or alike else reversed(groups):
        dist.all_reduce(torch.ones(1, device=here), group=group, async_op=True)
    torch.accelerator.synchronize(torch.device(here))


def test_two_orders_over_two_communicators_are_named(cluster: Cluster) -> None:
    cluster.run(launch_in_two_orders, 2, True, virtual=True, backend="vccl")
    named = r"rank 0 launches ALLREDUCE.* of '1'\) where rank 1 launches .* of '2'\)"
    with pytest.raises(AssertionError, match=named):
        cluster.run(launch_in_two_orders, 2, False, virtual=True, backend="vccl")


def use_one_device_twice(rank: int, size: int, physical: bool) -> str:
    set_habits(physical=physical)
    try:
        dist.all_reduce(torch.ones(1, device="virtual:0"))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_device_is_in_a_communicator_once(cluster: Cluster) -> None:
    first, second = cluster.run(use_one_device_twice, 2, True, virtual=True, backend="vccl")
    assert "Duplicate GPU detected : rank 0 and rank 1 both on virtual:0" in first
    assert "Duplicate GPU detected : rank 1 and rank 0" in second
    got = cluster.run(use_one_device_twice, 2, False, virtual=True, backend="vccl")
    assert got == ["no error", "no error"]


def wait_alone(rank: int, size: int) -> list[str]:
    """Rank 0 alone launches, and its host waits for the result."""
    here = f"virtual:{rank}"
    group: Any = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    dist.all_reduce(torch.ones(1, device=here), group=group)
    if rank == 0:
        tensor = torch.ones(1, device=here)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        assert not work.is_completed(), "the host goes on"
        tensor.item()
    dist.all_reduce(torch.ones(1, device=here))
    return take_records().kills


def test_a_host_behind_a_missing_peer_is_ended_by_the_watchdog(cluster: Cluster) -> None:
    first, second = cluster.run(wait_alone, 2, virtual=True, backend="vccl")
    assert first == ["ALLREDUCE of kind 0 of Float [1], number 1 of '1'"] and second == []


# --- making a communicator ------------------------------------------------------------------------


def make_slowly(rank: int, size: int) -> list[float]:
    set_habits(setup=3.0)
    link = ProcessLink(timeout=1.5, purpose="slow")
    tensor = torch.ones(2, device=f"virtual:{rank}")
    link.all_reduce(tensor, what="a tensor").wait()
    found: list[float] = tensor.tolist()
    return found


def test_making_a_communicator_is_in_no_time_limit(cluster: Cluster) -> None:
    assert cluster.run(make_slowly, 2, virtual=True, backend="vccl") == [[2.0, 2.0]] * 2


def miss_the_making(rank: int, size: int, how: str) -> str:
    here = f"virtual:{rank}"
    link = ProcessLink(timeout=1, purpose="made by one")
    try:
        with dp.telling_failures():
            if rank == 1:
                if how == "raises":
                    raise ArithmeticError("not today")
                if how == "ends":
                    os._exit(3)
                link.all_gather_json(rank, what="something else")
            link.all_reduce(torch.ones(2, device=here), what="a tensor").wait()
    except (ArithmeticError, *LOST) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("raises", "rank 1 .*ArithmeticError: not today"),
        ("ends", r"rank 1 \(process .* has ended"),
        ("is elsewhere", "rank 1 is at all_gather of size of something else"),
    ],
)
def test_a_rank_that_misses_the_making_is_named(cluster: Cluster, how: str, named: str) -> None:
    first, _ = cluster.run(
        miss_the_making, 2, how, virtual=True, backend="vccl", expect_errors=True
    )
    assert isinstance(first, str), first
    with pytest.raises(ValueError, match=f"(?s)making of the communicator of virtual:0.*{named}"):
        raise ValueError(first)


# --- recovery -------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in backward if told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.how == "raises":
            raise ArithmeticError("no gradient")
        return grads[0], None


class Faulty(nn.Module):
    """Fails between the gradients of its two layers, or before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, before: str = "", between: str = "") -> torch.Tensor:
        hidden = Fails.apply(self.first(x), between)
        output: torch.Tensor = Fails.apply(self.last(hidden), before)
        return output


def recover(rank: int, size: int, fault: str, replicas: int) -> tuple[str, list[float]]:
    """Rank 1 fails in step 2; the host of rank 0 waits for its device in each step."""
    model = wrap(Faulty(), rank, replicas, bucket_cap_mb=1e-4)
    optimizer, here, said = optimizer_of(model), f"virtual:{rank * replicas}", ""
    for step in range(6):
        fails = (rank, step) == (1, 2)
        try:
            with dp.telling_failures():
                if fails and fault == "leaves":
                    raise ArithmeticError("no batch")
                x, y = share(step, rank)
                how = {fault: "raises"} if fails and fault != "leaves" else {}
                loss = mean_loss(model(x.to(here), **how), y)
                loss.backward()
                optimizer.step()
                # Behind all buckets.
                next(model.parameters()).sum().item()
        except (ArithmeticError, *LOST) as error:
            said = str(error)
            break
    # They differ where one has taken the step.
    with contextlib.suppress(ReplicaMismatch):
        model.check_replicas()
    zeros = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    model.load_state_dict(zeros)
    steps(model, rank, [0, 1])
    model.check_replicas()
    return said, [float(each.detach().sum().cpu()) for each in model.parameters()]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fault", ["before", "between", "leaves"])
def test_no_host_stays_behind_a_bucket(cluster: Cluster, fault: str, replicas: int) -> None:
    args = fault, replicas
    (first, sums), (_, others) = cluster.run(recover, 2, *args, virtual=True, backend="vccl")
    assert "rank 1" in first and "ArithmeticError" in first, first
    assert sums == others and any(sums)


def fall_silent(rank: int, size: int) -> str:
    """Rank 1 does not come to its second backward until the others have given up."""
    with mock.patch.object(link, "_PATIENCE", 3.0):
        model = wrap(make_net(), rank, 1, timeout=1.0)
    steps(model, rank, [0])
    given_up: Any = dist.new_group(backend="gloo")
    said = ""
    if rank == 0:
        with mock.patch.object(link, "_PATIENCE", 3.0), pytest.raises(LOST, match="rank 1") as lost:
            steps(model, rank, [1, 2])
        said = str(lost.value)
    dist.barrier(given_up)
    return said


def test_a_silent_rank_is_given_up_before_the_watchdog_ends_the_process(cluster: Cluster) -> None:
    said, _ = cluster.run(fall_silent, 2, virtual=True, backend="vccl")
    assert "rank 1 did not come" in said


# --- orders ---------------------------------------------------------------------------------------


def train_two(rank: int, size: int, replicas: int) -> None:
    """Two wrappers in one backward."""
    nets = [wrap(make_net(), rank, replicas, bucket_cap_mb=1e-4) for _ in range(2)]
    here = nets[0].device_ids[0]
    for step in range(8):
        x, y = share(step, rank)
        loss = mean_loss(nets[0](x.to(here)) + nets[1](x.to(here)), y)
        loss.backward()


def train_normed(rank: int, size: int, replicas: int) -> None:
    """Statistics of the whole batch, over a communicator beside that of the buckets."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    net = collectives.SyncBatchNorm.convert(nn.Sequential(*layers, nn.Linear(8, 3)))
    model = wrap(net, rank, replicas, bucket_cap_mb=1e-4)
    steps(model, rank, range(8))


@pytest.mark.parametrize(
    ("train", "replicas"), [(train_two, 1), (train_normed, 1), (train_normed, 2)]
)
def test_ranks_launch_in_one_order(
    cluster: Cluster, train: Callable[..., None], replicas: int
) -> None:
    cluster.run(train, 2, replicas, virtual=True, backend="vccl")
