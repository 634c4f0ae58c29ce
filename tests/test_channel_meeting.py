"""Processes that meet see who has failed meanwhile, and a store that is gone."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from dataparallel.comm import process_errors, store_requests
from dataparallel.comm.failure_channel import FailureChannel
from dataparallel.comm.meeting import Meeting
from dataparallel.comm.peer import Sign
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, Place, Reports
from dataparallel.comm.process_identity import ProcessIdentity
from dataparallel.extras.process_start.start import init_process_group
from tests.channel_cases import CountingStore, Listens, channel_over
from tests.cluster import Cluster


def meet(store: Any, channel: FailureChannel, rank: int, timeout: float = 20.0) -> Meeting:
    """Meet as a link does."""
    meeting = Meeting(store, "test", [0, 1], rank, channel, timeout)
    channel.add(meeting)
    try:
        meeting.meet()
    finally:
        channel.discard(meeting)
        channel.stop()
        channel._stopping = False
    return meeting


def both_meet(store: Any, channels: list[FailureChannel]) -> list[Meeting]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: meet(store, channels[rank], rank), range(2)))


def test_who_has_ended_before_it_came_is_named_at_once() -> None:
    store: Any = HashStore()
    name, ended = "e" * 32, replace(ProcessIdentity.of_this_process(), started="1")
    store.set(f"process/{name}", json.dumps(asdict(ended)))
    store.set("alive/1", json.dumps(asdict(Sign(name, 0, 1, "", 0, True))))
    with pytest.raises(CollectiveError, match=r"'test/1' over ranks 0, 1, but rank 1 .* has ended"):
        meet(store, channel_over(store), 0)
    assert not store.check(["test/1/arrived/0"])


def test_who_has_raised_before_the_first_meeting_is_named_and_may_come_later() -> None:
    store = HashStore()
    channels = [channel_over(store, rank) for rank in range(2)]
    channels[1].tell(ValueError("no such data set"))
    with pytest.raises(CollectiveError, match="ValueError: no such data set") as raised:
        meet(store, channels[0], 0)
    assert raised.value.failure is not None and raised.value.failure.kind == "raised"
    # After that it is expected again, and what it told is forgotten.
    meetings = both_meet(store, channels)
    assert [meeting.name for meeting in meetings] == ["test/2"] * 2
    assert [meeting.known for meeting in meetings] == [{0: 0, 1: 1}] * 2
    channels[1].stop()


def test_what_was_heard_of_before_the_first_meeting_does_not_end_it() -> None:
    store, listener = HashStore(), Listens()
    channels = [channel_over(store, rank) for rank in range(2)]
    channels[1].tell(ValueError("a bad batch, in a collective"))
    channels[0].add(listener)
    channels[0].look(5.0)
    assert len(listener.heard) > 0
    assert both_meet(store, channels)[0].known == {0: 0, 1: 1}
    channels[1].stop()


def test_who_does_not_come_is_quoted() -> None:
    store = HashStore()
    channels = [channel_over(store, rank) for rank in range(2)]
    both_meet(store, channels)
    channels[1].tell(ValueError("a bad batch"))
    with pytest.raises(CollectiveTimeout, match="rank 1 has told of ValueError: a bad batch"):
        meet(store, channels[0], 0, timeout=0.1)
    channels[1].stop()


def test_who_is_waited_for_is_said_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_errors, "PATIENCE", 0.05)
    store = HashStore()
    with pytest.raises(CollectiveTimeout):
        meet(store, channel_over(store), 0, timeout=0.5)
    said = [record.getMessage() for record in caplog.records if "waits for" in record.getMessage()]
    where = "the making of the process group 'test/1'"
    assert said == [f"rank 0 waits for rank 1 in {where}, since 0.05 s and for at most 0.5 s"]


# --- stores that are gone --------------------------------------------------------------------


def test_a_store_that_does_not_answer_is_not_met_in() -> None:
    store = CountingStore()
    channel = channel_over(store)
    store.open.clear()
    meeting = Meeting(store, "test", [0, 1], 0, channel, 0.1)  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match=r"rank 0 .* is cut off from the others") as raised:
        meeting.meet()
    assert "makes a process group for 'test' over ranks 0, 1" in str(raised.value)
    assert raised.value.failure is not None and raised.value.failure.kind == "cut off"
    store.open.set()


def test_what_a_store_says_is_told() -> None:
    store = CountingStore()
    store.error = dist.DistNetworkError("Broken pipe\nat line 3")
    with pytest.raises(CollectiveError, match=r"has failed 0.0 s ago \(Broken pipe\)"):
        meet(store, channel_over(store), 0)


def test_a_request_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    channel = channel_over(HashStore())
    monkeypatch.setattr(store_requests.threading, "Event", Interrupted)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        store_requests.ask(opened.is_set, channel, 60.0, "asks")
    monkeypatch.undo()
    assert store_requests.ask(lambda: 5, channel, 60.0, "asks") == 5


# --- reports ---------------------------------------------------------------------------------


def test_the_reports_of_an_earlier_failure_are_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_errors, "_LATE_GRACE", 0.0)
    monkeypatch.setattr(process_errors, "GRACE", 0.0)
    store = HashStore()
    channels = [channel_over(store, rank) for rank in range(2)]
    group = "process group 0/collectives"
    first, second = (Reports(store, group, i, 2, channels[i]) for i in range(2))
    first.exchange(Place(1, "all_reduce", "a"), timed_out=True)
    found = second.exchange(Place(2, "broadcast", "b"), timed_out=True)
    assert isinstance(found, dict) and found[0].place.what == "a"
    assert second.exchange(Place(3, "broadcast", "c"), timed_out=True) == {}
    first.exchange(Place(3, "all_reduce", "d"), timed_out=True)
    found = second.exchange(Place(4, "broadcast", "e"), timed_out=True)
    assert isinstance(found, dict) and found[0].place.what == "d"


# --- the default group -----------------------------------------------------------------------


def begin(rank: int, world_size: int, path: str) -> list[bool]:
    init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=20.0
    )
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore("dataparallel", world.get_group_store())
    dist.barrier()
    found = [store.check([f"alive/{i}"]) for i in range(world_size)]
    deadline = time.monotonic() + 10
    while any(one.name == "dataparallel-failures" for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    dist.destroy_process_group()
    return found


def test_the_default_group_knows_who_is_there(cluster: Cluster, tmp_path: Any) -> None:
    path = str(tmp_path / "store")
    assert cluster.run(begin, 2, path, init_group=False, timeout=30.0) == [[True, True]] * 2
