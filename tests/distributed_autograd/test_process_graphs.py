"""What ordinary autograd can do with a graph, over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    get_gradients,
    rpc_sync,
)
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import Call, compare_all, leaf, own_gradients
from tests.distributed_autograd.rpc_workers import scenarios

counts: dict[str, int] = {}


def count(name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def take_counts() -> dict[str, int]:
    taken = dict(counts)
    counts.clear()
    return taken


def chained(x: Tensor) -> Tensor:
    y: Tensor = rpc_sync("worker2", torch.mul, (x * leaf("w"), 2.0))
    return y * leaf("w")


# --- more than one backward ------------------------------------------------------------------


def retained() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", chained, (x,)).sum()
        for times in (1, 2, 3):
            backward(context_id, [loss], retain_graph=times < 3)
            found = get_gradients(context_id)[x]
            there = rpc_sync("worker1", own_gradients, (context_id,))["w"]
            if times == 1:
                first, first_there = found.clone(), there
            torch.testing.assert_close(found, times * first)
            torch.testing.assert_close(there, times * first_there)


def not_retained() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = (rpc_sync("worker1", chained, (x,)) * x).sum()
        backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(context_id, [loss])
        # What was freed is at another worker.
        loss = rpc_sync("worker1", chained, (x,)).sum()
        backward(context_id, [loss])
        with pytest.raises(WorkerError, match=r"'worker1'.*backward through the graph a second"):
            backward(context_id, [loss])


def parts_of_one_graph() -> None:
    """Backward passes with different roots reach different workers."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        first = rpc_sync("worker1", torch.mul, (x, 2.0))
        second = rpc_sync("worker2", torch.mul, (x, 3.0))
        both = rpc_sync("worker1", torch.add, (first, second))
        backward(context_id, [first.sum()], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        backward(context_id, [second.sum()], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [5] * 3
        backward(context_id, [both.sum(), first.sum()])
        assert get_gradients(context_id)[x].tolist() == [12] * 3


def forward_after_backward() -> None:
    """A context goes on after a backward; new calls use what was received before."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2.0))
        backward(context_id, [y.sum()], retain_graph=True)
        z = rpc_sync("worker2", torch.mul, (y, 5.0))
        backward(context_id, [z.sum()])
        assert get_gradients(context_id)[x].tolist() == [12] * 3


def backward_there(context_id: int, x: Tensor) -> None:
    """A called function starts a backward of its own in the caller's context."""
    loss = rpc_sync("worker2", torch.mul, (x * leaf("w"), 2.0)).sum()
    backward(context_id, [loss])


def root_at_another_worker() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        for times in (1, 2):
            rpc_sync("worker1", backward_there, (context_id, x * 3))
            weight = rpc_sync("worker1", leaf, ("w",)).detach()
            torch.testing.assert_close(get_gradients(context_id)[x], 6 * times * weight)
            there = rpc_sync("worker1", own_gradients, (context_id,))
            torch.testing.assert_close(there["w"].tolist(), [6.0 * times] * 3)


def test_more_than_one_backward(cluster: Cluster) -> None:
    scenarios(cluster, 3, retained, not_retained, parts_of_one_graph, forward_after_backward)


def test_roots_at_other_workers(cluster: Cluster) -> None:
    scenarios(cluster, 3, root_at_another_worker)


# --- functions of users ----------------------------------------------------------------------


class Counted(torch.autograd.Function):
    """Counts how often its backward runs, and what it got."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        count(ctx.name)
        return gradients[0] * 2, None


class Nothing(torch.autograd.Function):
    """Has no gradient for its first input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0]


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        count(f"undefined {[gradient is None for gradient in gradients]}")
        return next(gradient for gradient in gradients if gradient is not None) * 1


def counted(x: Tensor, depth: int) -> Tensor:
    y: Tensor = Counted.apply(x, "counted")
    if depth:
        y = y + rpc_sync(f"worker{depth % 3}", counted, (y, depth - 1))
        y = y + rpc_sync(f"worker{depth % 3}", counted, (y, 0)) * y
    return y


def side_effects_once() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        backward(context_id, [counted(x, 4).sum()])
    runs = [rpc_sync(f"worker{rank}", take_counts)["counted"] for rank in range(3)]
    assert sum(runs) == 9


def nothing(x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = Nothing.apply(x * leaf("w"), y)
    return out


def no_gradients(call: Call) -> list[Tensor]:
    """The gradient of a message is undefined, and so is all that it was computed from."""
    x, y = leaf("x"), leaf("y")
    z = call("worker1", torch.mul, x, 2)
    return [call("worker2", nothing, call("worker1", torch.mul, z, 3), y).sum()]


def only_undefined(call: Call) -> list[Tensor]:
    """A worker gets undefined gradients alone, and must end all the same."""
    x, y = leaf("x"), leaf("y")
    z = call("worker1", torch.mul, x, 2)
    return [(call("worker2", torch.mul, nothing(z, y), 2) + y).sum()]


def two_outputs(x: Tensor) -> Any:
    return TwoOutputs.apply(x)


def undefined_inputs() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        _, second = rpc_sync("worker1", two_outputs, (x,))
        backward(context_id, [second.sum()])
        assert get_gradients(context_id)[x].tolist() == [1] * 3
    assert rpc_sync("worker1", take_counts) == {"undefined [True, False]": 1}


def test_functions_of_users(cluster: Cluster) -> None:
    compare_all(cluster, 3, no_gradients, only_undefined, torch_too=False)
    scenarios(cluster, 3, side_effects_once, undefined_inputs)


# --- what reaches into the engine ------------------------------------------------------------


def block(x: Tensor) -> Tensor:
    count("block")
    return torch.tanh(x * leaf("w")).sin()


def checkpointed(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def with_checkpoints(call: Call) -> list[Tensor]:
    x = leaf("x")
    y = call("worker1", checkpointed, checkpointed(x))
    return [call("worker1", checkpointed, y).sum()]


def reentrant(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def reentrant_checkpoint() -> None:
    """Its inner backward would write to ``.grad``."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", reentrant, (x,)).sum()
        with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*use_reentrant=False"):
            backward(context_id, [loss])
        loss = (rpc_sync("worker1", torch.mul, (x, 2)) + reentrant(x)).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            backward(context_id, [loss])
        assert get_gradients(context_id) == {}
        assert x.grad is None


class InnerGradient(torch.autograd.Function):
    """Differentiates a graph of its own in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin().sum(), x)
            y = ctx.saved_tensors[0].detach().requires_grad_()
            y.sin().sum().backward()
            assert y.grad is not None
        return gradients[0] * (slope + y.grad) / 2


def inner_gradient(x: Tensor) -> Tensor:
    out: Tensor = InnerGradient.apply(x * leaf("w"))
    return out


def nested_engine(call: Call) -> list[Tensor]:
    return [call("worker1", inner_gradient, inner_gradient(leaf("x"))).sum()]


def test_nested_backward(cluster: Cluster) -> None:
    compare_all(cluster, 2, with_checkpoints, nested_engine, torch_too=False)
    scenarios(cluster, 2, reentrant_checkpoint)


def anomaly() -> None:
    x = torch.zeros(3, requires_grad=True)
    with context() as context_id:
        with torch.autograd.set_detect_anomaly(True):
            loss = (torch.sqrt(x) * rpc_sync("worker1", torch.mul, (x, 2))).sum()
            with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
                backward(context_id, [loss])
        assert x.grad is None


def graph_of_gradients() -> None:
    """The gradients have no graph: torch's names do not offer create_graph."""
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, x)).sum()
        backward(context_id, [loss])
        assert not get_gradients(context_id)[x].requires_grad


def own_gradient_storage() -> None:
    """Leaves that got one and the same gradient do not share its memory."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (x + y, 2)).sum()])
        found = get_gradients(context_id)
        found[x].add_(100)
        assert found[y].tolist() == [2] * 3
        assert get_gradients(context_id)[y].is_contiguous()


def not_for_backward_of_torch() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2))
        with pytest.raises(RuntimeError, match=r"distributed_autograd.backward\(context_id"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(y.sum(), x)
        assert x.grad is None
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def test_engine(cluster: Cluster) -> None:
    used = (graph_of_gradients, own_gradient_storage, not_for_backward_of_torch)
    scenarios(cluster, 2, anomaly, *used)
