"""Links between processes: results as those of torch, and failures that say who is missing."""

from __future__ import annotations

import _thread
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dataparallel.comm import process_errors
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.processes import ProcessLink
from tests.cluster import Cluster

Numbers = list[Any]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def random(rank: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-20, 20, size, generator=generator).to(dtype)


# --- results ---------------------------------------------------------------------------------


def reduce_both_ways(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="test")
    results = []
    for dtype in DTYPES:
        for op in ("sum",) if dtype.is_complex else ("sum", "product", "min", "max"):
            ours = random(rank, 7, 5, dtype=dtype)
            theirs = ours.clone()
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op.upper()))
            link.all_reduce(ours, op=op, what="numbers").wait()
            results.append((dtype, op, ours.equal(theirs)))
    link.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_is_that_of_torch(cluster: Cluster, world_size: int) -> None:
    for results in cluster.run(reduce_both_ways, world_size):
        assert len(results) == 4 * len(DTYPES) - 3
        assert not [(dtype, op) for dtype, op, same in results if not same]


def reduce_rare_types(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="test")
    small = torch.tensor([1.0, 1.0, 448.0 * rank]).to(torch.float8_e4m3fn)
    wide = torch.tensor([30000, -5, rank], dtype=torch.int16)
    link.all_reduce(small, what="small").wait()
    link.all_reduce(wide, what="wide").wait()
    link.close()
    return [small.float().tolist(), wide.tolist()]


def test_types_without_a_sum_in_the_backend(cluster: Cluster) -> None:
    wrapped = torch.tensor(90000).to(torch.int16).item()
    for small, wide in cluster.run(reduce_rare_types, 3):
        assert small[:2] == [3.0, 3.0]
        assert wide == [wrapped, -15, 3]


def move_everything(rank: int, world_size: int, device: str) -> Numbers:
    link = ProcessLink(purpose="test")
    right = []
    for dtype in (*DTYPES, torch.bool, torch.int16, torch.float8_e4m3fn):
        for shape in ((4, 3), (), (0,)):
            expected = [random(r, *shape).to(dtype) for r in range(world_size)]
            mine = expected[rank].to(device, copy=True)
            found = link.all_gather(mine, what="numbers")
            right.append(mine.cpu().flatten().equal(expected[rank].flatten()))
            expected.append(random(10 + 1, *shape).to(dtype))
            found.append(random(10 + rank, *shape).to(dtype).to(device))
            link.broadcast(found[-1], 1, what="numbers").wait()
            for part, value in zip(found, expected, strict=True):
                right.append(part.dtype == dtype and part.shape == value.shape)
                right.append(part.device == mine.device)
                right.append(part.cpu().flatten().tolist() == value.flatten().tolist())
    link.close()
    return right


@pytest.mark.parametrize("device", ["cpu", "virtual:2"])
def test_broadcast_and_all_gather_move_any_type(cluster: Cluster, device: str) -> None:
    for right in cluster.run(move_everything, 2, device, virtual=device != "cpu"):
        assert len(right) == 11 * 3 * 10 and all(right)


def reduce_in_memory_formats(rank: int, world_size: int) -> list[list[float]]:
    link = ProcessLink(purpose="test")
    whole = torch.arange(24.0).view(2, 3, 4)
    # One process has the transposed of what the other has, and only every second column.
    column = whole[:, :, ::2]
    mine = column if rank == 0 else column.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    link.all_reduce(mine, what="columns").wait()
    empty = torch.empty(0, 3)
    link.all_reduce(empty, what="nothing").wait()
    leaf = torch.ones(2, requires_grad=True)
    link.all_reduce(leaf, what="a leaf").wait()
    link.close()
    return [mine.flatten().tolist(), whole[:, :, 1].flatten().tolist(), leaf.tolist()]


def test_memory_formats_may_differ_between_processes(cluster: Cluster) -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    for columns, untouched, leaf in cluster.run(reduce_in_memory_formats, 2):
        assert columns == (2 * whole[:, :, ::2]).flatten().tolist()
        assert untouched == whole[:, :, 1].flatten().tolist()
        assert leaf == [2.0, 2.0]


def sparse_part(rank: int) -> torch.Tensor:
    indices = torch.tensor([[rank, 3, 3], [0, 1, 1]])
    values = torch.tensor([1.0, 2.0, 3.0])
    return torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)


