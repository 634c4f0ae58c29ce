"""Worker threads: reuse, errors, interrupts, nesting, forks, and their end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel import intra_op
from dataparallel.workers import WorkerPools, Workers, locate

LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    with pools.borrow() as workers:
        return workers.run(tasks, LABELS[: len(tasks)], **options)


def replica_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("dataparallel-replica-")}


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


def test_failing_calls_create_no_threads() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    threads = replica_threads()
    for _ in range(100):
        with pytest.raises(ZeroDivisionError, match="in replica 1 on device cpu"):
            run(pools, int, lambda: 1 // 0)
    assert replica_threads() == threads
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
    with holder[0].borrow() as workers:
        workers.run([holder.clear, int], LABELS[:2])
    started = replica_threads() - before
    del workers
    gc.collect()
    assert wait_until(lambda: not any(t.is_alive() for t in started))


def test_an_idle_worker_holds_neither_task_nor_result() -> None:
    class Thing:
        pass

    pools = WorkerPools()
    result = Thing()
    reference = weakref.ref(result)
    gc.disable()
    try:
        outputs = run(pools, lambda kept=result: kept, int)
        del outputs, result
        assert wait_until(lambda: reference() is None)
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
            tasks = [lambda value=value: value for value in expected]
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
    import copy
    import pickle

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
    pools = WorkerPools()
    try:
        torch.set_num_threads(4)
        for count, shares in ((4, [3, 1]), (6, [2, 4])):
            torch.set_num_threads(count)
            assert run(pools, *[torch.get_num_threads] * 2, threads=shares) == shares
            assert torch.get_num_threads() == count
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert later == [4, 6]
    finally:
        torch.set_num_threads(whole)
        pools.close()


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
        workers = Workers()
        # One thread works alone: the process uses as much time as the thread.
        used = min(workers.run([cores_used], LABELS[:1], threads=[1])[0] for _ in range(3))
        assert used < 1.3
        workers.close()
    finally:
        torch.set_num_threads(whole)


def test_without_openmp_symbols_the_share_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intra_op, "_setters", lambda: ())
    whole = torch.get_num_threads()
    intra_op.use_threads(whole + 1)
    assert torch.get_num_threads() == whole


# --- errors ----------------------------------------------------------------------------------


class WithTwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class WithoutArguments(Exception):
    pass


class WithOwnText(Exception):
    def __str__(self) -> str:
        return "always the same"


def raises(error: BaseException) -> Callable[[], None]:
    def deep_inside() -> None:
        raise error

    return deep_inside


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        ValueError(),
        KeyError("missing"),
        KeyError(3),
        WithoutArguments(),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte"),
        StopIteration("end"),
        torch.OutOfMemoryError("too big"),
        AssertionError("no"),
        SystemExit("bye"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_itself_and_tells_where(error: BaseException) -> None:
    pools = WorkerPools()
    finished: list[int] = []
    original = type(error)

    def slow() -> None:
        time.sleep(0.05)
        finished.append(1)

    with pytest.raises(original, match="in replica 1 on device cpu") as caught:
        run(pools, slow, raises(error), slow)
    assert caught.value is error
    assert type(error) is original
    assert finished == [1, 1], "the other replicas are let finish"
    assert "deep_inside" in "".join(traceback.format_exception(error))
    assert run(pools, int, int, int) == [0, 0, 0]
    pools.close()


@pytest.mark.parametrize(
    "error", [WithTwoArguments(3, "why"), WithOwnText("x")], ids=lambda error: type(error).__name__
)
def test_an_error_with_its_own_text_tells_where_in_a_note(error: Exception) -> None:
    pools = WorkerPools()
    text = str(error)
    with pytest.raises(type(error)) as caught:
        run(pools, int, raises(error))
    assert caught.value is error
    assert str(error) == text
    assert "in replica 1 on device cpu" in error.__notes__
    pools.close()


def test_of_several_errors_the_lowest_index_is_raised_and_the_others_are_notes() -> None:
    pools = WorkerPools()
    with pytest.raises(ValueError, match="first\nin replica 1 on device cpu") as caught:
        run(pools, int, raises(ValueError("first")), raises(KeyError("second")))
    assert caught.value.__notes__ == [
        "in replica 2 on device cpu also failed: KeyError: 'second'",
    ]
    pools.close()


def test_an_error_raised_again_and_again_keeps_one_location() -> None:
    pools = WorkerPools()
    error = ValueError("kept")
    for _ in range(3):
        with pytest.raises(ValueError, match="in replica 0"):
            run(pools, raises(error), int)
    assert str(error) == "kept\nin replica 0 on device cpu"
    pools.close()


def test_a_nested_error_names_both_places() -> None:
    error = ValueError("inner")
    locate(error, "in replica 1 on device cpu")
    locate(error, "in replica 0 on device virtual:2")
    assert str(error) == "inner\nin replica 1 on device cpu\nin replica 0 on device virtual:2"


def test_errors_leave_no_reference_cycles() -> None:
    class Payload:
        pass

    def fail() -> None:
        payload = Payload()
        references.append(weakref.ref(payload))
        raise ValueError("with a frame that holds the payload")

    references: list[weakref.ref[Payload]] = []
    pools = WorkerPools()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            try:
                run(pools, fail, fail)
            except ValueError:
                pass
        assert len(references) == 10
        assert wait_until(lambda: all(reference() is None for reference in references), 2.0)
    finally:
        gc.enable()
    pools.close()


# --- interrupts ------------------------------------------------------------------------------


INTERRUPTED = """
    import os, signal, sys, threading, time
    import torch
    from dataparallel.parallel_apply import parallel_apply
    from dataparallel.rendezvous import current_rendezvous

    def compute(x):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            x = x + 1
        return x

    def sleep(x):
        time.sleep(20)

    def meet(x):
        # Replica 1 never comes: it computes until it is interrupted.
        return current_rendezvous().exchange("k", x, lambda values: values)

    def run(*functions):
        begin = time.monotonic()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            parallel_apply(functions, [torch.zeros(4)] * len(functions))
        except KeyboardInterrupt:
            print("interrupted after", time.monotonic() - begin, flush=True)
        else:
            sys.exit("not interrupted")
        assert time.monotonic() - begin < 6, "the interrupt took too long"
        outputs = parallel_apply([torch.exp] * 3, [torch.zeros(2)] * 3)
        assert [y.tolist() for y in outputs] == [[1.0, 1.0]] * 3

    run(compute, compute)
    time.sleep(0.2)
    names = [t.name for t in threading.enumerate()]
    assert len(names) == 1 + 3, names
    run(meet, compute, compute)
    run(sleep, compute)
    print("usable")
