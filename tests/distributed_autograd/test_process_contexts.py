"""Contexts begin and end while calls and backward passes are under way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    backward,
    context,
    debug_info,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import leaf
from tests.distributed_autograd.rpc_workers import expect_clean_everywhere, rpc_world, scenarios

gates: dict[str, threading.Event] = {}


def gate(name: str) -> threading.Event:
    return gates.setdefault(name, threading.Event())


def open_gate(name: str) -> None:
    gate(name).set()


def wait_for_gate(name: str) -> None:
    assert gate(name).wait(20)


def behind_gate(x: Tensor, name: str) -> Tensor:
    gate(f"{name} entered").set()
    assert gate(name).wait(20)
    return x * leaf("w")


def calls_behind_gate(x: Tensor, name: str) -> Tensor:
    """Calls on, after the context may have ended."""
    gate(f"{name} entered").set()
    assert gate(name).wait(20)
    y: Tensor = rpc_sync("worker2", torch.mul, (x * leaf("w"), 2.0))
    return y


# --- released while something is outstanding --------------------------------------------------


def call_outstanding() -> None:
    """The answer comes after the context has ended: a tensor without connection."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context():
        future = rpc_async("worker1", behind_gate, (x, "late"))
        torch_rpc.rpc_sync("worker1", wait_for_gate, ("late entered",))
    # The release has to be there before the function goes on.
    expect_clean_everywhere(3, calling=True)
    torch_rpc.rpc_sync("worker1", open_gate, ("late",))
    assert not future.wait().requires_grad
    expect_clean_everywhere(3)


def nested_call_outstanding() -> None:
    """A function that goes on after the release makes a call: nothing comes to life again."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context():
        future = rpc_async("worker1", calls_behind_gate, (x, "nested"))
        torch_rpc.rpc_sync("worker1", wait_for_gate, ("nested entered",))
    expect_clean_everywhere(3, calling=True)
    torch_rpc.rpc_sync("worker1", open_gate, ("nested",))
    assert not future.wait().requires_grad
    expect_clean_everywhere(3)


def many_calls_outstanding() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(5):
        with context():
            futures = [
                rpc_async(f"worker{1 + index % 2}", torch.mul, (x, 2.0)) for index in range(20)
            ]
        # The end overtakes some of the calls: they run all the same.
        for future in futures:
            assert future.wait().tolist() == [2] * 3
    expect_clean_everywhere(3)


def test_calls_outstanding(cluster: Cluster) -> None:
    scenarios(cluster, 3, call_outstanding, nested_call_outstanding, many_calls_outstanding)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate(f"{ctx.name} entered").set()
        assert gate(ctx.name).wait(20)
        return gradients[0], None


def gated(x: Tensor, name: str) -> Tensor:
    y: Tensor = Gated.apply(x * leaf("w"), name)
    return y


def released_in_backward() -> None:
    """The block ends in one thread while a backward of its context runs in another."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    failed: list[BaseException] = []

    def run(context_id: int, loss: Tensor) -> None:
        try:
            backward(context_id, [loss], timeout=20)
        except RuntimeError as error:
            failed.append(error)

    with context() as context_id:
        loss = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", gated, (x, "pass")), 2.0)).sum()
        thread = threading.Thread(target=run, args=(context_id, loss))
        thread.start()
        torch_rpc.rpc_sync("worker1", wait_for_gate, ("pass entered",))
    thread.join(10)
    assert not thread.is_alive()
    assert "released" in str(failed[0])
    torch_rpc.rpc_sync("worker1", open_gate, ("pass",))
    expect_clean_everywhere(3)


def passes_are_counted() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", gated, (x, "counted")).sum()
        thread = threading.Thread(target=backward, args=(context_id, [loss]))
        thread.start()
        torch_rpc.rpc_sync("worker1", wait_for_gate, ("counted entered",))
        for worker in ("worker0", "worker1"):
            info = torch_rpc.rpc_sync(worker, debug_info)
            assert info["num_current_backward_passes"] == 1
            assert info["num_autograd_contexts"] == 1
        assert torch_rpc.rpc_sync("worker2", debug_info)["num_autograd_contexts"] == 0
        torch_rpc.rpc_sync("worker1", open_gate, ("counted",))
        thread.join(10)
        assert not thread.is_alive()
        assert list(get_gradients(context_id)) == [x]
        assert debug_info()["num_current_backward_passes"] == 0


def test_backward_outstanding(cluster: Cluster) -> None:
    scenarios(cluster, 3, released_in_backward, passes_are_counted)


# --- which worker has which context ----------------------------------------------------------


def everyone_starts(rank: int, world_size: int) -> list[int]:
    """All workers call all others in contexts of their own at the same time."""
    ids = []
    x = leaf("x")
    for step in range(10):
        with context() as context_id:
            ids.append(context_id)
            y = x * (rank + 1.0)
            for other in range(world_size):
                y = rpc_sync(f"worker{(rank + other) % world_size}", torch.mul, (y, 2.0))
            backward(context_id, [y.sum()])
            assert get_gradients(context_id)[x].tolist() == [16.0 * (rank + 1)] * 3
            assert step < 5 or x.grad is None
    return ids


def test_ids_do_not_collide(cluster: Cluster) -> None:
    ids = rpc_world(cluster, everyone_starts, 4)
    assert len({context_id for own in ids for context_id in own}) == 40


def without_tensors() -> None:
    """A worker that got no tensor that requires grad is told of the end, too."""
    with context() as context_id:
        assert rpc_sync("worker1", has_context, (context_id,))
        assert rpc_sync("worker1", relay_has_context, (context_id,))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            rpc_sync("worker2", divide, (1, 0))
    expect_clean_everywhere(3)
    assert not torch_rpc.rpc_sync("worker1", has_context, (context_id,))


def divide(x: int, y: int) -> float:
    return x / y


def has_context(context_id: int) -> bool:
    try:
        return get_gradients(context_id) == {}
    except ValueError:
        return False


def relay_has_context(context_id: int) -> bool:
    found = rpc_sync("worker2", has_context, (context_id,))
    assert isinstance(found, bool)
    return found


def calls_outside() -> None:
    """Outside of a block, calls are torch's own: nothing is recorded."""
    x = torch.ones(3, requires_grad=True)
    y = rpc_sync("worker1", torch.mul, (x.detach(), 2.0))
    assert not y.requires_grad
    assert rpc_async("worker1", torch.mul, (x.detach(), 2.0)).wait().tolist() == [2] * 3
    expect_clean_everywhere(3)


def threads_have_their_own() -> None:
    """A context belongs to the thread that entered it."""
    inside: list[Any] = []
    x = torch.ones(3, requires_grad=True)

    def run() -> None:
        with context() as own:
            z = rpc_sync("worker1", torch.mul, (x, 5.0))
            backward(own, [z.sum()])
            inside.append((own, get_gradients(own)[x].tolist()))

    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2.0))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3
    assert inside[0][1] == [5] * 3
    assert inside[0][0] != context_id


def many_contexts() -> None:
    """Far more contexts than a worker remembers the ends of."""
    x = torch.ones(3, requires_grad=True)
    for _ in range(300):
        with context() as context_id:
            backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
    assert x.grad is None


def test_who_has_a_context(cluster: Cluster) -> None:
    rest = (calls_outside, threads_have_their_own, many_contexts)
    scenarios(cluster, 3, without_tensors, *rest)
