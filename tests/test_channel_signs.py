"""Signs of life: what is written and read, and what is believed."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, replace
from typing import Any

import pytest

from dataparallel.comm.awake_clock import AwakeClock
from dataparallel.comm.failure import Failure
from dataparallel.comm.peer import Peer, Read, Sign, Told
from dataparallel.comm.process_identity import ProcessIdentity
from dataparallel.comm.signs import Signs
from tests.channel_cases import CountingStore

MINE = ProcessIdentity.of_this_process()
ENDED = replace(MINE, started="1")
OLD, NEW = "a" * 32, "b" * 32
TOLD = Told(1, True, Failure(1, "h", 1, "raised", "forward", "ValueError: boom", "trace"))


def entries(identity: ProcessIdentity = MINE) -> Read:
    """What signs of life refer to."""
    found = {f"process/{name}": asdict(identity) for name in (OLD, NEW)}
    found |= {f"told/{name}": TOLD.to_json() for name in (OLD, NEW)}
    return lambda key: json.dumps(found[key]).encode()


def sign(channel: str, beat: int = 1, told: int = 0, away: bool = False, since: int = 0) -> bytes:
    return json.dumps(asdict(Sign(channel, since, beat, "", told, away))).encode()


def signs_over(store: object, rank: int = 0) -> Signs:
    anything: Any = store
    made = Signs(anything, rank, MINE)
    made.connect()
    return made


# --- what is written and read ----------------------------------------------------------------


def test_only_what_has_changed_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("dataparallel.comm.signs.time.monotonic", lambda: now)
    store = CountingStore()
    mine = signs_over(store)
    mine.write("", None, 0, away=False)
    assert store.keys_set() == ["process", "alive"]
    mine.write("", None, 0, away=False)
    assert len(store.keys_set()) == 2
    mine.write("all_reduce", None, 0, away=False)
    assert store.keys_set()[2:] == ["alive"]
    mine.write("all_reduce", TOLD, 1, away=False)
    assert store.keys_set()[3:] == ["told", "alive"]
    now += 1.5
    # A long traceback is written once, and the sign of life stays short.
    mine.write("all_reduce", TOLD, 1, away=False)
    assert store.keys_set()[5:] == ["alive"]
    assert len(store.inner.get("alive/0")) < 150


def test_the_others_are_read_in_one_request() -> None:
    store = CountingStore()
    for rank in range(1, 6):
        signs_over(store, rank).write("", None, 0, away=False)
    mine, peers = signs_over(store), {rank: Peer(rank) for rank in range(1, 6)}
    mine.read(peers, 0.0)
    assert all(peer.describe() for peer in peers.values())
    store.asked.clear()
    mine.read(peers, 0.0)
    assert [request for request, _ in store.asked] == ["multi_get"]


def test_a_lost_store_is_looked_for_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("dataparallel.comm.signs.time.monotonic", lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        store: Any = CountingStore()
        store.host, store.port = "127.0.0.1", port
        mine = signs_over(store)
    pauses = []
    for _ in range(6):
        mine.drop()
        lost = now
        while mine.rests:
            now += 0.25
        pauses.append(now - lost)
        # A store itself would write to the standard error each time.
        with pytest.raises(ConnectionRefusedError):
            mine.connect()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    with socket.create_server(("127.0.0.1", port)):
        mine.connect()
        mine.read({}, 0.0)
    mine.drop()
    now += 0.25
    assert not mine.rests


# --- what is believed ------------------------------------------------------------------------


def test_what_an_earlier_group_has_left_is_not_believed() -> None:
    peer = Peer(1)
    peer.hear(sign(OLD, told=1), 0.0, entries(ENDED))
    peer.hear(sign(OLD, told=1), 30.0, entries(ENDED))
    assert peer.failure(0) is None
    # Who writes something new is there.
    peer.hear(sign(NEW, told=1), 0.0, entries())
    found = peer.failure(0)
    assert found is not None and found.message == "ValueError: boom"


@pytest.mark.parametrize("later", [False, True])
def test_who_has_ended_is_believed_to_have_been_of_this_group(later: bool) -> None:
    mine = replace(MINE, started="1000")
    peer = Peer(1, mine)
    peer.hear(sign(OLD, told=1, since=1001 if later else 999), 0.0, entries(ENDED))
    found = peer.failure(0)
    assert (found is not None and found.kind == "ended") == later


def test_in_a_new_part_of_the_store_everything_is_believed() -> None:
    peer = Peer(1, fresh=True)
    peer.hear(sign(OLD, away=True), 0.0, entries(ENDED))
    found = peer.failure(0)
    assert found is not None and found.kind == "ended"


def test_after_a_meeting_only_who_was_met_is_believed() -> None:
    peer = Peer(1)
    peer.hear(sign(OLD, told=1), 0.0, entries())
    peer.expect(NEW, asdict(MINE))
    for beat in (2, 3):
        peer.hear(sign(OLD, beat, told=1), 0.5, entries())
        assert peer.failure(0) is None
    peer.hear(sign(OLD, 4), 5.0, entries())
    assert peer.describe() == ""
    peer.hear(sign(NEW, 1), 0.5, entries())
    assert peer.describe() == "alive, not in a collective"


def test_silence_is_described_and_is_no_failure() -> None:
    peer = Peer(1, fresh=True)
    peer.hear(sign(NEW, 1), 0.0, entries())
    for _ in range(10):
        peer.hear(sign(NEW, 1), 360.0, entries())
    assert peer.failure(0) is None
    assert peer.describe() == "no sign of life for 3600.0 s"


def test_who_was_met_and_never_writes_is_seen_to_end() -> None:
    peer = Peer(1)
    peer.expect(NEW, asdict(ENDED))
    peer.hear(None, 0.25, entries())
    found = peer.failure(0)
    assert found is not None and found.kind == "ended"


def test_who_has_said_that_it_is_away_is_not_missed() -> None:
    peer = Peer(1, fresh=True)
    peer.hear(sign(NEW, away=True), 0.0, entries())
    peer.hear(sign(NEW, away=True), 100.0, entries())
    assert peer.describe() == "alive, not in a collective"


def test_an_ended_process_is_not_called_alive() -> None:
    peer = Peer(1)
    peer.hear(sign(NEW), 0.0, entries(ENDED))
    assert peer.describe() == "ended"


# --- time ------------------------------------------------------------------------------------


def test_time_in_which_a_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("dataparallel.comm.awake_clock.time.monotonic", lambda: now)
    clock = AwakeClock(0.5)
    for seconds in (0.25, 0.5, 1000.0):
        now += seconds
        clock.tick()
    assert clock.tick() == 1.25
