"""What is measured in which iterations."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DistributedDataParallel, devices
from dataparallel.reducer import statistics
from dataparallel.reducer.statistics import ReducerStatistics, Timings
from dataparallel.virtual import pending
from tests.cluster import Cluster

MS = 1_000_000


class Clock:
    """Stands for the host's clock; moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000 * MS
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(time, "time_ns", lambda: self.now + 5)

    def tick(self, milliseconds: float) -> None:
        self.now += int(milliseconds * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def iterate(measured: ReducerStatistics, clock: Clock, factor: float = 1.0) -> None:
    """Forward 3 ms, loss 1, backward 8; buckets 0 and 1 are on their way from 4 to 9, 7 to 12."""
    measured.forward_begin()
    clock.tick(3 * factor)
    measured.forward_end()
    clock.tick(1 * factor)
    measured.backward_begin()
    clock.tick(4 * factor)
    measured.bucket_launched(0)
    clock.tick(3 * factor)
    measured.bucket_launched(1)
    clock.tick(1 * factor)
    measured.backward_compute_end()
    clock.tick(1 * factor)
    measured.bucket_finished(0)
    clock.tick(3 * factor)
    measured.bucket_finished(1)
    clock.tick(2 * factor)
    measured.backward_end()


# --- what is measured ------------------------------------------------------------------------


def test_one_iteration(clock: Clock) -> None:
    measured = ReducerStatistics()
    iterate(measured, clock)
    start = 1000 * MS + 5
    assert measured.snapshot() == Timings(
        iteration=1,
        num_sampled=1,
        forward_compute_time=3 * MS,
        backward_compute_time=8 * MS,
        backward_comm_time=8 * MS,
        backward_compute_comm_overlap_time=4 * MS,
        backward_comm_exposed_time=4 * MS,
        avg_forward_compute_time=3 * MS,
        avg_backward_compute_time=8 * MS,
        avg_backward_comm_time=8 * MS,
        avg_backward_compute_comm_overlap_time=4 * MS,
        avg_backward_comm_exposed_time=4 * MS,
        forward_compute_time_start=start,
        backward_compute_time_start=start + 4 * MS,
        backward_compute_time_end=start + 12 * MS,
        backward_comm_time_start=start + 8 * MS,
        backward_comm_time_end=start + 16 * MS,
        bucket_comm_times=(5 * MS, 5 * MS),
    )


def test_means_are_over_all_samples(clock: Clock) -> None:
    measured = ReducerStatistics()
    for factor in (1.0, 2.0, 6.0):
        iterate(measured, clock, factor)
    found = measured.snapshot()
    assert (found.iteration, found.num_sampled) == (3, 3)
    assert found.forward_compute_time == 18 * MS
    assert found.avg_forward_compute_time == 9 * MS
    assert found.backward_compute_comm_overlap_time == 24 * MS
    assert found.avg_backward_compute_comm_overlap_time == 12 * MS


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1, list(range(1, 31))),
        (7, [*range(1, 11), 14, 21, 28]),
        (100, [*range(1, 11)]),
    ],
)
def test_which_iterations_are_sampled(clock: Clock, rate: int, expected: list[int]) -> None:
    measured = ReducerStatistics(rate)
    sampled = []
    for _ in range(30):
        measured.forward_begin()
        if measured.is_sampled:
            sampled.append(measured.iteration)
        measured.backward_end()
    assert sampled == expected
    assert measured.snapshot().num_sampled == len(expected)


def test_another_sample_rate(clock: Clock) -> None:
    measured = ReducerStatistics()
    assert measured.sample_rate == 100
    for _ in range(19):
        iterate(measured, clock)
    measured.set_sample_rate(10)
    iterate(measured, clock, 2)
    assert measured.snapshot().iteration == 20
    assert measured.snapshot().forward_compute_time == 6 * MS


@pytest.mark.parametrize("rate", [0, -3])
def test_sample_rates_that_are_too_small(rate: int) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, but got {rate}; 1 samples every"):
        ReducerStatistics(rate)


