"""What a process tells through its failure channel arrives, and is told once."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import weakref
from typing import Any

import pytest

from dataparallel.comm import failure_channel, telling
from dataparallel.comm.failure import Failure
from dataparallel.comm.process_errors import CollectiveError
from tests.channel_cases import CountingStore, Listens, channel_over

CAUSE = Failure(2, "h", 1, "ended", "", "has ended")


def told_in(store: CountingStore) -> dict[str, Any]:
    """What rank 0 has told, as the others find it."""
    sign = json.loads(store.inner.get("alive/0"))
    assert store.inner.check([f"told/{sign['channel']}"])
    found: dict[str, Any] = json.loads(store.inner.get(f"told/{sign['channel']}"))
    return found


def test_news_are_written_when_telling_returns() -> None:
    store, listener = CountingStore(), Listens()
    channel = channel_over(store)
    channel.add(listener)
    channel.look(5.0)
    store.open.clear()
    assert store.held.wait(10)
    # The thread is in a round that began before.
    thread = threading.Thread(target=channel.tell, args=(ValueError("the message"),))
    thread.start()
    while channel.number == 0:
        pass
    store.open.set()
    thread.join()
    assert told_in(store)["failure"]["message"] == "ValueError: the message"
    assert [failure.kind for failure in listener.heard] == ["raised"]
    channel.stop()


def test_what_was_told_is_written_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store, listener = CountingStore(), Listens()
    channel = channel_over(store)
    channel.add(listener)
    store.open.clear()
    assert store.held.wait(10)
    monkeypatch.setattr(failure_channel, "_TELLING", 0.0)
    channel.tell(ValueError("the message"))
    threading.Timer(0.05, store.open.set).start()
    channel.stop()
    assert told_in(store)["number"] == 1


def test_who_has_no_link_is_heard_too() -> None:
    store = CountingStore()
    one, other = channel_over(store, 0), channel_over(store, 1)
    one.tell(ValueError("no such data set"))
    listener = Listens()
    other.add(listener)
    other.look(5.0)
    assert listener.heard[0].message == "ValueError: no such data set"
    for channel in (one, other):
        channel.stop()


def test_who_listens_no_more_says_that_it_is_away() -> None:
    store, listener = CountingStore(), Listens()
    channel = channel_over(store)
    channel.add(listener)
    channel.look(5.0)
    assert not json.loads(store.inner.get("alive/0"))["away"]
    thread = channel._thread
    channel.discard(listener)
    assert thread is not None
    thread.join(10)
    assert json.loads(store.inner.get("alive/0"))["away"]


def test_one_error_is_told_once_and_anew_after_a_meeting() -> None:
    channel = channel_over(CountingStore())
    error = ValueError("boom")
    channel.tell(error)
    channel.tell(error)
    assert channel.number == 1
    channel.meetings += 1
    channel.tell(error)
    assert channel.number == 2
    channel.stop()


def test_a_group_that_is_gone_needs_no_thread() -> None:
    store, listener = CountingStore(), Listens()
    anything: Any = store
    channel = failure_channel.FailureChannel(anything, [0, 1], 0, exists=lambda: False)
    channel.add(listener)
    channel.look(5.0)
    assert channel._thread is None
    # Nobody waits for what can't be told.
    channel.tell(ValueError("boom"))
    assert channel._thread is None and store.asked == []


def test_a_listener_that_fails_does_not_end_the_thread() -> None:
    class Broken(Listens):
        def hear(self, failure: Failure) -> None:
            raise KeyError("lost")

    store, broken = CountingStore(), Broken()
    one, other = channel_over(store, 0), channel_over(store, 1)
    one.tell(ValueError("boom"))
    other.add(broken)
    other.look(5.0)
    other.look(5.0)
    assert other._thread is not None and other._thread.is_alive()
    for channel in (one, other):
        channel.stop()


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), TimeoutError("no answer")])
def test_only_a_store_that_refuses_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store, listener = CountingStore(), Listens()
    channel = channel_over(store)
    channel.add(listener)
    channel.look(5.0)
    store.error = error
    while not channel.unanswered():
        channel.look(5.0)
    channel.look(5.0)
    now = 1e9
    monkeypatch.setattr("dataparallel.comm.awake_clock.time.monotonic", lambda: now)
    # In which this process was stopped itself.
    now += 3600.0
    assert channel.gone() is None
    for _ in range(12):
        now += 0.5
        found = channel.gone()
    refuses = isinstance(error, ConnectionRefusedError)
    assert (found is not None and found.kind == "cut off" and "refused" in str(found)) == refuses
    monkeypatch.undo()
    store.error = None
    while channel.unanswered():
        channel.look(5.0)
    assert channel.gone() is None
    channel.stop()


# --- errors that leave a program -------------------------------------------------------------


def test_a_failure_in_one_group_is_told_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    # The first group has heard of it from rank 1, the second knows nothing of it.
    first, teller, second = channel_over(store), channel_over(store, 1), channel_over(store)
    teller.tell(CAUSE)
    listener = Listens()
    first.add(listener)
    first.look(5.0)
    monkeypatch.setattr(telling, "all_channels", lambda: [first, second])
    error = CollectiveError("given up")
    error.failure = CAUSE
    with pytest.raises(CollectiveError), telling.telling_failures():
        raise error
    assert (first.number, second.number) == (0, 1)
    with pytest.raises(CollectiveError), telling.telling_failures():
        raise error
    assert second.number == 1
    for channel in (first, teller, second):
        channel.stop()


def test_a_module_that_is_loaded_again_takes_its_own_hook_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = telling._before
    hook = weakref.ref(telling._tell_at_the_end)
    importlib.reload(telling)
    assert telling._before is before
    assert sys.excepthook is telling._tell_at_the_end is not hook()
