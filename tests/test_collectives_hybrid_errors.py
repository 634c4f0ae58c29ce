"""Collectives over all replicas of all processes: misuse, and failures of some processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel.collectives import functional, hybrid_group
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.operations import Broadcast
from tests.cluster import Cluster
from tests.hybrid_cases import COUNTS, check_works, error_of, everywhere, total

# --- different collectives -------------------------------------------------------------------


def call_differently(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)

    def shapes(m: int) -> Tensor:
        return functional.all_reduce(torch.ones(2 + rank), "sum", group)

    def names(m: int) -> Tensor:
        if rank == 0:
            return functional.all_gather_tensor(torch.ones(2), 0, group)
        return functional.broadcast(torch.ones(2), 0, group)

    def sizes(m: int) -> Any:
        return group.size() if rank == 0 else functional.broadcast(torch.ones(2), 0, group)

    errors = [error_of(functools.partial(everywhere, rank, f)) for f in (shapes, names, sizes)]
    link = group._link.current()
    works = total(rank, group)
    assert group._link.current() is link, "an error that all processes have breaks nothing"
    group.close()
    return [errors, works]


def test_different_collectives_are_an_error_everywhere(cluster: Cluster) -> None:
    results = cluster.run(call_differently, 2)
    for errors, _ in results:
        assert [name for name, _ in errors] == ["RuntimeError"] * 3
        texts = [text for _, text in errors]
        assert "rank 0 (members 0 to 1) came to all_reduce(op='sum') of float32 (2,)" in texts[0]
        assert "rank 1 (member 2) came to all_reduce(op='sum') of float32 (3,)" in texts[0]
        assert "all_gather_tensor(dim=0)" in texts[1] and "broadcast(root=0)" in texts[1]
        assert "came to the number of members" in texts[2]
    check_works([works for _, works in results])


def split_wrongly(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    x = torch.arange(6.0)

    def unlike(m: int) -> Tensor:
        gets = [3, 2, 2] if m == 1 else [2, 2, 2]
        return functional.all_to_all_single(torch.zeros(6), gets, [2, 2, 2], group)

    def short(m: int) -> Tensor:
        gives = [2, 4] if m == 2 else [2, 2, 2]
        return functional.all_to_all_single(x, [2, 2, 2], gives, group)

    errors = [error_of(functools.partial(everywhere, rank, f)) for f in (unlike, short)]
    errors.append(error_of(lambda: everywhere(rank, lambda m: functional.broadcast(x, 3, group))))
    errors.append(
        error_of(lambda: everywhere(rank, lambda m: functional.scatter(torch.ones(4), 0, 0, group)))
    )
    link = group._link.current()
    works = total(rank, group)
    assert group._link.current() is link
    group.close()
    return [errors, works]


def test_wrong_arguments_are_an_error_everywhere(cluster: Cluster) -> None:
    results = cluster.run(split_wrongly, 2)
    for errors, _ in results:
        assert [name for name, _ in errors] == ["ValueError"] * 4
        texts = [text for _, text in errors]
        assert "member 0 gives 2 rows to member 1, which expects 3" in texts[0]
        assert "rank 0 (members 0 to 1), rank 1 (member 2)" in texts[0]
        assert "member 2: input_split_sizes has one number of rows" in texts[1]
        assert "member 0:" not in texts[1]
        assert "from 0 to 2, but got 3" in texts[2]
        assert "4 is no multiple of 3" in texts[3]
    check_works([works for _, works in results])


# --- failures of one process -----------------------------------------------------------------


def fail_in_one_replica(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    works = [total(rank, group)]

    def forward(m: int) -> Tensor:
        if m == 1:
            raise ValueError("replica 1 has a fault of its own")
        return functional.all_reduce(torch.ones(2), "sum", group)

    errors = [error_of(lambda: everywhere(rank, forward))]
    # The same group works again, and a new one too.
    works.append(total(rank, group))
    works.append(total(rank, HybridGroup(timeout=20)))
    group.close()
    return [errors, works]


def test_a_replica_that_fails_releases_the_other_processes(cluster: Cluster) -> None:
    (ours, works), (theirs, others) = cluster.run(fail_in_one_replica, 2)
    assert ours[0][0] == "ValueError" and "a fault of its own" in ours[0][1]
    # At once, and not after 20 seconds.
    assert theirs[0][0] == "CollectiveError"
    assert "rank 0 did not come" in theirs[0][1]
    for i in range(3):
        check_works([works[i], others[i]])


def bring_what_cannot_be_sent(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    works = [total(rank, group)]
    x = torch.ones(2).to_sparse() if rank == 1 else torch.ones(2)
    errors = [error_of(lambda: everywhere(rank, lambda m: group.run(Broadcast(0), x)))]
    works.append(total(rank, group))
    doubled = functools.partial(functional.all_reduce, reduceOp="sum", group=group)
    errors.append(error_of(lambda: torch.func.vmap(doubled)(torch.ones(2, 2))))
    works.append(total(rank, group))
    group.close()
    return [errors, works]


def test_what_cannot_be_sent_is_an_error_at_once(cluster: Cluster) -> None:
    (others, works), (ours, also) = cluster.run(bring_what_cannot_be_sent, 2)
    assert ours[0][0] == "ValueError" and "layout torch.sparse_coo" in ours[0][1]
    assert others[0][0] == "CollectiveError" and "rank 1 did not come" in others[0][1]
    for errors in (ours, others):
        assert errors[1][0] == "RuntimeError" and "torch.func transform" in errors[1][1]
    for i in range(3):
        check_works([works[i], also[i]])


def run_out_of_memory(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    works = [total(rank, group)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def fail(*args: Any) -> None:
                raise MemoryError("after the processes have agreed")

            patch.setattr(hybrid_group, "exchange_of", fail)
        errors = [error_of(lambda: total(rank, group))]
    works.append(total(rank, group))
    group.close()
    return [errors, works]


def test_a_failure_after_the_agreement(cluster: Cluster) -> None:
    (others, works), (ours, also) = cluster.run(run_out_of_memory, 2)
    assert ours[0][0] == "MemoryError"
    assert others[0][0] == "CollectiveError"
    assert "all_reduce of all_reduce over 3 members" in others[0][1]
    assert "rank 1 did not come" in others[0][1]
    for i in range(2):
        check_works([works[i], also[i]])


def stay_away(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=1)
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
    works.append(total(rank, HybridGroup(timeout=20)))
    group.close()
    return [errors, works]


def test_a_process_that_stays_away_is_named(cluster: Cluster) -> None:
    (late, works), (waited, others) = cluster.run(stay_away, 2)
    assert waited[0][0] == "CollectiveTimeout"
    assert "plans for all_reduce(op='sum') of float32 ()" in waited[0][1]
    assert "rank 0 did not come" in waited[0][1] and "within 1" in waited[0][1]
    assert late[0][0] in ("CollectiveError", "CollectiveTimeout")
    for i in range(3):
        check_works([works[i], others[i]])


def run_forward_before_a_failure(rank: int, world_size: int) -> tuple[str, str]:
    group = HybridGroup(timeout=20)
    x = torch.ones(2, requires_grad=True)
    y = functional.all_reduce(x, "sum", group)
    group.close()
    functional.all_reduce(x, "sum", group)
    found = error_of(lambda: y.sum().backward())
    group.close()
    return found


def test_backward_over_a_link_that_is_gone(cluster: Cluster) -> None:
    for name, text in cluster.run(run_forward_before_a_failure, 2):
        assert name == "CollectiveError"
        assert "run forward again in every process" in text


# --- gradients in some processes -------------------------------------------------------------


def want_gradients_in_one(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    sources = [torch.full((2,), 3.0, requires_grad=m == 0) for m in range(3)]
    outputs = everywhere(rank, lambda m: functional.broadcast(sources[m], 0, group))
    recorded = [output.requires_grad for output in outputs]
    torch.stack([(m + 1) * y for m, y in enumerate(outputs, sum(COUNTS[:rank]))]).sum().backward()
    group.close()
    return [recorded, sources[0].grad]


def test_all_processes_take_part_in_backward(cluster: Cluster) -> None:
    (recorded, grad), (others, none) = cluster.run(want_gradients_in_one, 2)
    assert recorded == [True, True] and others == [True]
    assert grad is not None and none is None
    assert grad.tolist() == [6.0, 6.0]


def differentiate_again(rank: int, world_size: int) -> list[Any]:
    """Twice through one graph, and through a part that only one process needs."""
    group = HybridGroup(timeout=20)
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    early = functional.all_reduce(x, "sum", group)
    late = functional.all_reduce(x * x, "sum", group)
    late.sum().backward(retain_graph=True)
    late.sum().backward()
    first = x.grad
    x.grad = None
    early.sum().backward()
    group.close()
    return [first, x.grad]


def test_parts_of_a_graph_and_the_same_graph_again(cluster: Cluster) -> None:
    for rank, (first, second) in enumerate(cluster.run(differentiate_again, 2)):
        assert first.tolist() == [8.0 * (rank + 1)] * 2
        assert second.tolist() == [2.0, 2.0]


def switch_gradients_off_in_one(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(rank == 0):
        y = functional.all_reduce(x, "sum", group)
    error = error_of(lambda: y.sum().backward())
    works = total(rank, group)
    group.close()
    return [y.tolist(), y.requires_grad, error, works]


def test_a_process_without_gradients_is_named(cluster: Cluster) -> None:
    results = cluster.run(switch_gradients_off_in_one, 2)
    assert [values for values, *_ in results] == [[2.0, 2.0]] * 2
    assert [recorded for _, recorded, *_ in results] == [True, False]
    name, text = results[0][2]
    assert name == "RuntimeError"
    assert "gradients were switched off in rank 1" in text
    check_works([works for *_, works in results])


def swap_in_backward(rank: int, world_size: int) -> tuple[str, str]:
    group = HybridGroup(timeout=20)
    x = torch.ones(2, requires_grad=True)
    outputs = [functional.all_reduce(x * i, "sum", group) for i in range(2)]
    found = error_of(lambda: outputs[rank].sum().backward())
    group.close()
    return found


def test_another_order_in_backward_is_an_error_everywhere(cluster: Cluster) -> None:
    for name, text in cluster.run(swap_in_backward, 2):
        assert name == "RuntimeError"
        assert "rank 0 (member 0) came to all_reduce(op='sum') of float32 (2,) in the backward of "
        assert "collective 1 (all_reduce)" in text and "collective 2 (all_reduce)" in text
