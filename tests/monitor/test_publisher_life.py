"""The side of the run: beginning and end, forks, and folders that cannot be used."""

from __future__ import annotations

import gc
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dataparallel
from dataparallel.monitor import StepMonitor, sockets
from dataparallel.monitor import publisher as publishing
from dataparallel.monitor.attach import Attachment, runs
from dataparallel.monitor.publisher import Publisher
from dataparallel.monitor.run import RunState
from tests.monitor.made_up_runs import a_state
from tests.monitor.made_up_runs import run_folder as run_folder


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_warned", set())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


# --- beginning and end -----------------------------------------------------------------------


def test_a_closed_publisher_leaves_nothing(run_folder: Path) -> None:
    publisher = Publisher(a_state)
    thread = publisher._server.thread if publisher._server else None
    assert thread is not None and thread.is_alive()
    (file,) = run_folder.iterdir()
    assert publisher.path == str(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    publisher.close()
    assert not thread.is_alive() and not list(run_folder.iterdir())
    publisher.close()


class Run:
    def state(self) -> RunState:
        return a_state()


def test_a_collected_publisher_ends_and_keeps_nothing_alive(run_folder: Path) -> None:
    run = Run()
    publisher = Publisher(run.state)
    thread = publisher._server.thread if publisher._server else None
    seen = weakref.ref(run)
    assert Attachment(os.getpid()).state() == a_state()
    del run
    gc.collect()
    assert seen() is None
    with pytest.raises(ValueError, match="the run has ended"):
        Attachment(os.getpid()).state()
    del publisher
    gc.collect()
    assert thread is not None
    wait_until(lambda: not thread.is_alive())
    assert not list(run_folder.iterdir())


def test_monitors_of_one_process_are_told_apart(run_folder: Path) -> None:
    first, second = Publisher(lambda: a_state(11)), Publisher(lambda: a_state(22))
    assert runs() == [os.getpid()]
    numbers = [file.number for file in sockets.listening()]
    states = [Attachment(os.getpid(), number=number).state() for number in numbers]
    assert [state.num_steps for state in states if state] == [11, 22]
    attachment = Attachment(os.getpid())
    newest = attachment.state()
    assert newest is not None and newest.num_steps == 22
    second.close()
    older = attachment.state()
    assert older is not None and older.num_steps == 11
    with pytest.raises(ValueError, match=f"has no monitor {numbers[1]}; it has {numbers[0]}"):
        Attachment(os.getpid(), number=numbers[1])
    first.close()
    assert attachment.state() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_a_process_that_ends_takes_its_socket_along(run_folder: Path) -> None:
    """One that leaves no `with` block; of one that is killed it stays until somebody looks."""
    program = """
        import os
        from dataparallel.monitor.publisher import Publisher
        from tests.monitor.made_up_runs import a_state

        child = os.fork()
        publisher = Publisher(a_state)
        if not child:
            os.kill(os.getpid(), 9)
        os.waitpid(child, 0)
        print(child, publisher.path, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert not done.returncode, done.stderr
    killed, path = done.stdout.split()
    assert path.startswith(str(run_folder))
    assert [file.name.split(".")[0] for file in run_folder.iterdir()] == [killed]
    assert runs() == [] and not list(run_folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_a_forked_child_leaves_its_parents_socket_alone(run_folder: Path) -> None:
    publisher = Publisher(a_state)
    server = publisher._server
    assert server is not None
    with warnings.catch_warnings():
        # The tests have threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        closed = server._listener.fileno() == -1
        publisher.close()
        publisher._finalizer()
        os._exit(0 if closed and Path(server.file.path).exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Attachment(os.getpid()).state() == a_state()
    publisher.close()


def test_what_a_dead_process_has_left_is_removed(run_folder: Path) -> None:
    dead = run_folder / "4711.0.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(dead))
    other = run_folder / "notes.txt"
    other.touch()
    publisher = Publisher(a_state)
    assert not dead.exists() and other.exists()
    publisher.close()


def test_a_socket_of_the_same_number_is_kept(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a process of a container, whose numbers begin anew."""
    first = Publisher(lambda: a_state(11))
    assert first.path is not None
    number = int(Path(first.path).name.split(".")[1])
    monkeypatch.setattr(publishing, "_numbers", iter([number]))
    second = Publisher(lambda: a_state(22))
    assert second.path is not None and second.path != first.path
    state = Attachment(os.getpid(), number=number).state()
    assert state is not None and state.num_steps == 11
    first.close()
    second.close()


def test_a_socket_that_was_removed_comes_back(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHECK_EVERY", 0.01)
    publisher = Publisher(a_state)
    assert publisher.path is not None
    os.unlink(publisher.path)
    wait_until(lambda: runs() == [os.getpid()])
    assert Attachment(os.getpid()).state() == a_state()
    publisher.close()
    assert not list(run_folder.iterdir())


# --- folders ---------------------------------------------------------------------------------


def test_the_folder_is_made_for_this_user_alone(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(sockets.VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_folder))
    publisher = Publisher(a_state)
    assert publisher.path is not None
    assert Path(publisher.path).parent == run_folder / "dataparallel"
    assert stat.S_IMODE((run_folder / "dataparallel").stat().st_mode) == 0o700
    # The shell of the watcher has another environment, and looks there as well.
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(run_folder))
    elsewhere = Publisher(a_state)
    assert elsewhere.path is not None
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_folder))
    assert {publisher.path, elsewhere.path} <= {file.path for file in sockets.listening()}
    publisher.close()
    elsewhere.close()


