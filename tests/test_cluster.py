"""The processes in which functions of tests run."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.cluster import Cluster, RankDied


def total(rank: int, world_size: int, factor: float) -> tuple[int, torch.Tensor]:
    tensor = torch.full((3,), rank * factor)
    dist.all_reduce(tensor)
    return dist.get_world_size(), tensor


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def draw(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def has_group(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def devices(rank: int, world_size: int) -> int:
    return torch.accelerator.device_count()


def fail_in_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        raise KeyError("lost")
    return "fine"


def end_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(3)
    return "fine"


def sleep_in_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        time.sleep(30)
    return "fine"


def wait_for_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("beware", stacklevel=1)


def fail_in_thread(rank: int, world_size: int) -> None:
    thread = threading.Thread(target=fail_in_rank_one, args=(1, 2))
    thread.start()
    thread.join()


def test_every_rank_is_a_member_of_a_group(cluster: Cluster) -> None:
    for world_size in (2, 3, 1):
        for size, tensor in cluster.run(total, world_size, 2.0):
            assert size == world_size
            assert tensor.tolist() == [2.0 * sum(range(world_size))] * 3


def test_processes_serve_again(cluster: Cluster) -> None:
    first = cluster.run(process_id, 2)
    assert len({*first, os.getpid()}) == 3
    assert cluster.run(process_id, 2) == first


def test_every_function_starts_from_the_seed(cluster: Cluster) -> None:
    torch.manual_seed(0)
    assert cluster.run(draw, 2) * 2 == [torch.rand(()).item()] * 4 == cluster.run(draw, 2) * 2


def test_a_group_and_virtual_devices_are_a_choice(cluster: Cluster) -> None:
    assert cluster.run(has_group, 2) == [True, True]
    assert cluster.run(has_group, 2, init_group=False) == [False, False]
    assert cluster.run(devices, 1, virtual=True) == [4]


def test_an_exception_comes_back_with_the_rank_and_the_traceback(cluster: Cluster) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        cluster.run(fail_in_rank_one, 2)
    assert "in rank 1:" in str(caught.value.__cause__)
    assert 'raise KeyError("lost")' in str(caught.value.__cause__)


def test_exceptions_can_be_results(cluster: Cluster) -> None:
    fine, error = cluster.run(fail_in_rank_one, 2, expect_errors=True)
    assert fine == "fine" and isinstance(error, KeyError)


def test_ranks_do_not_wait_for_one_that_failed(cluster: Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        cluster.run(wait_for_rank_one, 2)
    assert time.monotonic() - started < 20


def test_a_process_that_ends_is_replaced(cluster: Cluster) -> None:
    with pytest.raises(RankDied, match="exit code 3") as caught:
        cluster.run(end_rank_one, 2)
    assert "in rank 1" in str(caught.value.__cause__)
    assert len(cluster.run(total, 2, 1.0)) == 2


def test_a_process_that_hangs_is_replaced(cluster: Cluster) -> None:
    with pytest.raises(RankDied, match=r"timeout 0.5 s(?s:.*)sleep_in_rank_one"):
        cluster.run(sleep_in_rank_one, 2, timeout=0.5)
    assert len(cluster.run(total, 2, 1.0)) == 2


def test_warnings_are_errors(cluster: Cluster) -> None:
    with pytest.raises(UserWarning, match="beware"):
        cluster.run(warn, 1)


def test_an_exception_in_a_thread_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"outside of the function(?s:.*)KeyError: 'lost'"):
        cluster.run(fail_in_thread, 1)
