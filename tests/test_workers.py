"""Worker threads: reuse, nesting, shares of the intra-op threads, and their end."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.threads import context
from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.workers import WorkerPools

CPU = torch.device("cpu")
LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    return pools.run(tasks, LABELS.__getitem__, **options)


def replica_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("dataparallel-replica-")}


def same(value: Any) -> Any:
    return value


def wait_until(predicate: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.005)
    return predicate()


# --- threads ---------------------------------------------------------------------------------


def test_each_task_has_the_thread_of_its_index() -> None:
    pools = WorkerPools()
    names = run(pools, *[lambda: threading.current_thread().name] * 3)
    assert names == [f"dataparallel-replica-{i}" for i in range(3)]
    assert all(t.daemon for t in replica_threads())
    pools.close()


def test_tasks_run_at_the_same_time() -> None:
    pools = WorkerPools()
    barrier = threading.Barrier(3)
    assert sorted(run(pools, *[lambda: barrier.wait(10)] * 3)) == [0, 1, 2]
    pools.close()


def test_no_thread_is_created_after_the_first_call() -> None:
    pools = WorkerPools()
    first = run(pools, *[threading.get_ident] * 3)
    threads = replica_threads()
    for _ in range(200):
        assert run(pools, *[threading.get_ident] * 3) == first
        assert run(pools, *[threading.get_ident] * 2) == first[:2]
    assert replica_threads() == threads
    assert run(pools, *[threading.get_ident] * 4)[:3] == first
    pools.close()


def test_failing_calls_leave_no_threads() -> None:
    pools = WorkerPools()
    before = replica_threads()
    for _ in range(100):
        with pytest.raises(ZeroDivisionError, match="in replica 1 on device cpu"):
            run(pools, int, lambda: 1 // 0)
        assert replica_threads() == before
    assert run(pools, int, int) == [0, 0]
    pools.close()


def test_what_a_failing_task_leaves_in_its_thread_is_gone() -> None:
    pools = WorkerPools()
    local = threading.local()

    def fail() -> None:
        local.left = True
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(pools, fail, fail)
    assert run(pools, *[lambda: hasattr(local, "left")] * 2) == [False, False]
    pools.close()


def test_close_ends_the_threads_and_a_later_call_starts_new_ones() -> None:
    pools = WorkerPools()
    before = replica_threads()
    run(pools, int, int)
    started = replica_threads() - before
    assert len(started) == 2
    pools.close()
    pools.close()
    assert not any(t.is_alive() for t in started)
    assert run(pools, int, int) == [0, 0]
    pools.close()


def test_a_pool_that_is_collected_ends_its_threads() -> None:
    pools = WorkerPools()
    before = replica_threads()
    run(pools, int, int)
    started = replica_threads() - before
    del pools
    gc.collect()
    assert wait_until(lambda: not any(t.is_alive() for t in started))


def test_a_pool_can_be_dropped_by_one_of_its_own_replicas() -> None:
    holder = [WorkerPools()]
    before = replica_threads()
    tasks: list[Callable[[], Any]] = [holder.clear, int]
    holder[0].run(tasks, LABELS.__getitem__)
    started = replica_threads() - before
    gc.collect()
    assert wait_until(lambda: not any(t.is_alive() for t in started))


def test_an_idle_worker_holds_neither_task_nor_result() -> None:
    class Thing:
        pass

    pools = WorkerPools()
    result: Thing | None = Thing()
    reference = weakref.ref(result)
    gc.disable()
    try:
        outputs = run(pools, functools.partial(same, result), int)
        del outputs, result
        assert reference() is None
    finally:
        gc.enable()
    pools.close()


def test_nested_calls_borrow_another_pool() -> None:
    pools = WorkerPools()
    idents: set[int] = set()

    def inner() -> int:
        idents.add(threading.get_ident())
        return 1

    def outer() -> int:
        idents.add(threading.get_ident())
        return sum(run(pools, inner, inner))

    for _ in range(20):
        assert run(pools, outer, outer) == [2, 2]
    assert 2 + 2 <= len(idents) <= 6
    pools.close()


def test_concurrent_callers_get_their_own_results() -> None:
    pools = WorkerPools()
    before = replica_threads()
    faults: list[str] = []

    def caller(number: int) -> None:
        for round_ in range(50):
            expected = [(number, round_, 0), (number, round_, 1)]
            tasks = [functools.partial(same, value) for value in expected]
            if run(pools, *tasks) != expected:
                faults.append(f"caller {number}, round {round_}")

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not faults
    assert len(replica_threads() - before) <= 8
    pools.close()


def test_pools_are_copied_and_pickled_without_threads() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    for other in (copy.deepcopy(pools), pickle.loads(pickle.dumps(pools))):
        assert run(other, int, int) == [0, 0]
        other.close()
    pools.close()


# --- intra-op threads ------------------------------------------------------------------------


def test_a_worker_has_its_share_and_nobody_else_notices() -> None:
    whole = torch.get_num_threads()
    later: list[int] = []
    try:
        for count, shares in ((4, [2, 2]), (7, [4, 3])):
            torch.set_num_threads(count)
            assert apply_replicas([torch.get_num_threads] * 2, [CPU] * 2) == shares
            assert torch.get_num_threads() == count
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert later == [4, 7]
    finally:
        torch.set_num_threads(whole)


def test_a_share_limits_matrix_products_too() -> None:
    def cores_used() -> float:
        x = torch.randn(600, 600)
        wall, cpu = time.perf_counter(), time.thread_time()
        process = time.process_time()
        for _ in range(10):
            x @ x
        del wall
        return (time.process_time() - process) / max(1e-9, time.thread_time() - cpu)

    whole = torch.get_num_threads()
    try:
        # This sets MKL's count for the whole process, unless a thread has its own.
        torch.set_num_threads(2)
        calls: list[Callable[[], float]] = [cores_used, float]
        # One thread works alone: the process uses as much time as the thread.
        used = min(apply_replicas(calls, [CPU] * 2)[0] for _ in range(3))
        assert used < 1.3
    finally:
        torch.set_num_threads(whole)


def test_without_openmp_symbols_the_share_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_setters", lambda: ())
    whole = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert apply_replicas([torch.get_num_threads] * 2, [CPU] * 2, WorkerPools()) == [4, 4]
    finally:
        torch.set_num_threads(whole)
