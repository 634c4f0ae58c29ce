"""Collectives over process groups that others leave, and tensors that change meanwhile."""

from __future__ import annotations

import _thread
import datetime
import itertools
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataparallel.collectives import functional
from dataparallel.collectives.checks import set_checks
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from tests import collective_cases as cases
from tests.cluster import Cluster, RankDied
from tests.process_groups import new_group

# --- what happens between the launch and the wait --------------------------------------------


def overwrite(rank: int, world_size: int) -> list[str]:
    """Write to the input before the other process has come; nothing may show in the results."""
    control = new_group()
    faults = []
    for case in (*cases.copies(), *cases.reductions("sum"), *cases.reductions("max")):
        for late in range(world_size):
            xs = [cases.numbers(i, torch.float32) for i in range(world_size)]
            mine = xs[rank].clone()
            if rank == late:
                dist.barrier(control)
            found = case.call(mine, dist.group.WORLD)
            mine.fill_(77)
            if rank != late:
                dist.barrier(control)
            fault = cases.fault_of(functional.wait_tensor(found), case.expected(xs, rank))
            faults += [] if fault is None else [f"{case.name}: {fault}"]
    return faults


def test_the_input_may_change_before_the_wait(cluster: Cluster) -> None:
    for faults in cluster.run(overwrite, 2):
        assert not faults


def wait_in_another_order(rank: int, world_size: int) -> list[str]:
    faults = []
    for _ in range(20):
        xs = [cases.numbers(i, torch.float32) for i in range(world_size)]
        chosen = [*cases.copies(), *cases.reductions("avg")]
        found = [case.call(xs[rank], dist.group.WORLD) for case in chosen]
        for case, result in reversed(list(zip(chosen, found, strict=True))):
            if fault := cases.fault_of(functional.wait_tensor(result), case.expected(xs, rank)):
                faults.append(f"{case.name}: {fault}")
    return [*faults, *(["left over"] * 0)]


def test_waits_come_in_any_order(cluster: Cluster) -> None:
    for faults in cluster.run(wait_in_another_order, 3):
        assert not faults


def wait_elsewhere(rank: int, world_size: int) -> list[str]:
    """Launch in one mode and thread, wait in another one."""
    faults = []
    xs = [cases.numbers(i, torch.float32) for i in range(world_size)]
    chosen = [*cases.copies(), *cases.reductions("avg")]
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for launch_in, wait_in in itertools.product(modes, modes):
        for case in chosen:
            with launch_in():
                found = case.call(xs[rank], dist.group.WORLD)
            waited: list[torch.Tensor] = []

            def wait(found: torch.Tensor, waited: list[torch.Tensor], mode: Any) -> None:
                with mode():
                    waited.append(functional.wait_tensor(found))

            thread = threading.Thread(target=wait, args=(found, waited, wait_in))
            thread.start()
            thread.join()
            if fault := cases.fault_of(waited[0], case.expected(xs, rank)):
                faults.append(f"{launch_in.__name__}, {wait_in.__name__}, {case.name}: {fault}")
    return faults


def test_waits_in_other_threads_and_modes(cluster: Cluster) -> None:
    for faults in cluster.run(wait_elsewhere, 2):
        assert not faults


def drop_without_a_wait(rank: int, world_size: int) -> int:
    for _ in range(50):
        functional.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)
    dist.barrier()
    functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
    return 0


def test_results_that_nobody_waits_for_are_given_up(cluster: Cluster) -> None:
    assert cluster.run(drop_without_a_wait, 2) == [0, 0]


