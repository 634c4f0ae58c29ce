"""What a forward has changed is brought back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.extras.balancing.memory import Rollback
from tests.test_balance_memory import Narrow

DEVICES = [torch.device("cpu")] * 2


def test_what_was_written_is_brought_back() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    shared = nn.ModuleList([net, net[0]])
    for _ in range(3):
        net(torch.randn(4, 3))
        expected = [buffer.clone() for buffer in net.buffers()]
        rollback = Rollback(DEVICES, [net, None, shared])
        net(torch.randn(4, 3))
        rollback.undo()
        assert all(map(torch.equal, net.buffers(), expected))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(5),
        torch.ones(3, 1),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(0),
        nn.Parameter(torch.ones(3)),
    ],
)
def test_a_buffer_that_becomes_another(other: Tensor) -> None:
    net: Any = nn.Module()
    net.register_buffer("kept", torch.zeros(3))
    other = torch.ones(3, device="virtual:0") if other.is_meta else other
    net._buffers["kept"] = other.detach().clone()
    expected = net.kept.clone()
    rollback = Rollback(DEVICES, [net])
    net.kept.mul_(3)
    rollback.undo()
    assert net.kept.dtype == expected.dtype
    assert torch.equal(net.kept.to_dense(), expected.to_dense())


def test_inside_and_outside_of_inference_mode() -> None:
    net = nn.BatchNorm1d(3)
    net.running_mean = torch.full((3,), 4.0)
    with torch.inference_mode():
        rollback = Rollback(DEVICES, [net])
    net.running_mean.zero_()
    rollback.undo()
    assert net.running_mean.tolist() == [4.0] * 3


def test_buffers_that_come_and_go() -> None:
    net = nn.BatchNorm1d(2)
    names, mean = list(net._buffers), net.running_mean
    rollback = Rollback(DEVICES, [net])
    del net.running_mean
    net.register_buffer("new", torch.zeros(2))
    rollback.undo()
    assert list(net._buffers) == names
    assert net.running_mean is mean
    # What is right is left alone, whoever looks at it meanwhile.
    live = net._buffers
    rollback.undo()
    assert net._buffers is live


class _Counting(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls: Tensor
        self.calls += 1
        return super().forward(x, y)


class _Averaging(nn.Module):
    """Its buffers are written in place, replaced, and made."""

    written: Tensor
    replaced: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written.mul_(0.5).add_(1)
        self.replaced = self.replaced * 0.5 + 1
        self.made = torch.ones_like(self.written) if self.made is None else self.made + 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize(
    "wrapper", [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
)
def test_buffers_of_net_and_criterion(wrapper: Any) -> None:
    net, narrow, criterion = _Averaging(), Narrow({1: 10}), _Counting()
    model = wrapper(nn.Sequential(net, narrow).to("virtual:0"), ["virtual:0", "virtual:1"])
    criterion.to("virtual:0")
    x, y = torch.randn(24, 6, device="virtual:0"), torch.randn(24, 2, device="virtual:0")
    with dataparallel.balance(model) as balancer:
        for number, values in enumerate(([1.0, 1.0, 1.0], [1.5, 1.5, 2.0]), 1):
            balancer.lift_limits()
            model.loss(criterion, x, y, weight="samples").backward()
            assert balancer.limits == (None, 9)
            assert [float(b) for b in (net.written, net.replaced, net.made) if b is not None] == (
                values
            )
            assert criterion.calls.item() == number
        assert len([n for replica, n in narrow.calls if replica == 1]) == 4
