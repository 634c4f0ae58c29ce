"""Buffers of replicas: those of replica 0 are kept, or their mean. For "sync" see batch norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, current_replica
from tests.models import assert_all_close

WRAPPERS = pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])


class Keeps(nn.Module):
    """Writes its buffers in some way."""

    table: Tensor
    calls: Tensor

    def __init__(self, write: Callable[[Keeps, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("part", self.table[:1])
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.write(self, x)
        output: Tensor = self.layer(x) + self.table.sum()
        return output


def in_place(net: Keeps, x: Tensor) -> None:
    net.table.copy_(x.mean())


def anew(net: Keeps, x: Tensor) -> None:
    net.table = x.mean().expand(2)


def grown(net: Keeps, x: Tensor) -> None:
    net.table = torch.cat([net.table, x.mean().reshape(1)])


@WRAPPERS
@pytest.mark.parametrize("write", [in_place, anew, grown])
@pytest.mark.parametrize("buffers", ["replica0", "mean"])
def test_what_becomes_of_buffers(
    slots: list[str], wrapper: Any, write: Callable[..., None], buffers: str
) -> None:
    net = Keeps(write).to(slots[0])
    net.part = net.table[:1]
    model = wrapper(net, slots[:3], buffers=buffers)
    table = [torch.zeros(2)]
    for _ in range(2):
        x = torch.randn(5, 1, device=slots[0])
        model(x)
        kept = x.mean() if buffers == "mean" else x[:2].mean()
        table = [*table, kept.reshape(1)] if write is grown else [kept.expand(2)]
        torch.testing.assert_close(net.table.cpu(), torch.cat([t.cpu() for t in table]))
    assert net.calls.item() == 2
    if write is in_place:
        # What shares its memory has the same mean.
        assert torch.equal(net.part, net.table[:1])


@WRAPPERS
@pytest.mark.parametrize("buffers", ["replica0", "mean"])
def test_running_statistics(slots: list[str], wrapper: Any, buffers: str) -> None:
    net = nn.BatchNorm1d(3).to(slots[0])
    first, second = copy.deepcopy(net), copy.deepcopy(net)
    x = torch.randn(8, 3, device=slots[0]) * 3 + 1
    wrapper(net, slots[:2], buffers=buffers)(x)
    for layer, chunk in zip((first, second), x.chunk(2), strict=True):
        layer(chunk)
    for found, a, b in zip(net.buffers(), first.buffers(), second.buffers(), strict=True):
        torch.testing.assert_close(found, a if buffers == "replica0" else ((a + b) / 2).to(a.dtype))


@WRAPPERS
@pytest.mark.parametrize("failing", [0, 2])
def test_a_forward_that_failed_leaves_no_statistics_behind(
    slots: list[str], wrapper: Any, failing: int
) -> None:
    armed = False

    def fail(*_: Any) -> None:
        replica = current_replica()
        if armed and replica is not None and replica.index == failing:
            raise ValueError("not now")

    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to(slots[0])
    twin = copy.deepcopy(net)
    net.register_forward_hook(fail)
    model, reference = (wrapper(module, slots[:3], buffers="mean") for module in (net, twin))
    x = torch.randn(24, 6, device=slots[0])
    for armed in (True, False, True, False):
        if armed:
            with pytest.raises(ValueError, match="not now"):
                model(x)
            continue
        model(x)
        reference(x)
        assert_all_close(list(net.buffers())[:2], list(twin.buffers())[:2])


@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_an_empty_batch(slots: list[str], buffers: Any) -> None:
    bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(slots[0])
    model = DataParallel(copy.deepcopy(bare), slots, buffers=buffers)
    x = torch.randn(0, 2, device=slots[0])
    assert model(x).shape == bare(x).shape == (0, 3)
    assert_all_close(model.buffers(), bare.buffers())


def test_an_unknown_policy_is_refused() -> None:
    text = r"buffers must be 'replica0', 'mean' or 'sync', but got 'average'$"
    with pytest.raises(ValueError, match=text):
        DataParallel(nn.Linear(1, 1), ["cpu"], buffers="average")  # type: ignore[arg-type]
