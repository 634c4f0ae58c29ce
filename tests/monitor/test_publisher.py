"""The side of the run: sockets, clients that mean no good, forks, folders that cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataparallel.monitor import publisher as publishing
from dataparallel.monitor import sockets
from dataparallel.monitor.attach import Attachment
from dataparallel.monitor.publisher import Publisher
from dataparallel.monitor.run import RunState
from tests.monitor.made_up_runs import a_state
from tests.monitor.made_up_runs import run_folder as run_folder

REQUEST = b'{"version": 1, "get": "state"}\n'


@pytest.fixture
def publisher(run_folder: Path) -> Iterator[Publisher]:
    one = Publisher(a_state)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_warned", set())


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "dataparallel monitor"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def connected(publisher: Publisher) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    assert publisher.path is not None
    connection.connect(publisher.path)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    # Reset where it is closed by a side that had not read all.
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def asked(publisher: Publisher, request: bytes) -> Any:
    with connected(publisher) as connection:
        connection.sendall(request)
        return json.loads(received(connection))


# --- answers ---------------------------------------------------------------------------------


def test_a_line_of_json_is_answered_with_the_state(publisher: Publisher) -> None:
    answer = asked(publisher, REQUEST)
    assert answer["version"] == 1
    assert RunState.from_json(answer["state"]) == a_state()


@pytest.mark.parametrize(
    ("request_line", "error"),
    [
        (b"\n", "a line of JSON"),
        (b"\x80\x04garbage\n", "a line of JSON"),
        (b"[" * 4000 + b"\n", "a line of JSON"),
        (b"[1]\n", '"get": "state"'),
        (b'{"get": "weights"}\n', '"get": "state"'),
        (b'{"version": 2, "get": "state"}\n', "version 1"),
        (b"x" * 4096, "at most 4096 bytes"),
    ],
)
def test_what_is_no_request_is_answered_with_an_error(
    publisher: Publisher, request_line: bytes, error: str
) -> None:
    assert error in asked(publisher, request_line)["error"]
    assert asked(publisher, REQUEST)["state"]["num_steps"] == 1


def test_a_request_may_come_in_parts(publisher: Publisher) -> None:
    with connected(publisher) as connection:
        for byte in REQUEST:
            connection.sendall(bytes([byte]))
        assert b'"state"' in received(connection)


def test_a_state_that_fails_is_told(run_folder: Path) -> None:
    def fails() -> RunState:
        raise RuntimeError("no state today")

    publisher = Publisher(fails)
    assert "RuntimeError: no state today" in asked(publisher, REQUEST)["error"]
    with pytest.raises(ValueError, match="cannot tell its state: RuntimeError: no state today"):
        Attachment(os.getpid()).state()
    publisher.close()


def test_an_answer_has_a_greatest_length(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_ANSWER", 100)
    assert "too many to send" in asked(publisher, REQUEST)["error"]


def test_those_who_ask_at_once_share_an_answer(run_folder: Path) -> None:
    """However many ask: the state is told as often as the thread has turns."""
    calls: list[int] = []
    here, go_on = threading.Event(), threading.Event()

    def state() -> RunState:
        calls.append(1)
        here.set()
        assert go_on.wait(10)
        return a_state(len(calls))

    publisher = Publisher(state)
    first = connected(publisher)
    first.sendall(REQUEST)
    assert here.wait(10)
    others = [connected(publisher) for _ in range(10)]
    for other in others:
        other.sendall(REQUEST)
    go_on.set()
    answers = [json.loads(received(one))["state"]["num_steps"] for one in (first, *others)]
    assert answers == [1] + [2] * 10
    publisher.close()
    for one in (first, *others):
        one.close()


# --- clients that mean no good ---------------------------------------------------------------


def test_a_client_that_does_not_read_delays_nobody(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_line", lambda content: b"x" * (8 << 20) + b"\n")
    publisher = Publisher(a_state)
    silent = connected(publisher)
    silent.sendall(REQUEST)
    # The answer does not fit into the socket: that much of it has come, and more does not.
    assert select.select([silent], [], [], 10)[0]
    with connected(publisher) as other:
        other.sendall(REQUEST)
        assert len(received(other)) == (8 << 20) + 1
    publisher.close()
    silent.close()


def test_a_client_has_limited_time(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_PATIENCE", 0.0)
    with connected(publisher) as silent:
        assert received(silent) == b""


def test_of_too_many_connections_the_oldest_is_closed(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_PATIENCE", 1000.0)
    monkeypatch.setattr(publishing, "_MAX_CLIENTS", 3)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(publisher)) for _ in range(5)]
        assert [received(one) for one in crowd[:2]] == [b"", b""]
        for one in crowd[2:]:
            one.sendall(REQUEST)
            assert b'"state"' in received(one)


def test_a_thousand_connections_leave_few(publisher: Publisher) -> None:
    server = publisher._server
    assert server is not None and publisher.path is not None
    most = 0
    with contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(1000):
            one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.setblocking(False)
            # Some do not even get into the queue.
            if one.connect_ex(publisher.path) == 0:
                crowd.append(one)
            most = max(most, len(server._clients))
        assert Attachment(os.getpid(), timeout=10).state() == a_state()
        assert most <= 32
        # Those who came first have been closed.
        crowd[0].settimeout(10)
        assert len(crowd) > 64 and received(crowd[0]) == b""
    wait_until(lambda: not server._clients)


def test_the_thread_rests_nine_times_as_long_as_it_works(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    rest = publishing._Server._rest

    def noted(self: Any, seconds: float) -> None:
        rests.append(seconds)
        rest(self, seconds)

    def slow() -> RunState:
        # Work, in the terms of this test.
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return a_state()

    monkeypatch.setattr(publishing._Server, "_rest", noted)
    publisher = Publisher(slow)
    asked(publisher, REQUEST)
    wait_until(lambda: any(one >= 9 * 0.02 for one in rests))
    publisher.close()


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the platform does not tell")
def test_another_user_is_not_answered(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_is_allowed", publishing._is_allowed)
    real = os.geteuid()
    with connected(publisher) as connection:
        assert publishing._is_allowed(connection)
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        # The other side is user ``real``: root may watch everybody.
        assert publishing._is_allowed(connection) == (real == 0)
    monkeypatch.setattr(publishing, "_is_allowed", lambda connection: False)
    # The run may have hung up before the request is sent.
    hung_up = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with connected(publisher) as connection, hung_up:
        connection.sendall(REQUEST)
        assert received(connection) == b""
