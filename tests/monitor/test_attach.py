"""Watching a run from another process: both ends of its socket."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import dataparallel
from dataparallel.monitor import StepMonitor, attach
from dataparallel.monitor.attach import Publisher, ask, runs
from dataparallel.monitor.run import RunState
from tests.monitor.cases import a_state
from tests.monitor.cases import run_folder as run_folder

PID = 999_999_999
ROOT = Path(__file__).parents[2]
ME = os.getpid()

pytestmark = pytest.mark.usefixtures("run_folder")


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "dataparallel monitor"]


def net() -> dataparallel.DataParallel[torch.nn.Linear]:
    return dataparallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])


@pytest.fixture
def publisher(run_folder: Path) -> Iterator[Publisher]:
    one = Publisher(a_state)
    yield one
    one.close()


@pytest.fixture
def listener(run_folder: Path) -> Iterator[socket.socket]:
    """The socket of a process that does what the test does with it."""
    with socket_of(run_folder) as one:
        yield one


def socket_of(folder: Path, pid: int = PID) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{pid}.0.sock"))
    listener.listen()
    return listener


def connected(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(next(folder.iterdir())))
    return connection


# --- a run and its watchers ------------------------------------------------------------------


def test_a_run_is_watched_while_it_trains(run_folder: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepMonitor(model) as monitor:
        assert runs() == [ME]
        for number in range(1, 4):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            monitor.step()
            for pid in (ME, None):
                (state,) = ask(pid).states
                assert (state.pid, state.num_steps) == (ME, number)
                assert state.last == monitor.steps[-1]
    assert ask() == ((), (), ())
    assert runs() == [] and not list(run_folder.iterdir()) and not threads()


def test_a_run_of_another_process_is_watched(run_folder: Path) -> None:
    """Also with other tools. It ends with its process, and what that leaves behind is removed."""
    program = (
        "import sys; from dataparallel.monitor.attach import Publisher;"
        "from tests.monitor.cases import a_state;"
        "publisher = Publisher(lambda: a_state(7)); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(process.pid).states == (a_state(7, pid=process.pid),)
        (file,) = run_folder.iterdir()
        with connected(run_folder) as connection, connection.makefile() as answer:
            assert json.loads(answer.read())["state"]["pid"] == process.pid
        process.kill()
        process.wait(10)
        assert file.exists()
        assert ask(process.pid) == ((), (), ()) and not list(run_folder.iterdir())


def test_all_runs_answer_and_one_that_hangs_delays_them_no_further(run_folder: Path) -> None:
    """In the order of their jobs and ranks, several of one process too; all have one deadline."""
    run = a_state()
    states = [
        dataclasses.replace(run, job=job, rank=rank, number=number)
        for job, rank, number in (("b", 1, 0), ("a", 7, 0), ("b", 0, 3), ("b", 0, 2))
    ]
    hanging = [socket_of(run_folder, PID + i) for i in range(3)]
    publishers = [Publisher(partial(dataclasses.replace, state)) for state in states]
    assert [one.order for one in ask(ME).states] == sorted(one.order for one in states)
    # So long that it is exceeded at once if one follows the other.
    began = time.monotonic()
    answers = ask(timeout=2)
    assert time.monotonic() - began < 4
    assert answers.states == ask(ME).states and len(answers.states) == 4
    silent = [f"process {PID + i} has not answered within 2 s" for i in range(3)]
    assert [text.partition(";")[0] for text in answers.problems] == silent
    for publisher in publishers:
        publisher.close()
    for listener in hanging:
        listener.close()


def test_a_forked_child_leaves_its_parents_socket_alone(
    run_folder: Path, publisher: Publisher
) -> None:
    with warnings.catch_warnings():
        # The tests have threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        publisher.close()
        os._exit(0 if list(run_folder.iterdir()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(ME).states == (a_state(),)


def test_a_state_that_fails_is_told() -> None:
    def fails() -> RunState:
        raise RuntimeError("no state today")

    publisher = Publisher(fails)
    (problem,) = ask(ME).problems
    assert "cannot tell its state: RuntimeError: no state today" in problem
    publisher.close()


def test_a_watcher_that_does_not_read_delays_others_for_little(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, publisher: Publisher
) -> None:
    monkeypatch.setattr(attach, "_PATIENCE", 0.2)
    # It does not fit into the socket.
    answer = json.dumps({"version": 4, "state": a_state().to_json()}).encode() + b"\n"
    monkeypatch.setattr(Publisher, "_answer", lambda self: b" " * (1 << 20) + answer)
    with connected(run_folder) as slow:
        assert ask(ME, timeout=10).states == (a_state(),)
        # The late answer is cut off.
        with slow.makefile("rb") as file:
            assert len(file.read()) < 1 << 20


def test_the_thread_rests_nine_times_as_long_as_it_works(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    class Time:
        now = 7.0
        perf_counter = staticmethod(lambda: Time.now)
        sleep = staticmethod(rests.append)
        thread_time = staticmethod(lambda: 0.25)

    def state() -> RunState:
        Time.now += 0.01
        return a_state()

    monkeypatch.setattr(attach, "time", Time)
    publisher = Publisher(state)
    with connected(run_folder) as watcher:
        watcher.makefile().read()
    publisher.close()
    assert rests == [pytest.approx(0.09)] and publisher.seconds == 0.25


# --- processes that answer something else ----------------------------------------------------


@pytest.mark.parametrize("asked_before", [0, 3])
def test_a_process_that_does_not_answer(
    run_folder: Path, listener: socket.socket, asked_before: int
) -> None:
    """As one that is stopped: until its queue is full, the system accepts connections for it."""
    listener.listen(0)
    queue = [socket.socket(socket.AF_UNIX) for _ in range(asked_before)]
    for one in queue:
        one.setblocking(False)
        one.connect_ex(str(run_folder / f"{PID}.0.sock"))
    (problem,) = ask(PID, timeout=0.05).problems
    assert problem.startswith(f"process {PID} has not answered within 0.05 s")
    for one in (*queue, listener):
        one.close()
    assert ask(PID) == ((), (), ())


def answer(**changes: object) -> bytes:
    state = {**a_state().to_json(), **changes}
    return json.dumps({"version": 4, "state": state}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"version": 4', "was cut off after 13 bytes"),
        # The run has ended.
        (b"", None),
        (b"hello\n", "what is no state of a run: b'hello"),
        (b"[]\n", "what is no state of a run"),
        (b"[" * 100_000 + b"\n", "what is no state of a run"),
        (b'{"version": 3, "news": {}}\n', r"version 3 of the protocol is .*this is version 4."),
        (b'{"version": 4, "error": "not now"}\n', f"process {PID}: not now"),
        (b'{"version": 4, "state": {"pid": 1}}\n', "what is no state of a run"),
        (answer(kinds={"train": {"steps": "abc"}}), "what is no state of a run"),
        (answer(memory=[0]), "what is no state of a run"),
    ],
)
def test_an_answer_that_is_no_state(
    listener: socket.socket, answer: bytes, message: str | None
) -> None:
    def serve() -> None:
        with listener.accept()[0] as connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    states, problems, _ = ask(PID)
    assert states == () and len(problems) == (message is not None)
    assert message is None or re.search(message, problems[0])
    thread.join(10)


# --- the folder ------------------------------------------------------------------------------


def test_the_folder_is_made_for_this_user_alone(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder / "new"
    monkeypatch.setenv(attach.VARIABLE, str(folder))
    publisher = Publisher(a_state)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1
    publisher.close()
    # The environment's folder of temporary files does not matter: the watcher has another one.
    monkeypatch.delenv(attach.VARIABLE)
    monkeypatch.setattr(attach, "USUAL", str(run_folder / "usual-{}"))
    monkeypatch.setenv("TMPDIR", str(folder))
    publisher = Publisher(a_state)
    assert len(list((run_folder / f"usual-{os.geteuid()}").iterdir())) == 1
    publisher.close()


@pytest.mark.parametrize("has_runtime", [True, False])
def test_a_folder_that_somebody_else_has_taken_is_refused_by_name(
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_runtime: bool,
) -> None:
    """A run then takes the folder of the session, in which watchers look, too."""
    user = os.geteuid() + 1
    monkeypatch.delenv(attach.VARIABLE)
    monkeypatch.setattr(attach, "USUAL", str(run_folder / "usual-{}"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_folder / "session") if has_runtime else "")
    taken, session = run_folder / f"usual-{user}", run_folder / "session"
    for folder in (taken, session, session / "dataparallel"):
        folder.mkdir(mode=0o700)
    found = os.lstat

    def lstat(path: Path) -> os.stat_result:
        told = list(found(path))
        told[stat.ST_UID] += path != taken
        return os.stat_result(told)

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    refusal = rf"{taken} belongs to user \w+, .* alone; have it removed"
    (problem,) = ask().problems
    assert re.search(f"runs cannot be watched: {refusal}", problem)
    publisher = Publisher(a_state)
    assert ask().states == ((a_state(),) if has_runtime else ())
    publisher.close()
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == (not has_runtime) and all(re.search(refusal, one) for one in lines)
    assert not list(taken.iterdir())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("open", "chmod 700, or name another one in DATAPARALLEL_MONITOR_DIR"),
        ("link", "chmod 700, or name another one in DATAPARALLEL_MONITOR_DIR"),
        ("missing", "No such file or directory"),
        ("long", "AF_UNIX path too long"),
    ],
)
def test_training_goes_on_where_the_folder_cannot_be_used(
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    why: str,
) -> None:
    folder = run_folder / ("x" * 100 if kind == "long" else "x")
    folder.mkdir(mode=0o755 if kind == "open" else 0o700)
    if kind == "link":
        folder = folder.with_name("y")
        folder.symlink_to(run_folder / "x")
    elif kind == "missing":
        folder = folder / "below" / "it"
    monkeypatch.setenv(attach.VARIABLE, str(folder))
    model = net()
    with StepMonitor(model) as monitor:
        model(torch.ones(4, 2)).sum().backward()
        assert runs() == []
    assert len(monitor.steps) == 1
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert why in line


def test_only_what_dead_processes_have_left_is_removed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket_of(run_folder, 4711).close()
    (run_folder / "notes.txt").touch()
    # As that of a process of a container, whose numbers begin anew.
    monkeypatch.setattr(attach, "_numbers", iter([0, 1]))
    same_number = socket_of(run_folder, ME)
    publisher = Publisher(a_state)
    names = {path.name for path in run_folder.iterdir()}
    assert names == {"notes.txt", f"{ME}.0.sock", f"{ME}.1.sock"}
    publisher.close()
    same_number.close()