@pytest.mark.parametrize("rate", [1.5, "2", True, None])
def test_sample_rates_of_another_type(rate: Any) -> None:
    with pytest.raises(TypeError, match=f"but got {rate!r} of type {type(rate).__name__}; pass an"):
        ReducerStatistics().set_sample_rate(rate)


def test_what_is_not_sampled_takes_no_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock is read, no event is made, and no lock is taken but by the forward."""
    measured = ReducerStatistics(1000)
    for _ in range(10):
        iterate(measured, clock)
    before = measured.snapshot()

    def never(*_: object) -> Any:
        raise AssertionError("an iteration was measured")

    measured.forward_begin()
    monkeypatch.setattr(statistics, "_Mark", never)
    monkeypatch.setattr(measured, "_lock", None)
    measured.forward_end()
    measured.backward_begin()
    measured.bucket_launched(0)
    measured.bucket_finished(0)
    measured.backward_compute_end()
    measured.backward_end()
    monkeypatch.undo()
    assert measured.snapshot() == before


def test_communication_may_begin_after_the_computation(clock: Clock) -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    measured.forward_end()
    measured.backward_begin()
    clock.tick(4)
    measured.backward_compute_end()
    clock.tick(1)
    measured.bucket_launched(0)
    clock.tick(2)
    measured.bucket_finished(0)
    measured.backward_end()
    found = measured.snapshot()
    assert found.backward_compute_comm_overlap_time == 0
    assert found.backward_comm_exposed_time == found.backward_comm_time == 2 * MS


def test_communication_may_end_before_the_computation(clock: Clock) -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    measured.backward_begin()
    measured.bucket_launched(0)
    clock.tick(2)
    measured.bucket_finished(0)
    clock.tick(5)
    measured.backward_compute_end()
    measured.backward_end()
    found = measured.snapshot()
    assert found.backward_compute_comm_overlap_time == found.backward_comm_time == 2 * MS
    assert found.backward_comm_exposed_time == 0


def test_an_iteration_without_communication(clock: Clock) -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    clock.tick(1)
    measured.forward_end()
    measured.backward_begin()
    clock.tick(2)
    measured.backward_compute_end()
    measured.backward_end()
    iterate(measured, clock)
    found = measured.snapshot()
    assert found.avg_backward_compute_time == 5 * MS
    assert found.avg_backward_comm_time == 8 * MS, "only one iteration had any"


def test_a_forward_without_backward(clock: Clock) -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    clock.tick(9)
    measured.forward_end()
    iterate(measured, clock)
    found = measured.snapshot()
    assert (found.iteration, found.num_sampled) == (2, 2)
    assert found.avg_forward_compute_time == 6 * MS
    assert found.avg_backward_compute_time == 8 * MS


def test_of_several_backwards_the_first_counts(clock: Clock) -> None:
    measured = ReducerStatistics()
    iterate(measured, clock)
    clock.tick(100)
    measured.backward_begin()
    clock.tick(50)
    measured.bucket_launched(0)
    measured.backward_compute_end()
    measured.bucket_finished(0)
    measured.backward_end()
    assert measured.snapshot().num_sampled == 1
    assert measured.snapshot().backward_compute_time == 8 * MS


def test_an_iteration_that_failed_does_not_count(clock: Clock) -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    clock.tick(70)
    measured.forward_end()
    measured.backward_begin()
    measured.abandon()
    measured.backward_end()
    assert measured.snapshot() == Timings()
    iterate(measured, clock)
    found = measured.snapshot()
    assert (found.iteration, found.num_sampled) == (2, 1)
    assert found.avg_forward_compute_time == 3 * MS


def test_buckets_may_be_told_by_several_threads() -> None:
    measured = ReducerStatistics()
    measured.forward_begin()
    measured.backward_begin()
    barrier = threading.Barrier(8, timeout=10)

    def run(first: int) -> None:
        barrier.wait()
        for bucket in range(first, 400, 8):
            measured.bucket_launched(bucket)
            measured.bucket_finished(bucket)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    measured.backward_compute_end()
    measured.backward_end()
    found = measured.snapshot()
    assert len(found.bucket_comm_times) == 400
    assert all(duration >= 0 for duration in found.bucket_comm_times)
    assert found.backward_comm_time >= max(found.bucket_comm_times)


# --- accelerators ----------------------------------------------------------------------------


def test_on_accelerators_events_tell_the_time(clock: Clock) -> None:
    """The host's clock stands still, and the work happens later than it is queued."""
    virtual = [torch.device("virtual", i) for i in range(2)]
    measured = ReducerStatistics(devices=[*virtual, virtual[0]])
    streams = [torch.Stream(device) for device in virtual]

    def compute(device: int) -> None:
        tensor = torch.ones(100, 100, device=virtual[device])
        for _ in range(20):
            tensor = tensor @ tensor

    with streams[0], streams[1]:
        measured.forward_begin()
        compute(1)
        measured.forward_end()
        measured.backward_begin()
        compute(0)
        measured.bucket_launched(0)
        measured.backward_compute_end()
        measured.bucket_finished(0)
        measured.backward_end()
        assert sum(map(pending, streams)) > 0, "measuring has waited for the device"
        measured.forward_begin()
        assert sum(map(pending, streams)) > 0, "reading has waited for the device"
    found = measured.snapshot()
    assert sum(map(pending, streams)) == 0
    assert found.num_sampled == 1
    # Each measure is that of the device that had something to do.
    assert found.forward_compute_time > 10_000
    assert found.backward_compute_time > 10_000
    assert found.backward_comm_time < min(found.forward_compute_time, found.backward_compute_time)


