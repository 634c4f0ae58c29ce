"""Worker threads: reuse, errors, interrupts, forks, their end, and the CPU's threads they use."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.errors import locate
from dataparallel.threads import context
from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.workers import WorkerPools
from tests.virtual.oracle import run_python

CPU = torch.device("cpu")
LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    return pools.run(tasks, LABELS.__getitem__, **options)


def replica_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("dataparallel-replica-")}


def wait_until(predicate: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.005)
    return predicate()


@pytest.fixture
def pools() -> Iterator[WorkerPools]:
    made = WorkerPools()
    yield made
    made.close()


# --- threads ---------------------------------------------------------------------------------


def test_each_task_has_the_thread_of_its_index(pools: WorkerPools) -> None:
    barrier = threading.Barrier(3)

    def call() -> threading.Thread:
        barrier.wait(10)  # They run at the same time.
        return threading.current_thread()

    first = run(pools, call, call, call)
    assert [t.name for t in first] == [f"dataparallel-replica-{i}" for i in range(3)]
    assert all(t.daemon for t in first)
    threads = replica_threads()
    for count in (3, 2) * 50:
        assert run(pools, *[threading.current_thread] * count) == first[:count]
    # Those of earlier tests may end meanwhile.
    assert replica_threads() <= threads
    assert run(pools, *[threading.current_thread] * 4)[:3] == first


@pytest.mark.parametrize(
    "drop",
    [
        lambda holder: holder[0].close(),
        lambda holder: holder.clear(),
        lambda holder: run(holder[0], holder.clear, int),
    ],
    ids=["closed", "collected", "dropped by one of its replicas"],
)
def test_the_end_of_a_pool_is_that_of_its_threads(drop: Callable[[Any], object]) -> None:
    holder, before = [WorkerPools()], replica_threads()
    run(holder[0], int, int)
    started = replica_threads() - before
    assert len(started) == 2
    drop(holder)
    gc.collect()
    assert wait_until(lambda: not any(thread.is_alive() for thread in started))
    for pools in holder:
        assert run(pools, int, int) == [0, 0], "a later call starts new ones"
        pools.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(pools: WorkerPools) -> None:
    run(pools, int, int)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(run(pools, *[os.getpid] * 2)))
    child.start()
    assert ours.poll(30), "the forked child hangs"
    assert ours.recv() == [child.pid] * 2
    child.join(30)
    assert child.exitcode == 0
    assert run(pools, *[os.getpid] * 2) == [os.getpid()] * 2


# --- errors ----------------------------------------------------------------------------------


class WithTwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


class WithOwnText(Exception):
    def __str__(self) -> str:
        return "always the same"


def raises(error: BaseException) -> Callable[[], None]:
    def deep_inside() -> None:
        raise error

    return deep_inside


@pytest.mark.parametrize(
    "error",
    [KeyError(3), WithTwoArguments(3, "why"), WithOwnText("x")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_itself_and_tells_where(
    pools: WorkerPools, error: BaseException
) -> None:
    """More kinds of errors, raised in a wrapper, are in faults/test_local_errors.py."""
    finished: list[int] = []
    original, text = type(error), str(error)

    def slow() -> None:
        time.sleep(0.02)
        finished.append(1)

    for _ in range(2):
        with pytest.raises(original) as caught:
            run(pools, slow, raises(error), slow)
        assert caught.value is error and type(error) is original
        told = "".join(traceback.format_exception(error))
        assert "deep_inside" in told and told.count(LABELS[1]) == 1
        if original is not KeyError:
            assert str(error) == text and vars(error)["__notes__"] == [LABELS[1]]
    assert finished == [1] * 4, "the other replicas are let finish"
    assert run(pools, int, int, int) == [0, 0, 0]


def test_of_several_errors_the_lowest_index_is_raised_and_the_others_are_notes(
    pools: WorkerPools,
) -> None:
    with pytest.raises(ValueError, match="first\nin replica 1 on device cpu") as caught:
        run(pools, int, raises(ValueError("first")), raises(KeyError("second")))
    told = ["in replica 2 on device cpu also failed: KeyError: 'second'"]
    assert vars(caught.value)["__notes__"] == told
    error = ValueError("inner")
    for place in ("in replica 1 on device cpu", "in replica 0 on device virtual:2"):
        locate(error, place)
    assert str(error) == "inner\nin replica 1 on device cpu\nin replica 0 on device virtual:2"


def test_what_a_failing_task_leaves_is_gone(pools: WorkerPools) -> None:
    local = threading.local()
    payloads: list[weakref.ref[Any]] = []

    def fail() -> None:
        payload = WorkerPools()
        payloads.append(weakref.ref(payload))
        local.left = True
        raise ValueError("with a frame that holds the payload")

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                run(pools, fail, fail)
        assert len(payloads) == 6
        assert wait_until(lambda: all(payload() is None for payload in payloads), 2.0)
    finally:
        gc.enable()
    assert run(pools, *[lambda: hasattr(local, "left")] * 2) == [False, False]


# --- interrupts, and the end of the process --------------------------------------------------


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from dataparallel.comm import interpreter_end
from dataparallel.threads.apply import parallel_apply
from dataparallel.threads.meeting import current_rendezvous

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
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
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
# What is stuck does not keep the interpreter.
interpreter_end.PATIENCE = 0.1
print("usable")
"""