def reduce_sparse(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="test")
    ours, leaf = sparse_part(rank), sparse_part(rank).requires_grad_()
    link.all_reduce(ours, what="embedding.weight").wait()
    link.all_reduce(leaf, what="a leaf").wait()
    link.close()
    coalesced = ours.is_coalesced() and leaf.is_coalesced()
    return [coalesced, ours.to_dense(), leaf.detach().to_dense()]


def test_sparse_tensors_are_added_and_coalesced(cluster: Cluster) -> None:
    expected = torch.stack([sparse_part(rank).to_dense() for rank in range(3)]).sum(0)
    for coalesced, total, leaf in cluster.run(reduce_sparse, 3):
        assert coalesced and total.equal(expected) and leaf.equal(expected)


def send_sparse(rank: int, world_size: int) -> None:
    link = ProcessLink(purpose="test")
    try:
        link.broadcast(sparse_part(rank), 0, what="embedding.weight")
    finally:
        link.close()


def test_sparse_tensors_are_not_broadcast(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"broadcast takes strided tensors, but embedding.weight"):
        cluster.run(send_sparse, 1)


def gather_values(rank: int, world_size: int) -> list[Any]:
    link = ProcessLink(purpose="test")
    values = link.all_gather_json(
        {"rank": rank, "names": ["gewöhnlich"] * rank, "none": None}, what="names"
    )
    link.close()
    return [values, dict(link.launched)]


def test_all_gather_json(cluster: Cluster) -> None:
    expected = [{"rank": r, "names": ["gewöhnlich"] * r, "none": None} for r in range(3)]
    for values, launched in cluster.run(gather_values, 3):
        assert values == expected
        assert launched == {"all_gather": 2}


# --- devices that the backend cannot take ----------------------------------------------------


def reduce_staged(rank: int, world_size: int, strict: bool) -> Numbers:
    from dataparallel import virtual

    link = ProcessLink(purpose="test")
    found: Numbers = []
    with virtual.strict_mode(strict):
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            mine = random(rank, 6, 2, dtype=dtype).to("virtual:1")
            # Queued work before and after, on the stream that the caller uses.
            mine.mul_(2)
            pending = link.all_reduce(mine, what="numbers")
            pending.wait()
            mine.add_(1)
            found.append(mine.cpu())
    link.close()
    return found


@pytest.mark.parametrize("strict", [False, True])
def test_other_devices_are_staged_through_the_host(cluster: Cluster, strict: bool) -> None:
    results = cluster.run(reduce_staged, 2, strict, virtual=True)
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int16)):
        expected = sum(2 * random(rank, 6, 2, dtype=dtype) for rank in range(2)) + 1
        assert results[0][i].equal(expected) and results[1][i].equal(expected)


