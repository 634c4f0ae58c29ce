"""Hooks of leaves, tensors and nodes in a backward over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    get_gradients,
    rpc_sync,
)
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import Call, compare_all, leaf
from tests.distributed_autograd.rpc_workers import expect_clean_everywhere, scenarios

seen: list[Any] = []


def take_seen() -> list[Any]:
    taken = list(seen)
    seen.clear()
    return taken


def doubled(x: Tensor) -> Tensor:
    """Tensor hooks on what arrives, on what is computed, and on a leaf of this worker."""
    weight = leaf("hooked there")
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: gradient * 2)
    # Not on the tensor that is returned or was given: the caller may have hooks there.
    x = x * 1.0
    x.register_hook(lambda gradient: gradient + 1)
    y = x * weight
    y.register_hook(lambda gradient: gradient * gradient)
    return y * 1.0


def hooks_that_change_gradients(call: Call) -> list[Tensor]:
    x = leaf("x")
    x.register_hook(lambda gradient: gradient * 3)
    x.register_hook(lambda gradient: gradient - 1)
    y = call("worker1", doubled, x * 2)
    y.register_hook(lambda gradient: gradient * 5)
    return [call("worker1", doubled, y * 1.0).sum()]


def test_tensor_hooks(cluster: Cluster) -> None:
    compare_all(cluster, 2, hooks_that_change_gradients)


def node_hooks() -> None:
    """Pre hooks and post hooks of nodes, those of accumulating nodes included."""
    x = torch.ones(2, requires_grad=True)
    with context() as context_id:
        y = x * 2
        z = rpc_sync("worker1", torch.mul, (y, 3))
        assert y.grad_fn is not None
        accumulate = y.grad_fn.next_functions[0][0]
        assert accumulate is not None
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,))
        y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] + 1, *inputs[1:]))
        accumulate.register_prehook(lambda gradients: (gradients[0] * 100,))
        accumulate.register_hook(lambda inputs, outputs: seen.append("accumulated"))
        backward(context_id, [z.sum()])
        assert get_gradients(context_id)[x].tolist() == [(3 * 10 * 2 + 1) * 100] * 2
        assert take_seen() == ["accumulated"]
        assert x.grad is None


def multi_grad_hooks() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    handle = torch.autograd.graph.register_multi_grad_hook(
        (x, y), lambda gradients: seen.append([gradient.tolist() for gradient in gradients])
    )
    with context() as context_id:
        z = rpc_sync("worker1", torch.mul, (x, 3)) + rpc_sync("worker1", torch.mul, (y, 4))
        backward(context_id, [z.sum()])
    assert take_seen() == [[[3, 3], [4, 4]]]
    handle.remove()


def retained_gradient() -> None:
    """``retain_grad`` of a tensor that is no leaf works as in an ordinary backward."""
    x = torch.ones(2, requires_grad=True)
    with context() as context_id:
        y = x * 2
        y.retain_grad()
        z = rpc_sync("worker1", torch.mul, (y, 3))
        z.retain_grad()
        backward(context_id, [(z * 5).sum()])
        assert y.grad is not None
        assert z.grad is not None
        assert y.grad.tolist() == [15, 15]
        assert z.grad.tolist() == [5, 5]
        assert x.grad is None


def test_hooks_of_nodes(cluster: Cluster) -> None:
    scenarios(cluster, 2, node_hooks, multi_grad_hooks, retained_gradient)


# --- after a gradient was accumulated --------------------------------------------------------


def sees_nothing(tensor: Tensor) -> None:
    raise AssertionError("not called")


def hooked_there(x: Tensor, hooked: bool) -> Tensor:
    weight = leaf("post there")
    if hooked:
        handles.append(weight.register_post_accumulate_grad_hook(sees_nothing))
    else:
        handles.pop().remove()
    return x * weight


handles: list[Any] = []


def post_accumulate_hooks_are_refused() -> None:
    """They read ``.grad``, which no pass writes; where they are removed the leaf is as any."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", hooked_there, (x, True)).sum()
        with pytest.raises(WorkerError, match=r"worker1(.|\n)*register_post_accumulate_grad_hook"):
            backward(context_id, [loss])
        loss = rpc_sync("worker1", hooked_there, (x, False)).sum()
        handle = x.register_post_accumulate_grad_hook(sees_nothing)
        with pytest.raises(RuntimeError, match=r"leaf of shape \[3\] has hooks from register_post"):
            backward(context_id, [loss])
        handle.remove()
        backward(context_id, [loss])
        assert x in get_gradients(context_id)
        (x * 5).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [5] * 3


def test_post_accumulate_hooks(cluster: Cluster) -> None:
    scenarios(cluster, 2, post_accumulate_hooks_are_refused)


# --- hooks that fail -------------------------------------------------------------------------


def failing(gradient: Tensor) -> None:
    raise ArithmeticError("the hook failed")


def failing_hook(x: Tensor) -> Tensor:
    x.register_hook(failing)
    return x * 2


def hooks_that_raise_here() -> None:
    for register in ("register_hook",):
        x = torch.ones(3, requires_grad=True)
        kept = x.grad = torch.full((3,), 9.0)
        handle = getattr(x, register)(failing)
        with context() as context_id:
            loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
            with pytest.raises(ArithmeticError, match="the hook failed"):
                backward(context_id, [loss], retain_graph=True)
            assert x.grad is kept
            assert kept.tolist() == [9] * 3
            handle.remove()
        with context() as context_id:
            loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
            backward(context_id, [loss])
            assert get_gradients(context_id)[x].tolist() == [2] * 3


def hooks_that_raise_there() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for function in (failing_hook,):
        with context() as context_id:
            loss = rpc_sync("worker1", function, (x,)).sum()
            with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*ArithmeticError: the hook fai"):
                backward(context_id, [loss])
            assert x.grad is None
        expect_clean_everywhere(2)
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def hook_that_runs_backward() -> None:
    """An ordinary backward within a pass leaves its gradients in ``.grad``."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            (x * y * 3).sum().backward()

    x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    y.register_hook(lambda gradient: seen.append(gradient.tolist()))
    with context() as context_id:
        z = x * 1
        z.register_hook(inner)
        backward(context_id, [(rpc_sync("worker1", torch.mul, (z, 2.0)) + y).sum()], timeout=10)
        found = get_gradients(context_id)
        assert (found[x].tolist(), found[y].tolist()) == ([2] * 3, [1] * 3)
        assert x.grad is not None and y.grad is not None
        assert x.grad.tolist() == y.grad.tolist() == [3] * 3
    assert len(take_seen()) == 4


def test_hooks_that_fail(cluster: Cluster) -> None:
    scenarios(cluster, 2, hooks_that_raise_here, hooks_that_raise_there, hook_that_runs_backward)
