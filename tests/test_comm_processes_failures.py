"""Links between processes that fail: timeouts and errors say who is missing."""

from __future__ import annotations

import _thread
import os
import re
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataparallel.comm.failures import CollectiveError, CollectiveTimeout, failures_of
from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster

Numbers = list[Any]


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
            f"rank {rank}: all_reduce of bucket 0 (collective 2) for 'reducer' over 3 processes did"
            " not complete within 0.4"
        ), text
        assert f"rank {missing} did not come" in text
        assert f"rank {3 - rank - missing} came and " in text
        assert "raise the timeout" in text
        for error in errors[1:]:
            assert "make a new one in every process" in str(error)
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


def wait_in_two_links(rank: int, world_size: int, other: str) -> str:
    sums = ProcessLink(purpose="reducer", timeout=0.4)
    control = ProcessLink(purpose=other, timeout=0.4)
    link = sums if rank == 0 else control
    try:
        link.all_reduce(torch.ones(2), what="numbers").wait()
    except CollectiveTimeout as error:
        return str(error)
    finally:
        sums.close()
        control.close()
    return "no error"


# Those of two wrappers have one purpose.
@pytest.mark.parametrize(("other", "named"), [("control", "control"), ("reducer", "reducer 2")])
def test_a_timeout_finds_who_waits_in_another_link(
    cluster: Cluster, other: str, named: str
) -> None:
    first, second = cluster.run(wait_in_two_links, 2, other)
    assert f"rank 1 is at all_reduce of numbers (collective 1) for {named!r}" in first
    assert "rank 0 is at all_reduce of numbers (collective 1) for 'reducer'" in second


def come_late(rank: int, world_size: int) -> BaseException | None:
    link = ProcessLink(purpose="reducer", timeout=1)
    if rank == 1:
        time.sleep(1.2)
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
    assert "rank 1 " in str(first)
    assert "rank 0 came and gave up" in str(second)


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
        assert re.search(r"rank 1 \(process \d+ on .*\) has ended", str(error))
        assert isinstance(error, CollectiveError)
        assert error.failure is not None and error.failure.kind == "ended"
        assert seconds < 5 and closing < 1
    assert "exit code 7" in str(results[1])


def make_alone(rank: int, world_size: int, late: bool) -> str:
    """Rank 1 makes another link than the others, or comes when they have given up."""
    text = ""
    if rank == 1 and late:
        time.sleep(1.5)
    else:
        with pytest.raises(CollectiveTimeout) as caught:
            ProcessLink(purpose="other" if rank == 1 else "reducer", timeout=30 if rank == 1 else 1)
        text = str(caught.value)
    # However many were made before, and whoever has failed: these meet.
    link = ProcessLink(purpose="control", timeout=5)
    link.all_reduce(torch.ones(1), what="flag").wait()
    link.close()
    return text


@pytest.mark.parametrize("late", [False, True])
def test_a_link_that_a_process_does_not_make(cluster: Cluster, late: bool) -> None:
    results = cluster.run(make_alone, 3, late)
    making = "the making of the process group"
    for rank in (0, 2):
        text = f"rank {rank}: {making} 'reducer' over 3 processes did not complete within "
        assert results[rank].startswith(text)
        why = "rank 1 did not come" if late else f"rank 1 is at {making} 'other'"
        assert why in results[rank]
        assert f"rank {2 - rank} came and gave up" in results[rank]
    assert late or f"rank 0 is at {making} 'reducer'" in results[1]


def make_anew_alone(rank: int, world_size: int) -> float:
    """Rank 1 makes a new link, and closes the one over which rank 0 waits."""
    link = ProcessLink(purpose="test", timeout=20)
    if rank == 1:
        threading.Timer(0.5, link.close).start()
    else:
        with pytest.raises(CollectiveError, match="rank 1 did not come"):
            link.all_reduce(torch.ones(1), what="numbers").wait()
    again = ProcessLink(purpose="test", timeout=20)
    total = torch.ones(1)
    again.all_reduce(total, what="numbers").wait()
    again.close()
    return total.item()


def test_who_makes_a_new_link_does_not_hear_that_the_old_one_broke(cluster: Cluster) -> None:
    assert cluster.run(make_anew_alone, 2) == [2.0, 2.0]


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
    assert "rank 0: the wait for the hook of bucket 2 over 2 processes" in first
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


def ask_behind_a_request_that_is_stuck(rank: int, world_size: int) -> tuple[list[str], float, int]:
    assert dist.group.WORLD is not None
    failures, stuck = failures_of(dist.group.WORLD), threading.Event()
    started, texts = time.monotonic(), []
    for _ in range(2):
        with pytest.raises(CollectiveTimeout) as caught:
            failures.ask(lambda store: stuck.wait(20), 0.2)
        texts.append(str(caught.value))
    seconds = time.monotonic() - started
    stuck.set()
    return texts, seconds, failures.ask(lambda store: 5, 20.0)


def test_a_store_that_does_not_answer_is_not_waited_for(cluster: Cluster) -> None:
    ((texts, seconds, answer),) = cluster.run(ask_behind_a_request_that_is_stuck, 1)
    assert all("(no answer within 0.2 s)" in text for text in texts)
    assert seconds < 5 and answer == 5


def test_a_store_that_is_gone_is_told(cluster: Cluster) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = cluster.run(lose_the_store, 2, port, init_group=False, expect_errors=True)
    found = results[1]
    assert isinstance(found, tuple), found
    assert "the store of the process group did not answer" in found[0]
    assert found[1] < 8
