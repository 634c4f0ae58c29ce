"""Processes between which the network fails: both sides notice in time, and go on afterwards."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dataparallel as dp
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from tests.faults import partition
from tests.faults.harness import Figures

# Seconds until the processes have met again: what was sent in vain is sent again after a while.
_HEALING = 20.0


def step(model: Any, rank: int) -> list[float]:
    model.zero_grad()
    model(torch.full((2, 2), rank + 1.0)).sum().backward()
    return [value for each in model.parameters() for value in each.grad.flatten().tolist()]


def be_cut_off(
    rank: int, world_size: int, folder: str, timeout: float
) -> tuple[float, str, list[float]]:
    """A step while rank 1 has no network: after how many seconds it fails, and with which text.

    And the gradient of the first step after the network is there again.
    """
    method = f"tcp://{partition.address(0)}:29501"
    dp.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=20)
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(torch.nn.Linear(2, 2), ["cpu"], timeout=timeout)
    for _ in range(3):
        step(model, rank)
    dist.barrier()
    if rank == 1:
        partition.cut()
    begin = time.monotonic()
    with pytest.raises((CollectiveTimeout, CollectiveError)) as caught:
        step(model, rank)
    seconds = time.monotonic() - begin
    # The network has no part in files.
    noticed = [pathlib.Path(folder, str(each)) for each in range(world_size)]
    noticed[rank].touch()
    while not all(path.exists() for path in noticed):
        time.sleep(0.02)
    if rank == 1:
        partition.heal(1)
    begin = time.monotonic()
    while True:
        try:
            return seconds, str(caught.value), step(model, rank)
        except (CollectiveTimeout, CollectiveError):
            if time.monotonic() - begin > _HEALING:
                raise
            time.sleep(0.1)


def test_both_sides_of_a_partition(
    repeats: Callable[..., int], figures: Figures, tmp_path: pathlib.Path
) -> None:
    partition.require()
    timeouts = [3.0, 12.0] * repeats(quick=0, long=5) or [2.0]
    worst = 0.0
    for number, timeout in enumerate(timeouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        reachable, cut_off = partition.run(be_cut_off, str(folder), timeout)
        assert "rank 1" in reachable[1].partition(":")[2], reachable
        assert "the store of the process group" in cut_off[1], cut_off
        assert "answer" in cut_off[1], cut_off
        assert reachable[2] == cut_off[2] == [3.0, 3.0, 3.0, 3.0, 2.0, 2.0]
        worst = max(worst, reachable[0] - timeout, cut_off[0] - timeout)
    what = "a partition: time beyond the timeout until both sides have an error, p100"
    # For a second of that, the side without a network waits for an answer of the store.
    figures.record(what, worst, "s", 1.5, repeats=len(timeouts))