def test_a_folder_of_somebody_else_is_not_used(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Publisher(a_state)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert Publisher(a_state).path is None
    assert runs() == []
    assert warned(caplog) == [
        "the run cannot be watched from other processes: "
        f"{run_folder} belongs to the user with number {real}, not to {real + 1}"
    ]
    monkeypatch.undo()
    mine.close()


@pytest.mark.parametrize("kind", ["open", "file", "link", "long"])
def test_a_folder_that_is_not_safe_is_not_used(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = run_folder / ("x" * 100 if kind == "long" else "x")
    if kind == "file":
        folder.touch()
    elif kind == "link":
        (run_folder / "y").mkdir(mode=0o700)
        folder.symlink_to(run_folder / "y")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700 if kind == "long" else 0o755)
    monkeypatch.setenv(sockets.VARIABLE, str(folder))
    # Twice, but one line of the log.
    assert Publisher(a_state).path is None and Publisher(a_state).path is None
    (line,) = warned(caplog)
    expected = {"open": "chmod 700", "file": "no directory", "link": "no directory"}
    assert expected.get(kind, "too long a name for a socket; set DATAPARALLEL_MONITOR") in line


def test_training_goes_on_without_a_socket(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = dataparallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    monkeypatch.setenv(sockets.VARIABLE, str(run_folder / "missing" / "folder"))
    with StepMonitor(model) as monitor:
        model(torch.ones(4, 2)).sum().backward()
    assert len(monitor.steps) == 1
    assert "No such file or directory" in warned(caplog)[0]


def test_a_platform_without_sockets_is_told(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    caplog.set_level(logging.INFO, "dataparallel")
    publisher = Publisher(a_state)
    assert publisher.path is None
    publisher.close()
    assert "Python does not have on this platform" in caplog.text and not warned(caplog)
    assert runs() == []
    with pytest.raises(ValueError, match="runs cannot be watched here: it takes Unix domain"):
        Attachment(os.getpid())


def test_a_thread_that_cannot_start_is_told(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    publisher = Publisher(a_state)
    assert publisher.path is None and "can't start new thread" in warned(caplog)[0]
    del publisher
    gc.collect()
    assert not list(run_folder.iterdir())