class Event:
    """Stands for the event of a device that is slower the higher its index."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.milliseconds = clock.now / MS * (device.index + 1)

    def elapsed_time(self, later: Event) -> float:
        return later.milliseconds - self.milliseconds

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def test_of_several_devices_the_slowest_counts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "timing_event", lambda device: Event(device, clock))
    measured = ReducerStatistics(devices=[torch.device("virtual", i) for i in (1, 2, 0)])
    iterate(measured, clock)
    assert measured.snapshot().forward_compute_time == 9 * MS
    assert measured.snapshot().backward_compute_comm_overlap_time == 12 * MS
    assert measured.snapshot().forward_compute_time_start == 1000 * MS + 5


def test_what_has_happened_is_read_by_the_next_forward() -> None:
    device = torch.device("virtual", 0)
    measured = ReducerStatistics(devices=[device])
    measured.forward_begin()
    measured.forward_end()
    measured.backward_end()
    torch.get_device_module(device).synchronize(device)
    measured.forward_begin()
    assert not measured._unread


# --- in training -----------------------------------------------------------------------------


def measured_training(rank: int, world_size: int, replicas: int) -> Timings:
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    model = DistributedDataParallel(net, ["cpu"] * replicas, bucket_cap_mb=0.001)
    for _ in range(4):
        model(torch.ones(6, 8)).sum().backward()
    timings: Timings = model.reducer.statistics.snapshot()
    model.close()
    return timings


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_measured(cluster: Cluster, replicas: int) -> None:
    for found in cluster.run(measured_training, 2, replicas):
        assert (found.iteration, found.num_sampled) == (4, 4)
        assert found.forward_compute_time > 0
        assert found.backward_compute_time > 0
        assert len(found.bucket_comm_times) == 2
        assert found.backward_comm_time >= max(found.bucket_comm_times) > 0
        assert found.backward_compute_comm_overlap_time + found.backward_comm_exposed_time == (
            found.backward_comm_time
        )
        assert (
            found.forward_compute_time_start
            < found.backward_compute_time_start
            < found.backward_comm_time_start
            < found.backward_comm_time_end
        )
