"""What ends a wait for another process: that it has failed, or that the store is gone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from dataparallel.collectives import process_failures
from dataparallel.collectives.process_failures import GroupFailures
from dataparallel.comm.failure import Failure, FailureKind
from dataparallel.comm.launcher import Launcher
from dataparallel.comm.listener import Listener
from dataparallel.comm.process_errors import CollectiveError, Place
from dataparallel.comm.process_identity import ProcessIdentity

CAME = {"channel": "c" * 32, "process": {}}
PLACE = Place(1, "all_reduce", "a bucket")


def lost(rank: int, kind: FailureKind = "ended") -> Failure:
    return Failure(rank, "node", 4711, kind, "", f"is {kind}")


class Channel:
    """Stands for that of the default group of ranks 0 to 2; this process is rank 0."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.said: list[Failure] = []
        self.of_others: dict[int, tuple[int, Failure]] = {}
        self.ended: set[int] = set()
        self.expected: dict[int, str] = {}
        self.is_cut_off = False
        self.name, self.number, self.identity = "a" * 32, 0, ProcessIdentity.of_this_process()

    def expect(self, rank: int, channel: str, identity: object) -> None:
        self.expected[rank] = channel

    def add(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def discard(self, listener: Listener) -> None:
        self.listeners.remove(listener)

    def gone(self) -> Failure | None:
        return lost(0, "cut off") if self.is_cut_off else None

    def tell(self, failure: Failure) -> None:
        self.said.append(failure)

    def hear_told(self, rank: int, number: int, failure: Failure) -> None:
        self.of_others[rank] = number, failure
        for listener in list(self.listeners):
            if number > listener.known.get(rank, 0):
                listener.hear(failure)

    def told(self, rank: int) -> Failure | None:
        return self.of_others[rank][1] if rank in self.of_others else None

    def told_number(self, rank: int) -> int:
        return self.of_others[rank][0] if rank in self.of_others else 0

    def failure_of(self, rank: int, known: int = 0) -> Failure | None:
        if self.told_number(rank) > known:
            return self.told(rank)
        return lost(rank, "ended") if rank in self.ended else None

    def forgiven(self, rank: int) -> int:
        return max(listener.known.get(rank, 0) for listener in self.listeners)


@pytest.fixture
def channel() -> Channel:
    return Channel()


# --- collectives of a link ---------------------------------------------------------------------


@pytest.fixture
def launcher(channel: Channel) -> Launcher:
    reports: Any = SimpleNamespace(channel=channel)
    checks: Any = SimpleNamespace(sequence=0, hear=lambda seconds: None)
    found = Launcher("gradients/1", [0, 1, 2], 0, 60.0, reports, {}, checks)
    channel.add(found)
    return found


def after(*events: Callable[[], object]) -> Callable[[float], bool]:
    """A wait that ends when all this has happened, one by one."""
    remaining = list(events)

    def wait(seconds: float) -> bool:
        if remaining:
            remaining.pop(0)()
            return False
        return True

    return wait


def nothing() -> None:
    pass


def test_what_another_process_told_holds_without_a_wait(
    channel: Channel, launcher: Launcher
) -> None:
    # It has given up its links, so these are broken for all.
    channel.hear_told(2, 1, lost(1))
    with pytest.raises(CollectiveError, match=r"rank 1 .* is ended"):
        launcher.check()


def test_a_process_that_is_cut_off_gives_up(channel: Channel, launcher: Launcher) -> None:
    channel.is_cut_off = True
    launcher.check()
    with pytest.raises(CollectiveError, match=r"rank 0 .* is cut off"):
        launcher.wait(PLACE, time.monotonic(), after(nothing))


def test_who_does_not_wait_for_rank_0_needs_no_store(channel: Channel) -> None:
    channel.is_cut_off = True
    reports: Any = SimpleNamespace(channel=channel)
    checks: Any = SimpleNamespace(sequence=0, hear=lambda seconds: None)
    launcher = Launcher("gradients/1", [1, 2], 0, 60.0, reports, {}, checks)
    launcher.wait(PLACE, time.monotonic(), after(nothing, nothing))
    assert launcher.broken is None


def test_the_others_read_where_a_process_waits(channel: Channel, launcher: Launcher) -> None:
    places: list[str | None] = []
    launcher.wait(
        PLACE,
        time.monotonic(),
        after(nothing, lambda: places.extend(one.place() for one in channel.listeners)),
    )
    assert places == [None, "all_reduce of a bucket (collective 1) for 'gradients'"]


# --- collectives of the user's group -----------------------------------------------------------


@pytest.fixture
def failures(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> GroupFailures:
    """Of the group {0, 1}."""
    world = SimpleNamespace(rank=lambda: 0, size=lambda: 3)
    of_torch = SimpleNamespace(
        group=SimpleNamespace(WORLD=world), get_process_group_ranks=lambda group: group
    )
    monkeypatch.setattr(process_failures, "dist", of_torch)
    monkeypatch.setattr(process_failures, "shared_store", lambda group: None)
    monkeypatch.setattr(process_failures, "channel_of", lambda group, store: channel)
    group: Any = [0, 1]
    return GroupFailures(group)


def found(failures: GroupFailures, meanwhile: Callable[[], object] = nothing) -> Failure | None:
    """What one wait finds, during which something happens."""
    watch = failures.watch("all_reduce of a tensor")
    try:
        meanwhile()
        return failures.find(watch)
    finally:
        watch.close()


def test_a_process_outside_of_the_group_ends_no_wait(
    channel: Channel, failures: GroupFailures
) -> None:
    channel.ended.add(2)
    assert found(failures, lambda: channel.hear_told(2, 1, lost(2, "cut off"))) is None
    # A member has given up something else because of it, and goes on.
    assert found(failures, lambda: channel.hear_told(1, 1, lost(2, "ended"))) is None
    channel.ended.add(1)
    assert found(failures) == lost(1, "ended")


def test_what_one_outside_of_the_group_saw_is_no_news(
    channel: Channel, failures: GroupFailures
) -> None:
    assert found(failures, lambda: channel.hear_told(2, 1, lost(1))) is None


@pytest.mark.parametrize("failure", [lost(0), lost(1, "raised")])
def test_who_tells_something_is_expected_no_more_until_it_comes(
    channel: Channel, failures: GroupFailures, failure: Failure
) -> None:
    store = HashStore()
    failures.introduce(store, "process group 0/2")
    # It has come to the group that had this name before, and to this one, and then told it.
    store.set("process group 0/1/came/1", json.dumps({**CAME, "told": 1}))
    store.set("process group 0/2/came/1", json.dumps({**CAME, "told": 0}))
    assert found(failures) is None
    channel.hear_told(1, 1, failure)
    assert found(failures) == failure
    store.set("process group 0/2/came/1", json.dumps({**CAME, "told": 1}))
    assert found(failures) is None
    assert channel.expected == {1: "c" * 32}
    channel.hear_told(1, 2, failure)
    assert found(failures) == failure


def test_who_has_told_something_says_that_it_comes(
    channel: Channel, failures: GroupFailures
) -> None:
    store = HashStore()

    def came() -> object:
        return json.loads(store.get("process group 0/1/came/0"))["told"]

    failures.introduce(store, "process group 0/1")
    assert came() == 0
    channel.number = 1
    assert came() == 0
    failures.come()
    assert came() == 1


def test_this_process_tells_because_of_whom_it_gives_up(
    channel: Channel, failures: GroupFailures
) -> None:
    failures.give_up(lost(1, "raised"))
    assert channel.said == []
    failures.give_up(lost(1))
    assert channel.said == [lost(1)]
