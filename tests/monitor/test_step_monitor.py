"""The monitor in a run: what it records and exports, what it leaves alone, and what it costs."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module

import dataparallel
from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.monitor import ReplicaStep, Segment, StepMonitor
from dataparallel.monitor.attach import runs
from dataparallel.monitor.run import RunState
from dataparallel.monitor.trace import write_timeline
from dataparallel.threads.timeline import Phase
from tests.cluster import Cluster
from tests.monitor.cases import BUSY, SLOW, make_info, make_step, make_steps

WRAPPERS = [DataParallel, DistributedDataParallel]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def make(wrapper: Any = DataParallel) -> tuple[Any, Optimizer]:
    model = wrapper(net(), ["cpu", "cpu"])
    return model, SGD(model.parameters(), 0.01)


def train(model: DataParallel[Any], optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_recorded_with_all_their_phases(wrapper: Any) -> None:
    """They add up to the time that the caller measures, and change no gradient."""
    (model, optimizer), (bare, bare_optimizer) = make(wrapper), make(wrapper)
    train(model, optimizer, 2)
    train(bare, bare_optimizer, 7)
    with StepMonitor(model, publish=False) as monitor:
        begin = time.perf_counter()
        for _ in range(5):
            time.sleep(0.004)
            train(model, optimizer)
        measured = time.perf_counter() - begin
    assert [(step.number, step.kind, step.samples) for step in monitor.steps] == [
        (number, "train", 5) for number in (1, 2, 3, 4, 5)
    ]
    expected = {"input", "scatter", "forward", "gather", "loss", "backward", "optimizer"}
    if wrapper is DistributedDataParallel:
        expected |= {"reduce local"}
    for step in monitor.steps:
        assert [replica.samples for replica in step.replicas] == [3, 2]
        assert expected <= set(step.replicas[0].seconds) <= expected | {"idle"}
        assert not {"loss", "optimizer"} & set(step.replicas[1].seconds)
    for replica in range(2):
        told = sum(sum(step.replicas[replica].seconds.values()) for step in monitor.steps)
        assert told == pytest.approx(measured, rel=0.02)
    waited = sum(step.replicas[0].seconds["input"] for step in monitor.steps)
    assert 0.02 <= waited < measured
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Slow(nn.Module):
    """Takes 20 ms longer in the second replica.

    It sleeps: two replicas that compute hold each other up, as they share an interpreter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dataparallel.current_replica()
        time.sleep(0.03 if replica is not None and replica.index == 1 else 0.01)
        y: torch.Tensor = self.linear(x)
        y.register_hook(lambda grad: time.sleep(0.005))
        return y


class SlowSGD(SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.015)
        return super().step(closure)


def test_each_phase_is_as_long_as_what_was_done_in_it_and_the_slow_replica_is_found() -> None:
    model = DistributedDataParallel(Slow(), ["cpu", "cpu"])
    optimizer = SlowSGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(5):
            out = model(torch.ones(6, 6))
            time.sleep(0.012)
            out.sum().backward()
            optimizer.step()
    first, second = (replica.seconds for replica in monitor.steps[-1].replicas)
    assert first["forward"] >= 0.01 and second["forward"] >= 0.03
    assert first["backward"] >= 0.005 and second["backward"] >= 0.005
    assert first["loss"] >= 0.012 and "loss" not in second
    assert first["optimizer"] >= 0.015 and "optimizer" not in second
    assert second["idle"] >= 0.027
    summary = monitor.summary()
    assert (summary.num_steps, summary.num_left_out) == (4, 1)
    assert summary.straggler is not None
    assert (summary.straggler.index, summary.straggler.moves) == (1, False)
    assert "slow replica" in {one.kind for one in summary.findings}
    assert "Replica 1 on cpu" in " ".join(str(one) for one in summary.findings)


def test_other_optimizers_are_no_business_of_this_model() -> None:
    model, ours = make()
    other = nn.Linear(2, 2)
    theirs = SGD(other.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(2):
            model(torch.ones(5, 6)).sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            theirs.step()
            ours.step()
    spans = [s for step in monitor.steps for s in step.replicas[0].segments]
    assert [segment.phase for segment in spans].count("optimizer") == 2


def test_what_fails_does_not_end_a_step_and_is_not_under_way_for_ever() -> None:
    model, optimizer = make()
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(4, 7))
        model(torch.ones(5, 6)).sum().backward()
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="division"):
                optimizer.step(lambda: 1 / 0)
        time.sleep(0.05)
        optimizer.step()
        train(model, optimizer)
        model(torch.ones(5, 6))
        assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]
    # The forward that failed belongs to the step after it.
    assert [step.samples for step in monitor.steps] == [5, 4 + 5, 5, 5]
    assert monitor.steps[1].replicas[0].seconds["optimizer"] < 0.05


