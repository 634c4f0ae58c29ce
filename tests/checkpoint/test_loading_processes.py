"""Several processes load the same generation, and either all of them have it then or none."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from dataparallel import checkpoint
from tests.checkpoint.files import folder
from tests.cluster import Cluster

TIMEOUT = 20.0


class Failing:
    """Takes no state in one process."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error("the user's own")


def load_and_fail(
    rank: int, world_size: int, directory: pathlib.Path, error: type[BaseException]
) -> tuple[str, bool, bool]:
    torch.manual_seed(rank)
    net, moving = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.1, momentum=0.9)
    before = net.weight.detach().clone()
    drawn = torch.get_rng_state()
    # The other process has loaded everything when it learns of this.
    failing = Failing(error if rank == 1 else None)
    with pytest.raises((checkpoint.CheckpointError, RuntimeError, KeyboardInterrupt)) as caught:
        checkpoint.load(directory, net, optimizer, states={"failing": failing}, timeout=TIMEOUT)
    kept = torch.equal(net.weight, before) and torch.equal(torch.get_rng_state(), drawn)
    return str(caught.value), kept, not optimizer.state


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_in_one_process_is_taken_back_in_all(
    cluster: Cluster, error: type[BaseException], tmp_path: pathlib.Path
) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = {"failing": Failing(None)}
    checkpoint.save(tmp_path, net, optimizer, step=1, states=states)
    checkpoint.close()
    results = cluster.run(load_and_fail, 2, tmp_path, error)
    assert [result[1:] for result in results] == [(True, True)] * 2
    if error is ZeroDivisionError:
        assert all("rank 1 on " in text and "the user's own" in text for text, _, _ in results)


def load_own(rank: int, world_size: int, directory: pathlib.Path) -> Any:
    read: list[str] = []
    original: Any = pathlib.Path.read_bytes

    def read_bytes(path: pathlib.Path) -> bytes:
        if path.suffix == ".safetensors":
            read.append(path.parent.name[-1])
        data: bytes = original(path)
        return data

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pathlib.Path, "read_bytes", read_bytes)
        loaded = checkpoint.load(directory / str(rank), timeout=TIMEOUT)
    return loaded.step, loaded.rejected, read


def damage(directory: pathlib.Path, rank: int, number: int) -> None:
    (folder(directory / str(rank), number) / "manifest.json").write_bytes(b"x")


def test_the_newest_that_is_good_for_all(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    for step in range(4):
        checkpoint.save(tmp_path / "0", step=step, keep=9)
    checkpoint.close()
    # As machines that see one directory, and each some of it damaged.
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    damage(tmp_path, 0, 2)
    damage(tmp_path, 1, 3)
    (step, rejected, read), (same_step, same_rejected, also_read) = cluster.run(
        load_own, 2, tmp_path
    )
    assert (step, rejected) == (same_step, same_rejected)
    # None of them twice.
    assert (read, also_read) == (["3", "1"], ["2", "1"])
    assert step == 1 and [number for number, _ in rejected] == [3, 2]
    assert rejected[0][1].startswith("rank 1: ") and rejected[1][1].startswith("rank 0: ")


def load_another(rank: int, world_size: int, directory: pathlib.Path) -> str:
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(directory / str(rank), timeout=TIMEOUT)
    return str(caught.value)


def test_directories_that_are_not_the_same(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    for rank in (0, 1):
        checkpoint.save(tmp_path / str(rank), step=rank)
    checkpoint.close()
    texts = cluster.run(load_another, 2, tmp_path)
    assert all("is not the same for all processes" in text for text in texts)
    damage(tmp_path, 0, 0)
    texts = cluster.run(load_another, 2, tmp_path)
    assert all("rank 0 on " in text and "no generation in" in text for text in texts)
    shutil.rmtree(tmp_path / "0")
    texts = cluster.run(load_another, 2, tmp_path)
    assert all("all must see the same directory" in text for text in texts)


def load_what_vanishes(rank: int, world_size: int, directory: pathlib.Path) -> Any:
    """Rank 0 reads what there is; another generation takes its place before rank 1 looks."""
    original, original_load = os.listdir, safetensors.torch.load

    def listdir(path: Any) -> list[str]:
        if str(path) == str(directory) and not seen:
            seen.append(True)
            if rank == 1:
                dist.barrier()
                os.rename(directory / "next", folder(directory, 1))
                shutil.rmtree(folder(directory, 0))
        names: list[str] = original(path)
        return names

    def load(*args: Any, **options: Any) -> Any:
        found = original_load(*args, **options)
        if rank == 0 and not told:
            told.append(True)
            dist.barrier()
        return found

    seen: list[bool] = []
    told: list[bool] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "listdir", listdir)
        patched.setattr("safetensors.torch.load", load)
        loaded = checkpoint.load(directory, timeout=TIMEOUT)
    return loaded.number, loaded.step


def test_beside_a_writer(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    for step in (10, 20):
        checkpoint.save(tmp_path, step=step)
    checkpoint.close()
    os.rename(folder(tmp_path, 1), tmp_path / "next")
    assert cluster.run(load_what_vanishes, 2, tmp_path) == [(1, 20)] * 2
