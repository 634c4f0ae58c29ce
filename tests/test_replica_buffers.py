"""Buffers that the replicas of a wrapper write differently, and the log's one message of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dataparallel import (
    DataParallel,
    DistributedDataParallel,
    collectives,
    data_parallel,
    devices,
    virtual,
)
from tests.models import WRAPPERS

TWO = ["virtual:0", "virtual:1"]


class Keeps(nn.Module):
    """Writes its buffers in some way."""

    table: Tensor
    count: Tensor

    def __init__(self, write: Callable[[Keeps, Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("later", None)
        # Statistics of batch norm are another matter.
        self.norm, self.tracks = nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        output: Tensor = self.norm(self.inner(x))
        return output


def nothing(net: Keeps, x: Tensor) -> None:
    # All write the count alike, and the table is nan in all.
    net.count += 1
    net.table.fill_(torch.nan)


def rounded(net: Keeps, x: Tensor) -> None:
    net.table.fill_(1 + 2e-7 * len(x))


def in_place(net: Keeps, x: Tensor) -> None:
    net.table.mul_(0.9).add_(x.mean())


def through_data(net: Keeps, x: Tensor) -> None:
    net.table.data.mul_(0.9).add_(x.mean())


def anew(net: Keeps, x: Tensor) -> None:
    net.table = net.table * 0.9 + x.mean()
    net.later = x.detach()[0].clone()


def grown(net: Keeps, x: Tensor) -> None:
    net.table = torch.cat([net.table, x.detach()])


def counted(net: Keeps, x: Tensor) -> None:
    net.count += len(x)


def tracked(net: Keeps, x: Tensor) -> None:
    net.tracks(torch.stack([x, 2 * x], 2))


def together(net: Keeps, x: Tensor) -> None:
    net.table.add_(collectives.all_reduce(x.mean(), "avg", "local"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings since the last call, but for the line on batch norm."""

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in found if not text.startswith("batch norm")]

    with caplog.at_level(logging.WARNING, "dataparallel"):
        yield take


def run(model: Any, number: int = 2, size: int = 8) -> None:
    device = model.device_ids[0]
    for _ in range(number):
        model(torch.randn(size, 3, device=device))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("write", [in_place, anew])
@pytest.mark.parametrize("buffers", ["replica0", "mean"])
def test_the_module_gets_what_the_policy_says(
    slots: list[str], wrapper: Any, write: Any, buffers: str
) -> None:
    net = Keeps(write).to(slots[0])
    # It shares memory, so it has the same mean.
    net.register_buffer("part", net.table[:1])
    model, expected = wrapper(net, slots[:3], buffers=buffers), torch.zeros(3, 3)
    for x in torch.randn(2, 8, 3):
        model(x)
        expected = expected * 0.9 + (x.mean() if buffers == "mean" else x[:3].mean())
        torch.testing.assert_close(net.table.cpu(), expected)
    if write is in_place:
        assert torch.equal(net.get_buffer("part"), net.table[:1])


RUNNING = "'tracks.running_mean', 'tracks.running_var'"


@pytest.mark.in_pairs
@pytest.mark.parametrize(
    ("wrapper", "slots"),
    [
        (DataParallel, ["virtual:0", "virtual:1", "virtual:2"]),
        (DistributedDataParallel, ["cpu"] * 3),
    ],
)
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (nothing, {}),
        (together, {}),
        (rounded, {}),
        (in_place, {"replica0": "'table'", "sync": "'table'"}),
        (through_data, {"replica0": "'table'", "sync": "'table'"}),
        (anew, {"replica0": "'table', 'later'", "sync": "'table', 'later'"}),
        (grown, {"replica0": "'table'", "mean": "'table'", "sync": "'table'"}),
        (counted, {"replica0": "'count'", "mean": "'count'", "sync": "'count'"}),
        (tracked, {"replica0": RUNNING}),
    ],
)
@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_buffers_that_differ_are_named_once(
    slots: list[str], wrapper: Any, write: Any, told: dict[str, str], buffers: str, said: Any
) -> None:
    model = wrapper(Keeps(write).to(slots[0]), slots, buffers=buffers)
    # Nobody trains, and nobody differs.
    run(model.eval())
    assert said() == []
    run(model.train(), 9)
    names = told.get(buffers)
    texts = said()
    if names is None:
        assert texts == []
    else:
        (text,) = texts
        assert (
            f"forward of Keeps writes different values in each replica to the buffers {names};"
            in text
        )
        assert f"with buffers={buffers!r} the module keeps those of replica 0" in text
        assert ("pass buffers='mean'" in text) == (buffers != "mean")
        assert "dataparallel.collectives.all_reduce()" in text


