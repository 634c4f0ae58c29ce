"""Counted, not timed: what a forward copies, starts and calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.comm import local


def wrapped(devices: list[str]) -> DataParallel[nn.Sequential]:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    return DataParallel(layers.to(devices[0]), devices)


@contextmanager
def counted_copies() -> Iterator[list[torch.device]]:
    """Notes the destination of every copy between devices, but those of inputs and outputs."""
    seen: list[torch.device] = []
    arrive = local.arrive

    def noted(device: torch.device, *rest: Any) -> torch.Tensor:
        result = arrive(device, *rest)
        if result.shape not in {torch.Size([2, 3]), torch.Size([6, 2])}:
            seen.append(device)
        return result

    with mock.patch.object(local, "arrive", noted):
        yield seen


def test_a_forward_copies_parameters_only_after_a_step_and_packed() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    model = wrapped(devices).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 3, device=devices[0])
    model(x).sum().backward()
    with counted_copies() as again:
        model(x)
        with torch.no_grad():
            model(x)
    assert again == []
    optimizer.step()
    with counted_copies() as after:
        model(x)
    assert sorted(map(str, after)) == devices[1:]


def test_replicas_on_one_device_copy_no_parameter() -> None:
    model = wrapped(["cpu"] * 3)
    pointers: set[int] = set()
    model.module[0].register_forward_hook(lambda net, *_: pointers.add(net.weight.data_ptr()))
    with counted_copies() as seen:
        model(torch.randn(6, 3)).sum().backward()
    assert seen == []
    assert pointers == {model.module[0].weight.data_ptr()}


def test_no_thread_starts_after_the_first_forward(slots: list[str]) -> None:
    model = wrapped(slots)
    x = torch.randn(8, 3, device=slots[0])
    model(x).sum().backward()
    with mock.patch.object(threading.Thread, "start", autospec=True) as start:
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
    start.assert_not_called()
