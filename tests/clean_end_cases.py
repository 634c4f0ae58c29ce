"""What an interpreter may be doing when it ends. See tests/test_clean_end_exit.py."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import dataparallel as dp
from dataparallel import checkpoint, virtual
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


def step_forward(model: nn.Module) -> None:
    model(torch.ones(8, 8))


def left_behind(status: int) -> None:
    """The caller was interrupted, and replicas are still in operations of torch."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                with contextlib.suppress(BaseException):
                    x = (x @ x).clamp(0, 1)
            return x

    def interrupt() -> None:
        entered.wait(20)
        _thread.interrupt_main()

    entered = threading.Event()
    model = dp.DataParallel(Slow(), ["cpu", "cpu"])
    threading.Thread(target=interrupt).start()
    with contextlib.suppress(KeyboardInterrupt):
        model(torch.rand(2, 300, 300))
        raise AssertionError("there was no interrupt")
    sys.exit(status)


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
