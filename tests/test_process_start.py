"""The default process group: where it is met, who is named when it is not, what it leaves."""

from __future__ import annotations

import datetime
import logging
import logging.handlers
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed import constants
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataparallel.comm import process_errors
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.extras.process_start import init_process_group, interfaces, start, stores
from dataparallel.extras.process_start.agreement import Agreement
from dataparallel.extras.process_start.membership import Membership, find_membership
from tests.cluster import Cluster

TCP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BOTH = {"RANK": "1", "WORLD_SIZE": "2"}
AGENT = {**TCP, **BOTH, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a run"}


@pytest.fixture
def world() -> Iterator[None]:
    """There is no default process group afterwards, and the hook for exceptions is as it was."""
    # What an example in a docstring may have left.
    start._restore_hook()
    hook = sys.excepthook
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    start._restore_hook()
    start._choose_interface(False)
    assert sys.excepthook is hook


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- membership ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((None, None, None), {}, Membership(0, 1)),
        ((None, None, None), {"RANK": "0", "WORLD_SIZE": "1"}, Membership(0, 1)),
        ((None, 0, 1), {}, Membership(0, 1)),
        ((None, None, None), {**TCP, **BOTH}, Membership(1, 2, ("127.0.0.1", 29500))),
        (("env://?rank=0", None, None), {**TCP, **BOTH}, Membership(0, 2, ("127.0.0.1", 29500))),
        ((None, 0, 3), {**TCP, **BOTH}, Membership(0, 3, ("127.0.0.1", 29500))),
        (("tcp://a:7?rank=1&world_size=2", None, None), {}, Membership(1, 2, ("a", 7))),
        (("tcp://[::1]:7", 1, 2), {}, Membership(1, 2, ("::1", 7))),
        (("file:///a%20b/c", 1, 2), {}, Membership(1, 2, path="/a b/c")),
        (("mine://x", 1, 2), {}, Membership(1, 2, url="mine://x")),
        (
            (None, None, None),
            {**AGENT, "TORCHELASTIC_RESTART_COUNT": "3"},
            Membership(1, 2, ("127.0.0.1", 29500), hosted=True, run="a run", restart=3),
        ),
        # torchrun has no store there, so process 0 has to make it.
        (("tcp://127.0.0.1:7", None, None), AGENT, Membership(1, 2, ("127.0.0.1", 7), run="a run")),
    ],
)
def test_membership(arguments: Any, environment: dict[str, str], expected: Membership) -> None:
    assert find_membership(*arguments, environment=environment) == expected


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((None, None, None), BOTH, "MASTER_ADDR, MASTER_PORT are not set .* has RANK=1, WORLD_S"),
        ((None, None, None), {**TCP, "RANK": "0"}, "WORLD_SIZE is not set .*start .* with torchru"),
        ((None, None, None), {"WORLD_SIZE": "1"}, "RANK is not set"),
        ((None, 1, None), TCP, "WORLD_SIZE is not set"),
        ((None, None, None), {**TCP, **BOTH, "RANK": "one"}, "RANK must be a whole .* is 'one'"),
        ((None, None, None), {**TCP, **BOTH, "MASTER_PORT": "x"}, "MASTER_PORT must be a whole"),
        ((None, None, None), {**TCP, **BOTH, "MASTER_PORT": "70000"}, "1 to 65535, but got 70000"),
        ((None, 2, None), {**TCP, **BOTH}, "got rank 2 with world_size 2"),
        ((None, -1, 2), TCP, "got rank -1 with world_size 2"),
        (("tcp://a:7", 0, None), {}, "init_method 'tcp://a:7' needs world_size"),
        (("tcp://a", 0, 1), {}, "'tcp://a' needs a host and a port"),
        (("tcp://a:999999", 0, 1), {}, "needs a host and a port"),
        (("file://", 0, 1), {}, "has no path"),
        (("tcp://a:7?rank=0", 0, 1), {}, r"rank is passed \(0\) and stands in init_method"),
        (
            (None, None, None),
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
            r"SLURM_STEP_NUM_TASKS=8, so other .* \(SLURM_PROCID=3\), but RANK",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    arguments: Any, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_membership(*arguments, environment=environment)


def test_a_given_store_needs_both_numbers() -> None:
    with pytest.raises(ValueError, match="store needs rank and world_size"):
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
        ({"backend": "bogus"}, ValueError, r"'bogus' is not in this build .* has .*gloo.*; pass"),
        ({"backend": "cpu:gloo,cuda:bogus"}, ValueError, "is not in this build of torch"),
        ({"device_id": 99}, ValueError, "device_id is 99, but of accelerators there is .* leave"),
        ({"device_id": torch.device("xpu:0")}, ValueError, "device_id is xpu:0, but of"),
    ],
)
def test_wrong_arguments(
    arguments: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(*_: Any) -> None:
        raise AssertionError("the others are not to be met")

    monkeypatch.setattr(start, "_gather", gather)
    with pytest.raises(kind, match=message):
        init_process_group(**arguments)
    assert not dist.is_initialized()


# --- one process -----------------------------------------------------------------------------


def test_alone_again_and_again(world: None) -> None:
    # What tests before this one have left.
    start._restore_hook()
    hook = sys.excepthook
    for _ in range(3):
        group = init_process_group(timeout=datetime.timedelta(seconds=5))
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        with pytest.raises(ValueError, match="already, in which this is rank 0 of 1; call torch"):
            init_process_group()
        dist.destroy_process_group()
    # Otherwise every start would put one more "[rank0]:" before each line of an error.
    start._restore_hook()
    assert sys.excepthook is hook


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
    stores_opened: list[Any] = []

    def open_store(member: Membership, timeout: float) -> Any:
        stores_opened.append(HashStore())
        stores_opened[-1].set_timeout(datetime.timedelta(seconds=timeout))
        return stores_opened[-1]

    def agree(store: Any, member: Membership, timeout: float) -> Agreement:
        if len(stores_opened) == 1:
            raise RuntimeError("Connection reset by peer")
        store.set_timeout(datetime.timedelta(seconds=1))
        return Agreement("a", one_machine=True)

    monkeypatch.setattr(start, "open_store", open_store)
    monkeypatch.setattr(start, "agree", agree)
    start._gather(Membership(1, 2, address=("a", 1)), None, 50.0)
    assert len(stores_opened) == 2
    assert stores_opened[1].timeout == datetime.timedelta(seconds=50)


def test_an_accelerator_gets_its_backend_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert start.default_backend() == "cpu:gloo,cuda:nccl"


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_there_is_gloo_and_no_device_to_have() -> None:
    assert start.default_backend() == "gloo"
    for device in (0, torch.device("cuda:0")):
        with pytest.raises(ValueError, match="of accelerators there is none here"):
            init_process_group(device_id=device, rank=0, world_size=1, store=HashStore())


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


@pytest.mark.parametrize("host", ["203.0.113.7", "localhost", "a.name"])
def test_where_the_others_may_know_another_address_the_store_makes_its_socket(host: str) -> None:
    assert stores._listener(host, free_port()) is None


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
    logger = logging.getLogger(process_errors.__name__)
    logger.addHandler(said)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_errors, "PATIENCE", 0.2)
            return _start_without_one(rank, world_size, method, begin)
    finally:
        logger.removeHandler(said)
        waits = [each.getMessage() for each in said.buffer if "since 0.2 s" in each.getMessage()]
        for_whom = "rank 1 in" if missing else "a store at"
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
        start._choose_interface(one_machine)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_interface_of_one_machine_is_not_that_of_several(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for _ in range(2):
        start._choose_interface(True)
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    start._choose_interface(False)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    # What the user says in between is nothing to take back.
    start._choose_interface(True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    start._choose_interface(False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_loopback_interface_leads_to_no_other_machine() -> None:
    assert interfaces.interface_towards("127.0.0.1", 29500) is None
    assert interfaces.interface_towards("no such name", 29500) is None
