"""Who waits in a functional collective is released when another process has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

import dataparallel
from dataparallel.collectives import functional
from dataparallel.comm.failures import CollectiveError, failures_of, report
from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster
from tests.process_groups import new_group


def total(group: dist.ProcessGroup | None = None) -> float:
    return float(functional.all_reduce(torch.ones(1), "sum", group or dist.group.WORLD))


def wait_for_one_that_raised(rank: int, world_size: int, late: bool) -> tuple[str, float]:
    link = ProcessLink(purpose="test", timeout=30)
    members = new_group([0, 1])
    done = new_group()
    if rank < 2:
        assert total(members) == 2
    if rank == 1 and late:
        dist.barrier(done)
    if rank == 1:
        report(ZeroDivisionError("no data"), "the forward of layer 3")
    if rank == 0 and not late:
        threading.Event().wait(1.0)
    started = time.monotonic()
    text = ""
    if rank == 0:
        if late:
            dist.barrier(done)
        with pytest.raises(CollectiveError, match="was given up after") as raised:
            total(members)
        text = str(raised.value)
        assert raised.value.failure is not None and raised.value.failure.rank == 1
        with pytest.raises(CollectiveError, match=r"make a new group[\s\S]*no data"):
            total(members)
    elif rank == 2 and late:
        dist.barrier(done)
    seconds = time.monotonic() - started
    dist.barrier()
    link.close()
    return text, seconds


@pytest.mark.parametrize("late", [False, True])
def test_the_error_of_another_process_ends_a_wait(cluster: Cluster, late: bool) -> None:
    text, seconds = cluster.run(wait_for_one_that_raised, 3, late)[0]
    assert "all_reduce of a tensor (1,) of float32 (collective 2) for 'process group" in text
    assert "rank 1 (process " in text
    assert "failed in the forward of layer 3: ZeroDivisionError: no data" in text
    assert seconds < 5


def go_on_after_an_error(rank: int, world_size: int) -> float:
    link = ProcessLink(purpose="test", timeout=30)
    world = dist.group.WORLD
    assert world is not None and total() == world_size
    if rank == 1:
        report(ZeroDivisionError("no data"), "the forward of layer 3")
    else:
        # Until it is known here.
        deadline = time.monotonic() + 10
        while not failures_of(world).while_waiting() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
    dist.barrier()
    link.close()
    again = ProcessLink(purpose="test", timeout=30)
    if rank == 1:
        # Slow, but on its way.
        threading.Event().wait(1.5)
    found = total()
    again.close()
    return found


def test_an_error_after_which_all_went_on_is_forgotten(cluster: Cluster) -> None:
    assert cluster.run(go_on_after_an_error, 2) == [2, 2]


def wait_for_others_of_no_concern(rank: int, world_size: int) -> float:
    link = ProcessLink(purpose="test", timeout=30)
    members = new_group([0, 1])
    if rank == 2:
        report(ZeroDivisionError("no data"), "the forward of layer 3")
    if rank == 1:
        threading.Event().wait(1.5)
    found = total(members) if rank < 2 else 2
    dist.barrier()
    link.close()
    return found


def test_an_error_outside_of_the_group_ends_no_wait(cluster: Cluster) -> None:
    assert cluster.run(wait_for_others_of_no_concern, 3) == [2, 2, 2]


def wait_for_one_that_is_busy(rank: int, world_size: int) -> tuple[float, list[float]]:
    """Rank 1 is stopped while rank 0 waits for it in a step."""
    net = torch.nn.Linear(1, 1, bias=False)
    model = dataparallel.DistributedDataParallel(net, ["cpu"], timeout=20)
    model(torch.ones(2, 1)).sum().backward()
    assert total() == 2
    started = time.monotonic()
    if rank == 1:
        wakes = f"sleep 7; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", wakes]):
            os.kill(os.getpid(), signal.SIGSTOP)
    model.zero_grad()
    model(torch.full((2, 1), rank + 1.0)).sum().backward()
    seconds = time.monotonic() - started
    assert total() == 2
    assert net.weight.grad is not None
    return seconds, net.weight.grad.flatten().tolist()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_process_that_is_stopped_for_a_while_is_waited_for(cluster: Cluster) -> None:
    """Its silence was once a failure after a quarter of the time limit, and at least 5 s."""
    for seconds, gradients in cluster.run(wait_for_one_that_is_busy, 2):
        assert seconds > 5.5
        assert gradients == [3.0]