class Allocations(TorchFunctionMode):
    """Counts the calls of ``torch.empty``."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.empty
        return func(*args, **kwargs or {})


def stage_often(rank: int, world_size: int) -> list[int]:
    link = ProcessLink(purpose="test")
    tensors = [torch.ones(100, device="virtual:0"), torch.ones(100, device="virtual:1")]
    counts = []
    with Allocations() as allocations:
        for _ in range(3):
            pending = [link.all_reduce(tensor, what="numbers") for tensor in tensors]
            for one in pending:
                one.wait()
            counts.append(allocations.count)
    link.close()
    return counts


def test_host_memory_is_used_again(cluster: Cluster) -> None:
    for counts in cluster.run(stage_often, 2, virtual=True):
        assert counts == [2, 2, 2]


# --- what is pending -------------------------------------------------------------------------


def reduce_several(rank: int, world_size: int) -> Numbers:
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
    found += [dict(link.launched), repr(pending[2]), repr(link)]
    link.broadcast(tensors[0], 0, what="buffers").wait()
    found.append(dict(link.launched))
    link.close()
    return [*found, repr(link)]


def test_several_are_in_flight_and_counted(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(reduce_several, 2)):
        assert found == [
            True,
            True,
            [2.0 * i for i in range(8)],
            {"all_reduce": 8},
            "Pending(all_reduce of bucket 2 (collective 3), done=True)",
            f"ProcessLink(test/1, rank {rank} of 2, open)",
            {"all_reduce": 8, "broadcast": 1},
            f"ProcessLink(test/1, rank {rank} of 2, closed)",
        ]


def chain_futures(rank: int, world_size: int, device: str) -> list[Any]:
    link = ProcessLink(purpose="test")
    tensor = torch.full((3,), rank + 1.0, device=device)
    pending = link.all_reduce(tensor, what="bucket 0")
    halved = pending.future().then(lambda future: future.value()[0] / 2)
    result = link.wait_for(halved, what="the hook of bucket 0")
    pending.wait()
    value = pending.future().wait()
    found = [result.tolist(), tensor.tolist(), len(value), value[0].data_ptr() == tensor.data_ptr()]
    link.close()
    return found


@pytest.mark.parametrize("device", ["cpu", "virtual:0"])
def test_a_future_has_the_result_in_the_tensor(cluster: Cluster, device: str) -> None:
    for found in cluster.run(chain_futures, 2, device, virtual=device != "cpu"):
        assert found == [[1.5] * 3, [3.0] * 3, 1, True]


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
    assert cluster.run(fail_in_future, 1) == [[None]]


# --- groups ----------------------------------------------------------------------------------


def links_of_a_subgroup(rank: int, world_size: int) -> Numbers:
    members = [0, 2]
    group = dist.new_group(members)
    if rank == 2:
        # One more group than in the other member: names must not depend on it.
        dist.new_group([2], use_local_synchronization=True)
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
        assert message.endswith("closed): the link was closed; make a new one in every process")
        assert seconds < 1


def make_without_group(rank: int, world_size: int) -> None:
    ProcessLink(purpose="test")


def test_a_link_needs_a_process_group(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        cluster.run(make_without_group, 1, init_group=False)


def make_with(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ProcessLink(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"purpose": "test", "timeout": 0}, "timeout is a positive number of seconds, but got 0"),
        ({"purpose": "two words"}, "purpose is one word without a slash, but got 'two words'"),
        ({"purpose": "a/b"}, "purpose is one word without a slash, but got 'a/b'"),
        ({"purpose": ""}, "purpose is one word without a slash, but got ''"),
    ],
)
def test_wrong_arguments_of_a_link(cluster: Cluster, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster.run(make_with, 1, options)


def call_wrongly(rank: int, world_size: int, operation: str) -> None:
    link = ProcessLink(purpose="test")
    try:
        if operation == "all_reduce":
            link.all_reduce(torch.ones(2), op="mean", what="numbers")
        else:
            link.broadcast(torch.ones(2), 2, what="numbers")
    finally:
        link.close()


def test_wrong_arguments_of_collectives(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="op is one of sum, product, min, max, but got 'mean'"):
        cluster.run(call_wrongly, 1, "all_reduce")
    with pytest.raises(ValueError, match="source is from 0 to 1, but got 2"):
        cluster.run(call_wrongly, 2, "broadcast")


# --- failures --------------------------------------------------------------------------------


def miss_a_collective(rank: int, world_size: int, missing: int) -> Numbers:
    link = ProcessLink(purpose="reducer", timeout=0.4)
    link.broadcast(torch.ones(2), 0, what="buffers").wait()
    if rank == missing:
        time.sleep(1.9)
        link.close()
        return []
    started = time.monotonic()
    pending = [link.all_reduce(torch.ones(2), what=f"bucket {i}") for i in range(3)]
    found: Numbers = []
    for one in pending:
        try:
            one.wait()
        except (CollectiveTimeout, CollectiveError) as error:
            found.append(error)
    try:
        link.all_reduce(torch.ones(2), what="bucket 3")
    except CollectiveError as error:
        found.append(error)
    link.close()
    return [*found, time.monotonic() - started, dict(link.launched)]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_timeout_says_who_is_missing(cluster: Cluster, missing: int) -> None:
    results = cluster.run(miss_a_collective, 3, missing)
    for rank, found in enumerate(results):
        if rank == missing:
            continue
        *errors, seconds, launched = found
        assert [type(error) for error in errors] == [CollectiveTimeout] + [CollectiveError] * 3
        text = str(errors[0])
        assert text.startswith(
            f"rank {rank}: all_reduce of bucket 0 (collective 2) over 3 processes for 'reducer' did"
            " not complete within 0.4"
        ), text
        assert f"rank {missing} did not come, or ended" in text
        assert f"rank {3 - rank - missing} came and gave up waiting" in text
        assert "raise the timeout" in text
        for error in errors[1:]:
            assert "close it and make a new one in every process" in str(error)
            assert text in str(error)
        # The timeout, the exchange of reports, and nothing for what follows.
        assert seconds < 2.5
        assert launched == {"broadcast": 1, "all_reduce": 3}


def run_in_another_order(rank: int, world_size: int) -> BaseException | None:
    link = ProcessLink(purpose="reducer", timeout=1)
    try:
        if rank == 0:
            link.all_reduce(torch.ones(2), what="bucket 0").wait()
        else:
            link.all_gather(torch.ones(2), what="the usage map")
            link.all_gather(torch.ones(2), what="the usage map, again")
    except (CollectiveTimeout, CollectiveError) as error:
        return error
    finally:
        link.close()
    return None


def test_a_timeout_says_where_the_others_are(cluster: Cluster) -> None:
    first, second = cluster.run(run_in_another_order, 2)
    assert isinstance(first, CollectiveTimeout) or isinstance(second, CollectiveTimeout)
    if first is not None:
        assert "rank 1 is at all_gather of the usage map" in str(first)
    if second is not None:
        assert "rank 0 is at all_reduce of bucket 0 (collective 1)" in str(second)


def wait_in_two_links(rank: int, world_size: int) -> str:
    sums = ProcessLink(purpose="reducer", timeout=0.4)
    control = ProcessLink(purpose="control", timeout=0.4)
    link = sums if rank == 0 else control
    try:
        link.all_reduce(torch.ones(2), what="numbers").wait()
    except CollectiveTimeout as error:
        return str(error)
    finally:
        sums.close()
        control.close()
    return "no error"


def test_a_timeout_finds_who_waits_in_another_link(cluster: Cluster) -> None:
    first, second = cluster.run(wait_in_two_links, 2)
    assert "rank 1 waits in another link, control/1: all_reduce of numbers (coll" in first
    assert "rank 0 waits in another link, reducer/1: all_reduce of numbers (coll" in second


def come_late(rank: int, world_size: int) -> BaseException | None:
    link = ProcessLink(purpose="reducer", timeout=1)
    if rank == 1:
        time.sleep(1.5)
    try:
        link.all_reduce(torch.ones(2), what="bucket 0").wait()
    except (CollectiveTimeout, CollectiveError) as error:
        return error
    finally:
        link.close()
    return None


def test_who_comes_late_hears_that_the_others_gave_up(cluster: Cluster) -> None:
    first, second = cluster.run(come_late, 2)
    assert isinstance(first, CollectiveTimeout) and isinstance(second, CollectiveTimeout)
    assert "rank 1 came and failed too" in str(first)
    assert "rank 0 came and gave up waiting" in str(second)


def lose_a_peer(rank: int, world_size: int) -> tuple[BaseException, float, float]:
    link = ProcessLink(purpose="reducer", timeout=30)
    link.all_reduce(torch.ones(2), what="bucket 0").wait()
    if rank == 1:
        os._exit(7)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        link.all_reduce(torch.ones(2), what="bucket 1").wait()
    failed = time.monotonic()
    link.close()
    return caught.value, failed - started, time.monotonic() - failed


def test_a_process_that_ended_is_named_at_once(cluster: Cluster) -> None:
    results = cluster.run(lose_a_peer, 3, expect_errors=True)
    for rank in (0, 2):
        found = results[rank]
        assert isinstance(found, tuple), found
        error, seconds, closing = found
        assert "all_reduce of bucket 1 (collective 2)" in str(error)
        assert "rank 1 did not come, or ended" in str(error)
        assert f"rank {2 - rank} came and failed too" in str(error)
        assert "The backend said: " in str(error)
        assert seconds < 5 and closing < 1
    assert "exit code 7" in str(results[1])


def make_alone(rank: int, world_size: int) -> BaseException | None:
    error: BaseException | None = None
    if rank != 1:
        try:
            ProcessLink(purpose="reducer", timeout=0.5)
        except CollectiveTimeout as caught:
            error = caught
    # The same number of links in every process, so these meet, although one failed before.
    link = ProcessLink(purpose="control", timeout=5)
    link.all_reduce(torch.ones(1), what="flag").wait()
    link.close()
    return error


def test_a_link_that_a_process_does_not_make(cluster: Cluster) -> None:
    results = cluster.run(make_alone, 3)
    assert results[1] is None
    for rank in (0, 2):
        assert isinstance(results[rank], CollectiveTimeout)
        assert str(results[rank]).startswith(
            f"rank {rank} makes the process group 'reducer/1' over ranks 0, 1, 2, but rank 1 did "
            "not come within 0.5 s"
        )


def await_nothing(rank: int, world_size: int) -> tuple[str, float]:
    link = ProcessLink(purpose="reducer", timeout=0.5)
    future: torch.futures.Future[int] = torch.futures.Future()
    if rank == 1:
        future.set_result(3)
    started = time.monotonic()
    try:
        found = str(link.wait_for(future, what="the hook of bucket 2"))
    except CollectiveTimeout as error:
        found = str(error)
    link.close()
    return found, time.monotonic() - started


def test_a_future_that_nobody_completes(cluster: Cluster) -> None:
    (first, seconds), (second, _) = cluster.run(await_nothing, 2)
    assert "rank 0: future of the hook of bucket 2 (collective 0) over 2 processes" in first
    assert "rank 1 did not come" in first
    assert seconds < 4
    assert second == "3"


def break_during_a_wait(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="reducer", timeout=30)
    if rank == 1:
        link.close()
        return []
    found: Numbers = []

    def wait_in_thread() -> None:
        future: torch.futures.Future[int] = torch.futures.Future()
        with pytest.raises(CollectiveError) as caught:
            link.wait_for(future, what="the hook of bucket 2")
        found.append(str(caught.value))

    thread = threading.Thread(target=wait_in_thread)
    thread.start()
    with pytest.raises(CollectiveError, match="collective 1"):
        link.all_reduce(torch.ones(2), what="bucket 0").wait()
    started = time.monotonic()
    thread.join()
    found.append(time.monotonic() - started)
    link.close()
    return found


def test_a_failure_ends_all_waits(cluster: Cluster) -> None:
    message, seconds = cluster.run(break_during_a_wait, 2)[0]
    assert message.startswith("the link for 'reducer' is broken")
    assert "all_reduce of bucket 0 (collective 1)" in message
    assert seconds < 2


def interrupt_a_wait(rank: int, world_size: int) -> tuple[float, float]:
    link = ProcessLink(purpose="reducer", timeout=30)
    tensor = torch.ones(2)
    if rank == 1:
        time.sleep(1)
    pending = link.all_reduce(tensor, what="bucket 0")
    started = time.monotonic()
    if rank == 0:
        threading.Timer(0.1, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    seconds = time.monotonic() - started
    pending.wait()
    link.close()
    return seconds, tensor[0].item()


def test_a_wait_can_be_interrupted_and_repeated(cluster: Cluster) -> None:
    (seconds, total), (_, other) = cluster.run(interrupt_a_wait, 2)
    assert seconds < 0.9
    assert total == other == 2.0


def lose_the_store(rank: int, world_size: int, port: int) -> tuple[str, float]:
    from torch._C._distributed_c10d import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    else:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    link = ProcessLink(purpose="reducer", timeout=30)
    if rank == 0:
        time.sleep(0.3)
        os._exit(7)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        link.all_reduce(torch.ones(2), what="bucket 0").wait()
    link.close()
    dist.destroy_process_group()
    return str(caught.value), time.monotonic() - started


class StuckStore:
    """A store that does not answer before it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.answer.wait(20)
        raise RuntimeError("too late")


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_errors, "GRACE", 0.1)
    monkeypatch.setattr(process_errors, "_STORE_TIMEOUT", 0.1)
    store: Any = StuckStore()
    reports = process_errors.Reports(store, "reducer/1", 0, 2)
    started = time.monotonic()
    answer = reports.exchange(process_errors.Place(1, "all_reduce", "bucket 0"), True)
    assert time.monotonic() - started < 5
    store.answer.set()
    assert answer == "no answer within 0.2 s"


def test_a_store_that_is_gone_is_told(cluster: Cluster) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = cluster.run(lose_the_store, 2, port, init_group=False, expect_errors=True)
    found = results[1]
    assert isinstance(found, tuple), found
    assert "the store of the process group did not answer" in found[0]
    assert found[1] < 8
