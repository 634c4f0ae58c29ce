"""What is measured in which iterations, and torch's logging data."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DistributedDataParallel
from dataparallel.reducer.statistics import Statistics
from dataparallel.threads.timeline import Timeline
from dataparallel.virtual import pending
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, one_layer, two_layers
from tests.ddp_cases import wrap as wrap_module

MS = 1_000_000

# --- what is measured, by a clock that moves when it is told to ----------------------------------


class Clock:
    """Stands for the host's clock."""

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

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timeline = Timeline([torch.device("cpu")])
        self.measured = Statistics(self.timeline)

    def forward(self, length: float) -> None:
        self.measured.begin()
        with self.timeline.span("forward", 0):
            self.clock.tick(length)

    def backward(self, factor: float = 1.0) -> None:
        """8 ms, and 4 ms after its begin buckets are on their way for 9 ms."""
        timeline, tick = self.timeline, self.clock.tick
        with timeline.span("backward", 0):
            tick(4 * factor)
            with timeline.span_here("reduce local"):
                tick(1 * factor)
            tick(3 * factor)
        with timeline.span("reduce local"):
            tick(2 * factor)
            with timeline.span("reduce across processes"):
                tick(3 * factor)
            tick(1 * factor)
        if self.measured.measures:
            self.measured.end()

    def iterate(self, factor: float = 1.0) -> None:
        self.forward(3 * factor)
        self.clock.tick(1 * factor)
        self.backward(factor)


def test_iterations(clock: Clock) -> None:
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
    # A forward counts without backward, the first backward does, and what has failed does not.
    steps.forward(9)
    steps.iterate(6.0)
    steps.backward(5)
    found = steps.measured.read()
    assert found["num_sampled"] == 3
    assert found["forward_compute_time"] == 18 * MS
    assert found["avg_forward_compute_time"] == 10 * MS
    assert found["avg_backward_compute_comm_overlap_time"] == 14 * MS
    steps.forward(70)
    steps.measured.abandon()
    steps.backward()
    assert steps.measured.read() == found
    assert not steps.timeline.listeners


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1, [*range(1, 31)]), (7, [*range(1, 11), 14, 21, 28])],
)
def test_which_iterations_are_sampled(clock: Clock, rate: int, expected: list[int]) -> None:
    """In the others nobody listens to the timeline."""
    steps = Steps(clock)
    steps.measured.set_sample_rate(rate)
    sampled = []
    for number in range(1, 31):
        steps.forward(1)
        if steps.timeline.listeners:
            sampled.append(number)
        steps.backward()
        assert not steps.timeline.listeners
    assert sampled == expected
    assert steps.measured.read()["num_sampled"] == len(expected)


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
        measured.begin()
        assert sum(map(pending, streams)) > 0, "measuring has waited for the device"
    found = measured.read()
    assert sum(map(pending, streams)) == 0
    # Each measure is that of the device that had something to do.
    assert found["forward_compute_time"] > 10_000
    assert found["backward_compute_time"] > 10_000
    assert found["backward_comm_time"] < found["backward_compute_time"]
    assert found["backward_compute_comm_overlap_time"] <= found["backward_comm_time"]


# --- torch's logging data ------------------------------------------------------------------------

#: What is about another way to reduce, what is called otherwise, and what os.environ tells.
_DIFFERENT = {
    # Torch's first plan is one bucket, since it does not look for unused parameters.
    "bucket_sizes",
    "initial_bucket_size_limits",
    "gloo_num_threads",
    "dtypes",
    *("master_addr", "master_port", "torch_distributed_debug", "cuda_visible_devices"),
    *("gloo_device_transport", "gloo_socket_ifname"),
}


def make_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).double()


def step(model: Any, *args: Any) -> None:
    model(batch(size=6), *args).sum().backward()


def _logging(rank: int, world_size: int, replicas: int) -> list[dict[str, Any]]:
    """The data at first, after each step, and after forwards that are no iteration."""
    model = wrap_module(make_net(), replicas, find_unused_parameters=False)
    model._set_ddp_runtime_logging_sample_rate(4)
    found = [dict(model._get_ddp_logging_data())]
    for number in range(14):
        step(model)
        found.append(dict(model._get_ddp_logging_data()))
        if number % 5 == 0:
            with torch.no_grad():
                model(batch())
            with model.no_sync():
                step(model)
            found.append(dict(model._get_ddp_logging_data()))
    return found


def test_logging_data_has_the_entries_of_torch(cluster: Cluster) -> None:
    theirs = cluster.run(_logging, 2, 0)
    of_two_replicas = cluster.run(_logging, 2, 2)
    for mine, other in zip(of_two_replicas[1], theirs[1], strict=True):
        assert mine["iteration"] == other["iteration"]
    for ours, others in zip(cluster.run(_logging, 2, 1), theirs, strict=True):
        assert [each["iteration"] for each in ours] == [each["iteration"] for each in others]
        for number in (0, 3):
            mine, other = ours[number], others[number]
            timed = {name for name in other if "time" in name}
            assert {n: mine.get(n) for n in other.keys() - timed - _DIFFERENT} == {
                n: other[n] for n in other.keys() - timed - _DIFFERENT
            }
            assert all(mine.get(name, -1) >= 0 for name in timed)
        last = ours[-1]
        assert last["num_buckets_reduced"] == 1 and last["dtypes"] == "float64"
        assert min(last["forward_compute_time"], last["backward_compute_time"]) > 0
        assert 0 <= last["backward_compute_comm_overlap_time"] <= last["backward_comm_time"]
        order = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        begins = [last[f"{name}_start"] for name in order]
        assert begins == sorted(begins) and last["backward_comm_time_end"] > begins[-1]


def _unused(rank: int, world_size: int, replicas: int) -> list[Any]:
    """The logging data before and after a parameter has had no gradient, against what was said."""
    net = Net("cpu", lambda net, x, all: two_layers(net, x) if all else one_layer(net, x, 0))
    net.layers[2].requires_grad_(False)
    model = wrap_module(net, replicas, find_unused_parameters=False)
    step(model, True)
    before = model._get_ddp_logging_data()
    # Ours notices in the backward, torch's in the forward after that.
    prior = "Expected to have finished reduction in the prior iteration"
    with pytest.raises(RuntimeError, match=prior):
        for _ in range(2):
            step(model, False)
    after = model._get_ddp_logging_data()
    return [before.get("has_error"), after.get("has_error"), prior in after.get("error", "")]


def test_a_round_that_has_failed_is_an_error_in_logging_data(cluster: Cluster) -> None:
    assert cluster.run(_unused, 2, 2) == cluster.run(_unused, 2, 0)


def test_logging_data_without_processes() -> None:
    model = DistributedDataParallel(make_net(), ["cpu", "cpu"])
    step(model)
    data: dict[str, Any] = model.get_ddp_logging_data()
    assert (data["world_size"], data["rank"], data["num_sampled"]) == (1, 0, 1)
    assert data["forward_compute_time"] > 0 and not model.timeline.listeners
    with pytest.raises(ValueError, match="is sampled, or in more, but got 0"):
        model._set_ddp_runtime_logging_sample_rate(0)


def test_whether_the_graph_is_static() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, left: bool) -> Any:
            return (self.left if left else self.right)(x)

    model = DistributedDataParallel(Either(), ["cpu"] * 2, find_unused_parameters=True)
    found = []
    for left in (True, True, False, False):
        model(torch.randn(4, 6), left).sum().backward()
        found.append(model._get_ddp_logging_data().get("can_set_static_graph"))
    assert found == [None, 1, 0, 0]
