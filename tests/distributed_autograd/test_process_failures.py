"""Workers that are killed or stopped, and callers that are interrupted."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    debug_info,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from tests.cluster import Cluster, RankDied
from tests.distributed_autograd.oracle import leaf
from tests.distributed_autograd.rpc_workers import expect_clean, rpc_world, scenarios

#: Seconds within which a lost worker has to be noticed.
SOON = 8.0


class Ends(torch.autograd.Function):
    """Ends the process of its worker, or stops it, in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        os.kill(os.getpid(), ctx.number)
        time.sleep(60)


def ends_in_backward(x: Tensor, number: int) -> Tensor:
    y: Tensor = Ends.apply(x * leaf("w"), number)
    return y


def ends(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def relayed(x: Tensor, names: list[str], function: Callable[..., Tensor], *args: int) -> Tensor:
    if not names:
        return function(x, *args)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:], function, *args))
    return y * 2


def others_still_work() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", torch.mul, (x, 2.0)), 2.0))
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].tolist() == [4] * 3
    for name in ("worker0", "worker1", "worker2"):
        torch_rpc.rpc_sync(name, expect_clean)


# The last of four workers is lost: the others keep their places.


def killed_in_forward(rank: int, world_size: int, names: list[str]) -> None:
    if rank == 0:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        started = time.monotonic()
        with context() as context_id:
            before = rpc_sync("worker1", torch.mul, (x, 2.0))
            with pytest.raises(RuntimeError, match="worker3"):
                relayed(x, names, ends)
            # What the others have done is there.
            backward(context_id, [before.sum()])
            assert get_gradients(context_id)[x].tolist() == [2] * 3
        assert time.monotonic() - started < SOON
        others_still_work()


@pytest.mark.parametrize("names", [["worker3"], ["worker1", "worker3"]], ids=len)
def test_killed_in_forward(cluster: Cluster, names: list[str]) -> None:
    expect_lost(cluster, killed_in_forward, names)


def killed_in_backward(rank: int, world_size: int, names: list[str]) -> None:
    if rank == 0:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        started = time.monotonic()
        with context() as context_id:
            loss = relayed(x, names, ends_in_backward, signal.SIGKILL).sum()
            with pytest.raises(RuntimeError, match="worker3"):
                backward(context_id, [loss])
            assert x.grad is None
        assert time.monotonic() - started < SOON
        others_still_work()


@pytest.mark.parametrize("names", [["worker3"], ["worker1", "worker3"]], ids=len)
def test_killed_in_backward(cluster: Cluster, names: list[str]) -> None:
    expect_lost(cluster, killed_in_backward, names)


def killed_before_backward(rank: int, world_size: int) -> None:
    """The worker is lost after forward, and is not the first to get a gradient."""
    if rank == 0:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        started = time.monotonic()
        with context() as context_id:
            loss = relayed(x, ["worker1", "worker3", "worker2"], torch.sin).sum()
            with pytest.raises(RuntimeError, match=r"worker3|(?i:eof|reset|closed)"):
                torch_rpc.rpc_sync("worker3", ends, (x.detach(),))
            with pytest.raises(RuntimeError, match="worker3"):
                backward(context_id, [loss])
        assert time.monotonic() - started < SOON
        others_still_work()


def test_killed_before_backward(cluster: Cluster) -> None:
    expect_lost(cluster, killed_before_backward)


def stopped(rank: int, world_size: int) -> None:
    """A worker that neither ends nor answers: the time limit names it."""
    if rank == 0:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        pid = torch_rpc.rpc_sync("worker3", os.getpid)
        with context() as context_id:
            loss = relayed(x, ["worker1", "worker3"], torch.sin).sum()
            os.kill(pid, signal.SIGSTOP)
            # Who notices first: the caller, or the worker whose gradients are not accepted.
            with pytest.raises((TimeoutError, WorkerError), match="'worker3'"):
                backward(context_id, [loss], timeout=1.5)
        os.kill(pid, signal.SIGKILL)
        others_still_work()


def test_stopped(cluster: Cluster) -> None:
    expect_lost(cluster, stopped)


def root_is_killed(rank: int, world_size: int) -> None:
    """The worker whose contexts and passes the others take part in is lost."""
    if rank == 3:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context() as context_id:
            loss = relayed(x, ["worker1", "worker2"], ends_when_asked).sum()
            backward(context_id, [loss], timeout=2.0)
    if rank == 0:
        deadline = time.monotonic() + SOON
        while not (pid := torch_rpc.rpc_sync("worker2", pid_to_end)):
            assert time.monotonic() < deadline
        os.kill(pid, signal.SIGKILL)
        torch_rpc.rpc_sync("worker2", go_on)
        # Their time is over by then: nothing of the pass is left.
        while torch_rpc.rpc_sync("worker1", debug_info)["num_current_backward_passes"]:
            assert time.monotonic() < deadline
        while torch_rpc.rpc_sync("worker2", debug_info)["num_current_backward_passes"]:
            assert time.monotonic() < deadline


class Meets(torch.autograd.Function):
    go_on = threading.Event()
    root: int = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Meets.root = torch_rpc.rpc_sync("worker3", os.getpid)
        assert Meets.go_on.wait(20)
        return gradients[0]


def ends_when_asked(x: Tensor) -> Tensor:
    Meets.root = 0
    Meets.go_on.clear()
    y: Tensor = Meets.apply(x)
    return y


def pid_to_end() -> int:
    return Meets.root


def go_on() -> None:
    Meets.go_on.set()


def test_root_is_killed(cluster: Cluster) -> None:
    expect_lost(cluster, root_is_killed)


def expect_lost(cluster: Cluster, function: Callable[..., None], *args: object) -> None:
    """Run a function on four workers, of which the last does not come back."""
    results = rpc_world(cluster, function, 4, *args, lost=(3,), expect_errors=True, timeout=40)
    for result in results[:3]:
        if isinstance(result, BaseException):
            raise result
    assert isinstance(results[3], RankDied)


# --- interrupts ------------------------------------------------------------------------------


class Held(torch.autograd.Function):
    entered = threading.Event()
    go_on = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Held.entered.set()
        assert Held.go_on.wait(20)
        return gradients[0]


def held(x: Tensor) -> Tensor:
    Held.entered.clear()
    Held.go_on.clear()
    y: Tensor = Held.apply(x)
    return y


def release_held() -> None:
    Held.go_on.set()


def wait_for_held() -> None:
    assert Held.entered.wait(20)


def interrupted() -> None:
    x = torch.ones(3, requires_grad=True)
    for name in ("worker1", "worker0"):
        with context() as context_id:
            loss = rpc_sync("worker2", torch.mul, (rpc_sync(name, held, (x,)), 2.0)).sum()

            def interrupt(name: str = name) -> None:
                torch_rpc.rpc_sync(name, wait_for_held)
                _thread.interrupt_main()

            thread = threading.Thread(target=interrupt)
            thread.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                backward(context_id, [loss])
            # It is given up here although the other worker is still busy with it.
            while name != "worker0" and debug_info()["num_current_backward_passes"]:
                assert time.monotonic() - started < SOON
            thread.join(20)
        torch_rpc.rpc_sync(name, release_held)
        others_still_work()


def interrupted_call() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        future = rpc_async("worker1", torch.mul, (x, 2.0))
        backward(context_id, [future.wait().sum()])
        with pytest.raises(KeyboardInterrupt):
            _thread.interrupt_main()
            rpc_sync("worker1", torch.mul, (x, 2.0))
    others_still_work()


def test_interrupts(cluster: Cluster) -> None:
    scenarios(cluster, 3, interrupted, interrupted_call)
