"""Worker threads, and replicas that run in them: at the same time, or in turn."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import virtual
from dataparallel.errors import locate
from dataparallel.threads import apply, context
from dataparallel.threads.apply import Replica, apply_replicas, current_replica, parallel_apply
from dataparallel.threads.workers import WorkerPools
from tests.faults.leaks import replica_threads

CPU = torch.device("cpu")
LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    return pools.run(tasks, LABELS.__getitem__, **options)


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
    [lambda holder: holder.clear(), lambda holder: run(holder[0], holder.clear, int)],
    ids=["collected", "dropped by one of its replicas"],
)
def test_the_end_of_a_pool_is_that_of_its_threads(drop: Callable[[Any], object]) -> None:
    holder, before = [WorkerPools()], replica_threads()
    run(holder[0], int, int)
    started = replica_threads() - before
    assert len(started) == 2
    drop(holder)
    gc.collect()
    assert wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_the_end_of_a_pool_is_nothing_that_an_interrupt_can_stop() -> None:
    """The collector may run in a replica, in which Ctrl-C would be raised inside a finalizer."""
    holder, called = [WorkerPools()], list[str]()
    run(holder[0], int, int)
    sys.settrace(lambda frame, *_: called.append(frame.f_code.co_name))
    holder.clear()
    sys.settrace(None)
    assert not called


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


class WithOwnText(Exception):
    def __str__(self) -> str:
        return "always the same"


def raises(error: BaseException) -> Callable[[], None]:
    def deep_inside() -> None:
        raise error

    return deep_inside


@pytest.mark.parametrize("error", [KeyError(3), WithOwnText("x")], ids=repr)
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
    error = ValueError("first")
    with pytest.raises(ValueError, match="first\nin replica 1 on device cpu"):
        run(pools, int, raises(error), raises(KeyError("second")))
    told = ["in replica 2 on device cpu also failed: KeyError: 'second'"]
    assert vars(error)["__notes__"] == told
    locate(error, "in replica 0 on device virtual:2")
    assert str(error) == "first\nin replica 1 on device cpu\nin replica 0 on device virtual:2"


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


def test_ctrl_c_ends_the_call_and_the_next_call_works(pools: WorkerPools) -> None:
    """In the middle of a step of a wrapper: see faults/test_interrupts.py."""
    before, released = replica_threads(), threading.Event()

    def compute() -> None:
        x = torch.zeros(4)
        while True:
            x = x + 1

    def wait() -> None:
        assert released.wait(30)

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        run(pools, compute, wait, compute, on_interrupt=released.set)
    timer.join()
    assert wait_until(lambda: replica_threads() <= before)
    assert run(pools, int, int) == [0, 0]


# --- intra-op threads ------------------------------------------------------------------------


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_each_worker_has_its_share_and_nobody_else_notices(
    set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_threads(8)
    assert apply_replicas([torch.get_num_threads] * 3, [CPU] * 3) == [3, 3, 2]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 8
    # If torch's OpenMP is not found, they keep the setting of the process.
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


class Watching(dp.DataParallel[nn.Module]):
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


# --- replicas in threads ------------------------------------------------------------------------


def here(*_: Any, **__: Any) -> Replica | None:
    return current_replica()


def test_what_is_an_argument(slots: list[str]) -> None:
    for container in (tuple, list):
        several = [container((7, 2)), container((9, 4))]
        assert parallel_apply([divmod, divmod], several) == [(3, 1), (2, 1)]
    assert parallel_apply([len, len], [{"a": 1}, "text"]) == [1, 4]
    assert parallel_apply([dict, dict], [(), ()], [{"a": 1}, None]) == [{"a": 1}, {}]
    assert parallel_apply([], []) == []
    # The device is that of the first tensor, or the CPU.
    nested = [{"deep": [1, torch.ones(1).to(slot)]} for slot in slots]
    expected = [Replica(i, torch.device(slot), 4) for i, slot in enumerate(slots)]
    assert parallel_apply([here] * 4, nested) == expected
    assert parallel_apply([here] * 4, [()] * 4, nested) == expected
    assert parallel_apply([here] * 2, [(), "text"]) == [Replica(i, CPU, 2) for i in range(2)]
    found = parallel_apply([here] * 4, [()] * 4, devices=[*slots[:3], None])
    assert found == [*expected[:3], Replica(3, CPU, 4)]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ([[[1, 2, 3]], [[1, 2], [{}]], [[1, 2], None, ["cpu"] * 4]][i], r"is (longer|shorter) than")
        for i in range(3)
    ]
    + [([["1", "2"], None, ["cpu", "nowhere"]], "'nowhere' is not a device")],
)
def test_arguments_that_do_not_match_the_functions_are_refused(args: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parallel_apply([int, int], *args)


def test_an_error_names_the_replica_and_its_device(slots: list[str]) -> None:
    modules = [nn.Linear(size, 3).to(slot) for size, slot in zip((3, 4), slots, strict=False)]
    inputs = [torch.ones(1, 3).to(slot) for slot in slots[:2]]
    where = re.escape(f"in replica 1 on device {slots[1]}")
    with pytest.raises(RuntimeError, match=f"(?s)shapes cannot be multiplied.*{where}"):
        parallel_apply(modules, inputs)
    modules[1] = nn.Linear(3, 3).to(slots[1])
    for module, x, y in zip(modules, inputs, parallel_apply(modules, inputs), strict=True):
        torch.testing.assert_close(y, module(x))
    with pytest.raises(ZeroDivisionError, match="in replica 0 on device cpu"):
        parallel_apply([lambda _: 1 / 0], [1])
    assert current_replica() is None


def test_current_replica_is_that_of_the_innermost_call() -> None:
    def outer(count: int) -> Any:
        return here(), apply_replicas([here] * count, [CPU] * count), here()

    for count in (1, 2):
        results = apply_replicas([lambda count=count: outer(count)] * 2, [CPU] * 2)  # type: ignore[misc]
        for i, (before, inner, after) in enumerate(results):
            assert before == after == Replica(i, CPU, 2)
            assert inner == [Replica(k, CPU, count) for k in range(count)]
    # A single module runs in the calling thread.
    (found,) = parallel_apply([lambda _: (threading.current_thread(), here())], [1])
    assert found == (threading.current_thread(), Replica(0, CPU, 1))
    assert current_replica() is None


# --- in turn ---------------------------------------------------------------------------------


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any Python, the interpreter has its lock."""
    monkeypatch.setattr(apply, "has_lock", lambda: True)


