"""Processes between which the network fails: both sides notice in time, and go on afterwards."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dataparallel as dp
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from tests.faults import partition
from tests.faults.harness import Figures

# Seconds until the processes have met again: what was sent in vain is sent again after a while.
_HEALING = 20.0


@dataclass(frozen=True)
class Side:
    """What a process saw of a cut.

    Attributes:
        seconds: Until it had an error.
        text: Of the error.
        gradient: Of the first step after the network is there again.
    """

    seconds: float
    text: str
    gradient: list[float]


def step(model: Any, rank: int) -> list[float]:
    model.zero_grad()
    model(torch.full((2, 2), rank + 1.0)).sum().backward()
    return [value for each in model.parameters() for value in each.grad.flatten().tolist()]


def wait_for(paths: list[pathlib.Path], seconds: float = 30.0) -> None:
    """Wait for files, which the network has no part in."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"missing after {seconds} s: {paths}"
        time.sleep(0.02)


def be_cut_off(rank: int, world_size: int, folder: str, timeout: float) -> Side:
    """A step while rank 1 has no network, and steps after that."""
    method = f"tcp://{partition.address(0)}:29501"
    dp.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=20)
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(torch.nn.Linear(2, 2), ["cpu"], timeout=timeout)
    for _ in range(3):
        step(model, rank)
    dist.barrier()
    if rank == 1:
        partition.cut(1)
    begin = time.monotonic()
    with pytest.raises((CollectiveTimeout, CollectiveError)) as caught:
        step(model, rank)
    seconds = time.monotonic() - begin
    noticed = [pathlib.Path(folder, str(each)) for each in range(world_size)]
    noticed[rank].touch()
    wait_for(noticed)
    if rank == 1:
        partition.heal(1)
    begin = time.monotonic()
    while True:
        try:
            return Side(seconds, str(caught.value), step(model, rank))
        except (CollectiveTimeout, CollectiveError):
            if time.monotonic() - begin > _HEALING:
                raise
            time.sleep(0.1)


def test_both_sides_of_a_partition(
    repeats: Callable[..., int], figures: Figures, tmp_path: pathlib.Path
) -> None:
    """Goal 5."""
    partition.require()
    timeouts = [3.0, 12.0] * repeats(quick=0, long=5) or [3.0]
    worst = 0.0
    for number, timeout in enumerate(timeouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        reachable, cut_off = partition.run(be_cut_off, 2, str(folder), timeout)
        assert "rank 1" in reachable.text.partition(":")[2], reachable.text
        assert "the store of the process group" in cut_off.text, cut_off.text
        assert "answer" in cut_off.text, cut_off.text
        assert reachable.gradient == cut_off.gradient == [3.0, 3.0, 3.0, 3.0, 2.0, 2.0]
        worst = max(worst, *(side.seconds - timeout for side in (reachable, cut_off)))
    figures.record(
        goal=5,
        what="a partition: time beyond the timeout until both sides have an error, p100",
        value=worst,
        unit="s",
        limit=0.5,
        repeats=len(timeouts),
        baseline="0 s beyond 1800 s, unnamed",
        details="rank named on the one side, cut off on the other; both went on",
    )


def raise_in_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("lost")


def test_an_error_in_a_network_of_its_own() -> None:
    partition.require()
    with pytest.raises(RuntimeError, match=r"in rank 1:[\s\S]*KeyError: 'lost'"):
        partition.run(raise_in_rank_one, 2)
