"""The default process group: where it is met, who is named when it is not, what it leaves."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import logging.handlers
import os
import pathlib
import random
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed import constants

from dataparallel.comm.failures import CollectiveTimeout
from dataparallel.extras import elastic
from dataparallel.extras.elastic import init_process_group
from tests.cluster import Cluster, free_port

TCP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BOTH = {"RANK": "1", "WORLD_SIZE": "2"}
# Seconds that nobody waits for unless something is broken.
LONG = 30.0


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
def test_alone_again_and_again(timeout: Any, world: None) -> None:
    cases: list[Any] = [{}, {"rank": 0, "world_size": 1}, {"rank": -1, "group_name": "mine"}]
    for arguments in cases:
        group = init_process_group(timeout=timeout, **arguments)
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        expected = datetime.timedelta(seconds=7) if timeout else constants.default_pg_timeout
        assert group._get_backend(torch.device("cpu")).options._timeout == expected
        dist.all_reduce(torch.ones(2))
        with pytest.raises(ValueError, match="already; call torch"):
            init_process_group()
        dist.destroy_process_group()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_accelerator_gets_its_backend_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(backend: str, **_: Any) -> None:
        raise KeyError(backend)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
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
    assert dist.get_world_size() == 1


# --- several processes -----------------------------------------------------------------------


def start_twice(rank: int, world_size: int, method: str | None, path: str = "") -> list[Any]:
    """Two groups one after the other; with what is told to gloo."""
    found, kept = [], []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLOO_SOCKET_IFNAME", "lo")
        patched.delenv("GLOO_SOCKET_IFNAME")
        if method and method.isdecimal():
            patched.setenv("MASTER_ADDR", "127.0.0.1")
            patched.setenv("MASTER_PORT", method)
            method = None
        for _ in range(2):
            # A file has the addresses of earlier groups, whose processes may be gone.
            store = FileStore(path, -1) if path else None
            group = init_process_group(
                init_method=method, rank=rank, world_size=world_size, store=store, timeout=20
            )
            # Somebody may still have the store, whose port is not free then.
            kept.append(group.get_group_store())
            total = torch.tensor(float(rank + 1))
            dist.all_reduce(total)
            found.append((total.item(), os.environ.get("GLOO_SOCKET_IFNAME")))
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("place", ["env", "tcp", "file", "store"])
def test_groups_one_after_the_other(place: str, cluster: Cluster, tmp_path: pathlib.Path) -> None:
    places: dict[str, list[Any]] = {
        "env": [str(free_port())],
        "tcp": [f"tcp://localhost:{free_port()}"],
        "file": [f"file://{tmp_path}/store"],
        "store": [None, str(tmp_path / "given")],
    }
    for _ in range(1 + (place in ("file", "store"))):
        found = cluster.run(start_twice, 3, *places[place], init_group=False)
        assert found == [[(6.0, "lo")] * 2] * 3


def start_without_one(rank: int, world_size: int, method: str, missing: int) -> str:
    if rank == missing:
        return ""
    said = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger(elastic.__name__)
    logger.addHandler(said)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(CollectiveTimeout) as caught,
        ):
            patch.setattr(elastic, "PATIENCE", 0.2)
            init_process_group(init_method=method, rank=rank, world_size=world_size, timeout=0.5)
        return f"{caught.value} {[each.getMessage() for each in said.buffer]}"
    finally:
        logger.removeHandler(said)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, cluster: Cluster) -> None:
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    errors = cluster.run(start_without_one, 3, method, missing, init_group=False)
    for rank, text in enumerate(errors):
        if rank != missing:
            assert text.startswith(f"rank {missing} did not come within 0.5")
            assert f"for which rank {rank} of 3 waits" in text
            assert f"['rank {missing} did not come within 0.2" in text
            assert missing or f"nobody answers at 127.0.0.1:{port}" in text
    # The processes and the port are as good as before.
    found = cluster.run(start_twice, 3, method, init_group=False)
    assert [[each[0] for each in rank] for rank in found] == [[6.0, 6.0]] * 3


# --- the round: here each process is a thread ------------------------------------------------


def meet(store: HashStore, rank: int, world_size: int, timeout: float = LONG) -> str:
    """What only those have in common who meet in one part of the store, used by nobody before."""
    part = elastic._meet(rank, world_size, store, datetime.timedelta(seconds=timeout))
    return part.compare_set("mark", "", uuid.uuid4().hex).decode()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return or raise."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def all_meet(store: HashStore, world_size: int) -> str:
    calls = [functools.partial(meet, store, rank, world_size) for rank in range(world_size)]
    (prefix,) = set(together(calls))
    assert isinstance(prefix, str), prefix
    return prefix


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("world_size", [1, 4])
def test_all_ranks_get_the_same_part_and_never_one_that_was_used(
    world_size: int, monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    store = HashStore()
    parts = [all_meet(store, world_size) for _ in range(3)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another run")
    assert len({*parts, all_meet(store, world_size)}) == 4


def test_what_killed_attempts_left_is_never_taken_for_a_process(world: None) -> None:
    """Any ranks of a group of any size came before the attempt ended, in any order of return."""
    chance = random.Random(0)
    for _ in range(12):
        store, world_size = HashStore(), chance.randint(2, 4)
        used = [all_meet(store, chance.randint(1, 4)) for _ in range(chance.randint(0, 2))]
        number = store.add("dataparallel/start/none/rounds", 1)
        place = f"dataparallel/start/none/{number}"
        store.set("dataparallel/start/none/open", str(number))
        there = [rank for rank in range(world_size) if chance.random() < 0.6]
        for rank in there:
            store.set(f"{place}/rank {rank}", "gone")
        if len(there) == world_size:
            store.set(f"{place}/plan", json.dumps(["gone"] * world_size))
        # Rank 0 is the first or the last.
        order = list(range(world_size))[:: chance.choice([1, -1])]
        with ThreadPoolExecutor(world_size) as pool:
            running = []
            for rank in order:
                running.append(pool.submit(meet, store, rank, world_size))
                time.sleep(chance.random() / 100)
            (prefix,) = {each.result(LONG) for each in running}
        assert prefix not in used


def test_a_process_that_is_started_again_while_the_others_wait(world: None) -> None:
    store, key = HashStore(), "dataparallel/start/none/1/rank 1"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 0, 3)
        # One that is killed while it waits has left its name.
        poll(lambda: store.check(["dataparallel/start/none/open"]))
        store.set(key, "gone")
        second = pool.submit(meet, store, 1, 3)
        poll(lambda: store.get(key) != b"gone")
        assert meet(store, 2, 3) == first.result(LONG) == second.result(LONG)


def test_two_processes_of_one_rank_do_not_begin_together(world: None) -> None:
    store = HashStore()
    outcomes = together([lambda r=r: meet(store, r, 2, 0.4) for r in (1, 1, 0)])  # type: ignore[misc]
    errors = [str(each) for each in outcomes if isinstance(each, CollectiveTimeout)]
    assert errors and all(re.search("rank [01] did not come|a rank of its own", e) for e in errors)


def test_processes_that_count_differently_all_learn_of_it(world: None) -> None:
    store = HashStore()
    for error in together([lambda r=r: meet(store, r, 2 + r) for r in (0, 1)]):  # type: ignore[misc]
        assert isinstance(error, ValueError)
        assert "world_size is the same in all processes, but got ['2', '3']" in str(error)


@pytest.mark.parametrize(
    ("machines", "own_address", "chosen"),
    [
        ("aa", "192.0.2.1", "lo"),
        ("ab", "192.0.2.1", None),
        (("a", ""), "192.0.2.1", None),
        (("", ""), "192.0.2.1", None),
        ("ab", "127.0.1.1", "eth7"),
    ],
)
@pytest.mark.parametrize("users", ["", "eth8"])
def test_gloo_listens_where_the_other_processes_are(
    machines: Any,
    own_address: str,
    chosen: str | None,
    users: str,
    monkeypatch: pytest.MonkeyPatch,
    world: None,
) -> None:
    """By the route to the store, also where MASTER_ADDR, of another program, names another host."""
    asked: list[str] = []

    def towards(host: str) -> str:
        asked.append(host)
        return "eth7"

    monkeypatch.setattr(elastic, "_machine", iter(machines).__next__)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: own_address)
    monkeypatch.setattr(elastic, "_interface_towards", towards)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.9")
    if users:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", users)
    method, limit = f"tcp://127.0.0.1:{free_port()}", datetime.timedelta(seconds=LONG)
    together([functools.partial(elastic._meet, rank, 2, method, limit) for rank in range(2)])
    assert os.environ.get("GLOO_SOCKET_IFNAME") == (users or chosen)
    assert set(asked) == ({"127.0.0.1"} if chosen == "eth7" else set())


@pytest.mark.skipif(not pathlib.Path("/proc/net/route").exists(), reason="needs Linux")
def test_the_interface_of_the_most_specific_route(monkeypatch: pytest.MonkeyPatch) -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    routes = [("eth0", "00000000", "00000000"), ("eth1", "0002000A", "00FFFFFF")]
    lines = [f"{name}\t{net}\t00000000\t1\t0\t0\t0\t{mask}\t0\t0\t0" for name, net, mask in routes]
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path: "\n".join([head, *lines]))
    assert elastic._interface_towards("10.0.2.7") == "eth1"
    assert elastic._interface_towards("192.0.2.7") == "eth0"
