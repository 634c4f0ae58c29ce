"""Gradients over processes, beside ordinary autograd and torch's distributed autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cluster import Cluster
from tests.distributed_autograd.oracle import Call, compare_all, leaf

NAMES = ["worker0", "worker1", "worker2", "worker3"]


def scaled(x: Tensor, name: str = "scale") -> Tensor:
    return torch.tanh(x * leaf(name))


def shifted(x: Tensor) -> Tensor:
    return x + leaf("shift")


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


# --- where calls go --------------------------------------------------------------------------


def simple(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    return [(call("worker1", product, x, y) + x).sum()]


def to_self(call: Call) -> list[Tensor]:
    x = leaf("x")
    return [call("worker0", scaled, x * 2).sum()]


def nothing_remote(call: Call) -> list[Tensor]:
    return [scaled(leaf("x")).sum()]


def down_the_line(call: Call, x: Tensor, names: list[str]) -> Tensor:
    x = scaled(x, f"at {names[0]}")
    if len(names) > 1:
        x = call(names[1], down_the_line, call, x, names[1:]) * leaf(f"back {names[0]}")
    return x


def nested_to_all(call: Call) -> list[Tensor]:
    return [call("worker1", down_the_line, call, leaf("x"), NAMES[1:]).sum()]


def chain_over_all(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    for name in NAMES[1:] + NAMES:
        x = call(name, scaled, x, f"of {name}")
    return [x.sum()]


def back_to_the_caller(call: Call) -> list[Tensor]:
    names = ["worker1", "worker0", "worker1", "worker0", "worker2", "worker0"]
    return [call("worker1", down_the_line, call, leaf("x"), names).sum()]


def calls_itself(call: Call) -> list[Tensor]:
    names = ["worker1", "worker1", "worker1", "worker0", "worker0"]
    return [call("worker1", down_the_line, call, leaf("x"), names).sum()]


def round_trips(call: Call) -> list[Tensor]:
    x = leaf("x")
    for _ in range(5):
        x = call("worker1", scaled, x, "far") + leaf("near")
    return [x.sum()]


def test_where_calls_go(cluster: Cluster) -> None:
    cases = (simple, to_self, nothing_remote, nested_to_all, chain_over_all)
    compare_all(cluster, 4, *cases, back_to_the_caller, calls_itself, round_trips)


# --- what is used, and how often -------------------------------------------------------------


def residual(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    for name in NAMES[1:]:
        x = x + call(name, scaled, x)
    return [x.sum()]


def residual_of_a_cycle(call: Call, x: Tensor, depth: int) -> Tensor:
    if depth == 0:
        return scaled(x, "bottom")
    y = scaled(x, f"level {depth}")
    below: Tensor = call(NAMES[depth % 2], residual_of_a_cycle, call, y, depth - 1)
    return x + y * below


def residual_cycle(call: Call) -> list[Tensor]:
    x = leaf("x")
    return [(x + call("worker1", residual_of_a_cycle, call, x, 5)).sum()]


def reused_weights(call: Call) -> list[Tensor]:
    """One weight here goes to all workers; one at each worker is used by several calls."""
    weight, x = leaf("weight"), leaf("x")
    for name in NAMES[1:] + NAMES[1:]:
        x = call(name, product, weight, call(name, scaled, x, "there")) + weight * x
    return [x.sum(), (weight * weight).sum()]


def shared_over_paths(call: Call, x: Tensor) -> Tensor:
    at_worker3: Tensor = call("worker3", scaled, x, "shared")
    at_worker0: Tensor = call("worker0", scaled, x, "shared")
    return at_worker3 + at_worker0


def shared_weights(call: Call) -> list[Tensor]:
    """worker3 is reached through worker1, through worker2, and from here."""
    x = leaf("x")
    paths = [call(name, shared_over_paths, call, x) for name in ("worker1", "worker2")]
    return [(paths[0] * paths[1] * call("worker3", scaled, x, "shared")).sum()]


def a_message_to_each(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * leaf("a"), x * leaf("b"), x * leaf("c")


def partly_used(call: Call) -> list[Tensor]:
    """One of three results is used: the gradient of a message is partly undefined."""
    first, _, _ = call("worker1", a_message_to_each, leaf("x"))
    _, second, _ = call("worker2", a_message_to_each, first)
    return [second.sum()]


def unused_calls(call: Call) -> list[Tensor]:
    x = leaf("x")
    call("worker1", scaled, x)
    call("worker2", unused_inside, call, x)
    return [call("worker1", unused_inside, call, x * 2).sum()]


def unused_inside(call: Call, x: Tensor) -> Tensor:
    call("worker3", scaled, x, "unused")
    unused: Tensor = call("worker0", scaled, x, "unused")
    assert unused.requires_grad
    return x * leaf("used")


def some_workers_only(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    for name in NAMES:
        call(name, scaled, y, "not reached")
    return [call("worker2", scaled, x).sum()]


def detached(call: Call) -> list[Tensor]:
    x = leaf("x")
    loose = call("worker1", scaled, x).detach()
    return [(call("worker2", scaled, x) * loose).sum()]


def several_roots(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    first = call("worker1", product, x, y)
    second = call("worker2", scaled, first)
    return [first.sum(), second.sum(), (first * second).mean(), first.prod(), x.max()]


def one_root_twice(call: Call) -> list[Tensor]:
    loss = call("worker1", scaled, leaf("x")).sum()
    return [loss, loss]


def test_what_is_used(cluster: Cluster) -> None:
    used = (residual, residual_cycle, reused_weights, shared_weights)
    compare_all(cluster, 4, *used, several_roots, one_root_twice)


def test_calls_whose_result_nobody_uses(cluster: Cluster) -> None:
    # torch's backward waits for them for ever, and makes zeros of gradients that are undefined.
    compare_all(cluster, 4, partly_used, unused_calls, some_workers_only, detached, torch_too=False)


# --- what happens to tensors -----------------------------------------------------------------


def changed_in_place(x: Tensor) -> Tensor:
    y = x * leaf("factor")
    y.mul_(2).add_(x)
    y[1:] *= leaf("slice", 2)
    return y


def in_place(call: Call) -> list[Tensor]:
    x = leaf("x")
    received = call("worker1", changed_in_place, x * 1.0)
    received.mul_(3)
    received[0] = x[1]
    return [call("worker2", scaled, received).sum()]


def after_it_was_sent(call: Call) -> list[Tensor]:
    """The change belongs to the sender: what was sent is what it was."""
    x = leaf("x") * 1.0
    y = call("worker1", shifted, x)
    x.mul_(2)
    return [(y * y + x).sum(), call("worker1", shifted, x).prod()]


def pieces(x: Tensor) -> list[Tensor]:
    return [*x.view(2, 3).unbind(0), x[::2], x.t() if x.dim() == 2 else x.flip(0)]


def views(call: Call) -> list[Tensor]:
    x = leaf("x", 2, 6)
    first, second, odd, rest = call("worker1", pieces, x[1])
    return [(first * second * odd).sum(), call("worker2", pieces, rest)[2].sum(), x.t()[2].sum()]


def looked_up(indices: Tensor, sparse: bool) -> Tensor:
    table = leaf("table", 10, 3)
    return torch.nn.functional.embedding(indices, table, sparse=sparse)


def sparse(call: Call) -> list[Tensor]:
    """The gradient of the table is sparse, and the sum of several."""
    weight = leaf("weight")
    first = call("worker1", looked_up, torch.tensor([1, 3, 3]), True)
    second = call("worker1", looked_up, torch.tensor([3, 4]), True)
    third = call("worker2", looked_up, torch.tensor([9]), True)
    return [(first * weight).sum() + second.prod() + third.sum()]


def sparse_and_dense(call: Call) -> list[Tensor]:
    first = call("worker1", looked_up, torch.tensor([1, 3]), True)
    second = call("worker1", looked_up, torch.tensor([3, 4]), False)
    third = call("worker1", looked_up, torch.tensor([0]), True)
    return [first.sum() + second.prod() + third.exp().sum()]


def of_a_table(table: Tensor, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, table, sparse=True)


def sparse_across(call: Call) -> list[Tensor]:
    """A sparse gradient travels to where the table is."""
    table = leaf("table", 6, 3)
    return [call("worker1", of_a_table, table, torch.tensor([0, 5, 5])).prod()]


def multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.sparse.mm(matrix, x)
    return out


def sparse_argument(call: Call) -> list[Tensor]:
    values = leaf("values")
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_coo_tensor(indices, values, (3, 3))
    return [call("worker1", multiplied, matrix.coalesce(), torch.eye(3).double()).pow(2).sum()]


def test_what_happens_to_tensors(cluster: Cluster) -> None:
    compare_all(cluster, 3, in_place, after_it_was_sent, views)


def test_sparse_tensors(cluster: Cluster) -> None:
    compare_all(cluster, 3, sparse, sparse_and_dense, sparse_across, sparse_argument)
