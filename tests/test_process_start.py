"""The default process group: where it is met, who is named when it is not, what it leaves."""

from __future__ import annotations

import datetime
import functools
import logging
import logging.handlers
import os
import pathlib
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed import constants
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from dataparallel.extras import elastic
from dataparallel.extras.elastic import init_process_group
from tests.cluster import Cluster

TCP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BOTH = {"RANK": "1", "WORLD_SIZE": "2"}
AGENT = {**TCP, **BOTH, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a run"}


@pytest.fixture
def world() -> Iterator[None]:
    """There is no default process group afterwards."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    elastic._choose_interface(False, None)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- arguments and environment ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ({}, {}, (0, 1, "")),
        ({}, {"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, "")),
        ({"rank": 0, "world_size": 1}, {}, (0, 1, "")),
        ({}, {**TCP, **BOTH}, (1, 2, "127.0.0.1:29500")),
        ({"init_method": "env://?rank=0"}, {**TCP, **BOTH}, (0, 2, "127.0.0.1:29500")),
        ({"rank": 0, "world_size": 3}, {**TCP, **BOTH}, (0, 3, "127.0.0.1:29500")),
        ({"init_method": "tcp://a:7?rank=1&world_size=2"}, {}, (1, 2, "a:7")),
        ({"init_method": "tcp://[::1]:7", "rank": 1, "world_size": 2}, {}, (1, 2, "::1:7")),
        ({"init_method": "file:///a/b", "rank": 1, "world_size": 2}, {}, (1, 2, "file:///a/b")),
        ({"init_method": "mine://x", "rank": 1, "world_size": 2}, {}, (1, 2, "mine://x")),
        ({}, AGENT, (1, 2, "127.0.0.1:29500 of torchrun")),
        # torchrun has no store there, so process 0 has to make it.
        ({"init_method": "tcp://127.0.0.1:7"}, AGENT, (1, 2, "127.0.0.1:7")),
    ],
)
def test_where_a_process_meets_the_others(
    arguments: Any, environment: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(member: Any, *_: Any) -> None:
        place = member.url if member.address is None else "{}:{}".format(*member.address)
        raise KeyError(member.rank, member.world_size, place + " of torchrun" * member.hosted)

    monkeypatch.setattr(elastic, "_meet", meet)
    in_environment(environment, monkeypatch)
    with pytest.raises(KeyError) as caught:
        init_process_group(**arguments)
    assert caught.value.args == expected


def in_environment(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TCP, *BOTH):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({}, BOTH, "the environment has the host None and the port None.* start .* with torchrun"),
        ({}, {**TCP, "RANK": "0"}, "world_size is missing; start .* with torchrun"),
        ({}, {"WORLD_SIZE": "1"}, "rank is missing"),
        ({"rank": 1}, TCP, "world_size is missing"),
        ({}, {**TCP, **BOTH, "RANK": "one"}, "rank must be a whole .* is 'one'"),
        ({}, {**TCP, **BOTH, "MASTER_PORT": "x"}, "MASTER_PORT must be a whole"),
        ({"rank": 2}, {**TCP, **BOTH}, "got rank 2 of 2"),
        ({"init_method": "tcp://a:7", "rank": 0}, {}, "world_size is missing"),
        ({"init_method": "tcp://a", "rank": 0, "world_size": 1}, {}, "port '', and both are"),
        (
            {},
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
            r"SLURM_STEP_NUM_TASKS=8, so other .* but RANK",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    arguments: Any, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_environment(environment, monkeypatch)
    with pytest.raises(ValueError, match=message):
        init_process_group(**arguments)


def test_a_given_store_needs_both_numbers() -> None:
    with pytest.raises(ValueError, match="rank is missing"):
        init_process_group(store=HashStore())
    with pytest.raises(ValueError, match="pass store or init_method, not both"):
        init_process_group(store=HashStore(), init_method="env://", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"timeout": 0}, ValueError, "above 0 and finite, but got 0"),
        ({"timeout": float("nan")}, ValueError, "above 0 and finite, but got nan"),
        ({"timeout": datetime.timedelta(-1)}, ValueError, "above 0 and finite"),
        ({"timeout": "60"}, TypeError, "seconds or a timedelta, but got '60' of type str"),
        ({"rank": 0.0, "world_size": 1}, TypeError, "rank is an int, but got 0.0 of type float"),
        ({"backend": 3}, TypeError, "backend is a str, but got 3 of type int"),
        ({"backend": "bogus"}, ValueError, r"'bogus' is not in this build of torch .*; pass"),
        ({"backend": "cpu:gloo,cuda:bogus"}, ValueError, "is not in this build of torch"),
    ],
)
def test_wrong_arguments(
    arguments: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*_: Any) -> None:
        raise AssertionError("the others are not to be met")

    monkeypatch.setattr(elastic, "_meet", meet)
    with pytest.raises(kind, match=message):
        init_process_group(**arguments)
    assert not dist.is_initialized()


# --- one process -----------------------------------------------------------------------------


def test_alone_again_and_again(world: None) -> None:
    for _ in range(3):
        group = init_process_group(timeout=datetime.timedelta(seconds=5))
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        with pytest.raises(ValueError, match="already, in which this is rank 0 of 1; call torch"):
            init_process_group()
        dist.destroy_process_group()


def test_torch_keeps_the_timeout(world: None) -> None:
    group = init_process_group(timeout=7)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7


@pytest.mark.parametrize(
    "arguments", [{"timeout": None, "rank": -1, "world_size": -1}, {"group_name": "mine"}]
)
def test_arguments_of_torch_that_say_nothing(arguments: Any, world: None) -> None:
    group = init_process_group("GLOO", **arguments)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert group._get_backend(torch.device("cpu")).options._timeout == constants.default_pg_timeout


@pytest.mark.parametrize("name", ["mpi", "MPI", "fake"])
@pytest.mark.parametrize("place", [{}, {"rank": 1, "world_size": 4, "store": HashStore()}])
def test_backends_that_meet_in_ways_of_their_own(
    name: str, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    passed: dict[str, Any] = {}
    make = dist.init_process_group

    def of_torch(backend: str, **arguments: Any) -> None:
        passed.update(arguments, backend=backend)
        make("fake", rank=1, world_size=4, store=FakeStore())

    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(dist, "init_process_group", of_torch)
    # As under mpirun.
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    group = init_process_group(name, timeout=7, pg_options="options", **place)
    of_us = {"backend": name.lower(), "timeout": datetime.timedelta(seconds=7)}
    assert passed == {**of_us, **place, "pg_options": "options", "device_id": None}
    assert (group.rank(), group.size()) == (1, 4)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Gloo connectFullMesh failed with [tcp/pair.cc] timed out"), CollectiveError),
        (dist.DistNetworkError("gone"), CollectiveError),
        (RuntimeError("these options are for another backend"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_only_what_is_of_the_network_is_called_so(
    error: BaseException,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    world: None,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
        raise error

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(kind) as caught:
        init_process_group()
    assert type(caught.value) is kind
    assert ("firewall" in str(caught.value)) == (kind is CollectiveError)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_store_has_the_whole_time_after_it_was_lost_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Any] = []

    def open_store(*_: Any) -> Any:
        opened.append(HashStore())
        return opened[-1]

    def agree(*_: Any) -> Any:
        if len(opened) == 1:
            raise RuntimeError("Connection reset by peer")
        return opened[-1], True

    monkeypatch.setattr(elastic, "_open_store", open_store)
    monkeypatch.setattr(elastic._Round, "agree", agree)
    elastic._meet(elastic._Member(1, 2, "tcp://a:1", ("a", 1)), None, 50.0)
    assert len(opened) == 2
    assert opened[1].timeout == datetime.timedelta(seconds=50)


def test_an_accelerator_gets_its_backend_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert elastic._checked_backend(None) == "cpu:gloo,cuda:nccl"


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_there_is_gloo() -> None:
    assert elastic._checked_backend(None) == "gloo"


# --- several processes -----------------------------------------------------------------------


def start_twice(rank: int, world_size: int, method: str) -> list[Any]:
    """Two groups one after the other; with what is told to gloo, and who listens where."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    found, kept = [], []
    for _ in range(2):
        group = init_process_group(init_method=method, rank=rank, world_size=world_size, timeout=20)
        # Somebody may still have the store, whose port is not free then.
        kept.append(group.get_group_store())
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        listening = {
            each.laddr.ip
            for each in psutil.Process().net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        found.append((total.item(), os.environ.get("GLOO_SOCKET_IFNAME"), sorted(listening)))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("place", ["tcp", "name", "file"])
def test_groups_one_after_the_other(place: str, cluster: Cluster, tmp_path: pathlib.Path) -> None:
    methods = {
        "tcp": f"tcp://127.0.0.1:{free_port()}",
        "name": f"tcp://localhost:{free_port()}",
        "file": f"file://{tmp_path}/store",
    }
    found = cluster.run(start_twice, 3, methods[place], init_group=False)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    # Nobody on other machines can reach the processes, the store of process 0 included.
    assert found == [[(6.0, loopback, ["127.0.0.1"])] * 2] * 3


@pytest.mark.parametrize("host", ["203.0.113.7", "a.name"])
def test_where_the_others_may_know_another_address_the_store_makes_its_socket(host: str) -> None:
    assert elastic._listener(host, free_port()) is None


def start_after_others(rank: int, world_size: int, path: str) -> float:
    """A group in a file that has the addresses of an earlier group, whose processes are gone."""
    store = FileStore(path, -1)
    init_process_group(store=store, rank=rank, world_size=world_size, timeout=20)
    dist.destroy_process_group()
    init_process_group(store=store, rank=rank, world_size=world_size, timeout=20)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_store_that_others_have_used(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "store")
    for _ in range(2):
        assert cluster.run(start_after_others, 2, path, init_group=False) == [3.0, 3.0]


def start_without_one(rank: int, world_size: int, method: str, missing: int) -> str:
    if rank == missing:
        return ""
    begin, said = time.monotonic(), logging.handlers.BufferingHandler(100)
    logger = logging.getLogger(elastic.__name__)
    logger.addHandler(said)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "PATIENCE", 0.2)
            return _start_without_one(rank, world_size, method, begin)
    finally:
        logger.removeHandler(said)
        waits = [each.getMessage() for each in said.buffer if "since 0.2 s" in each.getMessage()]
        for_whom = "rank 1 in" if missing else "the store at"
        assert len(waits) == 1 and f"rank {rank} waits for {for_whom}" in waits[0], waits


def _start_without_one(rank: int, world_size: int, method: str, begin: float) -> str:
    try:
        init_process_group(init_method=method, rank=rank, world_size=world_size, timeout=1)
    except CollectiveTimeout as error:
        assert 1.0 <= time.monotonic() - begin < 10.0
        return str(error)
    raise AssertionError("the group was made without a process")


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, cluster: Cluster) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    errors = cluster.run(start_without_one, 3, method, missing, init_group=False)
    named = "rank 1 did not come (" if missing else "rank 0 has none there, or ended"
    assert [named in error for error in errors] == [rank != missing for rank in range(3)]
    # The processes and the port are as good as before.
    found = cluster.run(start_twice, 3, method, init_group=False)
    assert [[each[0] for each in rank] for rank in found] == [[6.0, 6.0]] * 3


