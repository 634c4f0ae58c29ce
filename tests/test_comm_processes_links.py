"""Links between processes: what is pending in them, their groups, what they leave behind."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dataparallel as dp
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster
from tests.process_groups import new_group

Numbers = list[Any]


# --- what is pending -------------------------------------------------------------------------


def reduce_several(rank: int, world_size: int) -> Numbers:
    # A check waits for the others for a moment.
    link = ProcessLink(purpose="test")
    if rank == 1:
        time.sleep(0.3)
    tensors = [torch.full((3,), float(i)) for i in range(8)]
    pending = [link.all_reduce(tensor, what=f"bucket {i}") for i, tensor in enumerate(tensors)]
    before = rank == 1 or not any(one.done() for one in pending)
    for one in reversed(pending):
        one.wait()
        one.wait()
    found = [before, all(one.done() for one in pending), [tensor[0].item() for tensor in tensors]]
    found += [dict(link.launched), pending[2].where, link.name, link.broken]
    link.broadcast(tensors[0], 0, what="buffers").wait()
    found.append(dict(link.launched))
    link.close()
    return [*found, link.broken]


def test_several_are_in_flight_and_counted(cluster: Cluster) -> None:
    for found in cluster.run(reduce_several, 2):
        assert found == [
            True,
            True,
            [2.0 * i for i in range(8)],
            {"all_reduce": 8},
            "all_reduce of bucket 2 (collective 3) for 'test'",
            "test/1.1.1",
            "",
            {"all_reduce": 8, "broadcast": 1},
            "it was closed",
        ]


def fail_in_future(rank: int, world_size: int) -> list[Any]:
    link = ProcessLink(purpose="test")
    future: torch.futures.Future[Any] = torch.futures.Future()
    failing: Any = future
    failing.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        link.wait_for(future, what="the hook of bucket 0")
    link.close()
    return [link.broken]


def test_an_error_in_a_future_comes_out_as_it_is(cluster: Cluster) -> None:
    assert cluster.run(fail_in_future, 1) == [["it was closed"]]


# --- groups ----------------------------------------------------------------------------------


def links_of_a_subgroup(rank: int, world_size: int) -> Numbers:
    members = [0, 2]
    group = new_group(members)
    if rank == 2:
        # One more group than in the other member: names must not depend on it.
        new_group([2], use_local_synchronization=True)
    if rank not in members:
        with pytest.raises(ValueError, match="rank 1 is not a member of the process group"):
            ProcessLink(group, purpose="test")
        return []
    results = []
    for _ in range(10):
        link = ProcessLink(group, purpose="test", timeout=5)
        tensor = torch.tensor([float(rank)])
        link.all_reduce(tensor, what="ranks").wait()
        results.append((link.rank, link.world_size, tensor.item(), link.group is not group))
        link.close()
    return results


def test_links_of_a_subgroup_are_made_again_and_again(cluster: Cluster) -> None:
    first, second, third = cluster.run(links_of_a_subgroup, 3)
    assert first == [(0, 2, 2.0, True)] * 10
    assert second == []
    assert third == [(1, 2, 2.0, True)] * 10


def links_over_overlapping_groups(rank: int, world_size: int) -> Numbers:
    groups = [dist.group.WORLD, new_group([0, 1]), new_group([1, 2])]
    sums: Numbers = []
    links = []
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            link = ProcessLink(group, purpose="test", timeout=5)
            tensor = torch.tensor([float(rank)])
            link.all_reduce(tensor, what="ranks").wait()
            links.append(link)
            sums.append((link.name, tensor.item()))
    for link in links:
        link.close()
    return sums


def test_links_over_overlapping_groups(cluster: Cluster) -> None:
    everybody, first, second = ("test/1.1.1", 3.0), ("test/1.1.1", 1.0), ("test/1.1.1", 3.0)
    found = cluster.run(links_over_overlapping_groups, 3)
    assert found == [[everybody, first], [everybody, first, second], [everybody, second]]


def swap_links(rank: int, world_size: int) -> list[float]:
    sums = ProcessLink(purpose="reducer")
    control = ProcessLink(purpose="control")
    one, thousand = torch.tensor(1.0), torch.tensor(1000.0)
    if rank == 0:
        pending = [sums.all_reduce(one, what="sum"), control.all_reduce(thousand, what="flag")]
    else:
        pending = [control.all_reduce(thousand, what="flag"), sums.all_reduce(one, what="sum")]
    for collective in pending:
        collective.wait()
    sums.close()
    control.close()
    return [one.item(), thousand.item()]


def test_links_do_not_mix(cluster: Cluster) -> None:
    assert cluster.run(swap_links, 2) == [[2.0, 2000.0]] * 2


def entries() -> int:
    """How many files and threads this process has."""
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))


def settled(level: int) -> int:
    """The number of entries; a thread is listed for a moment after it was joined."""
    for _ in range(100):
        if entries() <= level:
            break
        time.sleep(0.01)
    return entries()


def open_files(rank: int, world_size: int) -> list[bool]:
    before = entries()
    counts = []
    for _ in range(3):
        link = ProcessLink(purpose="test")
        link.all_reduce(torch.ones(2), what="numbers").wait()
        link.close()
        link.close()
        counts.append(settled(before) <= before)
    link = ProcessLink(purpose="test")
    link.all_reduce(torch.ones(2), what="numbers").wait()
    counts.append(entries() > before)
    del link
    return [*counts, settled(before) <= before]


def test_closed_and_forgotten_links_leave_nothing(cluster: Cluster) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts the entries of /proc")
    assert cluster.run(open_files, 2) == [[True] * 5] * 2


def limits_of_groups(rank: int, world_size: int) -> list[float]:
    """Of links over the default group, over one of the user's, and with a limit of their own."""
    short = new_group(timeout=datetime.timedelta(seconds=2))
    net = torch.nn.Linear(1, 1)
    links = [ProcessLink(purpose="test"), ProcessLink(short, purpose="test")]
    links += [ProcessLink(short, purpose="test", timeout=7)]
    found = [link.timeout for link in links]
    for link in links:
        link.close()
    model = dp.DistributedDataParallel(net, ["cpu"], process_group=short)
    model(torch.ones(2, 1)).sum().backward()
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"did not complete within 2(\.\d+)? s"):
            model(torch.ones(2, 1)).sum().backward()
        assert time.monotonic() - started < 10
    dist.barrier()
    return found


