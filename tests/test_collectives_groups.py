"""What users may pass as a group, and what they get for anything else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dataparallel
from dataparallel.collectives import functional
from dataparallel.collectives.groups import resolve
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster
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
        ([0, 1, 2, 3], world),
        ([3, 1, 0, 2], world),
        (range(4), world),
        ([0, 1] if rank < 2 else [2, 3], row),
        ([[0, 1], [2, 3]], row),
        ([[0, 2], [1, 3]], column),
        ([[0, 1, 2, 3]], world),
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
        total = functional.all_reduce(torch.tensor(10**rank), "sum", given).item()
        if total != sum(10**member for member in dist.get_process_group_ranks(group)):
            faults.append(f"{given}: total {total}")
    if resolve([0, 1, 2, 3], "other") != tagged.group_name:
        faults.append("the tag is ignored")
    return faults


def test_everything_that_stands_for_a_group(cluster: Cluster) -> None:
    for faults in cluster.run(resolve_everything, 4):
        assert not faults


def test_groups_of_replicas() -> None:
    mine, all_of_them = LocalGroup(timeout=5), HybridGroup(timeout=5)
    assert resolve(mine) is mine
    assert resolve(all_of_them) is all_of_them
    assert type(resolve("local")) is LocalGroup
    assert type(resolve("hybrid")) is HybridGroup


def avoid_links(rank: int, world_size: int) -> None:
    """A link has a process group over the same ranks, which belongs to it alone."""
    group = new_group([0, 1])
    if rank != 2:
        assert resolve([0, 1]) == group.group_name
        link = ProcessLink(group, purpose="test")
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match=r"over the ranks \[0, 1\]; make it once"):
            resolve([0, 1])
        link.close()
    dist.barrier()


def test_the_groups_of_links_are_not_found_by_their_ranks(cluster: Cluster) -> None:
    cluster.run(avoid_links, 3)


# --- what does not ---------------------------------------------------------------------------


def refuse(rank: int, world_size: int) -> list[str]:
    """Bad groups that are not refused as they should be. Two processes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    gone = new_group()
    dist.destroy_process_group(gone)
    outside = new_group([1])
    bad: list[tuple[Any, type[Exception], str]] = [
        ("nobody", ValueError, "there is no process group 'nobody'"),
        *(
            (ranks, ValueError, f"is no group: one has different ranks .*, rank {rank}, is among")
            for ranks in ([0, 1, 2], [0, -1], [0, 1, 1], [[0], [1, 0]], [1 - rank], [[1 - rank]])
        ),
        ([], ValueError, "is no group"),
        ([[]], ValueError, "is no group"),
        ([0, [1]], ValueError, "a list of ranks, or a list of such lists"),
        ([0.0, 1.0], TypeError, "consists of ranks, but got 0.0"),
        ([True, False], TypeError, "consists of ranks, but got True"),
        (["0", "1"], TypeError, "consists of ranks, but got '0'"),
        (mesh, ValueError, r"this one has 2; pass \(mesh, dim\)"),
        ((mesh, 2), ValueError, "one of the 2 dimensions of the mesh called 'a', 'b', but got 2"),
        ((mesh, "c"), ValueError, "one of the 2 dimensions .* but got 'c'"),
        ((0, 1), ValueError, r"a tuple as a group is \(DeviceMesh, dim\), but got \(int, int\)"),
        ((mesh,), ValueError, r"but got \(DeviceMesh\)"),
        (gone, ValueError, "was destroyed"),
        (3, TypeError, "group is a ProcessGroup, the name of one, .* but got int"),
    ]
    if rank == 0:
        bad.append((outside, ValueError, "rank 0 is not in the process group"))
    faults = []
    for group, error, message in bad:
        try:
            functional.all_reduce(torch.ones(1), "sum", group)
        except error as raised:
            if not re.search(message, str(raised)):
                faults.append(f"{group}: {raised}")
        else:
            faults.append(f"{group} is taken")
    # A process that leaves at once would break the connection that another still makes.
    dist.barrier()
    return faults


def test_bad_groups_are_refused_with_a_reason(cluster: Cluster) -> None:
    for faults in cluster.run(refuse, 2):
        assert not faults


def leave_the_mesh(rank: int, world_size: int) -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match=r"rank 2 is not in the mesh of ranks \[0, 1\]"):
            functional.all_reduce(torch.ones(1), "sum", mesh)
    else:
        assert functional.all_reduce(torch.ones(1), "sum", mesh).item() == 2.0
    dist.barrier()


def test_a_process_outside_of_the_mesh(cluster: Cluster) -> None:
    cluster.run(leave_the_mesh, 3)


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
    world = dist.group.WORLD
    assert world is not None
    messages = []
    for group in (world, world.group_name, [0, 1], None):
        module = CallsOverProcesses(group)
        several = dataparallel.DataParallel(module, ["cpu", "cpu"])
        with pytest.raises(RuntimeError, match="pass group='hybrid' for all replicas") as raised:
            several(torch.ones(4, 1))
        messages.append(str(raised.value))
        several.close()
        single = dataparallel.DataParallel(module, ["cpu"])
        assert single(torch.ones(4, 1)).tolist() == [[2.0]] * 4
        single.close()
    return messages


def test_processes_are_refused_in_one_of_several_replicas(cluster: Cluster) -> None:
    for messages in cluster.run(call_in_replicas, 2):
        assert all(re.search(r"in replica [01] of 2", message) for message in messages)
