"""Collectives over all replicas of all processes: misuse, failures, and modules that train."""

from __future__ import annotations

import functools as partials
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import HybridGroup, functional, hybrid_group
from dataparallel.collectives.operations import Broadcast
from tests.cluster import Cluster
from tests.collective_cases import (
    COUNTS,
    check_works,
    each,
    error_of,
    everywhere,
    index,
    total,
)

# --- misuse in all processes -----------------------------------------------------------------


def misuse(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    ones = torch.ones(2)
    calls: list[Callable[[int], Any]] = [
        lambda m: functional.all_reduce(torch.ones(2 + rank), "sum", group),
        lambda m: (
            functional.all_gather_tensor(ones, 0, group)
            if rank == 0
            else functional.broadcast(ones, 0, group)
        ),
        lambda m: group.size() if rank == 0 else functional.broadcast(ones, 0, group),
        lambda m: functional.broadcast(ones, 3, group),
        lambda m: functional.scatter(torch.ones(4), 0, 0, group),
        lambda m: functional.all_to_all_single(
            torch.zeros(6), [3, 2, 2] if m == 1 else [2, 2, 2], [2, 2, 2], group
        ),
    ]
    errors = [error_of(partials.partial(everywhere, rank, call)) for call in calls]
    link = group._link
    works = total(rank, group)
    assert group._link is link, "an error that all processes have breaks nothing"
    group.close()
    return [errors, works]


def test_misuse_is_an_error_everywhere(cluster: Cluster) -> None:
    results = cluster.run(misuse, 2)
    for errors, _ in results:
        assert [name for name, _ in errors] == ["RuntimeError"] * 3 + ["ValueError"] * 3
        texts = [text for _, text in errors]
        assert "rank 0 (2 members) came to all_reduce(op='sum') of float32 (2,)" in texts[0]
        assert "rank 1 (1 members) came to all_reduce(op='sum') of float32 (3,)" in texts[0]
        assert "all_gather_tensor(dim=0)" in texts[1] and "broadcast(root=0)" in texts[1]
        assert "came to the number of members" in texts[2]
        assert "from 0 to 2, but got 3" in texts[3]
        assert "4 is no multiple of 3" in texts[4]
        assert "member 0 gives 2 rows to member 1, which expects 3" in texts[5]
    check_works([works for _, works in results])


# --- failures of one process -----------------------------------------------------------------


def raise_in_a_replica(rank: int, group: Any) -> Any:
    def forward(m: int) -> Tensor:
        if m == 1:
            raise ValueError("replica 1 has a fault of its own")
        return functional.all_reduce(torch.ones(2), "sum", group)

    return everywhere(rank, forward)


def bring_what_cannot_be_sent(rank: int, group: Any) -> Any:
    x = torch.ones(2).to_sparse() if rank == 0 else torch.ones(2)
    return everywhere(rank, lambda m: group.run(Broadcast(0), x))


def split_wrongly(rank: int, group: Any) -> Any:
    def forward(m: int) -> Tensor:
        gives = [2, 4] if m == 1 else [2, 2, 2]
        return functional.all_to_all_single(torch.zeros(6), [2, 2, 2], gives, group)

    return everywhere(rank, forward)


def run_out_of_memory(rank: int, group: Any) -> Any:
    def fail(*args: Any) -> None:
        raise MemoryError("after the processes have agreed")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(hybrid_group, "exchange_of", fail)
        return total(rank, group)


def transform(rank: int, group: Any) -> Any:
    doubled = partials.partial(functional.all_reduce, reduceOp="sum", group=group)
    return torch.func.vmap(doubled)(torch.ones(2, 2)) if rank == 0 else doubled(torch.ones(2))


FAILURES: dict[Callable[[int, Any], Any], tuple[str, str]] = {
    raise_in_a_replica: ("ValueError", "a fault of its own"),
    bring_what_cannot_be_sent: ("ValueError", "layout torch.sparse_coo"),
    split_wrongly: ("ValueError", "input_split_sizes has one number of rows"),
    run_out_of_memory: ("MemoryError", "after the processes have agreed"),
    transform: ("RuntimeError", "torch.func transform"),
}


def fail_in_one_process(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    works, errors = [total(rank, group)], []
    for failure in FAILURES:
        errors.append(error_of(partials.partial(failure, rank, group)))
        # The same group works again.
        works.append(total(rank, group))
    works.append(total(rank, HybridGroup(timeout=20)))
    group.close()
    return [errors, works]


def test_a_process_that_fails_releases_the_others_at_once(cluster: Cluster) -> None:
    (ours, works), (theirs, others) = cluster.run(fail_in_one_process, 2)
    for (kind, text), found, other in zip(FAILURES.values(), ours, theirs, strict=True):
        assert found[0] == kind and text in found[1], found
        # And not after 20 seconds.
        assert other[0] == "CollectiveError" and "rank 0 did not come" in other[1], other
    for pair in zip(works, others, strict=True):
        check_works(pair)


def stay_away(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=0.5)
    works = [total(rank, group)]
    errors = []
    if rank == 1:
        errors.append(error_of(lambda: total(rank, group)))
    dist.barrier()
    if rank == 0:
        # Its link does not know yet.
        errors.append(error_of(lambda: total(rank, group)))
    dist.barrier()
    works.append(total(rank, group))
    group.close()
    return [errors, works]


def test_a_process_that_stays_away_is_named(cluster: Cluster) -> None:
    (late, works), (waited, others) = cluster.run(stay_away, 2)
    assert waited[0][0] == "CollectiveTimeout"
    assert "plans for all_reduce(op='sum') of float32 ()" in waited[0][1]
    assert "rank 0 did not come" in waited[0][1] and "within 0.5" in waited[0][1]
    assert late[0][0] in ("CollectiveError", "CollectiveTimeout")
    for pair in zip(works, others, strict=True):
        check_works(pair)


# --- backward --------------------------------------------------------------------------------


def lose_the_link(rank: int, group: HybridGroup, x: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", group)
    group.close()
    functional.all_reduce(x, "sum", group)
    return error_of(lambda: y.sum().backward())


def swap(rank: int, group: HybridGroup, x: Tensor) -> Any:
    outputs = [functional.all_reduce(x * i, "sum", group) for i in range(2)]
    return error_of(lambda: outputs[rank].sum().backward())


def switch_off_in_one(rank: int, group: HybridGroup, x: Tensor) -> Any:
    with torch.set_grad_enabled(rank == 0):
        y = functional.all_reduce(x, "sum", group)
    assert y.requires_grad == (rank == 0) and y.tolist() == [2.0, 2.0]
    return error_of(lambda: y.sum().backward())


def run_again(rank: int, group: HybridGroup, x: Tensor) -> Any:
    """Twice through one graph, and through a part of it."""
    early = functional.all_reduce(x, "sum", group)
    late = functional.all_reduce(x * x, "sum", group)
    late.sum().backward(retain_graph=True)
    late.sum().backward()
    early.sum().backward()
    return x.grad


def multiply_a_constant(rank: int, group: HybridGroup, x: Tensor) -> Any:
    with torch.inference_mode():
        constant = torch.full((2,), 2.0)
    functional.all_reduce(x if rank else constant, "product", group).sum().backward()
    return x.grad


def want_gradients_in_one(rank: int, group: HybridGroup, x: Tensor) -> Any:
    x.requires_grad_(rank == 0)
    outputs = everywhere(rank, lambda m: functional.broadcast(x, 0, group))
    assert all(output.requires_grad for output in outputs)
    torch.stack([(m + 1) * y for m, y in enumerate(outputs, sum(COUNTS[:rank]))]).sum().backward()
    return x.grad


BACKWARDS = [lose_the_link, swap, switch_off_in_one, run_again, multiply_a_constant]
BACKWARDS += [want_gradients_in_one]


def go_backward(rank: int, world_size: int) -> list[Any]:
    found = []
    for case in BACKWARDS:
        group = HybridGroup(timeout=20)
        found.append(case(rank, group, torch.ones(2, requires_grad=True)))
        group.close()
    return found


def test_backward_in_all_processes_or_in_none(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(go_backward, 2)):
        lost, swapped, off, again, constant, one = found
        assert lost[0] == "CollectiveError" and "run forward again in every process" in lost[1]
        assert swapped[0] == "RuntimeError"
        assert "came to all_reduce(op='sum') of float32 (2,) in the backward of " in swapped[1]
        assert "collective 1 (all_reduce)" in swapped[1] and "collective 2 (" in swapped[1]
        assert off[0] == "RuntimeError"
        assert rank == 1 or "gradients were switched off in rank 1" in off[1]
        assert again.tolist() == [10.0, 10.0]
        # Each member's loss depends on the result.
        assert constant is None if rank == 0 else constant.tolist() == [4.0] * 2
        assert one.tolist() == [6.0, 6.0] if rank == 0 else one is None


def backward_in_two_branches(rank: int, world_size: int) -> list[Tensor]:
    group = HybridGroup(timeout=20)

    def branches(x: Tensor) -> Tensor:
        # The nodes of this replica come later in backward than those of the others.
        for _ in range(2000 if index() == 0 else 0):
            x.mul(1)
        left = functional.all_reduce(x, "sum", group)
        right = functional.all_reduce(x * 2, "product", group)
        long = right.sin().cos().exp()
        return long + left * left

    first, count = sum(COUNTS[:rank]), COUNTS[rank]
    xs = [torch.full((2,), 0.1 * (first + i), requires_grad=True) for i in range(count)]
    torch.stack(each(["cpu"] * count, branches, xs)).sum().backward()
    group.close()
    return [x.grad for x in xs if x.grad is not None]


def test_branches_keep_their_order_in_backward(cluster: Cluster) -> None:
    xs = [torch.full((2,), 0.1 * i, requires_grad=True) for i in range(3)]
    left = torch.stack(xs).sum(0)
    long = (torch.stack(xs) * 2).prod(0).sin().cos().exp()
    (3 * (long + left * left)).sum().backward()
    found = cluster.run(backward_in_two_branches, 2)
    for ours, x in zip([*found[0], *found[1]], xs, strict=True):
        torch.testing.assert_close(ours, x.grad)


# --- modules ---------------------------------------------------------------------------------

ROWS = 4


class Centered(nn.Module):
    """Two branches that need the whole batch, and a third layer that needs both."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.group = group

    def mean(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x.mean(0)
        rows = functional.all_reduce(torch.tensor(len(x), device=x.device), "sum", self.group)
        return functional.all_reduce(x.sum(0), "sum", self.group) / rows

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        left = hidden - self.mean(hidden)
        right = hidden.square() / self.mean(hidden.square() + 1)
        y: Tensor = self.second(left.tanh() + right)
        return y * self.mean(y.exp())


def batch(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count * ROWS, 3, generator=generator, dtype=torch.double)


def train(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    # By hand, since the optimizers of torch import its compiler, which takes seconds.
    for x in batches:
        model(x).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_wrapped(
    rank: int, world_size: int, counts: Sequence[int], kind: str, group: Any
) -> list[Tensor]:
    first = sum(counts[:rank]) * ROWS
    length = counts[rank] * ROWS
    devices = [kind if kind == "cpu" else f"{kind}:{i}" for i in range(counts[rank])]
    torch.manual_seed(3)
    module = Centered(group or HybridGroup(timeout=30)).double()
    model = dp.DistributedDataParallel(module.to(devices[0]), devices, average="none")
    # In one step each process has a single row, so a single replica.
    sizes = [(first, length), (first, length), (rank, 1), (first, length)]
    whole = [batch(sum(counts), step) for step in range(4)]
    chunks = [x[start : start + rows] for x, (start, rows) in zip(whole, sizes, strict=True)]
    return train(model, [x.to(devices[0]) for x in chunks])


@pytest.mark.parametrize(
    "counts, kind, group", [((1, 2), "cpu", None), ((2, 1), "virtual", "hybrid")]
)
def test_training_is_that_of_the_bare_module(
    cluster: Cluster, counts: tuple[int, ...], kind: str, group: Any
) -> None:
    torch.manual_seed(3)
    bare = Centered(None).double()
    whole = [batch(sum(counts), step) for step in range(4)]
    whole[2] = whole[2][: len(counts)]
    expected = train(bare, whole)
    for found in cluster.run(
        train_wrapped, len(counts), counts, kind, group, virtual=kind == "virtual"
    ):
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)
