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
    rpc_sync,
)
from tests.cluster import Cluster, RankDied
from tests.distributed_autograd.rpc_workers import (
    World,
    expect_clean,
    gated,
    leaf,
    open_gate,
    pass_gate,
    rpc_world,
)

#: Seconds within which a lost worker has to be noticed.
SOON = 8.0


def ones() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


class Ends(torch.autograd.Function):
    """Ends the process of its worker in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ends(gradients[0])


def ends_in_backward(x: Tensor) -> Tensor:
    y: Tensor = Ends.apply(x * leaf("w"))
    return y


def ends(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def relayed(x: Tensor, names: list[str], function: Callable[..., Tensor], *args: Any) -> Tensor:
    if not names:
        return function(x, *args)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:], function, *args))
    return y * 2


def others_still_work() -> None:
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", torch.mul, (x, 2.0)), 2.0))
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].tolist() == [4] * 3
    for name in ("worker0", "worker1", "worker2"):
        torch_rpc.rpc_sync(name, expect_clean)


# The last of four workers is lost: the others keep their places.


def killed_in_forward(names: list[str]) -> None:
    x = ones()
    with context() as context_id:
        before = rpc_sync("worker1", torch.mul, (x, 2.0))
        with pytest.raises(RuntimeError, match="worker3"):
            relayed(x, names, ends)
        # What the others have done is there.
        backward(context_id, [before.sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def killed_in_backward(names: list[str]) -> None:
    x = ones()
    with context() as context_id:
        loss = relayed(x, names, ends_in_backward).sum()
        with pytest.raises(RuntimeError, match="worker3"):
            backward(context_id, [loss])
        assert x.grad is None


def killed_while_another_computes(names: list[str]) -> None:
    """The worker is lost before a gradient gets there: nobody has a connection that breaks."""
    x = ones()
    pid = torch_rpc.rpc_sync("worker3", os.getpid)
    with context() as context_id:
        y = rpc_sync("worker3", torch.mul, (x, 2.0))
        loss = rpc_sync("worker1", gated, (y, "slow")).sum()

        def kill() -> None:
            torch_rpc.rpc_sync("worker1", pass_gate, ("slow entered",))
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(RuntimeError, match="worker3"):
            backward(context_id, [loss])
        thread.join(20)
    torch_rpc.rpc_sync("worker1", open_gate, ("slow",))


def stopped(names: list[str]) -> None:
    """A worker that neither ends nor answers: the time limit names it."""
    x = ones()
    pid = torch_rpc.rpc_sync("worker3", os.getpid)
    with context() as context_id:
        loss = relayed(x, names, torch.sin).sum()
        os.kill(pid, signal.SIGSTOP)
        # Who notices first: the caller, or the worker whose gradients are not accepted.
        with pytest.raises((TimeoutError, WorkerError), match="'worker3'"):
            backward(context_id, [loss], timeout=1.5)
    os.kill(pid, signal.SIGKILL)


def _losing(rank: int, world_size: int, case: Callable[[list[str]], None], names: Any) -> None:
    if rank == 0:
        started = time.monotonic()
        case(names)
        assert time.monotonic() - started < SOON
        others_still_work()


def expect_lost(cluster: Cluster, function: Callable[..., None], *args: object) -> None:
    """Run a function on four workers, of which the last does not come back."""
    results = rpc_world(cluster, function, 4, *args, lost=(3,), expect_errors=True, timeout=40)
    for result in results[:3]:
        if isinstance(result, BaseException):
            raise result
    assert isinstance(results[3], RankDied)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (killed_in_forward, ["worker1", "worker3"]),
        (killed_in_backward, ["worker1", "worker3"]),
        (killed_while_another_computes, []),
        (stopped, ["worker1", "worker3"]),
    ],
)
def test_a_worker_is_lost(
    cluster: Cluster, case: Callable[[list[str]], None], names: list[str]
) -> None:
    expect_lost(cluster, _losing, case, names)


def root_is_killed(rank: int, world_size: int) -> None:
    """The worker whose contexts and passes the others take part in is lost."""
    if rank == 3:
        with context() as context_id:
            loss = relayed(ones(), ["worker1", "worker2"], gated, "root").sum()
            backward(context_id, [loss], timeout=2.0)
    if rank == 0:
        torch_rpc.rpc_sync("worker2", pass_gate, ("root entered",))
        deadline = time.monotonic() + SOON
        os.kill(torch_rpc.rpc_sync("worker3", os.getpid), signal.SIGKILL)
        torch_rpc.rpc_sync("worker2", open_gate, ("root",))
        # Their time is over by then: nothing of the pass is left.
        for name in ("worker1", "worker2"):
            while torch_rpc.rpc_sync(name, debug_info)["num_current_backward_passes"]:
                assert time.monotonic() < deadline


def test_the_root_is_lost(cluster: Cluster) -> None:
    expect_lost(cluster, root_is_killed)


def interrupted() -> None:
    x = ones()
    for name in ("worker1", "worker0"):
        with context() as context_id:
            loss = rpc_sync("worker2", torch.mul, (rpc_sync(name, gated, (x, name)), 2.0)).sum()

            def interrupt(name: str = name) -> None:
                torch_rpc.rpc_sync(name, pass_gate, (f"{name} entered",))
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
        torch_rpc.rpc_sync(name, open_gate, (name,))
        others_still_work()
    with context(), pytest.raises(KeyboardInterrupt):
        _thread.interrupt_main()
        rpc_sync("worker1", torch.mul, (x, 2.0))
    others_still_work()


def test_interrupts(world: World) -> None:
    world.run(interrupted)
