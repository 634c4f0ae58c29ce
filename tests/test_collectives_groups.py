"""The groups that users may pass; groups over all replicas of all processes, and their misuse."""

from __future__ import annotations

import copy
import functools as partials
import gc
import pickle
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataparallel.collectives import HybridGroup, LocalGroup, functional, groups
from dataparallel.collectives.functional import resolve
from dataparallel.collectives.operations import Broadcast
from dataparallel.comm.link import ProcessLink
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
from tests.free_threading import settle
from tests.process_groups import new_group

# --- what stands for a group -----------------------------------------------------------------


def resolve_everything(rank: int, world_size: int) -> list[str]:
    """Return the values that do not resolve to their group. It takes four processes."""
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
        ("nobody", RuntimeError, "nobody"),
        *((ranks, ValueError, missing) for ranks in ([0, 1, 2, 3], [0, -1], [0, 1, 1], [], (0, 5))),
        ([(rank + 1) % 3], ValueError, missing),
        ([[(rank + 1) % 3]], ValueError, missing),
        (
            [[0, 1], [2]],
            ValueError,
            r"have one length.*got \[\[0, 1\], \[2\]\]; pass the list with",
        ),
        ([[0, 1], [1, 2]], ValueError, "no rank is in two of them"),
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


def refuse_lists(rank: int, world_size: int) -> None:
    """Torch, too, refuses lists of several lengths where the own list is a group. Three ranks."""
    row, _ = new_group([0, 1]), new_group([2])
    for lists in ([[0, 1], [2]], [[0, 1], [1, 2]]):
        with pytest.raises(ValueError, match=r"have one length, and no rank .* got \[\[0, 1\], \["):
            functional.all_reduce(torch.ones(1), "sum", lists)
    if rank < 2:
        assert resolve([[0, 1]]) == row.group_name
    dist.barrier()


def test_lists_that_are_no_groups_are_refused_in_all_ranks(cluster: Cluster) -> None:
    cluster.run(refuse_lists, 3)


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


def call_in_replicas(rank: int, world_size: int) -> list[str]:
    messages = []
    for group in ([0, 1], None):
        call = partials.partial(functional.all_reduce, reduceOp="sum", group=group)
        with pytest.raises(RuntimeError, match="pass group='hybrid' for all replicas") as raised:
            each(["cpu"] * 2, call, [torch.ones(4)] * 2)
        messages.append(str(raised.value))
        (single,) = each(["cpu"], call, [torch.ones(4)])
        assert single.tolist() == [2.0] * 4
    return messages


def test_processes_are_refused_in_one_of_several_replicas(cluster: Cluster) -> None:
    for messages in cluster.run(call_in_replicas, 2):
        assert all(re.search(r"in replica [01] of 2", message) for message in messages)


# --- groups over all replicas of all processes -----------------------------------------------


def use_by_name_twice(rank: int, world_size: int, path: str) -> list[Any]:
    hybrid: Any = resolve("hybrid")
    works = [total(rank, "hybrid")]
    dist.destroy_process_group()
    alone = everywhere(rank, lambda m: hybrid.place())
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    works.append(total(rank, "hybrid"))
    return [works, alone]


def test_the_default_group_follows_torch_distributed(cluster: Cluster, tmp_path: Any) -> None:
    results = cluster.run(use_by_name_twice, 2, str(tmp_path / "store"))
    for i in range(2):
        check_works([works[i] for works, _ in results])
    assert [alone for _, alone in results] == [[(0, 2), (1, 2)], [(0, 1)]]


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
    turns = len(group._turns_in_backward)
    del outputs, grad
    # The thread of a member may hold its call a moment longer.
    deadline = time.monotonic() + 5
    while gc.collect() or any(node() is not None for node in nodes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    alive = sum(node() is not None for node in nodes)
    return [held, turns, alive, weakref.ref(group._current())]


def leave_things_behind(rank: int, world_size: int) -> list[Any]:
    held, turns, alive, link = use_and_drop(rank)
    gc.collect()
    settle()
    return [held, turns, alive, link() is None]


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    assert cluster.run(leave_things_behind, 2) == [[0, 0, 0, True]] * 2


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
        assert "rank 0 (2 members): all_reduce(op='sum') of float32 (2,)" in texts[0]
        assert "rank 1 (1 members): all_reduce(op='sum') of float32 (3,)" in texts[0]
        assert "all_gather_tensor(dim=0)" in texts[1] and "broadcast(root=0)" in texts[1]
        assert "(2 members): the number of members" in texts[2]
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
    return everywhere(rank, lambda m: group.run(Broadcast(root=0), x))


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
            patch.setattr(groups, "exchange_of", fail)
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
    group = HybridGroup(timeout=2.0)
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
    assert "rank 0 did not come" in waited[0][1] and "within 2" in waited[0][1]
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
        assert ": all_reduce(op='sum') of float32 (2,) in the backward of " in swapped[1]
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