def test_nothing_stays_behind() -> None:
    model, optimizer = make(DistributedDataParallel)
    hooks: Any = optimizer_module._global_optimizer_pre_hooks
    before = len(hooks)
    with StepMonitor(model, publish=False) as monitor:
        assert len(hooks) == before + 1
        train(model, optimizer)
    assert len(hooks) == before and not model.timeline.listeners
    train(model, optimizer)
    assert len(monitor.steps) == 1
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


def test_a_monitor_can_watch_again_and_two_can_watch_at_once() -> None:
    model, optimizer = make()
    one, two = StepMonitor(model, publish=False), StepMonitor(model, publish=False)
    with one:
        train(model, optimizer)
        with two:
            train(model, optimizer)
        with pytest.raises(RuntimeError, match="is watching already"):
            one.__enter__()
    with one:
        train(model, optimizer)
    assert (len(one.steps), len(two.steps)) == (3, 1)
    assert one.steps[-1].replicas[0].seconds.keys() >= {"optimizer", "backward"}


def test_a_listener_that_fails_does_not_keep_the_monitor_open() -> None:
    def refuse(step: Any) -> None:
        seen.append(step.number)
        if step.number == 2:
            raise ValueError("no room for a record")

    seen: list[int] = []
    model, optimizer = make()
    monitor = StepMonitor(model, on_step=refuse)
    monitor.__exit__(None, None, None)
    with pytest.raises(ValueError, match="no room for a record"), monitor:
        train(model, optimizer, 2)
    assert not model.timeline.listeners and os.getpid() not in runs()
    with monitor:
        train(model, optimizer, 2)
    assert seen == [1, 2, 3, 4] and [step.number for step in monitor.steps] == [1, 2, 3, 4]


def test_only_the_last_steps_are_kept() -> None:
    """In the totals, those that nobody has asked for in time count like the others."""
    model, optimizer = make()
    seen: list[int] = []
    with (
        StepMonitor(model, publish=False, keep=3) as monitor,
        StepMonitor(model, publish=False, keep=2, on_step=lambda s: seen.append(s.number)) as told,
    ):
        for rounds in range(1, 3):
            train(model, optimizer, 10)
            numbers = [step.number for step in monitor.steps]
            assert numbers == [10 * rounds - 3, 10 * rounds - 2, 10 * rounds - 1]
            for step in monitor.steps:
                for replica in step.replicas:
                    assert sum(replica.seconds.values()) == pytest.approx(step.seconds)
            if rounds == 1:
                kept = [step.replicas[1].seconds["forward"] for step in monitor.steps]
                total = monitor.state().totals[1]["forward"]
                assert total == pytest.approx(9 / 3 * sum(kept))
    assert seen == list(range(1, 21)) and [step.number for step in told.steps] == [19, 20]


def test_the_state_is_published_as_json() -> None:
    model, optimizer = make(DistributedDataParallel)
    with StepMonitor(model, publish=False) as monitor:
        assert monitor.state().last is None
        train(model, optimizer, 3)
        state = monitor.state()
    assert (state.num_steps, state.num_samples) == (2, 10)
    assert (state.info.model, state.info.wrapper) == ("Sequential", "DistributedDataParallel")
    assert state.info.devices == ("cpu", "cpu") and state.info.num_buckets == 1
    assert state.info.num_parameters == state.info.bucket_bytes // 4 == 83
    for replica in range(2):
        total = sum(state.totals[replica].values())
        assert total == pytest.approx(sum(step.seconds for step in monitor.steps[:2]))
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="watches a wrapper of this package, but got Linear"):
        StepMonitor(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"number of steps to keep, at least 1, but got 0"):
        StepMonitor(make()[0], keep=0)
    with pytest.raises(ValueError, match="this is no state of a run"):
        RunState.from_json({"pid": 1})


# --- the timeline as a file -------------------------------------------------------------------


