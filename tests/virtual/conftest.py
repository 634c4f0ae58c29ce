"""Four virtual devices for every test of this folder, with nothing left over between tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dataparallel.virtual
from dataparallel.virtual import device_module as virtual

dataparallel.virtual.enable(4)


@pytest.fixture(autouse=True)
def _clean_devices() -> Iterator[None]:
    """Each test starts and ends in normal mode, with nothing queued."""
    virtual.set_device(0)
    yield
    dataparallel.virtual.set_strict(False)
    for index in range(4):
        torch.accelerator.synchronize(index)


@pytest.fixture
def stream() -> torch.Stream:
    """A new side stream of device 0."""
    return torch.Stream("virtual:0")
