"""The default process group: where it is met, who is named when it is not, what it leaves."""

from __future__ import annotations

import datetime
import functools
import logging
import logging.handlers
import os
import pathlib
import random
import re
import socket
import threading
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
from tests.cluster import Cluster

TCP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BOTH = {"RANK": "1", "WORLD_SIZE": "2"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- arguments and environment ---------------------------------------------------------------


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
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_of(group: dist.ProcessGroup) -> datetime.timedelta:
    limit: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


@pytest.mark.parametrize("timeout", [7, datetime.timedelta(seconds=7), None])
def test_alone_again_and_again(timeout: Any, world: None) -> None:
    cases: list[Any] = [{}, {"rank": 0, "world_size": 1}, {"rank": -1, "group_name": "mine"}]
    for arguments in cases:
        group = init_process_group(timeout=timeout, **arguments)
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        expected = datetime.timedelta(seconds=7) if timeout else constants.default_pg_timeout
        assert limit_of(group) == expected
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


# --- several processes -----------------------------------------------------------------------


def start_twice(rank: int, world_size: int, place: dict[str, str], path: str) -> list[Any]:
    """Two groups one after the other; with what is told to gloo."""
    found, kept = [], []
    numbers: Any = {"rank": rank, "world_size": world_size}
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("GLOO_SOCKET_IFNAME", raising=False)
        for name, value in place.items():
            if name in TCP:
                patched.setenv(name, value)
        for _ in range(2):
            where: dict[str, Any] = {"init_method": place.get("init_method")}
            if path:
                # It has the addresses of earlier groups, whose processes may be gone.
                where = {"store": FileStore(path, -1)}
            group = init_process_group(**where, **numbers, timeout=20)
            # Somebody may still have the store, whose port is not free then.
            kept.append(group.get_group_store())
            total = torch.tensor(float(rank + 1))
            dist.all_reduce(total)
            found.append((total.item(), os.environ.get("GLOO_SOCKET_IFNAME")))
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("place", ["env", "tcp", "file", "store"])
def test_groups_one_after_the_other(place: str, cluster: Cluster, tmp_path: pathlib.Path) -> None:
    where = {
        "env": {**TCP, "MASTER_PORT": str(free_port())},
        "tcp": {"init_method": f"tcp://localhost:{free_port()}"},
        "file": {"init_method": f"file://{tmp_path}/store"},
        "store": {},
    }[place]
    path = str(tmp_path / "given") if place == "store" else ""
    for _ in range(1 + (place in ("file", "store"))):
        found = cluster.run(start_twice, 3, where, path, init_group=False)
        assert found == [[(6.0, "lo")] * 2] * 3


def start_without_one(rank: int, world_size: int, method: str, missing: int) -> str:
    if rank == missing:
        return ""
    begin, said = time.monotonic(), logging.handlers.BufferingHandler(100)
    logger = logging.getLogger(elastic.__name__)
    logger.addHandler(said)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "PATIENCE", 0.2)
            init_process_group(init_method=method, rank=rank, world_size=world_size, timeout=1)
    except (RuntimeError, CollectiveTimeout) as error:
        assert 1.0 <= time.monotonic() - begin < 10.0
        return f"{error} {[each.getMessage() for each in said.buffer]}"
    finally:
        logger.removeHandler(said)
    raise AssertionError("the group was made without a process")


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, cluster: Cluster) -> None:
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    errors = cluster.run(start_without_one, 3, method, missing, init_group=False)
    texts = [error for rank, error in enumerate(errors) if rank != missing]
    if missing:
        assert all(re.match(r"rank 1 did not come within (1|0\.9)", text) for text in texts)
        assert all("['rank 1 did not come within 0.2" in text for text in texts)
    else:
        assert all(text.startswith("rank 0 did not come within 1") for text in texts)
        assert all("['rank 0 did not come within 0.2" in text for text in texts)
        assert all(f"nobody answers at 127.0.0.1:{port}" in text for text in texts)
    # The processes and the port are as good as before.
    found = cluster.run(start_twice, 3, {"init_method": method}, "", init_group=False)
    assert [[each[0] for each in rank] for rank in found] == [[6.0, 6.0]] * 3


# --- the round: here each process is a thread ------------------------------------------------

