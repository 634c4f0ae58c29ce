"""Nothing that comes from another process is run, nor does it end what reads it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint, comm_hooks
from dataparallel.collectives import SyncBatchNorm
from dataparallel.comm.failures import CollectiveError, failures_of, shared_store
from dataparallel.comm.link import ProcessLink
from dataparallel.extras.elastic import init_process_group
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import Attachment
from tests.cluster import Cluster
from tests.faults.hostile import KINDS, Canary, Touch, no_code_from_data
from tests.monitor.made_up_runs import run_folder as run_folder

PAYLOADS = [payload for payload in KINDS if payload != "JSON"]


@pytest.fixture
def canary(tmp_path: pathlib.Path) -> Iterator[Canary]:
    made = Canary(tmp_path)
    yield made
    assert made.is_alive, "hostile data was run"


# --- a whole training ------------------------------------------------------------------------


class State:
    """What a user gives to a hook: it may hold anything."""

    def __init__(self, path: str) -> None:
        self.process_group: Any = None
        self.held = Touch(path)


def hook(state: State, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return comm_hooks.allreduce_hook(state.process_group, bucket)


def train(rank: int, world_size: int, folder: str, canary: str) -> list[str]:
    """All that talks to other processes; and no unpickling anywhere."""
    with no_code_from_data():
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model = dp.DistributedDataParallel(body, ["cpu", "cpu"])
        model.register_comm_hook(State(canary), hook)
        optimizer = dp.ShardedOptimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        with StepMonitor(model, publish=False), model.join():
            for _ in range(2 + rank):
                optimizer.zero_grad()
                model(torch.randn(4, 4)).sum().backward()
                optimizer.step()
        together = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
        dp.DistributedDataParallel(together, ["cpu", "cpu"])(torch.randn(4, 4)).sum().backward()
        checkpoint.save(folder, model, optimizer, step=1, user={"rank": rank}).wait()
        checkpoint.load(folder, model, optimizer)
        checkpoint.close(folder)
        model.close()
    return [str(p.sum()) for p in body.parameters()]


def test_a_training_unpickles_nothing(
    cluster: Cluster, canary: Canary, tmp_path: pathlib.Path
) -> None:
    first, second = cluster.run(train, 2, str(tmp_path / "run"), str(canary.path), timeout=30.0)
    assert first == second


class HostileError(RuntimeError):
    """An error that runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.args[1]}'",))


def fail_with_an_object(rank: int, world_size: int, canary: str) -> str:
    model = dp.DistributedDataParallel(nn.Linear(2, 2), ["cpu", "cpu"])

    def refuse(grad: torch.Tensor) -> torch.Tensor:
        raise HostileError("no gradient", canary)

    if rank == 1:
        model.module.weight.register_hook(refuse)
    with no_code_from_data():
        try:
            model(torch.ones(2, 2)).sum().backward()
        except (HostileError, RuntimeError) as error:
            return f"{error} {getattr(error, 'failure', '')}"
    raise AssertionError("there was no error")


def test_an_error_travels_as_text(cluster: Cluster, canary: Canary) -> None:
    told = cluster.run(fail_with_an_object, 2, str(canary.path), timeout=30.0)
    assert "no gradient" in told[0] and "rank 1" in told[0]


# --- what other processes send ---------------------------------------------------------------


def send_text(rank: int, world_size: int, text: bytes) -> str:
    """Process 1 sends something else than JSON where all exchange JSON."""
    link = ProcessLink(purpose="test")
    said = ""
    with no_code_from_data():
        if rank == 1:
            link.all_gather(torch.tensor(len(text)), what="size of words")
            size = max(len(text), len(json.dumps("x")))
            padded = torch.tensor(list(text.ljust(size)), dtype=torch.uint8)
            link.all_gather(padded, what="words")
        else:
            refusal = "Expecting value|codec can't decode|recursion depth"
            with pytest.raises((ValueError, RecursionError), match=refusal) as error:
                link.all_gather_json("x", what="words")
            said = str(error.value)
    # And the link goes on.
    assert link.all_gather_json(rank, what="ranks") == [0, 1]
    link.close()
    return said


@pytest.mark.parametrize("payload", [*PAYLOADS, "deep"])
def test_only_json_comes_from_peers(cluster: Cluster, canary: Canary, payload: str) -> None:
    text = b"[" * 100_000 if payload == "deep" else canary.payloads()[payload]
    assert len(cluster.run(send_text, 2, text, timeout=30.0)[0]) < 1000


def read_a_record(rank: int, world_size: int, text: bytes) -> str:
    """Process 1 writes something else than a record of a failure where all look for one."""
    link = ProcessLink(purpose="test", timeout=20)
    world = dist.group.WORLD
    assert world is not None
    if rank == 1:
        put: Any = shared_store(world).set
        put(failures_of(world)._key("failed", 1), text)
        return ""
    refusal = "Expecting value|codec can't decode|recursion depth"
    with no_code_from_data(), pytest.raises((ValueError, CollectiveError), match=refusal) as error:
        link.all_reduce(torch.ones(1), what="numbers").wait()
    return str(error.value)


@pytest.mark.parametrize("payload", [*PAYLOADS, "deep"])
def test_what_is_no_record_of_a_failure_is_refused(
    cluster: Cluster, canary: Canary, payload: str
) -> None:
    text = b"[" * 100_000 if payload == "deep" else canary.payloads()[payload]
    told, _ = cluster.run(read_a_record, 2, text, timeout=30.0)
    assert len(told) < 1000


# --- sockets of runs -------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [*PAYLOADS, "deep"])
def test_a_run_that_is_none_is_not_believed(
    run_folder: pathlib.Path, canary: Canary, payload: str
) -> None:
    text = b"[" * 100_000 if payload == "deep" else canary.payloads()[payload]
    path = run_folder / f"{os.getpid()}.0.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(10)

    def answer() -> None:
        # The first one is a look whether somebody listens.
        for _ in range(2):
            with listener.accept()[0] as connection, contextlib.suppress(BrokenPipeError):
                connection.sendall(text.replace(b"\n", b" ") + b"\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        run = Attachment(os.getpid(), timeout=5.0)
        with no_code_from_data(), pytest.raises(ValueError, match="no state of a run"):
            run.state()
    finally:
        thread.join(10)
        listener.close()


# --- who can reach a process -----------------------------------------------------------------


def where_it_listens(rank: int, world_size: int, port: int) -> set[str]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=30.0)
    torch_rpc._init_counter = 0
    torch_rpc.api._all_gather_sequence_id.clear()
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=address, rpc_timeout=30.0, _transports=["uv"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        torch_rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
        )
    try:
        answer = torch_rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), 1))
        assert answer.tolist() == [2.0, 2.0]
        connections = psutil.Process().net_connections("inet")
        dist.barrier()
    finally:
        torch_rpc.shutdown(graceful=False)
        dist.destroy_process_group()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_processes_listen_at_the_address_they_were_given(cluster: Cluster) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = cluster.run(where_it_listens, 2, port, init_group=False, timeout=30.0)
    assert found == [{"127.0.0.1"}, {"127.0.0.1"}]
