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
from tests.cluster import Cluster
from tests.models import WRAPPERS, assert_all_close, grads_of

DEVICES = ["virtual:0", "virtual:1", "virtual:2"]


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    # In float64, since Adam's first steps make much of a rounding.
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch_of(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(12, 2, generator=generator, dtype=torch.float64)


class Training:
    """A wrapper and its optimizer, step by step."""

    def __init__(self, wrapper: Any, devices: list[str], **options: Any) -> None:
        self.home = devices[0]
        self.model = wrapper(make_net().to(self.home), devices, **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
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
        found = [p.cpu() for p in self.model.parameters()]
        assert_all_close(found, net.parameters(), rtol=1e-5, atol=1e-6)


@WRAPPERS
@pytest.mark.parametrize("devices", [["cpu", "cpu"], DEVICES])
def test_dropped_and_added(wrapper: Any, devices: list[str]) -> None:
    training = Training(wrapper, devices)
    model, expected = training.model, list(devices)
    for step, device in enumerate([None, devices[1], devices[0], None, None, devices[1]]):
        training.step(step)
        # Those after it move up.
        if device is None:
            model.drop_replica(1)
            del expected[1]
        else:
            model.add_replica(device)
            expected.append(device)
        assert list(map(str, model.device_ids)) == expected
        assert len(model.timeline.devices) == len(expected)
    training.step(6)
    training.assert_weights(7)
    assert pickle.loads(pickle.dumps(model)).device_ids == model.device_ids


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
    assert_all_close(grads_of(plain), grads_of(reducing))


def test_replicas_that_cannot_be_dropped_or_added_are_refused() -> None:
    model = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    for index in (0, 2, -1, "1"):
        text = f"2 replicas, of which all but replica 0, .* can be dropped; but got {index!r}"
        with pytest.raises(ValueError, match=text):
            model.drop_replica(index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="virtual:9"):
        model.add_replica("virtual:9")
    assert len(model.device_ids) == 2
    spread = nn.Sequential(nn.Linear(2, 2).to("virtual:0"), nn.Linear(2, 2).to("virtual:2"))
    with pytest.raises(ValueError, match="layers of the module are on several devices"):
        dataparallel.DistributedDataParallel(spread, ["virtual:0"]).add_replica("virtual:3")


def test_leaves_of_a_replica_that_is_dropped() -> None:
    """They go at once, since others may need the memory."""
    training = Training(dataparallel.DistributedDataParallel, ["cpu", "cpu"])
    training.step(0)
    leaves = [weakref.ref(leaf) for leaf in training.model._training.leaves.rows[1]]
    gc.collect()
    gc.disable()
    try:
        training.model.drop_replica(1)
        assert [leaf() for leaf in leaves] == [None] * 4
    finally:
        gc.enable()


# --- what watches or divides the batches of a wrapper --------------------------------------------


@WRAPPERS
def test_monitor_and_balance(wrapper: Any) -> None:
    training = Training(wrapper, DEVICES)
    model, seen = training.model, list[Any]()
    options: dict[str, Any] = {"every": 1, "warmup": 0, "threshold": 0.9}
    with (
        StepMonitor(model, publish=False, on_step=seen.append) as monitor,
        dataparallel.balance(model, **options) as balancer,
    ):
        balancer.load_state_dict({"costs": None, "limits": [None, 4, 5]})
        for step in range(9):
            if step == 3:
                model.drop_replica(1)
                assert list(balancer.limits) == [None, 5]
            if step == 6:
                assert len(balancer.sizes(12)) == 2
                model.add_replica("virtual:1")
                assert list(balancer.limits) == [None, 5, None]
            training.step(step)
        state = monitor.state()
    assert balancer.speeds is not None and len(balancer.speeds) == 3
    assert state.info.devices == ("virtual:0", "virtual:2", "virtual:1")
    assert len(state.main.seconds) == len(state.memory) == len(state.now) == 3
    # The step before a change has no record: it ends with the next forward.
    assert [len(record.replicas) for record in seen] == [3, 3, 2, 2, 3, 3, 3]
    assert [record.number for record in seen] == [1, 2, 1, 2, 1, 2, 3]
    # The kept records are about the replicas that there are now.
    assert list(monitor.steps) == seen[-3:]
    training.assert_weights(9)


# --- several processes ---------------------------------------------------------------------------


def _train(rank: int, world_size: int) -> list[str]:
    """Rank 1 has other replicas after each step; what it says of a backward from before."""
    averages: list[Literal["processes", "samples", "none"]] = ["processes", "samples", "none"]
    texts = []
    for average in averages:
        training = Training(
            dataparallel.DistributedDataParallel, ["cpu"] * (2 + rank), timeout=20, average=average
        )
        model = training.model
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
        text = "rank 1" if rank == 0 else "dropped or added"
        with pytest.raises(RuntimeError, match=text) as caught:
            loss.backward()
        model.zero_grad()
        training.loss(5, rank).backward()
        texts.append(str(caught.value))
    return texts


def test_in_one_of_several_processes(cluster: Cluster) -> None:
    for text in cluster.run(_train, 2, timeout=60)[0]:
        assert "replicas were dropped or added after the forward" in text