# Seconds that nobody waits for unless something is broken.
LONG = 30.0


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
    """Wait until something is true."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def _no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_get_the_same_part_and_never_one_that_was_used(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    parts = [all_meet(store, world_size) for _ in range(4)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another run")
    assert len({*parts, all_meet(store, world_size)}) == 5


def test_what_killed_attempts_left_is_never_taken_for_a_process() -> None:
    """Any ranks of a group of any size came before the attempt ended, in any order of return."""
    chance, gone = random.Random(0), '["gone", null]'
    for _ in range(20):
        store, world_size = HashStore(), chance.randint(2, 4)
        used = [all_meet(store, chance.randint(1, 4)) for _ in range(chance.randint(0, 2))]
        number = store.add("dataparallel/start/none/rounds", 1)
        place = f"dataparallel/start/none/{number}"
        store.set("dataparallel/start/none/open", str(number))
        there = [rank for rank in range(world_size) if chance.random() < 0.6]
        for rank in there:
            store.set(f"{place}/rank {rank}", gone)
        if len(there) == world_size:
            store.set(f"{place}/plan", f"[{', '.join([gone] * world_size)}]")
        barrier = threading.Barrier(world_size)

        def come(
            rank: int,
            store: HashStore = store,
            world_size: int = world_size,
            barrier: threading.Barrier = barrier,
            pause: float = chance.random() / 50,
        ) -> str:
            barrier.wait(LONG)
            # Rank 0 is the first or the last.
            time.sleep(pause * (world_size - rank if world_size % 2 else rank))
            return meet(store, rank, world_size)

        (prefix,) = set(together([functools.partial(come, rank) for rank in range(world_size)]))
        assert isinstance(prefix, str) and prefix not in used


@pytest.mark.parametrize("again", [1, 2])
def test_a_process_that_is_started_again_while_the_others_wait(again: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 0, 3)
        # One that is killed while it waits has left its name.
        poll(lambda: store.check(["dataparallel/start/none/open"]))
        store.set(f"dataparallel/start/none/1/rank {again}", '["gone", null]')
        second = pool.submit(meet, store, again, 3)
        key = f"dataparallel/start/none/1/rank {again}"
        poll(lambda: b"gone" not in store.get(key))
        assert meet(store, 3 - again, 3) == first.result(LONG) == second.result(LONG)


@pytest.mark.parametrize(("missing", "named"), [({1}, "rank 1"), ({2, 3}, "ranks 2, 3")])
def test_who_did_not_come_is_named_in_all(missing: set[int], named: str) -> None:
    store = HashStore()
    there = [rank for rank in range(4) if rank not in missing]
    errors = together([functools.partial(meet, store, rank, 4, 0.3) for rank in there])
    for rank, error in zip(there, errors, strict=True):
        assert isinstance(error, CollectiveTimeout)
        assert str(error).startswith(f"{named} did not come within 0.3")
        assert f"for which rank {rank} of 4 waits" in str(error)
    # Nobody who has given up is waited for later.
    assert all_meet(store, 4)


def test_who_has_given_up_is_not_begun_with() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, store, 0, 3)
        poll(lambda: store.check(["dataparallel/start/none/open"]))
        (error,) = together([lambda: meet(store, 1, 3, 0.1)])
        assert isinstance(error, CollectiveTimeout) and "rank 2 did not come" in str(error)
        (error,) = together([lambda: meet(store, 2, 3, 0.1)])
        assert isinstance(error, CollectiveTimeout)
        assert together([lambda: meet(store, 1, 3), lambda: meet(store, 2, 3)])[0] == first.result()


def test_who_gives_up_leaves_the_name_of_the_process_that_took_its_place() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, store, 0, 3)
        poll(lambda: store.check(["dataparallel/start/none/open"]))
        # Before it ends, the process that was started in its place has come.
        old = pool.submit(meet, store, 1, 3, 0.5)
        key = "dataparallel/start/none/1/rank 1"
        poll(lambda: store.check([key]))
        name = store.get(key)
        new = pool.submit(meet, store, 1, 3)
        poll(lambda: store.get(key) != name)
        with pytest.raises(CollectiveTimeout, match="rank 2 did not come"):
            old.result(LONG)
        assert meet(store, 2, 3) == first.result(LONG) == new.result(LONG)


def test_processes_that_count_differently_all_learn_it() -> None:
    store = HashStore()
    outcomes = together([lambda: meet(store, 0, 2), lambda: meet(store, 1, 3)])
    assert all(isinstance(each, ValueError) for each in outcomes)
    assert all(re.search(r"count differently: .* \[2, 3\]", str(each)) for each in outcomes)


def test_a_store_of_torchrun_is_at_its_own_address_only(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    for name, value in {**TCP, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    method = f"tcp://127.0.0.1:{free_port()}"
    init_process_group(init_method=method, rank=0, world_size=1, timeout=5)
    assert dist.get_world_size() == 1


def test_a_backend_that_meets_nobody(world: None) -> None:
    from torch.testing._internal.distributed import fake_pg

    store = fake_pg.FakeStore()
    init_process_group("fake", rank=3, world_size=4, store=store, timeout=5)
    assert (dist.get_rank(), dist.get_world_size()) == (3, 4)


def test_without_rank_0_it_is_named() -> None:
    (error,) = together([lambda: meet(HashStore(), 1, 2, 0.2)])
    assert isinstance(error, CollectiveTimeout) and "rank 0 did not come" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_do_not_begin_together(rank: int) -> None:
    store = HashStore()
    calls = [lambda: meet(store, rank, 2, 0.5)] * 2 + [lambda: meet(store, 1 - rank, 2, 0.5)]
    outcomes = together(calls)
    assert sum(isinstance(each, Exception) for each in outcomes[:2]) >= 1
    for each in outcomes:
        assert isinstance(each, str) or re.search("has rank 0, too|a rank of its own", str(each))


def test_a_machine_named_after_its_loopback_takes_the_route_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where MASTER_ADDR, which is another program's, names another place."""
    monkeypatch.setattr(elastic, "_machine", iter("ab").__next__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    asked: list[str] = []
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")

    def towards(host: str) -> str:
        asked.append(host)
        return "eth7"

    monkeypatch.setattr(elastic, "_interface_towards", towards)
    method, limit = f"tcp://127.0.0.1:{free_port()}", datetime.timedelta(seconds=LONG)
    together([functools.partial(elastic._meet, rank, 2, method, limit) for rank in range(2)])
    assert set(asked) == {"127.0.0.1"} and os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("machines", "chosen"), [("aa", "lo"), ("ab", None), (("a", None), None), ((None, None), None)]
)
def test_loopback_is_for_processes_of_one_machine(
    machines: Any, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = list(machines)
    monkeypatch.setattr(elastic, "_machine", remaining.pop)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    # The guide's two machines have names that mean a loopback address.
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "192.0.2.1")
    all_meet(HashStore(), 2)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    if chosen:
        remaining = ["a", "b"]
        monkeypatch.setattr(elastic, "_machine", remaining.pop)
        all_meet(HashStore(), 2)
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "another machine has come"
    # What the user chose stays.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    remaining = ["a", "a"]
    monkeypatch.setattr(elastic, "_machine", remaining.pop)
    all_meet(HashStore(), 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
