"""The side of the watcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dataparallel
from dataparallel.monitor import StepMonitor, sockets
from dataparallel.monitor.attach import Attachment, runs
from dataparallel.monitor.publisher import Publisher
from tests.monitor.made_up_runs import a_state
from tests.monitor.made_up_runs import run_folder as run_folder

PID = 999_999_999


@pytest.fixture
def fake_run(run_folder: Path) -> Iterator[Callable[[bytes], None]]:
    """A socket of process PID that answers what the test says, or nothing at all."""
    listener, file = sockets.listen(PID, 0)
    listener.setblocking(True)
    answers: list[bytes] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            connection, _ = listener.accept()
            with connection:
                while answers and not connection.recv(4096).endswith(b"\n"):
                    if ended.is_set():
                        return
                    break
                else:
                    for answer in answers:
                        connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)

    def answer(line: bytes) -> None:
        answers.append(line)
        thread.start()

    yield answer
    ended.set()
    if thread.ident is not None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
            last.connect(file.path)
        thread.join(10)
    listener.close()


def test_a_run_is_watched_while_it_trains(run_folder: Path) -> None:
    model = dataparallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepMonitor(model) as monitor:
        assert runs() == [os.getpid()]
        # Two who watch at the same time.
        with Attachment(os.getpid()) as first, Attachment(os.getpid()) as second:
            for number in range(1, 4):
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
                monitor.step()
                for watcher in (first, second):
                    state = watcher.state()
                    assert state is not None
                    assert (state.pid, state.num_steps) == (os.getpid(), number)
                    assert state.last == monitor.steps[-1]
            watcher = Attachment(os.getpid())
    assert watcher.state() is None
    assert runs() == []


def test_a_process_without_a_run_is_refused(run_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"process 999999999 has no run .* no process of this"):
        Attachment(PID)
    publisher = Publisher(a_state)
    with pytest.raises(ValueError, match=f"these have: {os.getpid()}. A run can be watched"):
        Attachment(PID)
    publisher.close()


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, ("4711",), "number of a process, but got '4711'"),
        (TypeError, (True,), "number of a process, but got True"),
        (ValueError, (PID, 0), "seconds above 0, but got 0"),
        (ValueError, (PID, float("nan")), "seconds above 0, but got nan"),
    ],
)
def test_bad_arguments(error: type[Exception], arguments: tuple[int], message: str) -> None:
    with pytest.raises(error, match=message):
        Attachment(*arguments)


def test_a_closed_attachment_asks_no_more(run_folder: Path) -> None:
    publisher = Publisher(a_state)
    attachment = Attachment(os.getpid())
    attachment.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        attachment.state()
    publisher.close()


def test_a_process_that_does_not_answer(run_folder: Path) -> None:
    """As one that is stopped: the system accepts the connection, and nothing more happens."""
    listener, _ = sockets.listen(PID, 0)
    attachment = Attachment(PID, timeout=0.05)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"999999999 has not answered within 0.05 seconds"):
        attachment.state()
    assert time.monotonic() - began < 10
    listener.close()
    assert attachment.state() is None


def test_a_process_that_always_hangs_up(fake_run: Callable[[bytes], None]) -> None:
    fake_run(b"")
    with pytest.raises(TimeoutError, match=r"has not answered within 0\.1 seconds"):
        Attachment(PID, timeout=0.1).state()


def test_a_process_that_accepts_no_more(run_folder: Path) -> None:
    """Its queue of connections is full."""
    listener, file = sockets.listen(PID, 0)
    listener.listen(0)
    attachment = Attachment(PID, timeout=0.1)
    queue = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for one in queue:
        one.setblocking(False)
        one.connect_ex(file.path)
    with pytest.raises(TimeoutError, match="has not answered"):
        attachment.state()
    for one in (*queue, listener):
        one.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"hello\n", "what is no state of a run: b'hello"),
        (b"[]\n", "what is no state of a run"),
        (b'{"version": 1}\n', "what is no state of a run"),
        (b'{"version": 2, "state": {}}\n', "version 2 of the protocol, but this is version 1"),
        (b'{"version": 1, "error": "not now"}\n', "process 999999999: not now"),
        (b'{"version": 1, "state": {"pid": 1}}\n', "no state of a run: KeyError"),
        (b'{"version": 1, "state": []}\n', "no state of a run"),
    ],
)
def test_an_answer_that_cannot_be_understood(
    fake_run: Callable[[bytes], None], answer: bytes, message: str
) -> None:
    fake_run(answer)
    with pytest.raises(ValueError, match=message):
        Attachment(PID).state()


def test_an_answer_without_end(
    fake_run: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_ANSWER", 100)
    fake_run(b"x" * 200)
    with pytest.raises(ValueError, match="answers without end"):
        Attachment(PID).state()


def test_a_run_of_another_process_is_watched(run_folder: Path) -> None:
    """Also with other tools: a line in, a line out."""
    program = (
        "import sys; from dataparallel.monitor.publisher import Publisher;"
        "from tests.monitor.made_up_runs import a_state;"
        "publisher = Publisher(lambda: a_state(7)); print(publisher.path, flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        path = process.stdout.readline().decode().strip()
        assert runs() == [process.pid]
        attachment = Attachment(process.pid)
        state = attachment.state()
        assert state == a_state(7, pid=process.pid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            connection.sendall(b'{"get": "state"}\n')
            line = connection.makefile().readline()
        assert json.loads(line)["state"]["pid"] == process.pid
        process.kill()
        process.wait(10)
        assert attachment.state() is None
        assert runs() == []
