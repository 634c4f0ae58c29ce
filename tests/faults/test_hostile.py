"""Nothing that is read from a disk or comes from another process is run, nor ends what reads it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint, comm_hooks
from dataparallel.collectives import SyncBatchNorm
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.failures import failures_of, shared_store
from dataparallel.comm.link import ProcessLink
from dataparallel.monitor import StepMonitor
from dataparallel.tools.monitor import recording
from tests.cluster import Cluster, free_port

# --- hostile data ----------------------------------------------------------------------------

COMMAND = "exit 0"
PYTHON = f"__import__('os').system({COMMAND!r})"


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (COMMAND,))


_file = io.BytesIO()
torch.save({"weight": Hostile()}, _file)
PAYLOADS: dict[str, bytes] = {
    "pickle": pickle.dumps(Hostile()),
    "torch.save": _file.getvalue(),
    "Python": PYTHON.encode(),
    "JSON": b'{"py/reduce": [{"py/function": "os.system"}, ["exit 0"]]}',
    "deep": b"[" * 100_000,
}
# Payloads that are no JSON at all.
NO_JSON = [kind for kind in PAYLOADS if kind != "JSON"]

_LOUD = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec")
_events: list[str] = []


@functools.cache
def _listen() -> None:
    """For ever: a hook cannot be removed, and outlives what this module holds."""
    loud, events = _LOUD, _events

    def hear(event: str, args: tuple[object, ...]) -> None:
        if event in loud:
            events.append(f"{event}{args!r}"[:200])

    sys.addaudithook(hear)


@contextlib.contextmanager
def no_code_from_data() -> Iterator[None]:
    """Fail if anything in this process is unpickled in the block, or starts a program.

    Python tells of every name that an unpickler looks up, in whatever library that happens.
    """
    _listen()
    _events.clear()
    yield
    assert not _events, f"code was taken from data: {_events}"


@pytest.mark.parametrize(("load", "kind"), [(pickle.loads, "pickle"), (eval, "Python")])
def test_the_alarm_is_real(load: Callable[[Any], Any], kind: str) -> None:
    with pytest.raises(AssertionError, match="code was taken from data"), no_code_from_data():
        load(PAYLOADS[kind])


# --- files -----------------------------------------------------------------------------------


def save_two(folder: pathlib.Path) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    for step in (1, 2):
        checkpoint.save(folder, model, step=step).wait()
    checkpoint.close(folder)
    return model


def last(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("generation-*"))[-1]


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("which", ["manifest.json", "*.safetensors"])
def test_a_file_of_another_kind_is_rejected(tmp_path: pathlib.Path, which: str, kind: str) -> None:
    model = save_two(tmp_path)
    for path in last(tmp_path).glob(which):
        path.write_bytes(PAYLOADS[kind])
    other = nn.Linear(3, 2)
    with no_code_from_data():
        loaded = checkpoint.load(tmp_path, other)
    assert (loaded.step, len(loaded.rejected)) == (1, 1)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "dtype", "value": "load"},
        {"$": "object", "value": "os.system"},
        {"$": "tensor", "name": "../../../etc/passwd"},
        {"$": "device", "value": "cuda:99999999999999999999"},
    ],
    ids=lambda value: f"{value['$']}-{value.get('value', '')!s:.20}",
)
def test_right_hashes_do_not_make_names_into_code(
    tmp_path: pathlib.Path, value: dict[str, object]
) -> None:
    """As somebody writes it who knows the format."""
    save_two(tmp_path)
    path = last(tmp_path) / "manifest.json"
    content = json.loads(path.read_bytes())["content"]
    content["trees"][0]["user"] = value
    text = json.dumps(content, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{{"sha256":"{sha256}","content":{text}}}')
    with no_code_from_data():
        loaded = checkpoint.load(tmp_path, nn.Linear(3, 2))
    ((number, why),) = loaded.rejected
    assert (loaded.step, number) == (1, 1)
    assert "is not as it was saved" in why or "does not contain tensor" in why


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_recording_is_data(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "run.jsonl"
    header = json.dumps({"format": recording.FORMAT, "version": recording.VERSION}).encode()
    path.write_bytes(b"\n".join([header, PAYLOADS[kind], b""]))
    with no_code_from_data():
        found = recording.read_recording(path)
    assert not found.samples and found.problems
    path.write_bytes(PAYLOADS[kind])
    with no_code_from_data(), pytest.raises(ValueError, match=r"run\.jsonl"):
        recording.read_recording(path)


# --- a whole training ------------------------------------------------------------------------


def hook(state: Hostile, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Its state may hold anything."""
    return comm_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def train(rank: int, world_size: int, folder: str) -> list[str]:
    """All that talks to other processes; and no unpickling anywhere."""
    with no_code_from_data():
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model = dp.DistributedDataParallel(body, ["cpu", "cpu"])
        model.register_comm_hook(Hostile(), hook)
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