def events_in(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def row(events: list[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


@pytest.mark.parametrize("name", ["timeline.json", "new/timeline.json.gz"])
def test_the_timeline_has_a_thread_per_replica(tmp_path: Path, name: str) -> None:
    steps = [
        dataclasses.replace(one, time=1e9 + 2 * i)
        for i, one in enumerate(make_steps(2, [BUSY, SLOW], [3, 2]))
    ]
    events = events_in(write_timeline(steps, make_info(), tmp_path / name, rank=3))
    for event in events:
        assert isinstance(event["name"], str) and event["pid"] == 3
        numbers = {"M": ["tid"], "X": ["tid", "ts", "dur"], "C": ["ts"]}[event["ph"]]
        assert all(type(event[key]) is int for key in numbers)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "replica 0 (virtual:0)", 1: "replica 1 (virtual:1)", 2: "steps"}
    (process,) = [e["args"] for e in events if e["name"] == "process_name"]
    assert process == {"name": "rank 3: DistributedDataParallel of Net"}
    for index, replica in enumerate(steps[0].replicas):
        shown = row(events, index)
        assert [e["name"] for e in shown] == [one.phase for one in replica.segments] * 2
        assert shown[-1]["args"] == {"step": 3, "samples": replica.samples}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"samples": 2.5}] * 2
    assert row(events, 2)[0]["name"] == "train step 2"
    for tid in range(3):
        # Each begins where the one before ended, after rounding too.
        own = row(events, tid)
        assert [e["ts"] + e["dur"] for e in own[:-1]] == [e["ts"] for e in own[1:]]
        assert sum(e["dur"] for e in own) == 4_000_000


def test_a_replica_behind_the_host_keeps_its_own_times(tmp_path: Path) -> None:
    """Its steps take 1.5 s each while the host begins one each second."""
    slow = ReplicaStep(0, "cpu:0", 3, (Segment("forward", 0.0, 1.5),))
    steps = [
        dataclasses.replace(make_step([BUSY], number=n), time=1e9 + n, replicas=(slow,))
        for n in range(1, 4)
    ]
    first = (10**9 + 1) * 1_000_000
    for chosen, expected in (
        (steps, [0, 1_500_000, 3_000_000]),
        # Where steps are missing there is nothing to go by but the host.
        (steps[::2], [0, 2_000_000]),
    ):
        events = events_in(write_timeline(chosen, make_info(1), tmp_path / "all.json", rank=0))
        assert [e["ts"] - first for e in row(events, 0)] == expected


def test_a_monitor_exports_what_it_has_seen(tmp_path: Path) -> None:
    model, optimizer = make()
    path = tmp_path / "timeline.json.gz"
    with StepMonitor(model, publish=False) as monitor:
        with pytest.raises(ValueError, match="no steps to write; a step is recorded when"):
            monitor.export_chrome_trace(path)
        train(model, optimizer, 3)
    shown = events_in(monitor.export_chrome_trace(path))
    length = sum(e["dur"] for e in row(shown, 2))
    for replica in (0, 1):
        assert {"scatter", "forward", "backward"} <= {e["name"] for e in row(shown, replica)}
        assert sum(e["dur"] for e in row(shown, replica)) == pytest.approx(length, rel=0.02)


# --- across processes and on devices ---------------------------------------------------------


def two_processes(rank: int, world_size: int) -> tuple[list[float], int]:
    model, optimizer = make(DistributedDataParallel)
    # In the first steps processes wait for each other before collectives, to compare them.
    train(model, optimizer, 4)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(3):
            if rank == 1:
                time.sleep(0.03)
            train(model, optimizer)
        state = monitor.state()
    return [
        step.replicas[0].seconds["reduce across processes"] for step in monitor.steps
    ], state.info.world_size


def test_waiting_for_other_processes_is_a_phase(cluster: Cluster) -> None:
    fast, slow = cluster.run(two_processes, 2)
    assert fast[1] == slow[1] == 2
    # The second process is late for each step, and the first one waits for it.
    assert min(fast[0]) > 0.01 and sum(slow[0]) < sum(fast[0])


def on_virtual_devices(rank: int, world_size: int) -> list[dict[Phase, float]]:
    devices = ["virtual:0", "virtual:1"]
    model = DistributedDataParallel(net(256).to(devices[0]), devices)
    optimizer = SGD(model.parameters(), 0.01)
    x = torch.ones(4096, 6, device=devices[0])
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(monitor.steps) == 4
    for step in monitor.steps:
        for replica in step.replicas:
            ends = [segment.end for segment in replica.segments]
            assert ends == sorted(ends) and replica.segments[0].begin == 0
    return [replica.seconds for replica in monitor.steps[-1].replicas]


def test_on_devices_phases_are_measured_by_their_clocks(cluster: Cluster) -> None:
    ((first, second),) = cluster.run(on_virtual_devices, 1, virtual=True, init_group=False)
    # The host only queues the work; the devices do it, and it takes them longer.
    for replica in (first, second):
        assert replica["forward"] > 0 and replica["backward"] > replica["gather"]
    assert "optimizer" in first and "optimizer" not in second
