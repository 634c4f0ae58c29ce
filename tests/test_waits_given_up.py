"""What other processes get to know where one gives up, and who can do without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel
from dataparallel.collectives import functional
from dataparallel.collectives.process_failures import GroupFailures
from dataparallel.comm.failure import Failure
from dataparallel.comm.process_errors import CollectiveError
from tests.cluster import Cluster
from tests.process_groups import new_group

ENDED = Failure(1, "node", 4711, "ended", "", "has ended")


def total() -> float:
    found = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    return float(functional.wait_tensor(found).item())


def accuse(rank: int, world_size: int) -> str:
    """Rank 0 gives up because of rank 1, which comes after that."""
    control = new_group()
    assert total() == 2
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupFailures, "find", lambda self, watch: ENDED)
            with pytest.raises(CollectiveError):
                total()
    dist.barrier(control)
    text = ""
    if rank == 1:
        # Rank 0 had launched this one.
        assert total() == 2
        with pytest.raises(CollectiveError) as raised:
            total()
        text = str(raised.value)
    dist.barrier(control)
    return text


def test_the_accused_process_does_not_wait_for_those_that_gave_up(cluster: Cluster) -> None:
    _, text = cluster.run(accuse, 2, timeout=20)
    assert "(collective 3)" in text
    assert text.endswith("rank 1 (process 4711 on node) has ended")


class Fails(nn.Linear):
    """A layer whose forward raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


def make(timeout: float, **options: Any) -> Any:
    torch.manual_seed(0)
    return dataparallel.DistributedDataParallel(Fails(3, 2), ["cpu"], timeout=timeout, **options)


def step(model: Any) -> torch.Tensor:
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    gradient: torch.Tensor = model.module.weight.grad
    return gradient.clone()


def evaluate_alone(rank: int, world_size: int) -> list[bool]:
    model = make(5.0)
    good = step(model)
    processes = model._training.processes
    processes.interrupted(KeyboardInterrupt())
    x = torch.ones(2, 3)
    if rank == 0:
        with torch.no_grad():
            equal = torch.equal(model(x), model.module(x))
        with model.no_sync():
            equal &= torch.equal(model(x), model.module(x))
        equal &= model._training.processes is processes
    else:
        equal = True
    dist.barrier()
    # Whoever needs the others makes new links.
    return [equal, torch.equal(step(model), good)]


def test_a_forward_that_needs_no_process_does_not_wait_for_one(cluster: Cluster) -> None:
    assert cluster.run(evaluate_alone, 2) == [[True, True]] * 2


def send_buffers(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = dataparallel.DistributedDataParallel(net, ["cpu"], timeout=20.0)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    processes = model._training.processes
    assert processes is not None
    processes.interrupted(KeyboardInterrupt())
    with torch.no_grad():
        model.eval()(x)
    return model._training.processes is not processes


def test_an_evaluation_that_begins_with_the_buffers_of_rank_0_makes_new_links(
    cluster: Cluster,
) -> None:
    assert cluster.run(send_buffers, 2) == [True, True]


def fail_elsewhere(rank: int, world_size: int) -> str:
    """The forward of rank 0 gives up in another group, because of a rank that is not in it."""
    model = make(20.0)
    good = step(model)
    if rank == 0:
        error = CollectiveError("given up")
        error.failure = Failure(7, "far", 12, "ended", "", "has ended")
        model.module.error = error
    with pytest.raises(CollectiveError) as raised:
        step(model)
    model.module.error = None
    assert torch.equal(step(model), good)
    return str(raised.value)


def test_a_failure_in_another_group_is_passed_on(cluster: Cluster) -> None:
    _, text = cluster.run(fail_elsewhere, 2)
    assert "rank 7 (process 12 on far) has ended" in text
