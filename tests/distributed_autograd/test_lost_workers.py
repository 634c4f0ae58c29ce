"""Workers that are killed or stopped, and callers that are interrupted."""

from __future__ import annotations

import _thread
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
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
from tests.distributed_autograd.rpc_workers import (
    World,
    expect_clean,
    gated,
    leaf,
    ones,
    open_gate,
    pass_gate,
)
from tests.faults.harness import Figures

#: Seconds within which a lost worker has to be noticed.
SOON = 16.0


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


# --- the last of four workers is lost ------------------------------------------------------------


def killed_before_backward() -> None:
    pid = torch_rpc.rpc_sync("worker3", os.getpid)
    with context() as context_id:
        loss = relayed(ones(), ["worker1", "worker3"], torch.sin).sum()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="worker3"):
            backward(context_id, [loss])


def killed_in_backward() -> None:
    x = ones()
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker3"], ends_in_backward).sum()
        with pytest.raises(RuntimeError, match="worker3"):
            backward(context_id, [loss])
        assert x.grad is None


def killed_while_another_computes() -> None:
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


def stopped() -> None:
    """A worker that neither ends nor answers: the time limit names it."""
    x = ones()
    pid = torch_rpc.rpc_sync("worker3", os.getpid)
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker3"], torch.sin).sum()
        os.kill(pid, signal.SIGSTOP)
        # Either may notice first: the caller, or the worker whose gradients are not accepted.
        with pytest.raises((TimeoutError, WorkerError), match="'worker3'"):
            backward(context_id, [loss], timeout=1.0)
    os.kill(pid, signal.SIGKILL)


def runs_backward() -> None:
    with context() as context_id:
        loss = relayed(ones(), ["worker1", "worker2"], gated, "root").sum()
        backward(context_id, [loss], timeout=2.0)


def the_root_is_killed() -> None:
    """The worker whose context and pass the others take part in."""
    torch_rpc.rpc_async("worker3", runs_backward)
    torch_rpc.rpc_sync("worker2", pass_gate, ("root entered",))
    deadline = time.monotonic() + SOON
    os.kill(torch_rpc.rpc_sync("worker3", os.getpid), signal.SIGKILL)
    torch_rpc.rpc_sync("worker2", open_gate, ("root",))
    # Their time is over by then: nothing of the pass is left.
    for name in ("worker1", "worker2"):
        while torch_rpc.rpc_sync(name, debug_info)["num_current_backward_passes"]:
            assert time.monotonic() < deadline


def losing(case: Callable[[], None]) -> float:
    """Seconds until the loss was noticed."""
    started = time.monotonic()
    case()
    seconds = time.monotonic() - started
    if case is not the_root_is_killed:
        others_still_work()
    return seconds


CASES = [
    killed_before_backward,
    killed_in_backward,
    killed_while_another_computes,
    stopped,
    the_root_is_killed,
]


@pytest.mark.parametrize("case", CASES)
def test_a_worker_is_lost(
    case: Callable[[], None], repeats: Callable[..., int], figures: Figures
) -> None:
    count, took = repeats(quick=1, long=20), []
    for _ in range(count):
        with World() as world:
            took.append(world.run(losing, case, clean=False))
    figures.record(f"a worker is lost: {case.__name__}, p100", max(took), "s", 5.0, repeats=count)


# --- interrupts ----------------------------------------------------------------------------------


@pytest.mark.on_worker0
def test_interrupts() -> None:
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


def test_the_end_of_a_process_while_a_hook_runs(tmp_path: pathlib.Path) -> None:
    """A thread that wants the interpreter when it is gone would abort the process."""
    script = """
        import sys, time, torch
        import torch.distributed.rpc as torch_rpc
        from dataparallel.distributed_autograd import backward, context, rpc_sync

        options = torch_rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
        torch_rpc.init_rpc("main", rank=0, world_size=1, rpc_backend_options=options)
        w = torch.ones(2, requires_grad=True)
        with context() as context_id:
            y = w * 2
            y.register_hook(lambda gradient: time.sleep(1))
            loss = rpc_sync("main", torch.mul, (y, 2)).sum()
            try:
                backward(context_id, [loss], timeout=0.1)
            except TimeoutError:
                print("leaving")
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), f"file://{tmp_path}/store"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "leaving\n"), ended.stderr
