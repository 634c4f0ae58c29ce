"""Backward across workers: nothing waits for what never comes, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    get_gradients,
    rpc_sync,
)
from dataparallel.distributed_autograd.calls import current_endpoint
from tests.distributed_autograd.rpc_workers import World, expect_clean
from tests.faults.harness import Figures

NAMES = ["worker1", "worker2"]


def scaled(x: Tensor) -> Tensor:
    return x * 2


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def relayed(x: Tensor, names: list[str], last: Callable[[Tensor], Tensor]) -> Tensor:
    if not names:
        return last(x)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:], last))
    return y * 2


def fails_in_backward(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda gradient: 1 / 0)
    return y


def release(context_id: int) -> None:
    """End a context too early, as a worker does that takes it for lost."""
    current_endpoint().worker.release(context_id, 20.0)


def hears_errors(count: int) -> float:
    """The longest time until the worker that runs backward heard of a fault."""
    took = 0.0
    for number in range(count):
        begin = time.monotonic()
        x = torch.ones(3, requires_grad=True)
        with context() as context_id:
            if number % 3 == 0:
                # What was sent and is not part of the loss: nobody waits for its gradient.
                used, _ = rpc_sync("worker1", two, (x,))
                backward(context_id, [used.sum()])
                assert get_gradients(context_id)[x].tolist() == [2.0] * 3
            elif number % 3 == 1:
                loss = relayed(x, NAMES, fails_in_backward).sum()
                # Torch 2.11 puts the traceback before it.
                with pytest.raises(WorkerError, match=r"(?s)'worker2': .*\bdivision by zero"):
                    backward(context_id, [loss])
            else:
                loss = relayed(x, NAMES, scaled).sum()
                torch_rpc.rpc_sync("worker1", release, (context_id,))
                refusal = r"no distributed autograd context"
                with pytest.raises((RuntimeError, ValueError), match=refusal):
                    backward(context_id, [loss])
        took = max(took, time.monotonic() - begin)
    return took


def test_errors(repeats: Callable[..., int], figures: Figures) -> None:
    count = repeats(quick=6, long=60)
    with World(3) as world:
        took = world.run(hears_errors, count)
    what = "unused send, remote error, released context, p100"
    figures.record(what, took, "s", 5.0, repeats=count)


def peer_is_killed() -> float:
    x = torch.ones(3, requires_grad=True)
    pid = torch_rpc.rpc_sync("worker2", os.getpid)
    with context() as context_id:
        loss = relayed(x, NAMES, scaled).sum()
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises((WorkerError, RuntimeError), match=r"worker2"):
            backward(context_id, [loss])
        seconds = time.monotonic() - begin
    for name in ("worker0", "worker1"):
        torch_rpc.rpc_sync(name, expect_clean)
    return seconds


def test_a_peer_that_is_killed(repeats: Callable[..., int], figures: Figures) -> None:
    count, took = repeats(quick=1, long=20), []
    for _ in range(count):
        with World(3) as world:
            took.append(world.run(peer_is_killed, clean=False))
    what = "a peer that is killed before backward, p100"
    figures.record(what, max(took), "s", 5.0, repeats=count)