@pytest.mark.usefixtures("locked")
@pytest.mark.parametrize(
    ("at_once", "in_turn", "kept"), [(2.0, 1.0, True), (1.0, 2.0, False), (300.0, 1.0, False)]
)
def test_both_ways_are_tried_and_the_faster_one_is_kept(
    at_once: float, in_turn: float, kept: bool
) -> None:
    pace, ways = apply.Pace(), list[bool]()
    for _ in range(35):
        ways.append(pace.is_in_turn())
        if pace.is_trial:
            pace.took((in_turn if ways[-1] else at_once) / 1000, in_turn=ways[-1])
    assert any(ways) == (at_once < 250) and ways[-3:] == [kept] * 3
    assert kept or sum(ways) <= 2, "what is clearly slower is tried no longer"


def test_no_replica_waits_for_its_turn_until_an_import_turns_the_lock_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace, ways, locked = apply.Pace(), list[bool](), False
    monkeypatch.setattr(apply, "has_lock", lambda: locked)
    for call in range(80):
        locked = call >= 40
        ways.append(pace.is_in_turn())
        if pace.is_trial:
            assert locked, "without the lock nothing is timed"
            pace.took(0.001 if ways[-1] else 0.002, in_turn=ways[-1])
    assert not any(ways[:40]) and all(ways[-3:])


