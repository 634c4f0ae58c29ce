"""What an interpreter may be doing when it ends. See tests/test_clean_end_exit.py."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import dataparallel as dp
from dataparallel import checkpoint, virtual
from dataparallel.comm import interpreter_end
from dataparallel.comm.failures import CollectiveError
from dataparallel.monitor import StepMonitor


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 4))


def step(model: dp.DataParallel[nn.Module]) -> None:
    place = next(model.parameters()).device
    model(torch.ones(8, 8, device=place)).sum().backward()


def wrapped(kind: str) -> dp.DataParallel[nn.Module]:
    if kind == "virtual":
        virtual.enable(2)
        return dp.DistributedDataParallel(network().to("virtual:0"), ["virtual:0", "virtual:1"])
    if kind == "data_parallel":
        return dp.DataParallel(network(), ["cpu", "cpu"])
    return dp.DistributedDataParallel(network(), ["cpu", "cpu"])


def join_group(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group(
        "gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size
    )


def trained(kind: str) -> object:
    model = wrapped(kind)
    step(model)
    return model


def trained_in_processes(rank: int, world_size: int, store: str, destroy: bool) -> object:
    join_group(rank, world_size, store)
    model = wrapped("distributed")
    for _ in range(2):
        step(model)
    if destroy:
        dist.destroy_process_group()
    return model


def failed_in_processes(rank: int, world_size: int, store: str) -> object:
    """One process fails and ends; in all, groups are still given back when the interpreter ends."""
    join_group(rank, world_size, store)
    model = wrapped("distributed")
    step(model)
    with contextlib.suppress(CollectiveError, ValueError), dp.telling_failures():
        if rank == 1:
            raise ValueError("no more data")
        step(model)
    return model


def closed(kind: str) -> object:
    model: Any = trained(kind)
    model.close()
    return model


def two_models(kind: str) -> object:
    return trained(kind), trained("data_parallel"), trained(kind)


def in_cycle(kind: str) -> None:
    model: Any = trained(kind)
    model.itself = [model]


def monitored(kind: str) -> object:
    model = wrapped(kind)
    monitor = StepMonitor(model)
    monitor.__enter__()
    step(model)
    return monitor


def balanced() -> object:
    model = dp.DataParallel(network(), ["cpu", "cpu"])
    balancer = dp.balance(model)
    step(model)
    return model, balancer


def saving(folder: str) -> object:
    """A checkpoint is still to be written."""
    model = nn.Linear(300, 300)
    return checkpoint.save(folder, model, step=7, asynchronous=True)


def after_an_error(kind: str) -> object:
    model = wrapped(kind)
    step(model)
    try:
        model(torch.ones(8, 3))
    except RuntimeError:
        return model
    raise AssertionError("there was no error")


def ends_by_an_error(kind: str) -> None:
    model = wrapped(kind)
    step(model)
    model(torch.ones(8, 3))


def ends_by_exit(kind: str, status: int) -> None:
    model = wrapped(kind)
    model.itself = [model]  # type: ignore[assignment]
    step(model)
    sys.exit(status)


def busy(kind: str) -> object:
    """A thread goes on with steps while the interpreter ends."""
    return _in_background(wrapped(kind), step)


def busy_forward(kind: str) -> object:
    """A thread is in forward, most of the time in long operations of torch."""
    model = wrapped(kind)
    model.module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    return _in_background(model, lambda model: model(torch.ones(512, 512)))


def sleeping_replicas() -> object:
    """Replicas are in a call that lets other threads run."""

    class Sleeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x

    return _in_background(dp.DataParallel(Sleeps(), ["cpu", "cpu"]), step_forward)


def step_forward(model: nn.Module) -> None:
    model(torch.ones(8, 8))


def busy_in_processes(rank: int, world_size: int, store: str) -> object:
    join_group(rank, world_size, store)
    return _in_background(wrapped("distributed"), step)


def busy_monitored() -> object:
    model = wrapped("data_parallel")
    monitor = StepMonitor(model)
    monitor.__enter__()
    return monitor, _in_background(model, step)


def _in_background(model: Any, work: Callable[[Any], object]) -> object:
    # Long enough for a test to fail that needs it.
    interpreter_end.PATIENCE = 100.0
    rounds = 0

    def loop() -> None:
        nonlocal rounds
        # Other processes may end first.
        with contextlib.suppress(CollectiveError):
            while True:
                work(model)
                rounds += 1

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while rounds < 3:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.001)
    return model, thread


def after_fork(kind: str) -> object:
    """A child that has forked while threads were there ends as well, and can train before."""
    model = wrapped(kind)
    step_forward(model)
    child = os.fork()
    if child == 0:
        step_forward(model)
        return model
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def stuck_in_torch() -> object:
    """A thread is in an operation of torch that does not end."""
    interpreter_end.PATIENCE = 1.0
    model = dp.DataParallel(network(), ["cpu", "cpu"])
    entered = threading.Event()

    def wait() -> None:
        step_forward(model)
        entered.set()
        torch.futures.Future[int]().wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    entered.wait(20)
    return model, thread