def interrupt(rank: int, world_size: int) -> list[float]:
    control = new_group()
    if rank == 1:
        dist.barrier(control)
    found = functional.all_reduce(torch.tensor([1.0 + rank]), "avg", dist.group.WORLD)
    if rank == 0:
        threading.Timer(0.1, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            functional.wait_tensor(found)
        dist.barrier(control)
    values: list[float] = found.tolist()
    return values


def test_a_wait_can_be_interrupted_and_repeated(cluster: Cluster) -> None:
    assert cluster.run(interrupt, 2) == [[1.5], [1.5]]


# --- others that do not come -----------------------------------------------------------------


def wait_for_nobody(rank: int, world_size: int) -> list[str]:
    control = new_group()
    calls: list[Any] = [
        lambda x, group: functional.all_reduce(x, "sum", group),
        lambda x, group: functional.all_gather_tensor(x, 1, group),
        lambda x, group: functional.all_to_all_single(x, None, None, group),
        lambda x, group: functional.broadcast(x, 1, group),
        lambda x, group: functional.reduce_scatter_tensor(x, "max", 0, group),
    ]
    messages = []
    groups = [new_group(timeout=datetime.timedelta(seconds=1)) for _ in calls]
    if rank == 0:
        launched = [
            call(torch.ones(4, 3), group) for call, group in zip(calls, groups, strict=True)
        ]
        for result in launched:
            for _ in range(2):
                # Again at every use: what is in the memory is not the result.
                with pytest.raises(CollectiveTimeout, match=r"rank 1 did not come") as raised:
                    result.sum()
                messages.append(str(raised.value))
                assert raised.value.__cause__ is not None
    dist.barrier(control)
    return [group.group_name for group in groups] if rank == 1 else messages


def test_a_process_that_does_not_come_is_named(cluster: Cluster) -> None:
    messages, names = cluster.run(wait_for_nobody, 2)
    operations = ["all_reduce", "all_gather_tensor", "all_to_all_single", "broadcast"]
    for i, (operation, name) in enumerate(zip(operations, names, strict=False)):
        assert messages[2 * i] == messages[2 * i + 1]
        assert messages[2 * i].startswith(
            f"rank 0: {operation} of a tensor (4, 3) of float32 (collective 1) for "
            f"'process group {name}' over 2 processes did not complete within"
        )


def lose_a_process(rank: int, world_size: int) -> str:
    functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
    if rank == 1:
        os._exit(3)
    with pytest.raises(
        (CollectiveError, CollectiveTimeout), match=r"rank 1 \(process \d+ on .*\) has ended"
    ):
        functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD).sum()
    with pytest.raises((CollectiveError, CollectiveTimeout), match="rank 1") as raised:
        functional.all_gather_tensor(torch.ones(5), 0, dist.group.WORLD).sum()
    return str(raised.value)


def test_a_process_that_ended_is_named(cluster: Cluster) -> None:
    message, ended = cluster.run(lose_a_process, 2, timeout=20, expect_errors=True)
    assert isinstance(ended, RankDied)
    assert isinstance(message, str), message
    assert "all_gather_tensor of a tensor (5,) of float32 (collective 3)" in message


def come_with_another_shape(rank: int, world_size: int) -> list[str]:
    # These names have no types.
    module: Any = dist
    level = module.get_debug_level()
    module.set_debug_level(module.DebugLevel.DETAIL)
    try:
        groups = [new_group() for _ in range(2)]
    finally:
        module.set_debug_level(level)
    for group in groups:
        set_checks("off", group)
    assert functional.all_reduce(torch.ones(3), "max", groups[0]).tolist() == [1.0] * 3
    mine = torch.ones(2 + 2 * rank)
    messages = []
    for call in (
        lambda: functional.broadcast(mine, 0, groups[0]),
        lambda: functional.all_reduce(mine, "sum", groups[1]),
    ):
        with pytest.raises(CollectiveError, match=f"rank {1 - rank} is at") as raised:
            functional.wait_tensor(call())
        messages.append(str(raised.value))
    dist.barrier()
    return messages


def test_other_shapes_are_named_at_the_debug_level_of_torch(cluster: Cluster) -> None:
    (broadcast, total), _ = cluster.run(come_with_another_shape, 2)
    assert "rank 1 is at broadcast of a tensor (4,) of float32" in broadcast
    assert "rank 1 is at all_reduce of a tensor (4,) of float32" in total
