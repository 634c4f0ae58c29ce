"""Backward across workers: nothing waits for what never comes, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

import psutil
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
from tests.distributed_autograd.rpc_workers import World, expect_clean, workers
from tests.faults.harness import Figures


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


def hears_errors(count: int) -> list[float]:
    """Seconds that it took to hear of each fault, in the worker that runs backward."""
    took: list[float] = []
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
                names = ["worker1", "worker2"]
                loss = relayed(x, names, fails_in_backward).sum()
                # Torch 2.11 puts the traceback before it.
                with pytest.raises(WorkerError, match=r"(?s)'worker2': .*\bdivision by zero"):
                    backward(context_id, [loss])
            else:
                loss = relayed(x, ["worker1", "worker2"], scaled).sum()
                torch_rpc.rpc_sync("worker1", release, (context_id,))
                with pytest.raises(
                    (RuntimeError, ValueError), match=r"no distributed autograd context"
                ):
                    backward(context_id, [loss])
        took.append(time.monotonic() - begin)
    return took


def release(context_id: int) -> None:
    """End a context too early, as a worker does that takes it for lost."""
    endpoint = current_endpoint()
    endpoint.worker.release(context_id, 20.0)


def test_errors(repeats: Callable[..., int], figures: Figures) -> None:
    """Goal 20: something unused, a remote error, a context that was released."""
    count = repeats(quick=6, long=60)
    with World(3) as world:
        took = world.run(hears_errors, count)
    _record(figures, "unused send, remote error, released context, p100", max(took), 5.0, count)


def _record(figures: Figures, what: str, value: float, limit: float, count: int) -> None:
    figures.record(
        goal=20,
        what=what,
        value=value,
        unit="s",
        limit=limit,
        repeats=count,
        baseline="waits for good",
        details="0 contexts left in any worker after 10 s",
    )


# --- a worker that is lost -------------------------------------------------------------------


def peer_is_killed() -> float:
    x = torch.ones(3, requires_grad=True)
    pid = torch_rpc.rpc_sync("worker2", os.getpid)
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker2"], scaled).sum()
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
    _record(figures, "a peer that is killed before backward, p100", max(took), 5.0, count)


# --- many cycles -----------------------------------------------------------------------------


def cycles(count: int) -> list[float]:
    """By how much of itself the memory of each worker grew."""
    weight = torch.randn(64, 64, requires_grad=True)
    names = workers()
    before: list[int] = []
    for number in range(count + count // 2):
        if number == count // 2:
            before = [torch_rpc.rpc_sync(name, memory) for name in names]
        with context() as context_id:
            loss = relayed(weight, ["worker1", "worker0"], scaled).sum()
            backward(context_id, [loss])
            assert get_gradients(context_id)[weight][0, 0].item() == 32.0
    after = [torch_rpc.rpc_sync(name, memory) for name in names]
    return [100.0 * (b - a) / a for a, b in zip(before, after, strict=True)]


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_memory(repeats: Callable[..., int], figures: Figures) -> None:
    count = repeats(quick=60, long=500)
    with World(2) as world:
        grown = world.run(cycles, count)
    figures.record(
        goal=20,
        what=f"memory growth over {count} backward passes, largest of all workers",
        value=max(grown),
        unit="%",
        limit=1.0,
        repeats=count,
        baseline="-",
    )
