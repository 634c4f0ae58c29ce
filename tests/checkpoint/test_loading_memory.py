"""A load holds what it loads and no more, and keeps nothing alive afterwards."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dataparallel import checkpoint
from tests.checkpoint.files import folder
from tests.cluster import Cluster


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def save_own(rank: int, world_size: int, directory: pathlib.Path) -> None:
    torch.manual_seed(0)
    same, own = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.no_grad():
        own.weight.fill_(rank)
    user = {"of": rank, "more": torch.full((3,), rank), "alike": same.weight.detach()}
    checkpoint.save(directory, own, step=1, states={"same": same}, user=user, timeout=20)
    checkpoint.close()


def test_only_what_is_loaded_is_in_memory(
    cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(save_own, 2, tmp_path)
    read: list[str] = []
    original: Any = pathlib.Path.read_bytes

    def read_bytes(path: pathlib.Path) -> bytes:
        read.append(path.name)
        data: bytes = original(path)
        return data

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
    net = nn.Linear(8, 8)
    loaded = checkpoint.load(tmp_path, net, rng=False)
    assert not net.weight.any() and loaded.user["of"] == 0
    # Each file once, and none of the other process.
    files = ["manifest.json", "rank-00000-00000.safetensors", "shared-00000.safetensors"]
    assert sorted(read) == files
    # A file of which nothing is wanted is not read, and may be damaged.
    (folder(tmp_path, 0) / "rank-00001-00000.safetensors").write_bytes(b"x")
    assert checkpoint.load(tmp_path, net, rng=False).step == 1


class Keeper:
    """Keeps the very tensor that it is given."""

    def __init__(self) -> None:
        self.kept = torch.ones(3)

    def state_dict(self) -> dict[str, Tensor]:
        return {"x": self.kept}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.kept = state["x"]


def test_parts_have_tensors_of_their_own(tmp_path: pathlib.Path) -> None:
    keeper = Keeper()
    states = {"keeper": keeper}
    checkpoint.save(tmp_path, step=1, states=states, user={"x": keeper.kept, "y": [keeper.kept]})
    user = checkpoint.load(tmp_path, states=states).user
    assert user["x"] is user["y"][0]
    user["x"].zero_()
    assert bool(keeper.kept.all())


def test_nothing_is_kept_alive(tmp_path: pathlib.Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    expected = torch.rand(2)
    loaded = checkpoint.load(tmp_path, net, optimizer)
    alive = [weakref.ref(each) for each in (net, optimizer)]
    del net, optimizer
    gc.collect()
    assert [each() for each in alive] == [None, None]
    loaded.restore_rng()
    assert torch.equal(torch.rand(2), expected)


def test_a_sampler_that_was_iterated_directly(tmp_path: pathlib.Path) -> None:
    sampler = checkpoint.ResumableSampler(20, 4)
    next(iter(sampler.over(sampler)))
    checkpoint.save(tmp_path, sampler=sampler, step=1)
    other = checkpoint.ResumableSampler(20, 4)
    list(other)
    checkpoint.load(tmp_path, sampler=other)
    assert other.state_dict() == sampler.state_dict()
    # What was not known is not known again where the load fails.
    other = checkpoint.ResumableSampler(20, 4, seed=3)
    list(other)
    with pytest.raises(ValueError, match="seed=0, but this sampler has seed=3"):
        checkpoint.load(tmp_path, sampler=other)
    with pytest.raises(RuntimeError, match="is not known"):
        other.state_dict()
    checkpoint.save(tmp_path, step=2, states={"sampler2": torch.Generator()})
    with pytest.raises(checkpoint.CheckpointError, match="sampler is to be loaded"):
        checkpoint.load(tmp_path, sampler=other)


def test_modules_without_values(tmp_path: pathlib.Path) -> None:
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(TypeError, match=r"model\.state\.weight is on the device 'meta'"):
        checkpoint.save(tmp_path, meta, step=1)
    with pytest.raises(TypeError, match=r"model\.state\.weight has no shape and no values yet"):
        checkpoint.save(tmp_path, nn.LazyLinear(2), step=1)
    checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"model\.weight is on the device 'meta' here and"
    ):
        checkpoint.load(tmp_path, meta)


def test_another_generator_of_numpy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, step=1)
    monkeypatch.setattr(numpy.random, "get_state", lambda: {"bit_generator": "PCG64"})
    with pytest.raises(TypeError, match=r"NumPy's generator is a PCG64 .*; pass rng=False"):
        checkpoint.save(tmp_path, step=2)
    checkpoint.save(tmp_path, step=2, rng=False)
    assert checkpoint.load(tmp_path, rng=False).step == 2
