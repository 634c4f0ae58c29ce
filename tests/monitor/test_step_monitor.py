"""The monitor in a run: what it records, what it leaves alone, and what it costs."""

from __future__ import annotations

import gc
import json
import os
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module

import dataparallel
from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import runs
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import Phase
from tests.cluster import Cluster

WRAPPERS = [DataParallel, DistributedDataParallel]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def train(model: DataParallel[Any], optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_recorded_with_all_their_phases(wrapper: Any) -> None:
    """They add up to the time that the caller measures."""
    model = wrapper(net(64), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, 2)
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


def test_each_phase_is_as_long_as_what_was_done_in_it() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = dataparallel.current_replica()
            time.sleep(0.02 if replica is not None and replica.index == 1 else 0.01)
            y: torch.Tensor = self.linear(x)
            y.register_hook(lambda grad: time.sleep(0.03))
            return y

    class SlowSGD(SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.015)
            return super().step(closure)

    model = DistributedDataParallel(Slow(), ["cpu", "cpu"])
    optimizer = SlowSGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        out = model(torch.ones(5, 6))
        time.sleep(0.012)
        out.sum().backward()
        optimizer.step()
    (step,) = monitor.steps
    first, second = (replica.seconds for replica in step.replicas)
    assert first["forward"] >= 0.01 and second["forward"] >= 0.02
    assert first["backward"] >= 0.03 and second["backward"] >= 0.03
    assert first["loss"] >= 0.012 and "loss" not in second
    assert first["optimizer"] >= 0.015 and "optimizer" not in second
    assert second["idle"] >= 0.027


def test_other_optimizers_are_no_business_of_this_model() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    other = nn.Linear(2, 2)
    theirs, ours = SGD(other.parameters(), 0.01), SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(2):
            model(torch.ones(5, 6)).sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            theirs.step()
            ours.step()
    spans = [s for step in monitor.steps for s in step.replicas[0].segments]
    assert [segment.phase for segment in spans].count("optimizer") == 2


def test_an_optimizer_that_fails_does_not_end_a_step() -> None:
    """Nor is it under way for ever."""
    model = DataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
        model(torch.ones(5, 6)).sum().backward()
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="division"):
                optimizer.step(lambda: 1 / 0)
        time.sleep(0.05)
        optimizer.step()
        train(model, optimizer)
        model(torch.ones(5, 6))
        assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]
    assert [step.samples for step in monitor.steps] == [5, 5, 5, 5]
    assert monitor.steps[1].replicas[0].seconds["optimizer"] < 0.05


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_the_same_with_a_monitor(wrapper: Any) -> None:
    def weights(watched: bool) -> list[torch.Tensor]:
        model = wrapper(net(), ["cpu", "cpu"])
        optimizer = SGD(model.parameters(), 0.1)
        if watched:
            with StepMonitor(model, publish=False):
                train(model, optimizer, 3)
        else:
            train(model, optimizer, 3)
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_nothing_stays_behind() -> None:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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
    model = DataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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


def test_an_error_in_training_leaves_the_monitor_usable() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(4, 7))
        train(model, optimizer)
    assert len(monitor.steps) == 2 and monitor.steps[0].samples == 5


def test_a_listener_that_fails_does_not_keep_the_monitor_open() -> None:
    def refuse(step: Any) -> None:
        seen.append(step.number)
        if step.number == 2:
            raise ValueError("no room for a record")

    seen: list[int] = []
    model = DataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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
    model = DataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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
        StepMonitor(DataParallel(net(), ["cpu"]), keep=0)
    with pytest.raises(ValueError, match="this is no state of a run"):
        RunState.from_json({"pid": 1})


# --- across processes and on devices ---------------------------------------------------------


def two_processes(rank: int, world_size: int) -> tuple[list[float], int]:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    optimizer = SGD(model.parameters(), 0.01)
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