def test_the_default_limit_is_that_of_the_group(cluster: Cluster) -> None:
    assert cluster.run(limits_of_groups, 2, timeout=45) == [[45.0, 2.0, 7.0]] * 2


def use_closed(rank: int, world_size: int, destroyed: bool) -> tuple[str, float]:
    link = ProcessLink(purpose="test")
    started = time.monotonic()
    if destroyed:
        dist.destroy_process_group()
    link.close()
    seconds = time.monotonic() - started
    with pytest.raises(CollectiveError) as caught:
        link.all_reduce(torch.ones(2), what="numbers")
    return str(caught.value), seconds


@pytest.mark.parametrize("destroyed", [False, True])
def test_a_closed_link_says_so(cluster: Cluster, destroyed: bool) -> None:
    for message, seconds in cluster.run(use_closed, 2, destroyed):
        assert message.startswith("the link for 'test' is broken; make a new one in every process")
        assert message.endswith("it was closed")
        assert seconds < 1


def wait_for_no_time(rank: int, world_size: int) -> None:
    ProcessLink(purpose="test", timeout=0)


def test_the_limit_of_a_link_is_positive(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="timeout is a positive number of seconds, but got 0"):
        cluster.run(wait_for_no_time, 1)


def make_without_group(rank: int, world_size: int) -> None:
    ProcessLink(purpose="test")


def test_a_link_needs_a_process_group(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        cluster.run(make_without_group, 1, init_group=False)
