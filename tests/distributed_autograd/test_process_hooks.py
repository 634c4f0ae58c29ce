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
from tests.distributed_autograd.oracle import Call, compare_all, everywhere, leaf
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


def note_gradient(tensor: Tensor) -> None:
    seen.append(None if tensor.grad is None else tensor.grad.tolist())


def hooked_there(x: Tensor) -> Tensor:
    weight = leaf("post there")
    weight.register_post_accumulate_grad_hook(note_gradient)
    weight.grad = torch.full((3,), 7.0, dtype=torch.float64)
    return x * weight


def check_own_grad(name: str, value: float) -> None:
    gradient = leaf(name).grad
    assert gradient is not None
    assert gradient.tolist() == [value] * 3


def post_accumulate() -> None:
    """The hook sees the gradient of the context in ``.grad``; what was there comes back."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x.register_post_accumulate_grad_hook(note_gradient)
    kept = x.grad = torch.full((3,), 9.0, dtype=torch.float64)
    with context() as context_id:
        loss = rpc_sync("worker1", hooked_there, (x * 2,)).sum()
        backward(context_id, [loss], retain_graph=True)
        backward(context_id, [loss])
        value = get_gradients(context_id)[x].tolist()
        once = [entry / 2 for entry in value]
        assert take_seen() == [once, value]
        assert x.grad is kept
        assert kept.tolist() == [9] * 3
    assert rpc_sync("worker1", take_seen) == [[2] * 3, [4] * 3]
    rpc_sync("worker1", check_own_grad, ("post there", 7.0))


def sgd_in_hook(tensor: Tensor) -> None:
    with torch.no_grad():
        assert tensor.grad is not None
        tensor.sub_(tensor.grad, alpha=0.5)
        tensor.grad = None


def optimizer_in_backward() -> None:
    """The hook uses the gradient up and drops it, so the context has none."""
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(sgd_in_hook)
    for _ in range(2):
        with context() as context_id:
            backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
            assert get_gradients(context_id) == {}
        assert x.grad is None
    assert x.tolist() == [-1] * 3


def scaled_in_hook() -> None:
    """What a hook puts into ``.grad`` is the gradient of the context from then on."""
    x = torch.ones(3, requires_grad=True)

    def clip(tensor: Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad = tensor.grad.clamp(max=1.0)

    x.register_post_accumulate_grad_hook(clip)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        backward(context_id, [loss], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [1] * 3
        backward(context_id, [loss])
        assert get_gradients(context_id)[x].tolist() == [1] * 3
        assert x.grad is None


def ordinary_backward_after() -> None:
    """Hooks of ours that stay on a leaf do nothing in an ordinary backward."""
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(note_gradient)
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        (x * 5).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [5] * 3
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3] * 3
    assert take_seen() == [[2] * 3, [5] * 3]


def test_post_accumulate_hooks(cluster: Cluster) -> None:
    uses = (optimizer_in_backward, scaled_in_hook, ordinary_backward_after)
    scenarios(cluster, 2, post_accumulate, *uses)


# --- hooks that fail -------------------------------------------------------------------------


def failing(gradient: Tensor) -> None:
    raise ArithmeticError("the hook failed")


def failing_post(x: Tensor) -> Tensor:
    weight = leaf("failing")
    weight.register_post_accumulate_grad_hook(failing)
    weight.grad = torch.full((3,), 7.0, dtype=torch.float64)
    return x * weight


def failing_hook(x: Tensor) -> Tensor:
    x.register_hook(failing)
    return x * 2


def hooks_that_raise_here() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
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
    for function in (failing_hook, failing_post):
        with context() as context_id:
            loss = rpc_sync("worker1", function, (x,)).sum()
            with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*ArithmeticError: the hook fai"):
                backward(context_id, [loss])
            assert x.grad is None
        expect_clean_everywhere(2)
    rpc_sync("worker1", check_own_grad, ("failing", 7.0))
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def other_hooks_still_run() -> None:
    """After a hook that failed, the leaf can be lent again by the next pass."""
    x = torch.ones(3, requires_grad=True)
    handle = x.register_post_accumulate_grad_hook(failing)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="the hook failed"):
                backward(context_id, [loss], retain_graph=True, timeout=10)
        handle.remove()
        x.register_post_accumulate_grad_hook(note_gradient)
        backward(context_id, [loss], timeout=10)
    assert len(take_seen()) == 1
    assert everywhere(take_seen) == [[], []]


def hooks_that_run_backward() -> None:
    """A hook that runs an ordinary backward through its own leaf does not wait for itself.

    As in one process, the inner gradient is added to what the hook sees in ``.grad``.
    """
    x = torch.ones(3, requires_grad=True)
    handle = x.register_post_accumulate_grad_hook(inner_backward_once)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        backward(context_id, [loss], timeout=10)
        seen.append(get_gradients(context_id)[x].tolist())
    handle.remove()
    assert take_seen() == [[5] * 3]
    assert x.grad is None


def inner_backward_once(tensor: Tensor) -> None:
    if not running:
        running.append(True)
        try:
            with torch.enable_grad():
                (tensor * 3).sum().backward()
        finally:
            running.clear()


running: list[bool] = []


def test_hooks_that_run_backward(cluster: Cluster) -> None:
    scenarios(cluster, 2, hooks_that_run_backward)


def test_hooks_that_fail(cluster: Cluster) -> None:
    scenarios(cluster, 2, hooks_that_raise_here, hooks_that_raise_there, other_hooks_still_run)