class _DeviceEvent:
    """An event of a device that is behind the host: it happens at a time, once that has come."""

    now = 0.0

    def __init__(self, at: float) -> None:
        self._at = at

    def query(self) -> bool:
        return self._at <= _DeviceEvent.now

    def elapsed_time(self, later: _DeviceEvent) -> float:
        assert self.query() and later.query(), "the host waits for a device"
        return (later._at - self._at) * 1000


@pytest.mark.usefixtures("locked")
@pytest.mark.parametrize(
    ("at_once", "in_turn", "kept"),
    [
        # Seconds of two devices, and of the host.
        ((0.010, 0.010, 0.004), (0.010, 0.015, 0.002), False),
        ((0.010, 0.020, 0.002), (0.015, 0.015, 0.004), True),
        # As much on the devices.
        ((0.010, 0.020, 0.004), (0.001, 0.0201, 0.002), True),
        ((0.010, 0.020, 0.002), (0.010, 0.0199, 0.004), False),
    ],
)
def test_the_device_that_needs_most_tells_which_way_is_faster_and_then_the_host(
    at_once: tuple[float, ...], in_turn: tuple[float, ...], kept: bool
) -> None:
    pace, ways, behind = apply.Pace(), list[bool](), 0.0
    _DeviceEvent.now = 0.0
    for call in range(60):
        ways.append(pace.is_in_turn())
        *devices, host = in_turn if ways[-1] else at_once
        if pace.is_trial:
            behind += 1
            events: Any = [(_DeviceEvent(behind), _DeviceEvent(behind + one)) for one in devices]
            pace.took(host, in_turn=ways[-1], events=events)
        # The devices come to all this long after the host has.
        _DeviceEvent.now = max(0.0, call - 40.0)
    assert not any(ways[25:40]), "nothing is known yet"
    assert sum(ways[:25]) == 5 and ways[-3:] == [kept] * 3


def test_calls_on_accelerators_are_timed_with_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took: list[Any] = []
    monkeypatch.setattr(apply.Pace, "is_trial", True)
    monkeypatch.setattr(apply.Pace, "is_in_turn", lambda self: False)
    monkeypatch.setattr(
        apply.Pace, "took", lambda self, _, in_turn, events: took.append((in_turn, events))
    )
    model = dp.DataParallel(nn.Linear(3, 2), ["virtual:0", "virtual:1", "virtual:1"])
    x = torch.ones(6, 3, device="virtual:0")
    # The host waits for the first looks at parameters. If other tests have compiled something, the
    # first call only shows that this one does not.
    for _ in range(12):
        model(x)
    took.clear()
    virtual.reset_counters()
    model(x)
    waits = virtual.counters()["host_waits"]
    for device in ("virtual:0", "virtual:1"):
        torch.accelerator.synchronize(device)
    ((in_turn, events),) = took
    assert not in_turn and waits == 0 and len(events) == 2
    assert all(end.query() and begin.elapsed_time(end) >= 0 for begin, end in events)


def test_a_replica_that_fails_in_its_turn_lets_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed, ran, second = list[bool](), list[int](), threading.Event()
    monkeypatch.setattr(apply.Pace, "is_in_turn", lambda self: True)
    monkeypatch.setattr(apply.Pace, "is_trial", True)
    monkeypatch.setattr(apply.Pace, "took", lambda self, _, in_turn, events: timed.append(in_turn))

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            assert replica is not None
            ran.append(replica.index)
            if replica.index:
                second.set()
            else:
                assert not second.wait(0.05), "the other one has not waited"
            return x.reshape(6) if replica.index else x.reshape(size)

    model = dp.DataParallel(Fails(), ["cpu"] * 2)
    size = 6
    # If other tests have compiled something, the first call only shows that this one does not.
    model(torch.ones(4, 3))
    timed.clear()
    size = 5
    second.clear()
    with pytest.raises(RuntimeError, match=r"(?s)invalid for input.*in replica 0 on device cpu"):
        model(torch.ones(4, 3))
    size = 6
    second.clear()
    model(torch.ones(4, 3))
    assert (ran, timed) == ([0, 1] * 3, [True])