"""


def python(code: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **options,
    )


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_ends_the_call_and_the_next_call_works() -> None:
    result = python(INTERRUPTED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("usable\n")
    assert result.stdout.count("interrupted after") == 3
    assert "Traceback" not in result.stderr


def test_an_interrupted_wait_releases_tasks_that_wait_for_each_other() -> None:
    pools = WorkerPools()
    released = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        released.wait(20)

    with pytest.raises(KeyboardInterrupt):
        run(pools, lambda: released.wait(20), interrupt, on_interrupt=released.set)
    assert released.is_set()
    assert run(pools, int, int) == [0, 0]
    pools.close()


# --- processes -------------------------------------------------------------------------------


def test_the_interpreter_exits_with_pools_alive_and_replicas_stuck() -> None:
    result = python(
        """
        import threading, time
        from dataparallel.workers import WorkerPools
        from dataparallel.parallel_apply import parallel_apply
        pools = WorkerPools()
        with pools.borrow() as workers:
            workers.run([int, int], ["a", "b"])
        parallel_apply([int, int], [1, 2])
        stuck = lambda: time.sleep(600)
        def call():
            with pools.borrow() as workers:
                workers.run([stuck, int], ["a", "b"])
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.2)
        print("end")
        """,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
    assert not result.stderr


def _in_child(pools: WorkerPools, connection: Any) -> None:
    try:
        connection.send(run(pools, *[os.getpid] * 2))
    finally:
        connection.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_in_child, args=(pools, theirs))
    child.start()
    assert ours.poll(30), "the forked child hangs"
    assert ours.recv() == [child.pid] * 2
    child.join(30)
    assert child.exitcode == 0
    assert run(pools, *[os.getpid] * 2) == [os.getpid()] * 2
    pools.close()


class _Dataset(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, pools: WorkerPools) -> None:
        self.pools = pools

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(sum(run(self.pools, lambda: index, lambda: index)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_data_loader_workers_can_use_pools_and_end() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    loader = torch.utils.data.DataLoader(
        _Dataset(pools), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    pools.close()