def test_ctrl_c_ends_the_call_and_the_next_call_works() -> None:
    result = run_python(INTERRUPTED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("usable\n")
    assert result.stdout.count("interrupted after") == 3
    assert not result.stderr


# --- intra-op threads ------------------------------------------------------------------------


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_each_worker_has_its_share_and_nobody_else_notices(
    set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[int] = []
    for count, shares in ((4, [2, 2]), (7, [4, 3]), (8, [3, 3, 2])):
        set_threads(count)
        found = apply_replicas([torch.get_num_threads] * len(shares), [CPU] * len(shares))
        assert found == shares
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later.pop() == torch.get_num_threads() == count
    # Where torch's OpenMP is not found, they keep the setting of the process.
    monkeypatch.setattr(context, "_setters", lambda: ())
    assert apply_replicas([torch.get_num_threads] * 2, [CPU] * 2, WorkerPools()) == [8, 8]


def test_a_share_limits_matrix_products_too(set_threads: Callable[[int], None]) -> None:
    def cores_used() -> float:
        x = torch.randn(600, 600)
        cpu, process = time.thread_time(), time.process_time()
        for _ in range(10):
            x @ x
        return (time.process_time() - process) / max(1e-9, time.thread_time() - cpu)

    # This sets MKL's count for the whole process, unless a thread has its own.
    set_threads(2)
    calls: list[Callable[[], float]] = [cores_used, float]
    # One thread works alone: the process uses as much time as the thread.
    assert min(apply_replicas(calls, [CPU] * 2)[0] for _ in range(3)) < 1.3


class Watching(DataParallel[nn.Module]):
    """Looks at the number of threads while it splits and gathers."""

    def scatter(self, *args: Any) -> Any:
        self.seen = [torch.get_num_threads()]
        return super().scatter(*args)

    def gather(self, *args: Any) -> Any:
        self.seen.append(torch.get_num_threads())
        return super().gather(*args)


@pytest.mark.parametrize(
    ("devices", "around"),
    [(["cpu", "cpu"], [1, 1]), (["virtual:0", "virtual:1"], [4, 4]), (["cpu"], [4])],
    ids=["two on the CPU", "virtual", "one on the CPU"],
)
def test_the_caller_uses_one_thread_around_several_cpu_replicas(
    devices: list[str], around: list[int], set_threads: Callable[[int], None]
) -> None:
    set_threads(4)
    model = Watching(nn.Identity(), devices)
    model(torch.randn(4, 2, device=devices[0]))
    assert model.seen == around and torch.get_num_threads() == 4
