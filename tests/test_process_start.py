"""The default process group: where it is met, who is named when it is not, what it leaves."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed import constants

from dataparallel.comm.errors import CollectiveTimeout
from dataparallel.extras import elastic
from dataparallel.extras.elastic import init_process_group
from tests.cluster import Cluster, free_port

TCP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BOTH = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({}, BOTH, "MASTER_ADDR expected, but not set"),
        ({}, {**TCP, "RANK": "0"}, "WORLD_SIZE missing; start .* with torchrun"),
        ({}, {"WORLD_SIZE": "1"}, "RANK missing"),
        ({}, TCP, "RANK, WORLD_SIZE missing"),
        ({}, {**TCP, **BOTH, "RANK": "one"}, "'one'"),
        ({"rank": 2}, {**TCP, **BOTH}, "got rank 2 of 2"),
        ({"init_method": "tcp://a:7", "rank": 0}, {}, "WORLD_SIZE missing"),
        ({"init_method": "tcp://a", "rank": 0, "world_size": 1}, {}, "port number missing"),
        ({"init_method": "env://?rank=3"}, {**TCP, **BOTH}, "got rank 3 of 2"),
        ({}, {"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8, so other .* but RANK"),
        ({"store": HashStore()}, {}, "RANK, WORLD_SIZE missing"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    arguments: Any, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*TCP, *BOTH):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        init_process_group(**arguments)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no default process group afterwards, and gloo is told nothing."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("timeout", [7, datetime.timedelta(seconds=7), None])
@pytest.mark.parametrize(
    "arguments", [{}, {"rank": 0, "world_size": 1}, {"rank": -1, "group_name": "mine"}]
)
def test_alone_and_once(timeout: Any, arguments: Any, world: None) -> None:
    group = init_process_group(timeout=timeout, **arguments)
    assert group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    expected = datetime.timedelta(seconds=7) if timeout else constants.default_pg_timeout
    assert group._get_backend(torch.device("cpu")).options._timeout == expected
    with pytest.raises(ValueError, match="already; call torch"):
        init_process_group()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_accelerator_gets_its_backend_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(backend: str, **_: Any) -> None:
        raise KeyError(backend)

    monkeypatch.setattr(elastic, "accelerators", lambda: (torch.device("cuda", 0),))
    monkeypatch.setattr(dist, "init_process_group", make)
    with pytest.raises(KeyError, match="cpu:gloo,cuda:nccl"):
        init_process_group()


def test_a_store_of_torchrun_is_at_its_own_address_only(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    for name, value in {**TCP, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    method = f"tcp://127.0.0.1:{free_port()}"
    init_process_group(init_method=method, rank=0, world_size=1, timeout=5)


# --- several processes -----------------------------------------------------------------------


def start_twice(rank: int, world_size: int, method: str | None, path: str = "") -> list[Any]:
    """Two groups one after the other; with what is told to gloo."""
    found, kept = [], []
    for _ in range(2):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        # A file has the addresses of earlier groups, whose processes may be gone.
        store = FileStore(path, -1) if path else None
        group = init_process_group(
            init_method=method, rank=rank, world_size=world_size, store=store, timeout=20
        )
        # Somebody may still have the store, whose port is not free then.
        kept.append(group.get_group_store())
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        found.append((total.item(), os.environ["GLOO_SOCKET_IFNAME"]))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("place", ["tcp", "file", "store"])
def test_groups_one_after_the_other(place: str, cluster: Cluster, tmp_path: pathlib.Path) -> None:
    places: dict[str, list[Any]] = {
        "tcp": [f"tcp://localhost:{free_port()}"],
        "file": [f"file://{tmp_path}/store"],
        "store": [None, str(tmp_path / "given")],
    }
    for _ in range(2):
        found = cluster.run(start_twice, 3, *places[place], init_group=False)
        assert found == [[(6.0, "lo")] * 2] * 3


def start_without_one(rank: int, world_size: int, method: str, missing: int) -> str:
    if rank == missing:
        return ""
    with (
        mock.patch.object(elastic, "PATIENCE", 0.2),
        mock.patch.object(elastic._logger, "warning") as warn,
        pytest.raises(CollectiveTimeout) as caught,
    ):
        init_process_group(init_method=method, rank=rank, world_size=world_size, timeout=2.0)
    return f"{caught.value} {warn.call_args_list[0].args}"


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, cluster: Cluster) -> None:
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    errors = cluster.run(start_without_one, 3, method, missing, init_group=False)
    for rank, text in enumerate(errors):
        if rank != missing:
            assert text.startswith(f"rank {missing} did not come within ")
            assert f"for which rank {rank} of 3 waits" in text
            assert f"('rank {missing} did not come within " in text
            assert missing or f"nobody answers at 127.0.0.1:{port}" in text
    # The processes and the port are as good as before.
    found = cluster.run(start_twice, 3, method, init_group=False)
    assert [[each[0] for each in rank] for rank in found] == [[6.0, 6.0]] * 3


# --- the round: here each process is a thread ------------------------------------------------

ROUNDS = "dataparallel/start/none"


def meet(store: Store, rank: int, world_size: int, timeout: float = 30.0) -> str:
    """Return a mark shared only by those who meet in one part of the store, unused before."""
    part = elastic._meet(rank, world_size, store, datetime.timedelta(seconds=timeout))
    return part.compare_set("mark", "", uuid.uuid4().hex).decode()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results or errors of calls that run together."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
    return [each.exception() or each.result() for each in running]


@pytest.mark.parametrize("seed", range(12))
def test_what_killed_attempts_left_is_never_taken_for_a_process(seed: int, world: None) -> None:
    """Any ranks of a group of any size came before the attempt ended, in any order of return."""
    chance = random.Random(seed)
    store, world_size = HashStore(), chance.randint(1, 4)
    used = []
    for _ in range(chance.randint(0, 2)):
        size = chance.randint(1, 4)
        used += together(*(functools.partial(meet, store, rank, size) for rank in range(size)))
    number = store.add(f"{ROUNDS}/rounds", 1)
    store.set(f"{ROUNDS}/open", str(number))
    there = [rank for rank in range(world_size) if chance.random() < 0.6]
    for rank in there:
        store.set(f"{ROUNDS}/{number}/rank {rank}", "gone")
    if len(there) == world_size:
        store.set(f"{ROUNDS}/{number}/plan", json.dumps(["gone"] * world_size))

    def come(rank: int) -> str:
        time.sleep(chance.random() / 50)
        return meet(store, rank, world_size)

    (part,) = set(together(*(functools.partial(come, rank) for rank in range(world_size))))
    assert part not in used


def test_a_process_that_is_started_again_while_the_others_wait(world: None) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 0, 3)
        # One that is killed while it waits has left its name.
        store.wait([f"{ROUNDS}/open"])
        store.set(f"{ROUNDS}/1/rank 1", "gone")
        second = pool.submit(meet, store, 1, 3)
        while store.get(f"{ROUNDS}/1/rank 1") == b"gone":
            time.sleep(0.001)
        assert meet(store, 2, 3) == first.result() == second.result()


@pytest.mark.parametrize(
    ("ranks", "sizes", "kind", "message"),
    [
        # Two of rank 1: one of them may be taken for the other, and nobody for both.
        ((1, 1, 0), (2, 2, 2), CollectiveTimeout, "rank [01] did not come.*a rank of its own"),
        ((0, 1), (2, 3), ValueError, r"world_size is the same .* but got \['2', '3'\]"),
    ],
)
def test_processes_that_do_not_fit_together_learn_of_it(
    ranks: tuple[int, ...],
    sizes: tuple[int, ...],
    kind: type[Exception],
    message: str,
    world: None,
) -> None:
    store, each = HashStore(), zip(ranks, sizes, strict=True)
    found = together(*(functools.partial(meet, store, *pair, 0.4) for pair in each))
    errors = [error for error in found if isinstance(error, kind)]
    assert len(errors) >= (len(found) if kind is ValueError else 1)
    assert all(re.search(message, str(error)) for error in errors)


@pytest.mark.parametrize(
    ("networks", "chosen"), [("aa", "lo"), ("ab", None), (("a", ""), None), (("", ""), None)]
)
@pytest.mark.parametrize("users", ["", "eth8"])
def test_gloo_listens_where_the_other_processes_are(
    networks: Any,
    chosen: str | None,
    users: str,
    monkeypatch: pytest.MonkeyPatch,
    world: None,
) -> None:
    found = iter(networks)
    monkeypatch.setattr(elastic, "namespace", lambda kind: next(found))
    if users:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", users)
    store = HashStore()
    together(*(functools.partial(meet, store, rank, 2) for rank in range(2)))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == (users or chosen)
