"""What users may pass as a group, what they get for anything else, and how long groups live."""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dataparallel
from dataparallel.collectives import HybridGroup, LocalGroup, functional
from dataparallel.collectives.groups import resolve
from dataparallel.comm.link import ProcessLink
from dataparallel.threads.apply import current_replica
from tests.cluster import Cluster
from tests.collective_cases import check_works, each, error_of, everywhere, total
from tests.process_groups import new_group

# --- what stands for a group -----------------------------------------------------------------


def resolve_everything(rank: int, world_size: int) -> list[str]:
    """What does not resolve to the group that it stands for. Four processes."""
    faults = []
    world = dist.group.WORLD
    assert world is not None
    rows = [new_group([0, 1]), new_group([2, 3])]
    columns = [new_group([0, 2]), new_group([1, 3])]
    tagged: Any = dist.distributed_c10d._new_group_with_tag([0, 1, 2, 3], pg_tag="other")
    row, column = rows[rank // 2], columns[rank % 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    line = init_device_mesh("cpu", (4,))
    expected: list[tuple[Any, Any]] = [
        (world, world),
        (None, world),
        (world.group_name, world),
        (row, row),
        (row.group_name, row),
        ([3, 1, 0, 2], world),
        (range(4), world),
        ([0, 1] if rank < 2 else [2, 3], row),
        ([[0, 1], [2, 3]], row),
        ([[0, 2], [1, 3]], column),
        ([(0, 1), (2, 3)], row),
        (line, line.get_group()),
        ((mesh, 0), mesh.get_group(0)),
        ((mesh, 1), mesh.get_group(1)),
        ((mesh, "column"), mesh.get_group("column")),
        (mesh["row"], mesh.get_group("row")),
    ]
    for given, group in expected:
        if resolve(given) != group.group_name:
            faults.append(f"{given}: {resolve(given)}")
        found = functional.all_reduce(torch.tensor(10**rank), "sum", given).item()
        if found != sum(10**member for member in dist.get_process_group_ranks(group)):
            faults.append(f"{given}: total {found}")
    if resolve([0, 1, 2, 3], "other") != tagged.group_name:
        faults.append("the tag is ignored")
    return faults


def test_everything_that_stands_for_a_group(cluster: Cluster) -> None:
    assert cluster.run(resolve_everything, 4) == [[]] * 4


def refuse(rank: int, world_size: int) -> list[str]:
    """Bad groups that are not refused as they should be. Three processes."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b"))
    gone, outside = new_group(), new_group([1])
    part = DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group(gone)
    missing = r"no process group over the ranks .* in rank \d; make it once, in every process"
    bad: list[tuple[Any, Any, str]] = [
        ("nobody", ValueError, "there is no process group 'nobody'"),
        *((ranks, ValueError, missing) for ranks in ([0, 1, 2, 3], [0, -1], [0, 1, 1], [], (0, 5))),
        ([(rank + 1) % 3], ValueError, missing),
        ([[(rank + 1) % 3]], ValueError, missing),
        ([0, [5]], TypeError, "not supported between"),
        (["0", "1"], TypeError, "requires string"),
        (mesh, RuntimeError, "2 dimensions"),
        ((mesh, "c"), KeyError, "c"),
        ((mesh, 2), IndexError, "range"),
        (gone, ValueError, "was destroyed"),
        (3, TypeError, "group is a ProcessGroup with this process in it, .* but got 3"),
    ]
    if rank != 1:
        bad.append((outside, TypeError, "with this process in it"))
    if rank == 2:
        bad.append((part, Exception, ""))
    else:
        assert functional.all_reduce(torch.ones(1), "sum", part).item() == 2.0
    faults = []
    for group, error, message in bad:
        try:
            functional.all_reduce(torch.ones(1), "sum", group)
        except error as raised:
            if not re.search(message, str(raised)):
                faults.append(f"{group}: {raised}")
        except Exception as raised:
            faults.append(f"{group}: {raised!r}")
        else:
            faults.append(f"{group} is taken")
    # A process that leaves at once would break the connection that another still makes.
    dist.barrier()
    return faults


def test_bad_groups_are_refused_with_a_reason(cluster: Cluster) -> None:
    assert cluster.run(refuse, 3) == [[]] * 3


def avoid_links(rank: int, world_size: int) -> None:
    """A link has a process group over the same ranks, which belongs to it alone."""
    group = new_group([0, 1])
    if rank != 2:
        assert resolve([0, 1]) == group.group_name
        link = ProcessLink(group, purpose="test")
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match=r"over the ranks \[0, 1\] in rank"):
            resolve([0, 1])
        link.close()
    dist.barrier()


def test_the_groups_of_links_are_not_found_by_their_ranks(cluster: Cluster) -> None:
    cluster.run(avoid_links, 3)


@pytest.mark.parametrize("group", [None, "0", [0, 1], (1, 2)])
def test_without_torch_distributed(group: Any) -> None:
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group\(\)"):
        functional.all_reduce(torch.ones(1), "sum", group)


class CallsOverProcesses(torch.nn.Module):
    """Means a collective over processes, in every replica."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * self.weight, "sum", self.group)


def call_in_replicas(rank: int, world_size: int) -> list[str]:
    messages = []
    for group in ([0, 1], None):
        module = CallsOverProcesses(group)
        several = dataparallel.DataParallel(module, ["cpu", "cpu"])
        with pytest.raises(RuntimeError, match="pass group='hybrid' for all replicas") as raised:
            several(torch.ones(4, 1))
        messages.append(str(raised.value))
        single = dataparallel.DataParallel(module, ["cpu"])
        assert single(torch.ones(4, 1)).tolist() == [[2.0]] * 4
        several.close()
        single.close()
    return messages


def test_processes_are_refused_in_one_of_several_replicas(cluster: Cluster) -> None:
    for messages in cluster.run(call_in_replicas, 2):
        assert all(re.search(r"in replica [01] of 2", message) for message in messages)


# --- groups over all replicas of all processes -----------------------------------------------


def use_by_name_twice(rank: int, world_size: int, path: str) -> list[Any]:
    hybrid: Any = resolve("hybrid")
    works = [total(rank, "hybrid")]
    dist.destroy_process_group()
    assert hybrid._link is None, "the default group is gone, and so is what belongs to it"
    alone = everywhere(rank, lambda m: hybrid.place())
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    works.append(total(rank, "hybrid"))
    return [works, alone]


def test_the_default_group_follows_torch_distributed(cluster: Cluster, tmp_path: Any) -> None:
    results = cluster.run(use_by_name_twice, 2, str(tmp_path / "store"))
    for i in range(2):
        check_works([works[i] for works, _ in results])
    assert [alone for _, alone in results] == [[(0, 2), (1, 2)], [(0, 1)]]


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
    turn = group._turn
    del outputs, grad
    gc.collect()
    alive = sum(node() is not None for node in nodes)
    return [held, turn, alive, weakref.ref(group._current())]


def leave_things_behind(rank: int, world_size: int) -> list[Any]:
    held, turn, alive, link = use_and_drop(rank)
    gc.collect()
    return [held, turn, alive, link() is None]


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    assert cluster.run(leave_things_behind, 2) == [[0, None, 0, True]] * 2


def test_alone_it_is_a_local_group() -> None:
    group = HybridGroup(timeout=5)
    xs = [torch.tensor([float(i)], requires_grad=True) for i in range(3)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        replica = current_replica()
        assert replica is not None and group.place() == (replica.index, 3)
        return functional.all_gather_tensor(x, 0, group)

    outputs = each(["cpu"] * 3, forward, xs)
    torch.stack(outputs).sum().backward()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0, 2.0]] * 3
    assert [x.grad.item() for x in xs if x.grad is not None] == [3.0] * 3
    assert (group.size(), group.rank()) == (1, 0)


def test_groups_of_replicas_as_objects() -> None:
    assert type(resolve("local")) is LocalGroup and type(resolve("hybrid")) is HybridGroup
    group = HybridGroup(timeout=20)
    assert resolve(group) is group and repr(group) == "HybridGroup(timeout=20)"
    # Modules that hold a group can be copied and saved.
    assert copy.deepcopy({"group": group})["group"] is group
    loaded = pickle.loads(pickle.dumps(group))
    assert isinstance(loaded, HybridGroup) and loaded.timeout == 20
    for kind in (LocalGroup, HybridGroup):
        with pytest.raises(ValueError, match="timeout is a positive number of seconds, but got 0"):
            kind(timeout=0)
