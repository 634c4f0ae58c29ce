"""Replicas are dropped and added between steps, and training goes on exactly."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.monitor import StepMonitor
from dataparallel.threads.timeline import Listener, Timeline
from tests.cluster import Cluster
from tests.test_balance_memory import Narrow

WRAPPERS = [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
DEVICES = ["virtual:0", "virtual:1", "virtual:2"]


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 2, generator=generator)


class Training:
    """A wrapper and its optimizer, step by step."""

    def __init__(self, model: Any, home: str = "virtual:0") -> None:
        self.model = model
        self.home = home
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(self, step: int, rank: int = 0) -> None:
        self.optimizer.zero_grad()
        self.loss(step, rank).backward()
        self.optimizer.step()

    def loss(self, step: int, rank: int = 0) -> Tensor:
        x, y = (t.to(self.home) for t in batch_of(step, rank))
        return nn.functional.mse_loss(self.model(x), y)

    def assert_weights(self, steps: int, ranks: int = 1, average: str = "processes") -> None:
        """They are those of the bare module after so many steps on the batches of all ranks."""
        net = make_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                x, y = batch_of(step, rank)
                scale = 1 if average == "none" else ranks
                (nn.functional.mse_loss(net(x), y) / scale).backward()
            optimizer.step()
        assert_close([p.cpu() for p in self.model.parameters()], list(net.parameters()))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_dropped_and_added(wrapper: Any) -> None:
    model = wrapper(make_net(), ["cpu", "cpu"])
    training = Training(model, home="cpu")
    for step, change in enumerate(
        [
            lambda: model.drop_replica(1),
            lambda: model.add_replica("cpu"),
            lambda: model.add_replica("cpu"),
            lambda: model.drop_replica(1),
        ]
    ):
        training.step(step)
        change()
    assert len(model.device_ids) == len(model.timeline.devices) == 2
    training.step(4)
    training.assert_weights(5)
    copied = pickle.loads(pickle.dumps(model))
    assert copied.device_ids == model.device_ids


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_those_after_it_move_up(wrapper: Any) -> None:
    model = wrapper(make_net().to("virtual:0"), DEVICES)
    training = Training(model)
    training.step(0)
    model.drop_replica(1)
    assert list(map(str, model.device_ids)) == ["virtual:0", "virtual:2"]
    training.step(1)
    model.add_replica("virtual:1")
    assert list(map(str, model.device_ids)) == ["virtual:0", "virtual:2", "virtual:1"]
    training.step(2)
    training.assert_weights(3)


def test_a_backward_from_before() -> None:
    x, y = batch_of(0)
    plain = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    reducing = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    losses = [nn.functional.mse_loss(model(x), y) for model in (plain, reducing)]
    inputs = x.clone().requires_grad_()
    inputs_loss = nn.functional.mse_loss(reducing(inputs), y)
    for model in (plain, reducing):
        model.add_replica("cpu")
    losses[0].backward()
    with pytest.raises(RuntimeError, match="dropped or added after the forward"):
        losses[1].backward()
    with pytest.raises(RuntimeError, match="dropped or added after the forward"):
        torch.autograd.grad(inputs_loss, [inputs])
    nn.functional.mse_loss(reducing(x), y).backward()
    grads = [[p.grad for p in model.parameters()] for model in (plain, reducing)]
    assert_close(grads[0], grads[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [0, 2, -1, "1"])
def test_wrong_index(index: Any) -> None:
    model = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    text = f"2 replicas, of which all but replica 0, .* can be dropped; but got {index!r}"
    with pytest.raises(ValueError, match=text):
        model.drop_replica(index)
    model.drop_replica(1)
    with pytest.raises(ValueError, match="there are 1 replicas"):
        model.drop_replica(1)


def test_wrong_device() -> None:
    model = dataparallel.DataParallel(make_net().to("virtual:0"), ["virtual:0"])
    with pytest.raises(ValueError, match="virtual:9"):
        model.add_replica("virtual:9")
    assert len(model.device_ids) == 1
    spread = nn.Sequential(nn.Linear(2, 2).to("virtual:0"), nn.Linear(2, 2).to("virtual:2"))
    with pytest.raises(ValueError, match="layers of the module are on several devices"):
        dataparallel.DistributedDataParallel(spread, ["virtual:0"]).add_replica("virtual:3")


def test_leaves_of_a_replica_that_is_dropped() -> None:
    """They go at once, since others may need the memory."""
    model = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    nn.functional.mse_loss(model(batch_of(0)[0]), batch_of(0)[1]).backward()
    leaves = [weakref.ref(leaf) for leaf in model._training.leaves.rows[1]]
    gc.collect()
    gc.disable()
    try:
        model.drop_replica(1)
        assert [leaf() for leaf in leaves] == [None] * 4
    finally:
        gc.enable()


# --- what watches or divides the batches of a wrapper --------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_monitor(wrapper: Any) -> None:
    model = wrapper(make_net().to("virtual:0"), DEVICES)
    training = Training(model)
    seen: list[Any] = []
    with (
        StepMonitor(model, publish=False) as monitor,
        StepMonitor(model, publish=False, on_step=seen.append) as told,
    ):
        for step in range(9):
            if step == 3:
                model.drop_replica(1)
            if step == 6:
                model.add_replica("virtual:1")
            training.step(step)
        state = monitor.state()
        summary = monitor.summary()
    training.assert_weights(9)
    # What is kept is about the replicas that there are now.
    for one in (monitor, told):
        assert [len(record.replicas) for record in one.steps] == [3, 3, 3]
    assert len(monitor.steps) >= summary.num_steps >= 2
    assert state.info.devices == ("virtual:0", "virtual:2", "virtual:1")
    assert len(state.totals) == len(state.memory) == len(state.now) == 3
    # The step before a change has no record: it ends with the next forward.
    assert [len(record.replicas) for record in seen] == [3, 3, 2, 2, 3, 3, 3]
    assert {record.samples for record in seen} == {12}
    assert [record.number for record in seen] == [1, 2, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_balance(wrapper: Any) -> None:
    model = wrapper(make_net().to("virtual:0"), DEVICES)
    training = Training(model)
    with dataparallel.balance(model, every=1, warmup=0, threshold=0.9) as balancer:
        balancer.load_state_dict({"costs": None, "limits": [None, 4, 5]})
        training.step(0)
        model.drop_replica(1)
        assert list(balancer.limits) == [None, 5]
        training.step(1)
        assert len(balancer.sizes(12)) == 2
        model.add_replica("virtual:1")
        assert list(balancer.limits) == [None, 5, None]
        assert len(balancer.shares) == 3
        for step in range(2, 6):
            training.step(step)
        assert balancer.speeds is not None and len(balancer.speeds) == 3
    training.assert_weights(6)


def test_too_little_memory_afterwards() -> None:
    """The forward that runs again brings back the generators of the replicas that there are."""
    found = []
    for limit in (None, 6):
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), Narrow({1: 6})).to("virtual:0")
        model = dataparallel.DataParallel(net, ["virtual:0", "virtual:1"])
        with dataparallel.balance(model) as balancer:
            model.drop_replica(1)
            model.add_replica("virtual:2")
            balancer.load_state_dict({"costs": None, "limits": [None, limit]})
            torch.manual_seed(3)
            model(torch.ones(16, 6, device="virtual:0"))
            assert len(balancer.history) == (limit is None)
            assert balancer.limits == (None, 6)
        found.append(torch.rand(3, device="virtual:2"))
    assert torch.equal(*found)


def test_timeline() -> None:
    timeline = Timeline([torch.device("cpu")] * 2)
    told: list[Any] = []
    timeline.subscribe(Listener(on_devices=told.append))
    timeline.use_devices([torch.device("cpu")], [1])
    assert told == [[1]]
    timeline.unsubscribe(Listener(on_devices=told.append))
    timeline.use_devices([torch.device("cpu")] * 3, [0, None, None])
    assert told == [[1]]
    assert len(timeline.now) == 3


# --- several processes ---------------------------------------------------------------------------


def _train(rank: int, world_size: int, average: Literal["processes", "samples", "none"]) -> str:
    """Rank 1 has other replicas after each step; what it says of a backward from before."""
    model = dataparallel.DistributedDataParallel(
        make_net(), ["cpu"] * (2 + rank), timeout=20, average=average
    )
    training = Training(model, home="cpu")
    for step in range(5):
        training.optimizer.zero_grad()
        with model.no_sync():
            (training.loss(step, rank) / 2).backward()
        if rank == 1 and step % 2 == 0:
            model.drop_replica(1)
        elif rank == 1:
            model.add_replica("cpu")
        (training.loss(step, rank) / 2).backward()
        training.optimizer.step()
    training.assert_weights(5, world_size, average)
    loss = training.loss(5, rank)
    if rank == 1:
        model.add_replica("cpu")
    with pytest.raises(RuntimeError, match="rank 1" if rank == 0 else "dropped or added") as caught:
        loss.backward()
    model.zero_grad()
    training.loss(5, rank).backward()
    return str(caught.value)


@pytest.mark.parametrize("average", ["processes", "samples", "none"])
def test_in_one_of_several_processes(cluster: Cluster, average: str) -> None:
    first, _ = cluster.run(_train, 2, average, timeout=60)
    assert "replicas were dropped or added after the forward" in first
