"""What is measured in which iterations; torch's logging data are in test_ddp_names_logging."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DistributedDataParallel, devices
from dataparallel.reducer.statistics import Statistics
from dataparallel.threads.timeline import Timeline
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


class Steps:
    """Iterations whose spans last as long as the clock says."""

    def __init__(self, clock: Clock, devices: list[str] | None = None) -> None:
        self.clock = clock
        self.timeline = Timeline([torch.device(device) for device in devices or ["cpu"]])
        self.measured = Statistics(self.timeline)
        self.number = 0

    def forward(self, length: float) -> None:
        self.number += 1
        self.measured.begin()
        with self.timeline.span("forward", 0):
            self.clock.tick(length)

    def backward(self, factor: float = 1.0, across: bool = True) -> None:
        """8 ms, and 4 ms after its begin buckets are on their way for 9 ms."""
        timeline, tick = self.timeline, self.clock.tick
        with timeline.span("backward", 0):
            tick(4 * factor)
            with timeline.span_here("reduce local"):
                tick(1 * factor)
            tick(3 * factor)
        with timeline.span("reduce local"):
            tick(2 * factor)
            if across:
                with timeline.span("reduce across processes"):
                    tick(3 * factor)
                tick(1 * factor)
        if self.measured.measures:
            self.measured.end()

    def iterate(self, factor: float = 1.0) -> None:
        self.forward(3 * factor)
        self.clock.tick(1 * factor)
        self.backward(factor)


# --- what is measured ------------------------------------------------------------------------


def test_one_iteration(clock: Clock) -> None:
    steps = Steps(clock)
    steps.iterate()
    start = 1000 * MS + 5
    expected = {
        "forward_compute_time": 3 * MS,
        "backward_compute_time": 8 * MS,
        "backward_comm_time": 9 * MS,
        "backward_compute_comm_overlap_time": 4 * MS,
    }
    assert steps.measured.read() == {
        **expected,
        **{f"avg_{name}": value for name, value in expected.items()},
        "num_sampled": 1,
        "forward_compute_time_start": start,
        "forward_compute_time_end": start + 3 * MS,
        "backward_compute_time_start": start + 4 * MS,
        "backward_compute_time_end": start + 12 * MS,
        "backward_comm_time_start": start + 8 * MS,
        "backward_comm_time_end": start + 17 * MS,
    }


def test_means_are_over_all_samples(clock: Clock) -> None:
    steps = Steps(clock)
    for factor in (1.0, 2.0, 6.0):
        steps.iterate(factor)
    found = steps.measured.read()
    assert found["num_sampled"] == 3
    assert found["forward_compute_time"] == 18 * MS
    assert found["avg_forward_compute_time"] == 9 * MS
    assert found["avg_backward_compute_comm_overlap_time"] == 12 * MS


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1, [*range(1, 31)]), (7, [*range(1, 11), 14, 21, 28]), (100, [*range(1, 11)])],
)
def test_which_iterations_are_sampled(clock: Clock, rate: int, expected: list[int]) -> None:
    """In the others nobody listens to the timeline."""
    steps = Steps(clock)
    steps.measured.set_sample_rate(rate)
    sampled = []
    for _ in range(30):
        steps.forward(1)
        if steps.timeline.listeners:
            sampled.append(steps.number)
        steps.backward()
        assert not steps.timeline.listeners
    assert sampled == expected
    assert steps.measured.read()["num_sampled"] == len(expected)


def test_what_is_no_sample_rate() -> None:
    model = DistributedDataParallel(nn.Linear(1, 1), ["cpu"])
    with pytest.raises(ValueError, match="is sampled, or in more, but got 0"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model.close()


def test_what_happens_in_an_iteration(clock: Clock) -> None:
    """A forward counts without backward, the first backward does, and what has failed does not."""
    steps = Steps(clock)
    steps.forward(9)
    steps.iterate()
    steps.backward(5)
    found = steps.measured.read()
    assert found["num_sampled"] == 2
    assert found["avg_forward_compute_time"] == 6 * MS
    assert found["backward_compute_time"] == found["avg_backward_compute_time"] == 8 * MS
    steps.forward(70)
    steps.measured.abandon()
    steps.backward()
    assert steps.measured.read() == found
    assert not steps.timeline.listeners


@pytest.mark.parametrize("before", [True, False])
def test_overlap_has_limits(clock: Clock, before: bool) -> None:
    """Communication may end before the computation does, or begin after it."""
    steps = Steps(clock)
    steps.measured.begin()
    with steps.timeline.span("backward", 0):
        if before:
            with steps.timeline.span("reduce local", 0):
                clock.tick(2)
        clock.tick(5)
    if not before:
        with steps.timeline.span("reduce local"):
            clock.tick(2)
    steps.measured.end()
    found = steps.measured.read()
    assert found["backward_comm_time"] == 2 * MS
    assert found["backward_compute_comm_overlap_time"] == (2 * MS if before else 0)


# --- accelerators ----------------------------------------------------------------------------


def test_on_accelerators_events_tell_the_time(clock: Clock) -> None:
    """The host's clock stands still, and the work happens later than it is queued."""
    virtual = [torch.device("virtual", i) for i in range(2)]
    timeline = Timeline(virtual)
    measured = Statistics(timeline)
    streams = [torch.Stream(device) for device in virtual]

    def compute(device: int) -> None:
        tensor = torch.ones(100, 100, device=virtual[device])
        for _ in range(20):
            tensor = tensor @ tensor

    with streams[0], streams[1]:
        measured.begin()
        with timeline.span("forward"):
            compute(1)
        with timeline.span("backward"):
            compute(0)
            with timeline.span("reduce local", 1):
                pass
        measured.end()
        assert sum(map(pending, streams)) > 0, "measuring has waited for the device"
        measured.begin()
        assert sum(map(pending, streams)) > 0, "reading has waited for the device"
    found = measured.read()
    assert sum(map(pending, streams)) == 0
    # Each measure is that of the device that had something to do.
    assert found["forward_compute_time"] > 10_000
    assert found["backward_compute_time"] > 10_000
    assert found["backward_comm_time"] < found["backward_compute_time"]
    assert found["backward_compute_comm_overlap_time"] <= found["backward_comm_time"]


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
    steps = Steps(clock, [f"virtual:{i}" for i in (1, 2, 0)])
    steps.measured.begin()
    with steps.timeline.span("forward"):
        clock.tick(3)
    steps.backward()
    found = steps.measured.read()
    assert found["forward_compute_time"] == 9 * MS
    # Computation is that of the first replica, which is on the second device.
    assert found["backward_compute_comm_overlap_time"] == 8 * MS
    assert found["forward_compute_time_start"] == 1000 * MS + 5


# --- in training -----------------------------------------------------------------------------


def measured_training(rank: int, world_size: int, replicas: int) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    model = DistributedDataParallel(net, ["cpu"] * replicas, bucket_cap_mb=0.001)
    for _ in range(4):
        model(torch.ones(6, 8)).sum().backward()
    found = model.get_ddp_logging_data()
    assert not model.timeline.listeners
    model.close()
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_measured(cluster: Cluster, replicas: int) -> None:
    for found in cluster.run(measured_training, 2, replicas):
        assert (found["iteration"], found["num_sampled"]) == (3, 4)
        assert found["forward_compute_time"] > 0
        assert found["backward_compute_time"] > 0
        assert 0 <= found["backward_compute_comm_overlap_time"] <= found["backward_comm_time"]
        assert (
            found["forward_compute_time_start"]
            < found["backward_compute_time_start"]
            < found["backward_comm_time_start"]
            < found["backward_comm_time_end"]
        )
