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


def net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(device)


@contextmanager
def counted_copies() -> Iterator[list[tuple[torch.Size, torch.device]]]:
    """Notes shape and destination of every copy between devices."""
    seen: list[tuple[torch.Size, torch.device]] = []
    arrive = local.arrive

    def noted(device: torch.device, *rest: Any) -> torch.Tensor:
        result = arrive(device, *rest)
        seen.append((result.shape, device))
        return result

    with mock.patch.object(local, "arrive", noted):
        yield seen


def test_a_forward_after_which_nothing_changed_copies_no_parameter() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    model = DataParallel(net(devices[0]), devices).eval()
    x = torch.randn(6, 3, device=devices[0])
    with counted_copies() as first:
        model(x)
    with counted_copies() as again:
        model(x)
        with torch.no_grad():
            model(x)
    inputs_and_outputs = {torch.Size([2, 3]), torch.Size([6, 2])}
    assert any(shape not in inputs_and_outputs for shape, _ in first)
    assert all(shape in inputs_and_outputs for shape, _ in again)


def test_an_optimizer_step_makes_one_packed_copy_per_device() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    model = DataParallel(net(devices[0]), devices).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 3, device=devices[0])
    model(x).sum().backward()
    optimizer.step()
    with counted_copies() as seen:
        model(x)
    parameters = [
        (shape, device)
        for shape, device in seen
        if shape not in {torch.Size([2, 3]), torch.Size([6, 2])}
    ]
    assert sorted(str(device) for _, device in parameters) == devices[1:]


def test_replicas_on_one_device_copy_no_parameter() -> None:
    model = DataParallel(net("cpu"), ["cpu"] * 3)
    pointers: dict[str, set[int]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        for name, parameter in module.named_parameters():
            pointers.setdefault(name, set()).add(parameter.data_ptr())

    model.module[0].register_forward_hook(note)
    with counted_copies() as seen:
        model(torch.randn(6, 3)).sum().backward()
    assert seen == []
    assert pointers == {
        name: {parameter.data_ptr()} for name, parameter in model.module[0].named_parameters()
    }


def test_no_thread_starts_after_the_first_forward(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots)
    x = torch.randn(8, 3, device=slots[0])
    model(x).sum().backward()
    with mock.patch.object(threading.Thread, "start", autospec=True) as start:
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
    start.assert_not_called()
