"""Links between processes: results as those of torch; failures say who is missing."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dataparallel import virtual
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.failures import failures_of
from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster, free_port
from tests.process_groups import new_group

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [torch.int8, torch.int32, torch.int64, *FLOATS, torch.complex64, torch.bool]


def random(rank: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-20, 20, size, generator=generator).to(dtype)


# --- results ---------------------------------------------------------------------------------


def reductions(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return []
    return ["sum"] if dtype.is_complex else ["sum", "max"]


def exchange(rank: int, world_size: int, device: str) -> None:
    link = ProcessLink(purpose="test")
    for dtype, shape in itertools.product(DTYPES, [(4, 3), (), (0,)]):
        values = [random(r, *shape, dtype=dtype) for r in range(world_size)]
        mine = values[rank].to(device, copy=True)
        found = link.all_gather(mine, what="numbers")
        assert mine.cpu().equal(values[rank])
        link.broadcast(mine, world_size - 1, what="numbers").wait()
        for part, value in zip([*found, mine], [*values, values[-1]], strict=True):
            assert part.device == torch.device(device) and part.cpu().equal(value)
        for op in reductions(dtype):
            ours, theirs = values[rank].to(device, copy=True), values[rank].clone()
            link.all_reduce(ours, op=op, what="numbers").wait()
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op.upper()))
            assert ours.cpu().equal(theirs), (dtype, op)
    # Memory formats may differ between processes: here every second column, in one transposed.
    whole = torch.arange(24.0).view(2, 3, 4)
    mine = whole[:, :, ::2]
    if rank == 1:
        mine = mine.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (mine, leaf):
        link.all_reduce(tensor, what="columns").wait()
    assert mine.equal(torch.arange(24.0).view(2, 3, 4)[:, :, ::2] * world_size)
    assert whole[:, :, 1].equal(torch.arange(24.0).view(2, 3, 4)[:, :, 1])
    assert leaf.tolist() == [world_size] * 2
    answers = link.all_gather_json({"names": ["gewöhnlich"] * rank, "none": None}, what="names")
    assert answers == [{"names": ["gewöhnlich"] * r, "none": None} for r in range(world_size)]
    parts = [sparse_part(r, torch.int64).to_dense() for r in range(world_size)]
    for dtype, needs_grad in itertools.product(FLOATS, [False, True]):
        rows = sparse_part(rank, dtype).requires_grad_(needs_grad)
        link.all_reduce(rows, what="embedding.weight").wait()
        assert rows.dtype == dtype and rows.is_coalesced()
        assert rows.detach().to_dense().equal(torch.stack(parts).sum(0).to(dtype)), dtype
    link.close()


def sparse_part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    indices = torch.tensor([[rank, 3, 3, 4]])
    values = torch.tensor([[1, 2], [100, 3], [100, 0], [0, 0]]).to(dtype)
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, values, (5, 2))


@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (3, "cpu"), (2, "virtual:2")])
def test_results_are_those_of_torch(cluster: Cluster, world_size: int, device: str) -> None:
    cluster.run(exchange, world_size, device, virtual=device != "cpu")


def reduce_behind_queued_work(rank: int, world_size: int) -> None:
    link = ProcessLink(purpose="test")
    with virtual.strict_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            mine = random(rank, 6, 2, dtype=dtype).to("virtual:2").mul_(2)
            link.all_reduce(mine, what="numbers").wait()
            mine.add_(1)
            first, second = (2 * random(r, 6, 2, dtype=dtype) for r in (0, 1))
            assert mine.cpu().equal(first + second + 1)
    link.close()


def test_a_collective_is_between_the_work_before_and_after_it(cluster: Cluster) -> None:
    cluster.run(reduce_behind_queued_work, 2, virtual=True)


# --- links and their groups ------------------------------------------------------------------


def reduce_several(rank: int, world_size: int) -> list[Any]:
    link, other = ProcessLink(purpose="test"), ProcessLink(purpose="control")
    thousand, tensors = torch.tensor(1000.0), [torch.full((3,), float(i)) for i in range(8)]
    if rank == 1:
        time.sleep(0.2)
        # Before what the other process launches first.
        between = other.all_reduce(thousand, what="flag")
    pending = [link.all_reduce(tensor, what=f"bucket {i}") for i, tensor in enumerate(tensors)]
    assert rank == 1 or not any(one.done() for one in pending)
    if rank == 0:
        between = other.all_reduce(thousand, what="flag")
    for one in [between, *reversed(pending)]:
        one.wait()
        one.wait()
    assert all(one.done() for one in pending)
    link.broadcast(tensors[0], 0, what="buffers").wait()
    found: list[Any] = [thousand.item(), [tensor[0].item() for tensor in tensors]]
    found += [dict(link.launched), pending[2].where, link.name, link.broken]
    future: torch.futures.Future[Any] = torch.futures.Future()
    failing: Any = future
    failing.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        link.wait_for(future, what="the hook of bucket 0")
    link.close()
    other.close()
    return [*found, link.broken]


def test_several_are_in_flight_and_counted_and_links_do_not_mix(cluster: Cluster) -> None:
    for found in cluster.run(reduce_several, 2):
        assert found == [
            2000.0,
            [2.0 * i for i in range(8)],
            {"all_reduce": 8, "broadcast": 1},
            "all_reduce of bucket 2 (collective 3) for 'test'",
            "test/1.1.1",
            "",
            "it was closed",
        ]


def links_over_groups(rank: int, world_size: int) -> list[Any]:
    """Links over groups that overlap, made again and again; one rank has one more group."""
    short = new_group([1, 2], timeout=datetime.timedelta(seconds=2))
    groups: list[Any] = [dist.group.WORLD, new_group([0, 1]), short]
    if rank == 2:
        new_group([2], use_local_synchronization=True)
    found, links = [], []
    for timeout, group in itertools.product((None, 7.0, None), groups):
        if isinstance(group, dist.ProcessGroup):
            links.append(ProcessLink(group, purpose="test", timeout=timeout))
            tensor = torch.tensor([float(rank)])
            links[-1].all_reduce(tensor, what="ranks").wait()
            link = links[-1]
            found.append((link.rank, link.world_size, link.name, link.timeout, tensor.item()))
        else:
            text = f"rank {rank} is not a member of the process group"
            with pytest.raises(ValueError, match=text):
                ProcessLink(group, purpose="test")
    for link in links:
        link.close()
    return found


def test_links_over_overlapping_groups(cluster: Cluster) -> None:
    groups = [([0, 1, 2], 45.0), ([0, 1], 1800.0), ([1, 2], 2.0)]
    for rank, found in enumerate(cluster.run(links_over_groups, 3, timeout=45)):
        assert found == [
            (
                members.index(rank),
                len(members),
                f"test/1.1.{number}",
                timeout or limit,
                sum(members),
            )
            for number, timeout in enumerate([None, 7.0, None], start=1)
            for members, limit in groups
            if rank in members
        ]


def use_closed(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="timeout is a positive number of seconds, but got 0"):
        ProcessLink(purpose="test", timeout=0)
    for destroyed in (False, True):
        link = ProcessLink(purpose="test")
        if destroyed:
            dist.destroy_process_group()
        link.close()
        text = "^the link for 'test.*' is broken; make a new one in every .*it was closed$"
        with pytest.raises(CollectiveError, match=text):
            link.all_reduce(torch.ones(2), what="numbers")
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        ProcessLink(purpose="test")


def test_a_closed_link_says_so(cluster: Cluster) -> None:
    cluster.run(use_closed, 2)


# --- failures --------------------------------------------------------------------------------

MAKING = "the making of the process group"
AT = r"is at all_reduce of numbers \(collective 1\) for 'reducer"
GAVE_UP = r"over 2 processes did not complete within [\d.]+ s: rank 1"

#: The action of rank 1 while rank 0 adds up numbers, or makes a link; and the messages of both.
WAYS: dict[str, tuple[str, str]] = {
    "missing": (f"^rank 0: all_reduce of .* {GAVE_UP} did not come; .* raise the timeout", "^$"),
    "late": (f"^rank 0: all_reduce of .* {GAVE_UP} ", "rank 0 came and gave up"),
    "another order": ("rank 1 is at all_gather of the usage map", f"rank 0 {AT}'"),
    "another wrapper": (f"rank 1 {AT} 2'", f"rank 0 {AT}'"),
    "another link": (f"rank 1 is at {MAKING} 'other'", f"rank 0 is at {MAKING} 'join'"),
    "no link": (f"^rank 0: {MAKING} 'join' {GAVE_UP} did not come", "^$"),
}


def part_ways(rank: int, world_size: int, way: str) -> str:
    # Those of two wrappers have one purpose.
    link, second = (ProcessLink(purpose="reducer", timeout=1.0) for _ in range(2))
    given_up = new_group()
    is_away = way in ("missing", "late", "no link")

    def go() -> None:
        if rank == 1 and is_away:
            dist.barrier(given_up)
        if rank == 0 and "link" in way:
            ProcessLink(purpose="join", timeout=1.0)
        elif way == "another link":
            ProcessLink(purpose="other", timeout=30)
        elif rank == 1 and way in ("missing", "no link"):
            return
        elif rank == 1 and way == "another order":
            link.all_gather(torch.ones(2), what="the usage map")
            link.all_gather(torch.ones(2), what="the usage map, again")
        else:
            used = second if rank == 1 and way == "another wrapper" else link
            used.all_reduce(torch.ones(2), what="numbers").wait()

    text = ""
    try:
        go()
    except (CollectiveTimeout, CollectiveError) as error:
        text = str(error)
    if rank == 0 and is_away:
        dist.barrier(given_up)
    link.close()
    second.close()
    # These meet, however many were made before, and whichever rank has failed.
    again = ProcessLink(purpose="control", timeout=5)
    again.all_reduce(torch.ones(1), what="flag").wait()
    again.close()
    return text


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_says_where_the_others_are(cluster: Cluster, way: str) -> None:
    for rank, text in enumerate(cluster.run(part_ways, 2, way)):
        # In another order, one of the two may get a result.
        assert re.search(WAYS[way][rank], text) or (way == "another order" and not text), text


def make_anew_alone(rank: int, world_size: int) -> float:
    """Rank 1 makes a new link, and closes the one over which rank 0 waits, in two threads."""
    link = ProcessLink(purpose="test", timeout=20)
    if rank == 1:
        threading.Timer(0.2, link.close).start()
    else:
        texts: list[str] = []

        def wait_in_thread() -> None:
            future: torch.futures.Future[int] = torch.futures.Future()
            with pytest.raises(CollectiveError) as caught:
                link.wait_for(future, what="the hook of bucket 2")
            texts.append(str(caught.value))

        thread = threading.Thread(target=wait_in_thread)
        thread.start()
        with pytest.raises(CollectiveError, match=r"collective 1.*rank 1 did not come"):
            link.all_reduce(torch.ones(1), what="numbers").wait()
        thread.join()
        assert texts[0].startswith("the link for 'test' is broken")
        assert "all_reduce of numbers (collective 1)" in texts[0]
    again = ProcessLink(purpose="test", timeout=20)
    total = torch.ones(1)
    again.all_reduce(total, what="numbers").wait()
    again.close()
    return total.item()


def test_who_makes_a_new_link_does_not_hear_that_the_old_one_broke(cluster: Cluster) -> None:
    assert cluster.run(make_anew_alone, 2) == [2.0, 2.0]


def lose_the_store(rank: int, world_size: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    link = ProcessLink(purpose="reducer", timeout=90)
    link.all_reduce(torch.ones(2), what="bucket 0").wait()
    if rank == 0:
        os._exit(7)
    with pytest.raises(CollectiveError, match="the store of the process group did not answer"):
        link.all_reduce(torch.ones(2), what="bucket 1").wait()
    link.close()
    dist.destroy_process_group()


def test_a_store_that_is_gone_is_told(cluster: Cluster) -> None:
    results: list[Any] = cluster.run(
        lose_the_store, 2, free_port(), init_group=False, expect_errors=True
    )
    assert results[1] is None and "exit code 7" in str(results[0])


def ask_behind_a_request_that_is_stuck(rank: int, world_size: int) -> int:
    assert dist.group.WORLD is not None
    failures, stuck = failures_of(dist.group.WORLD), threading.Event()
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match=r"\(no answer within 0.2 s\)"):
            failures.ask(lambda store: stuck.wait(90), 0.2)
    stuck.set()
    return failures.ask(lambda store: 5, 20.0)


def test_a_store_that_does_not_answer_is_not_waited_for(cluster: Cluster) -> None:
    assert cluster.run(ask_behind_a_request_that_is_stuck, 1) == [5]
