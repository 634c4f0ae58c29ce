"""What travels badly: shared memory, odd texts, transformed tensors, long chains, traced code."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from dataparallel.distributed_autograd.calls import current_context
from tests.cluster import Cluster
from tests.distributed_autograd.rpc_workers import scenarios

CALLS = 200


def added(a: Tensor, b: Tensor) -> Tensor:
    return a + b.view(3)


def gradients_of_one_memory() -> None:
    """One sum has one gradient for both terms, which must not become the memory of both leaves."""
    a = torch.ones(3, requires_grad=True)
    b = torch.ones(1, 3, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", added, (a, b)).square().sum()
        backward(context_id, [loss], retain_graph=True)
        backward(context_id, [loss])
        gradients = get_gradients(context_id)
        assert gradients[a].tolist() == [8.0] * 3
        assert gradients[b].tolist() == [[8.0] * 3]


def fail_with_odd_text(x: Tensor) -> Tensor:
    def fail(_: Tensor) -> None:
        raise ValueError("no file \udcff")

    y = x * 2
    y.register_hook(fail)
    return y * 1


def text_that_is_no_unicode() -> None:
    w = torch.ones(3, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", fail_with_odd_text, (w,)).sum()
        with pytest.raises(WorkerError, match=r"no file \\udcff"):
            backward(context_id, [loss])


def transformed_tensors() -> None:
    def call(x: Tensor) -> Tensor:
        result: Tensor = rpc_sync("worker1", torch.mul, (x, 2))
        return result

    with context(), pytest.raises(TypeError, match=r"torch\.func.*outside of the transform"):
        torch.func.vmap(call)(torch.ones(3))


def tenth(x: Tensor) -> Tensor:
    return x * 0.1


def long_chain() -> None:
    """What a call tells of the graph does not grow with the calls before it."""
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        state: Tensor = w
        for _ in range(CALLS):
            state = state + rpc_sync("worker1", tenth, (state,))
        native = current_context()
        assert native is not None
        # A peer that was told nothing yet: all that is known. What was computed from consecutive
        # messages is one run of them.
        sent = native.send([], 99)
        assert sent is not None and len(sent[1]) <= CALLS * (4 + 4)
        backward(context_id, [state.sum()])
        expected = torch.full((2,), 1.1**CALLS, dtype=torch.float64)
        torch.testing.assert_close(get_gradients(context_id)[w], expected)


def compiled_backward_after_a_pass() -> None:
    """A leaf that a pass has reached is as good as any other for compiled autograd."""
    w = torch.ones(2, requires_grad=True)
    kept = (w * 1).exp()  # keeps the leaf's node
    with context() as context_id:
        backward(context_id, [(rpc_sync("worker1", tenth, (w,)) * kept).sum()], retain_graph=True)
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with compiled:
        (w * 3).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3.0, 3.0]


def backward_after_a_trace() -> None:
    """Tracing makes a build for CUDA count one device where there is none."""
    with FakeTensorMode():
        pass
    w = torch.ones(2, requires_grad=True)
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", tenth, (w,)).sum()])
        torch.testing.assert_close(get_gradients(context_id)[w], torch.full((2,), 0.1))


def numbers_of_seconds() -> None:
    w = torch.ones(2, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", tenth, (w,), timeout=1e12).sum()
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="must be at least 0"):
                backward(context_id, [loss], timeout=wrong)
            with pytest.raises(ValueError, match="must be at least 0"):
                rpc_async("worker1", tenth, (w,), timeout=wrong)
        with pytest.raises(TypeError, match="func must be callable, not int"):
            rpc_async("worker1", 3)  # type: ignore[arg-type]
        backward(context_id, [loss], timeout=1e12)
        assert w in get_gradients(context_id)


def test_limits(cluster: Cluster) -> None:
    scenarios(
        cluster,
        2,
        gradients_of_one_memory,
        text_that_is_no_unicode,
        transformed_tensors,
        long_chain,
        compiled_backward_after_a_pass,
        backward_after_a_trace,
        numbers_of_seconds,
    )


def test_the_end_of_a_process_while_a_hook_runs(tmp_path: pathlib.Path) -> None:
    """A thread that wants the interpreter when it is gone would abort the process."""
    script = """
        import sys, threading, time, torch
        import torch.distributed.rpc as torch_rpc
        from dataparallel.distributed_autograd import backward, context, rpc_sync

        torch_rpc.init_rpc(
            "main",
            rank=0,
            world_size=1,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1]),
        )
        entered = threading.Event()

        def slow(gradient):
            entered.set()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                time.sleep(0.001)

        w = torch.ones(2, requires_grad=True)
        with context() as context_id:
            y = w * 2
            y.register_hook(slow)
            loss = rpc_sync("main", torch.mul, (y, 2)).sum()
            try:
                backward(context_id, [loss], timeout=0.2)
            except TimeoutError:
                assert entered.is_set()
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
