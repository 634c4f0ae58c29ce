"""How many steps a killed process costs: at most one with generations in memory, else at most k."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DistributedDataParallel, checkpoint
from tests.cluster import Cluster, RankDied
from tests.faults.harness import Figures

STEPS = 8
# A generation on the disk at every so many steps.
EVERY = 3
TIMEOUT = 20.0


@pytest.fixture
def memory() -> Iterator[pathlib.Path]:
    """A folder in the machine's memory, which outlives a process."""
    shared = pathlib.Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None)
    yield pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def train(
    rank: int,
    world_size: int,
    memory: pathlib.Path,
    disk: pathlib.Path,
    killed_at: int,
) -> tuple[int, dict[str, Tensor]]:
    """Train to the end, or until this process is killed in a step."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    model: Any = DistributedDataParallel(net, ["cpu", "cpu"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaded = checkpoint.load([memory, disk], model, optimizer, missing_ok=True, timeout=TIMEOUT)
    if loaded.number is None:
        torch.manual_seed(rank)
    for step in range(loaded.step + 1, STEPS + 1):
        model(torch.rand(8, 4)).sum().backward()
        if rank == 1 and step == killed_at:
            # In the middle of a step that the others may have finished.
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(memory, model, optimizer, step=step, keep=2, timeout=TIMEOUT)
        if step % EVERY == 0:
            checkpoint.save(disk, model, optimizer, step=step, timeout=TIMEOUT)
    result = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    checkpoint.close()
    return loaded.step, {**result, "drawn": torch.rand(3)}


@pytest.mark.parametrize("lost", ["process", "machine"])
def test_lost_work(
    lost: str,
    cluster: Cluster,
    memory: pathlib.Path,
    tmp_path: pathlib.Path,
    repeats: Callable[..., int],
    figures: Figures,
) -> None:
    expected = cluster.run(train, 2, tmp_path / "a", tmp_path / "b", 0)
    worst = 0
    count = repeats(quick=1, long=25)
    for number in range(count):
        disk = tmp_path / f"disk-{number}"
        killed_at = random.Random(number).randint(EVERY + 1, STEPS)
        results = cluster.run(train, 2, memory, disk, killed_at, expect_errors=True, timeout=60)
        assert isinstance(results[1], RankDied)
        if lost == "machine":
            shutil.rmtree(memory)
        again = cluster.run(train, 2, memory, disk, 0)
        assert {step for step, _ in again} == {again[0][0]}
        worst = max(worst, killed_at - again[0][0])
        for (_, got), (_, whole) in zip(again, expected, strict=True):
            assert all(torch.equal(got[name], value) for name, value in whole.items())
        shutil.rmtree(memory)
    figures.record(
        goal=14,
        what=f"steps lost when a {lost} is lost, bit for bit the same at the end",
        value=worst,
        unit="steps",
        limit=1 if lost == "process" else EVERY,
        repeats=count,
        baseline="all steps",
    )