def test_the_interface_that_the_user_chose_stays(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for one_machine in (True, False):
        elastic._choose_interface(one_machine, None)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_interface_of_one_machine_is_not_that_of_several(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for _ in range(2):
        elastic._choose_interface(True, None)
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    elastic._choose_interface(False, None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    # What the user says in between is nothing to take back.
    elastic._choose_interface(True, None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    elastic._choose_interface(False, None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_loopback_interface_leads_to_no_other_machine() -> None:
    assert elastic._interface_towards(("127.0.0.1", 29500)) is None
    assert elastic._interface_towards(("no such name", 29500)) is None


# --- the round: here each process is a thread ------------------------------------------------

# Seconds that nobody waits for unless something is broken.
LONG = 30.0


def meet(store: HashStore, rank: int, world_size: int, timeout: float = LONG) -> str:
    """What only those have in common who meet in one part of the store, used by nobody before."""
    part, _ = elastic._meet(elastic._Member(rank, world_size), store, timeout)
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
    (prefix,) = set(
        together([functools.partial(meet, store, rank, world_size) for rank in range(world_size)])
    )
    assert isinstance(prefix, str), prefix
    return prefix


def poll(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
    chance = random.Random(0)
    for _ in range(30):
        store, world_size = HashStore(), chance.randint(2, 4)
        used = [all_meet(store, chance.randint(1, 4)) for _ in range(chance.randint(0, 2))]
        number = store.add("dataparallel/start/none/rounds", 1)
        store.set("dataparallel/start/none/open", str(number))
        for rank in range(world_size):
            if chance.random() < 0.6:
                gone = f'["gone", {chance.choice([2, 3, 4])}, null, "pid 1 on gone"]'
                store.set(f"dataparallel/start/none/{number}/rank {rank}", gone)
        barrier = threading.Barrier(world_size)

        def come(
            rank: int,
            store: HashStore = store,
            world_size: int = world_size,
            barrier: threading.Barrier = barrier,
            pause: float = chance.random() / 20,
        ) -> str:
            barrier.wait(LONG)
            time.sleep(pause * rank)
            return meet(store, rank, world_size)

        (prefix,) = set(together([functools.partial(come, rank) for rank in range(world_size)]))
        assert isinstance(prefix, str) and prefix not in used


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_process_that_is_started_again_while_the_others_wait(order: tuple[int, int]) -> None:
    store = HashStore()
    again, late = order
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 0, 3)
        # One that is killed while it waits has left its name.
        poll(lambda: store.check(["dataparallel/start/none/open"]))
        store.set(f"dataparallel/start/none/1/rank {again}", '["gone", 3, null, "pid 1 on gone"]')
        second = pool.submit(meet, store, again, 3)
        poll(lambda: store.get("dataparallel/start/none/open") == b"2")
        assert meet(store, late, 3) == first.result(LONG) == second.result(LONG)


@pytest.mark.parametrize(("missing", "named"), [({1}, "rank 1"), ({2, 3}, "ranks 2, 3")])
def test_who_did_not_come_is_named_in_all(missing: set[int], named: str) -> None:
    store = HashStore()
    there = [rank for rank in range(4) if rank not in missing]
    begin = time.monotonic()
    errors = together([functools.partial(meet, store, rank, 4, 0.5) for rank in there])
    assert 0.5 <= time.monotonic() - begin < 5.0
    for rank, error in zip(there, errors, strict=True):
        assert isinstance(error, CollectiveTimeout)
        assert str(error).startswith(f"rank {rank} ")
        assert f"process group of 4: {named} did not come (there are pid" in str(error)
    # Nobody who has given up is waited for later.
    assert all_meet(store, 4)


def test_without_rank_0_it_is_named() -> None:
    (error,) = together([lambda: meet(HashStore(), 1, 2, 0.3)])
    assert isinstance(error, CollectiveTimeout) and "rank 0 did not come" in str(error)


def test_different_numbers_of_processes_are_an_error_in_both() -> None:
    store = HashStore()
    errors = together([lambda: meet(store, 0, 2), lambda: meet(store, 1, 3)])
    assert all(type(error) is ValueError for error in errors)
    assert all("rank 0 has world_size 2, rank 1 has 3" in str(error) for error in errors)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_are_an_error(rank: int) -> None:
    store = HashStore()
    errors = together(
        [lambda: meet(store, rank, 3, 1.0)] * 2 + [lambda: meet(store, 0, 3, 1.0)] * rank
    )
    assert any(f"two processes have rank {rank}, and this is pid" in str(e) for e in errors)


@pytest.mark.parametrize(
    ("identities", "one_machine"), [("aa", True), ("ab", False), (("a", None), False)]
)
def test_loopback_is_for_processes_of_one_machine(
    identities: Any, one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = list(identities)
    monkeypatch.setattr(elastic, "_machine", lambda _: remaining.pop())
    store = HashStore()

    def of(rank: int) -> bool:
        return elastic._meet(elastic._Member(rank, 2), store, LONG)[1]

    assert together([lambda: of(0), lambda: of(1)]) == [one_machine] * 2
