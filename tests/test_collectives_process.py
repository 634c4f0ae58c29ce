"""Collectives over process groups that others leave, come late to, or call differently."""

from __future__ import annotations

import _thread
import datetime
import itertools
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataparallel.collectives import CollectiveMismatch, functional, named, set_checks
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.failures import failures_of, report
from dataparallel.comm.link import ProcessLink
from tests import collective_cases as cases
from tests.cluster import Cluster, RankDied
from tests.process_groups import new_group


def total(group: dist.ProcessGroup | None = None) -> float:
    return float(functional.all_reduce(torch.ones(1), "sum", group or dist.group.WORLD))


# --- what happens between the launch and the wait --------------------------------------------


def overwrite(rank: int, world_size: int) -> list[str]:
    """Write to the input before the other process has come; nothing may show in the results."""
    control = new_group()
    xs = [cases.numbers(i, torch.float32) for i in range(world_size)]
    faults = []
    for case in (*cases.copies(), *cases.reductions("sum"), *cases.reductions("max")):
        for late in range(world_size):
            mine = xs[rank].clone()
            if rank == late:
                dist.barrier(control)
            found = case.call(mine, dist.group.WORLD)
            mine.fill_(77)
            if rank != late:
                dist.barrier(control)
            found = functional.wait_tensor(found)
            faults += cases.check(case, [found], [xs[rank]], xs, rank)
    return faults


def wait_in_another_order(rank: int, world_size: int) -> list[str]:
    """And launch in one mode, wait in another one, in other threads."""
    faults = []
    xs = [cases.numbers(i, torch.float32) for i in range(world_size)]
    chosen = [*cases.copies(), *cases.reductions("avg")]
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for launch_in, wait_in in itertools.product(modes, modes):
        with launch_in():
            launched = [case.call(xs[rank], dist.group.WORLD) for case in chosen]
        waited: list[torch.Tensor] = []

        def wait(launched: Any, waited: list[torch.Tensor], mode: Any) -> None:
            with mode():
                waited.extend(functional.wait_tensor(each) for each in reversed(launched))

        thread = threading.Thread(target=wait, args=(launched, waited, wait_in))
        thread.start()
        thread.join()
        for case, found in zip(reversed(chosen), waited, strict=True):
            with torch.inference_mode(found.is_inference()):
                fault = cases.check(case, [found], [xs[rank]], xs, rank)
            faults += [f"{launch_in.__name__}, {wait_in.__name__}, {x}" for x in fault]
    return faults


def drop_without_a_wait(rank: int, world_size: int) -> list[str]:
    for _ in range(50):
        functional.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)
    dist.barrier()
    return [] if total() == world_size else ["another result"]


@pytest.mark.parametrize("kind", [overwrite, wait_in_another_order, drop_without_a_wait])
def test_between_launch_and_wait(cluster: Cluster, kind: Any) -> None:
    assert cluster.run(kind, 2) == [[], []]


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
    ]
    messages = []
    groups = [new_group(timeout=datetime.timedelta(seconds=1)) for _ in calls]
    for group in groups:
        set_checks("off", group)
    if rank == 0:
        pairs = zip(calls, groups, strict=True)
        for result in [call(torch.ones(4, 3), group) for call, group in pairs]:
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
    for i, (operation, name) in enumerate(zip(operations, names, strict=True)):
        assert messages[2 * i] == messages[2 * i + 1]
        assert messages[2 * i].startswith(
            f"rank 0: {operation} of a tensor (4, 3) of float32 (collective 1) for "
            f"'process group {name}' over 2 processes did not complete within"
        )


def lose_a_process(rank: int, world_size: int) -> str:
    assert total() == 2
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


def wait_for_one_that_raised(rank: int, world_size: int, late: bool) -> str:
    link = ProcessLink(purpose="test", timeout=30)
    members = new_group([0, 1])
    done = new_group()
    if rank < 2:
        assert total(members) == 2
    if rank == 1:
        if late:
            dist.barrier(done)
        report(ZeroDivisionError("no data"), "the forward of layer 3")
    elif late:
        dist.barrier(done)
    else:
        # Until it is known here.
        threading.Event().wait(0.5)
    text = ""
    if rank == 0:
        with pytest.raises(CollectiveError, match="was given up after") as raised:
            total(members)
        text = str(raised.value)
        assert raised.value.failure is not None and raised.value.failure.rank == 1
        with pytest.raises(CollectiveError, match=r"make a new group[\s\S]*no data"):
            total(members)
    dist.barrier()
    link.close()
    return text


@pytest.mark.parametrize("late", [False, True])
def test_the_error_of_another_process_ends_a_wait(cluster: Cluster, late: bool) -> None:
    text = cluster.run(wait_for_one_that_raised, 3, late)[0]
    assert "all_reduce of a tensor (1,) of float32 (collective 2) for 'process group" in text
    assert "rank 1 (process " in text
    assert "failed in the forward of layer 3: ZeroDivisionError: no data" in text


def go_on_after_an_error(rank: int, world_size: int) -> float:
    """An error of a process outside of the group ends no wait, nor does one that is over."""
    link = ProcessLink(purpose="test", timeout=30)
    world = dist.group.WORLD
    assert world is not None and total() == world_size
    members = new_group([0, 1])
    if rank == 2:
        report(ZeroDivisionError("no data"), "the forward of layer 3")
    else:
        # Until it is known here.
        deadline = time.monotonic() + 10
        while not failures_of(world).while_waiting() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        if rank == 1:
            # Slow, but on its way.
            threading.Event().wait(0.5)
        assert total(members) == 2
    dist.barrier()
    link.close()
    again = ProcessLink(purpose="test", timeout=30)
    if rank == 1:
        threading.Event().wait(0.5)
    found = total()
    again.close()
    return found


def test_an_error_of_no_concern_ends_no_wait(cluster: Cluster) -> None:
    assert cluster.run(go_on_after_an_error, 3) == [3, 3, 3]


# --- others that call something else ---------------------------------------------------------


def call_differently(rank: int, world_size: int) -> list[str]:
    """Each time the group works again. Beside these, tests/faults/test_mismatch.py."""
    group = new_group()
    set_checks("always", group)
    x = torch.ones(4)
    texts = []
    for number in range(8):
        calls: list[Any] = [
            lambda n: functional.all_reduce(x, "max" if n else "sum", group),
            lambda n: functional.all_to_all_single(x, [2, 2], [1, 3] if n else [2, 2], group),
        ]
        with named("tokens"), pytest.raises(CollectiveMismatch) as raised:
            calls[number % 2](rank)
        texts.append(str(raised.value))
        assert total(group) == world_size
    set_checks("off", group)
    assert total(group) == world_size
    return texts


def test_different_collectives_are_named_by_all(cluster: Cluster) -> None:
    first, second = cluster.run(call_differently, 2)
    assert first == second
    assert "rank 0: tokens: all_reduce(op='sum') of float32 (4,)" in first[0]
    assert "rank 1: tokens: all_reduce(op='max') of float32 (4,)" in first[0]
    assert "as number 13 of" in first[6] and "all processes can go on" in first[6]
    assert "member 1 gives 1 rows to member 0, which expects 2" in first[1]
    with pytest.raises(ValueError, match="checks must be 'off', 'sampled' or 'always'"):
        set_checks("sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got one of replicas"):
        set_checks("off", "local")