def test_an_answer_of_the_device_is_not_read_before_it_is_there(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, event = devices.to_host_later, mock.Mock(query=mock.Mock(return_value=False))
    monkeypatch.setattr(devices, "to_host_later", lambda value: (send(value)[0], event))
    model = DataParallel(Keeps(in_place).to("virtual:0"), ["virtual:0", "virtual:1"])
    run(model, 3)
    assert said() == []
    event.query.return_value = True
    run(model)
    assert len(said()) == 1


@WRAPPERS
def test_what_begins_late_is_found_too(slots: list[str], wrapper: Any, said: Any) -> None:
    net = Keeps(counted)
    model = wrapper(net.to(slots[0]), slots[:3])
    run(model, 5)
    assert len(said()) == 1
    net.write = in_place
    run(model, 5)
    (text,) = said()
    assert "'table'" in text and "'count'" not in text


def test_wrappers_of_one_module_say_it_once(said: Any) -> None:
    net = Keeps(counted)
    for _ in range(3):
        data_parallel(net, torch.randn(8, 3), ["cpu"] * 3)
    assert len(said()) == 1
    DataParallel(net, ["cpu"] * 3, buffers="mean")(torch.randn(8, 3))
    assert len(said()) == 1


def test_a_criterion_with_buffers(said: Any) -> None:
    class Centered(nn.MSELoss):
        center: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.center.data.copy_(output.mean(0))
            return super().forward(output, target)

    model = DistributedDataParallel(nn.Linear(3, 3), ["cpu"] * 2)
    criterion = Centered()
    for _ in range(3):
        model.loss(criterion, torch.randn(4, 3), torch.randn(4, 3), weight="samples").backward()
    (text,) = said()
    assert "forward of Centered writes" in text and "'center'" in text


@WRAPPERS
def test_no_forward_waits_for_a_device(wrapper: Any) -> None:
    model = wrapper(Keeps(through_data).to(TWO[0]), TWO)
    x = torch.randn(8, 3, device=TWO[0])
    # Other buffers that are compared at first may wait.
    run(model, 15)
    virtual.reset_counters()
    for _ in range(20):
        model(x)
    assert virtual.counters()["host_waits"] == 0


# --- batch norm ----------------------------------------------------------------------------------


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize(
    ("buffers", "kind", "replicas", "lines"),
    [
        ("replica0", nn.BatchNorm1d, 2, 1),
        ("mean", nn.BatchNorm1d, 2, 1),
        ("sync", nn.BatchNorm1d, 2, 0),
        ("replica0", nn.BatchNorm1d, 1, 0),
        ("replica0", nn.SyncBatchNorm, 2, 0),
        ("replica0", collectives.SyncBatchNorm, 2, 0),
        ("replica0", nn.Identity, 2, 0),
    ],
)
def test_batch_norm_of_chunks_is_told_once(
    wrapper: Any,
    buffers: str,
    kind: Any,
    replicas: int,
    lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), *[kind(3) for _ in range(5)])
    model = wrapper(net, ["cpu"] * replicas, buffers=buffers)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        model.eval()(torch.randn(6, 3))
        assert caplog.records == []
        net.train()
        for _ in range(3):
            model(torch.randn(6, 3))
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == lines
    if found:
        assert found[0].startswith("batch norm ('1', '2', '3' and 2 more) normalizes the chunk of")
        assert "pass buffers='sync' for the statistics of the whole batch" in found[0]
