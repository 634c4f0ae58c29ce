"""The life of groups over all replicas of all processes, and who is in them."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel.collectives import functional
from dataparallel.collectives.groups import resolve
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.threads.apply import current_replica, parallel_apply
from tests.cluster import Cluster
from tests.hybrid_cases import check_works, error_of, everywhere, total
from tests.process_groups import new_group


def use_by_name_twice(rank: int, world_size: int, path: str) -> list[Any]:
    link = resolve("hybrid")._link  # type: ignore[union-attr]
    works = [total(rank, "hybrid")]
    assert link._link is not None
    dist.destroy_process_group()
    assert link._link is None, "the default group is gone, and so is what belongs to it"
    alone = everywhere(rank, lambda m: (resolve("hybrid").size(), resolve("hybrid").rank()))  # type: ignore[union-attr]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    works.append(total(rank, "hybrid"))
    return [works, alone]


def test_the_default_group_follows_torch_distributed(cluster: Cluster, tmp_path: Any) -> None:
    results = cluster.run(use_by_name_twice, 2, str(tmp_path / "store"))
    for i in range(2):
        check_works([works[i] for works, _ in results])
    assert [alone for _, alone in results] == [[(2, 0), (2, 1)], [(1, 0)]]


def count_members(rank: int, world_size: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    places = everywhere(rank, lambda m: (group.size(), group.rank()))
    outside = (group.size(), group.rank())
    group.close()
    return [places, outside]


def test_size_and_rank_count_all_members(cluster: Cluster) -> None:
    (first, outside), (second, also) = cluster.run(count_members, 2)
    assert first == [(3, 0), (3, 1)] and second == [(3, 2)]
    assert outside == (2, 0) and also == (2, 1)


def use_a_subgroup(rank: int, world_size: int) -> Any:
    pair = new_group([0, 2])
    group = HybridGroup(None if rank == 1 else pair, timeout=20)
    if rank == 1:
        return None
    x = torch.tensor(float(rank + 1), requires_grad=True)
    y = functional.all_reduce(x, "product", group)
    y.backward()
    dist.destroy_process_group(pair)
    name, text = error_of(lambda: functional.all_reduce(x, "sum", group))
    return [y.item(), x.grad.item() if x.grad is not None else None, name, text]


def test_a_group_over_some_processes(cluster: Cluster) -> None:
    first, nothing, last = cluster.run(use_a_subgroup, 3)
    assert nothing is None
    # The gradient of both members' results.
    assert first[:2] == [3.0, 6.0] and last[:2] == [3.0, 2.0]
    assert first[2] == "ValueError" and "was destroyed" in first[3]


def use_and_drop(rank: int) -> list[Any]:
    group = HybridGroup(timeout=20)
    x = torch.ones(2, requires_grad=True)
    outputs = everywhere(rank, lambda m: functional.all_reduce(x * m, "sum", group))
    held = len(group._turns)
    nodes = [weakref.ref(output.grad_fn) for output in outputs]
    (grad,) = torch.autograd.grad(torch.stack(outputs).square().sum(), x, create_graph=True)
    turn = group._link._turn
    del outputs, grad
    gc.collect()
    alive = sum(node() is not None for node in nodes)
    return [held, turn, alive, weakref.ref(group._link.current())]


def leave_things_behind(rank: int, world_size: int) -> list[Any]:
    held, turn, alive, link = use_and_drop(rank)
    gc.collect()
    return [held, turn, alive, link() is None]


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    assert cluster.run(leave_things_behind, 2) == [[0, None, 0, True]] * 2


def test_alone_it_is_a_local_group() -> None:
    group = HybridGroup(timeout=5)
    xs = [torch.tensor([float(i)], requires_grad=True) for i in range(3)]

    def forward(x: Tensor) -> Tensor:
        replica = current_replica()
        assert replica is not None and (group.size(), group.rank()) == (3, replica.index)
        return functional.all_gather_tensor(x, 0, group)

    outputs = parallel_apply([forward] * 3, xs, devices=["cpu"] * 3)
    torch.stack(outputs).sum().backward()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0, 2.0]] * 3
    assert [x.grad.item() for x in xs if x.grad is not None] == [3.0] * 3
    assert (group.size(), group.rank()) == (1, 0)
    group.close()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="timeout is a positive number of seconds, but got 0"):
        HybridGroup(timeout=0)
    assert re.fullmatch(r"HybridGroup\(timeout=2\)", repr(HybridGroup(timeout=2)))


def test_modules_that_hold_a_group_can_be_copied_and_saved() -> None:
    group = HybridGroup(timeout=20)
    assert copy.deepcopy({"group": group})["group"] is group
    loaded = pickle.loads(pickle.dumps(group))
    assert isinstance(loaded, HybridGroup) and loaded.timeout == 20


def pickle_group(rank: int, world_size: int) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled, .* or use 'hybrid'"):
        pickle.dumps(HybridGroup(dist.group.WORLD))


def test_a_group_over_a_process_group_says_that_it_cannot_be_saved(cluster: Cluster) -> None:
    cluster.run(pickle_group, 1)


def multiply_a_constant(rank: int, world_size: int) -> Any:
    group = HybridGroup(timeout=20)
    with torch.inference_mode():
        constant = torch.full((3,), 2.0)
    x = torch.full((3,), 5.0, requires_grad=True)
    # Each member's loss depends on the result, and so do the gradients of both.
    functional.all_reduce(x if rank else constant, "product", group).sum().backward()
    group.close()
    return x.grad


def test_what_one_process_made_in_inference_mode_is_a_constant(cluster: Cluster) -> None:
    nothing, grad = cluster.run(multiply_a_constant, 2)
    assert nothing is None
    assert grad.tolist() == [4.0] * 3
