"""What watches or divides the batches of a wrapper goes on when replicas are lost and come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataparallel
from dataparallel import virtual
from dataparallel.monitor import StepMonitor
from dataparallel.shrinking import survive_device_loss
from dataparallel.timeline import Timeline
from tests.shrink_cases import Training, assert_close, make_net, undisturbed, weights_of

WRAPPERS = [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
DEVICES = ["virtual:0", "virtual:1", "virtual:2"]


@pytest.fixture(autouse=True)
def _all_work() -> Iterator[None]:
    yield
    virtual.restore_device()


def train(model: Any, keeper: Any, after: int) -> list[int]:
    """Lose the device in the third step and add it back after the fifth; sizes of the batches."""
    training = Training(model, keeper)
    numbers = []
    for step in range(8):
        if step == 2:
            virtual.lose_device(1, after=after)
        training.step(step)
        numbers.append(len(model.device_ids))
        if step == 4:
            virtual.restore_device()
            model.add_replica("virtual:1")
    return numbers


@pytest.mark.parametrize("after", [0, 4, 13])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_monitor(wrapper: Any, after: int) -> None:
    model = wrapper(make_net().to("virtual:0"), DEVICES)
    seen: list[Any] = []
    with (
        survive_device_loss(model) as keeper,
        StepMonitor(model, publish=False) as monitor,
        StepMonitor(model, publish=False, on_step=seen.append),
    ):
        assert train(model, keeper, after) == [3, 3, 2, 2, 2, 3, 3, 3]
        state = monitor.state()
        summary = monitor.summary()
    assert_close(weights_of(model), undisturbed(8))
    assert len(monitor.steps) >= 2
    assert {len(record.replicas) for record in monitor.steps} == {3}
    assert {record.samples for record in monitor.steps} == {12}
    assert state.info.devices == ("virtual:0", "virtual:2", "virtual:1")
    assert len(state.totals) == len(state.memory) == len(state.now) == 3
    assert summary.num_steps == len(monitor.steps) or str(summary)
    replicas = [len(record.replicas) for record in seen]
    assert replicas == sorted(replicas[: replicas.index(2)], reverse=True) + [2] * replicas.count(
        2
    ) + [3] * (len(replicas) - replicas.index(2) - replicas.count(2))
    assert [record.number for record in seen] == sorted(record.number for record in seen)


@pytest.mark.parametrize("after", [0, 13])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_balance(wrapper: Any, after: int) -> None:
    model = wrapper(make_net().to("virtual:0"), DEVICES)
    with (
        dataparallel.balance(model, every=1, warmup=0, threshold=0.9) as balancer,
        survive_device_loss(model) as keeper,
    ):
        limits: Any = balancer._handover.limits
        limits[:] = [None, 4, 5]
        training = Training(model, keeper)
        training.step(0)
        virtual.lose_device(1, after=after)
        training.step(1)
        assert list(balancer.limits) == [None, 5]
        assert len(balancer.sizes(12)) == 2
        virtual.restore_device()
        model.add_replica("virtual:1")
        assert list(balancer.limits) == [None, 5, None]
        assert len(balancer.shares) == 3
        for step in range(2, 6):
            training.step(step)
        assert balancer.speeds is not None and len(balancer.speeds) == 3
    assert_close(weights_of(model), undisturbed(6))


def test_too_little_memory_and_a_lost_device() -> None:
    """Balancer and keeper each do their part for one forward."""
    model = dataparallel.DataParallel(make_net().to("virtual:0"), DEVICES)
    training = Training(model, None)
    with dataparallel.balance(model) as balancer, survive_device_loss(model):
        training.step(0)
        virtual.lose_device(1)
        virtual.set_memory_limit(2, torch.virtual.memory_allocated(2) + 200)  # type: ignore[attr-defined]
        # How much a backward has at once depends on the order of its threads.
        model.register_forward_hook(lambda *_: virtual.set_memory_limit(2, None))
        try:
            training.step(1)
        finally:
            virtual.set_memory_limit(2, None)
        assert [change.reason for change in balancer.history] == ["memory"] * len(balancer.history)
    assert list(map(str, model.device_ids)) == ["virtual:0", "virtual:2"]
    assert_close(weights_of(model), undisturbed(2))


def test_timeline() -> None:
    timeline = Timeline([torch.device("cpu")] * 2)
    told: list[Any] = []
    timeline.follow_devices(told.append)
    spans: list[Any] = []
    timeline.subscribe(spans.append)
    timeline.use_devices([torch.device("virtual", 0)], [1])
    with timeline.span("forward", 0):
        virtual.lose_device(0)
    assert told == [[1]]
    assert spans[0].end_events == (None,)
    timeline.leave_devices(told.append)
    timeline.use_devices([torch.device("cpu")] * 3, [0, None, None])
    assert told == [[1]]
    assert len(timeline.now) == 3
