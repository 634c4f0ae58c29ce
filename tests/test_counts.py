"""Counted, not timed: what a forward copies and starts."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.comm import local


@contextlib.contextmanager
def counting_copies() -> Iterator[list[torch.device]]:
    """Where copies go that are made in the block."""
    with mock.patch.object(local, "arrive", wraps=local.arrive) as arrive:
        made: list[torch.device] = []
        yield made
        made += [call.args[0] for call in arrive.call_args_list]


def wrapped(devices: list[str]) -> DataParallel[nn.Sequential]:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    return DataParallel(layers.to(devices[0]), devices)


def test_a_forward_copies_parameters_only_after_a_step_and_packed() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    model = wrapped(devices).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 3, device=devices[0])
    model(x).sum().backward()
    with counting_copies() as again:
        model(x)
    # A chunk goes to each other device, and the outputs come back together.
    assert sorted(map(str, again)) == devices
    optimizer.step()
    with counting_copies() as after:
        model(x)
    assert sorted(map(str, (Counter(after) - Counter(again)).elements())) == devices[1:]


def test_replicas_on_one_device_copy_nothing() -> None:
    model = wrapped(["cpu"] * 3)
    pointers: set[int] = set()
    model.module[0].register_forward_hook(lambda net, *_: pointers.add(net.weight.data_ptr()))
    with counting_copies() as seen:
        model(torch.randn(6, 3)).sum().backward()
    assert seen == []
    assert pointers == {next(model.parameters()).data_ptr()}


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