def test_a_training_unpickles_nothing(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    first, second = cluster.run(train, 2, str(tmp_path / "run"), timeout=30.0)
    assert first == second


class HostileError(RuntimeError):
    """An error that runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (COMMAND,))


def fail_with_an_object(rank: int, world_size: int) -> str:
    model = dp.DistributedDataParallel(nn.Linear(2, 2), ["cpu", "cpu"])

    def refuse(grad: torch.Tensor) -> torch.Tensor:
        raise HostileError("no gradient")

    if rank == 1:
        model.module.weight.register_hook(refuse)
    with no_code_from_data(), pytest.raises(RuntimeError, match="no gradient") as caught:
        model(torch.ones(2, 2)).sum().backward()
    return str(caught.value)


def test_an_error_travels_as_text(cluster: Cluster) -> None:
    assert "rank 1" in cluster.run(fail_with_an_object, 2, timeout=30.0)[0]


# --- what other processes send ---------------------------------------------------------------

NO_TEXT = "Expecting value|codec can't decode|recursion depth|Stack overflow"


def send_text(rank: int, world_size: int, text: bytes) -> None:
    """Process 1 sends something else than JSON where all exchange JSON."""
    link = ProcessLink(purpose="test")
    with no_code_from_data():
        if rank == 1:
            link.all_gather(torch.tensor(len(text)), what="size of words")
            padded = torch.tensor(list(text.ljust(3)), dtype=torch.uint8)
            link.all_gather(padded, what="words")
        else:
            with pytest.raises((ValueError, RecursionError), match=NO_TEXT) as error:
                link.all_gather_json("x", what="words")
            assert len(str(error.value)) < 1000
    # And the link goes on.
    assert link.all_gather_json(rank, what="ranks") == [0, 1]
    link.close()


def write_a_record(rank: int, world_size: int, text: bytes) -> None:
    """Process 1 writes something else than a record of a failure where all look for one."""
    link = ProcessLink(purpose="test", timeout=20)
    world = dist.group.WORLD
    assert world is not None
    if rank == 1:
        put: Any = shared_store(world).set
        put(failures_of(world)._key("failed", 1), text)
        return
    refusals = (ValueError, CollectiveError)
    with no_code_from_data(), pytest.raises(refusals, match=NO_TEXT) as error:
        link.all_reduce(torch.ones(1), what="numbers").wait()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("send", [send_text, write_a_record], ids=["text", "record"])
@pytest.mark.parametrize("kind", NO_JSON)
def test_only_json_comes_from_peers(cluster: Cluster, send: Callable[..., None], kind: str) -> None:
    cluster.run(send, 2, PAYLOADS[kind], timeout=30.0)


def where_it_listens(rank: int, world_size: int, port: int) -> set[str]:
    address = f"tcp://127.0.0.1:{port}"
    dp.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=30)
    model = dp.DistributedDataParallel(nn.Linear(2, 2), ["cpu"])
    model(torch.ones(2, 2)).sum().backward()
    connections = psutil.Process().net_connections("inet")
    dist.barrier()
    dist.destroy_process_group()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_processes_listen_at_the_address_they_were_given(cluster: Cluster) -> None:
    found = cluster.run(where_it_listens, 2, free_port(), init_group=False, timeout=30.0)
    assert set.union(*found) == {"127.0.0.1"}
