"""How processes agree on a part of a store in which others have been: here each is a thread."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from dataparallel.comm.process_errors import CollectiveTimeout
from dataparallel.extras.process_start import agreement
from dataparallel.extras.process_start.agreement import Agreement, agree
from dataparallel.extras.process_start.membership import Membership

# Seconds that nobody waits for unless something is broken.
LONG = 30.0


def together(
    store: HashStore, world_size: int, *, run: str = "none", timeout: float = LONG
) -> list[Agreement]:
    """What all ranks agree upon."""
    with ThreadPoolExecutor(world_size) as pool:
        members = [Membership(rank, world_size, run=run) for rank in range(world_size)]
        return list(pool.map(lambda member: agree(store, member, timeout), members))


def outcome(call: Callable[[], object]) -> object:
    """What it returns or raises."""
    try:
        return call()
    except Exception as error:
        return error


def leave_behind(store: HashStore, rank: int, world_size: int) -> None:
    """What a process leaves that was killed while it waited for the others."""
    hello = {
        "nonce": f"left by {rank}",
        "world_size": world_size,
        "restart": 0,
        "host": "gone",
        "pid": 1,
        "machine": None,
        "left": None,
    }
    store.set(f"dataparallel/start/none/hello/{rank}", json.dumps(hello))


def join_as_gone(store: HashStore, rank: int) -> bool:
    """What a process leaves that was killed after it had joined the first plan."""
    if not store.check(["dataparallel/start/none/plan"]):
        return False
    store.set(f"dataparallel/start/none/1/ack/{rank}", "")
    return True


def poll(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_get_the_same_part_and_never_one_that_was_used(world_size: int) -> None:
    store = HashStore()
    prefixes = []
    for _ in range(4):
        (prefix,) = {each.prefix for each in together(store, world_size)}
        prefixes.append(prefix)
    prefixes.append(together(store, world_size, run="another run")[0].prefix)
    assert len(set(prefixes)) == 5


def test_what_a_killed_attempt_left_is_never_taken_for_a_process() -> None:
    """Any subset of the ranks had come before the attempt was ended, in any order of return."""
    chance = random.Random(0)
    for _ in range(30):
        store, world_size = HashStore(), chance.randint(2, 4)
        used = [each.prefix for each in together(store, world_size)] * chance.randint(0, 1)
        for rank in range(world_size):
            if chance.random() < 0.6:
                leave_behind(store, rank, chance.choice([2, 3, 4]))
        barrier = threading.Barrier(world_size)

        def come(
            rank: int,
            store: HashStore = store,
            world_size: int = world_size,
            barrier: threading.Barrier = barrier,
            pause: float = chance.random() / 100,
        ) -> str:
            barrier.wait(LONG)
            time.sleep(pause * rank)
            return agree(store, Membership(rank, world_size), LONG).prefix

        with ThreadPoolExecutor(world_size) as pool:
            (prefix,) = set(pool.map(come, range(world_size)))
        assert prefix not in used


def test_a_plan_with_somebody_who_is_gone_is_replaced() -> None:
    store = HashStore()
    leave_behind(store, 1, 2)
    with ThreadPoolExecutor(2) as pool:
        first: Future[Agreement] = pool.submit(agree, store, Membership(0, 2), LONG)
        poll(lambda: store.check(["dataparallel/start/none/plan"]))
        plan = json.loads(store.get("dataparallel/start/none/plan"))
        assert plan["nonces"][1] == "left by 1" and not first.done()
        second = agree(store, Membership(1, 2), LONG)
        assert first.result(LONG) == second
        assert second.prefix.endswith(f"/{plan['round'] + 1}")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_while_the_store_is_emptied_says_again_that_it_is_here(rank: int) -> None:
    store = HashStore()
    hello = f"dataparallel/start/none/hello/{rank}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree, store, Membership(rank, 2), LONG)
        poll(lambda: store.check([hello]))
        # As where the last process of an earlier group takes the file with it.
        store.delete_key(hello)
        assert agree(store, Membership(1 - rank, 2), LONG) == first.result(LONG)


def test_a_process_that_joined_and_was_started_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    seen: list[list[int]] = []
    absent_from = agreement._Attendee._absent

    def absent(attendee: Any, plan: dict[str, Any]) -> list[int]:
        seen.append(absent_from(attendee, plan))
        return seen[-1]

    monkeypatch.setattr(agreement._Attendee, "_absent", absent)
    for rank in (1, 2):
        leave_behind(store, rank, 3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree, store, Membership(0, 3), LONG)
        poll(lambda: join_as_gone(store, 1))
        poll(lambda: [2] in seen)
        again = pool.submit(agree, store, Membership(1, 3), LONG)
        poll(lambda: b"left by" not in store.get("dataparallel/start/none/hello/1"))
        # Now all have joined the first plan, but not all are those that it was made of.
        join_as_gone(store, 2)
        poll(lambda: [] in seen)
        last = agree(store, Membership(2, 3), LONG)
        assert first.result(LONG) == again.result(LONG) == last
        assert not last.prefix.endswith("/1")


@pytest.mark.parametrize(("missing", "named"), [({1}, "rank 1"), ({0, 3}, "ranks 0, 3")])
def test_who_did_not_come_is_named(missing: set[int], named: str) -> None:
    store = HashStore()
    there = [Membership(rank, 4) for rank in range(4) if rank not in missing]
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(lambda member: outcome(lambda: agree(store, member, 0.5)), there))
    assert 0.5 <= time.monotonic() - begin < 5.0
    for member, error in zip(there, errors, strict=True):
        assert isinstance(error, CollectiveTimeout)
        assert str(error).startswith(f"rank {member.rank} ")
        assert "waited 0.5 s in a store" in str(error)
        assert f"process group of 4: {named} did not come (" in str(error)
        assert "every process must call init_process_group" in str(error)
    # Nobody who has given up is waited for later.
    (prefix,) = {each.prefix for each in together(store, 4)}
    assert prefix


def test_somebody_who_is_gone_is_named_by_those_who_have_a_plan_with_it() -> None:
    store = HashStore()
    leave_behind(store, 1, 3)
    members = [Membership(0, 3), Membership(2, 3)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda member: outcome(lambda: agree(store, member, 0.5)), members))
    assert all("of 3: rank 1 did not come (" in str(error) for error in errors)


def test_different_numbers_of_processes_are_an_error_in_both() -> None:
    store = HashStore()
    members = [Membership(0, 2), Membership(1, 3)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda member: outcome(lambda: agree(store, member, LONG)), members))
    assert all(type(error) is ValueError for error in errors)
    (text,) = {str(error) for error in errors}
    assert "rank 0 has world_size 2, rank 1 has 3; start all with the same" in text


def test_two_processes_of_one_rank_are_an_error() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        twin = pool.submit(agree, store, Membership(1, 2), LONG)
        poll(lambda: store.check(["dataparallel/start/none/hello/1"]))
        second = pool.submit(agree, store, Membership(1, 2), LONG)
        with pytest.raises(ValueError, match="two processes have rank 1: pid"):
            twin.result(LONG)
        assert agree(store, Membership(0, 2), LONG) == second.result(LONG)


@pytest.mark.parametrize(
    ("identities", "one_machine"), [("aa", True), ("ab", False), (("a", None), False)]
)
def test_loopback_is_for_processes_of_one_machine(
    identities: Any, one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = list(identities)
    monkeypatch.setattr(agreement, "network_identity", lambda: remaining.pop())
    assert [each.one_machine for each in together(HashStore(), 2)] == [one_machine] * 2
    assert not remaining


def test_processes_that_meet_over_loopback_are_on_one_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "network_identity", lambda: None)
    members = [Membership(rank, 2, ("localhost", 29500)) for rank in range(2)]
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda member: agree(store, member, LONG), members))
    assert [each.one_machine for each in found] == [True, True]
