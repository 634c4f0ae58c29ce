"""The attachment to runs from another process of the same user.

Note [Sockets of runs]
~~~~~~~~~~~~~~~~~~~~~~
Each run listens on a Unix domain socket, ``PID.NUMBER.sock``, in a folder that only this user can
enter; who can enter it may watch. The folder does not depend on where the environment puts
temporary files. A run that cron or a scheduler has started has another environment than the
watcher's shell. Where somebody else has taken that folder, it is one in ``$XDG_RUNTIME_DIR``, which
nobody can take, but which ends with the user's last session. Watchers look into both.

Whoever connects gets one line of JSON, and the run closes the connection. It reads nothing::

    {"version": 4, "state": {"pid": 4711, ...}}      or      {"version": 4, "error": "..."}

A socket on which nobody listens is what a dead process has left behind. Its number does not tell if
it is dead: that may have been given to another process, or belong to a container. So a socket gets
its name when it is listening already.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from dataparallel.monitor.run import RunState

_log = logging.getLogger("dataparallel")

#: Version of the protocol.
VERSION = 4
#: Variable that names another folder.
VARIABLE = "DATAPARALLEL_MONITOR_DIR"
#: The usual folder of a user.
USUAL = "/tmp/dataparallel-{}"
_NAME = re.compile(r"(\d+)\.(\d+)\.sock")
_MAX_ANSWER = 16 << 20
#: So long a watcher may take to read its answer, in seconds.
_PATIENCE = 0.5
#: So long the thread of a run rests at most, in seconds.
_MAX_REST = 0.2

_numbers = itertools.count()


def runs() -> list[int]:
    """Return the processes of this user whose runs can be watched, in ascending order."""
    return sorted({pid for pid, _, path in _sockets() if _is_there(path)})


class Answers(NamedTuple):
    """The states of runs, in order, and the reasons in words why others did not answer."""

    states: tuple[RunState, ...]
    problems: tuple[str, ...]
    #: The processes that are there, but say nothing.
    silent: tuple[int, ...] = ()


def ask(pid: int | None = None, timeout: float = 2.0) -> Answers:
    """Ask runs for their states, all at the same time. See Note [Sockets of runs].

    All answers together may take ``timeout`` seconds. Without a process, all of this user's are
    asked; a process may have several runs.
    """
    answers: list[tuple[int, bytes]] = []
    silent: list[int] = []
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for owner, _, path in _sockets():
            if pid is None or pid == owner:
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    if _connect(connection, path):
                        selector.register(connection, selectors.EVENT_READ, (owner, bytearray()))
                except BlockingIOError:
                    silent.append(owner)
        deadline = time.monotonic() + timeout
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                (owner, answer), connection = key.data, cast(socket.socket, key.fileobj)
                received = b""
                with contextlib.suppress(ConnectionError):
                    received = connection.recv(1 << 20)
                answer += received
                if not received or len(answer) > _MAX_ANSWER:
                    selector.unregister(connection)
                    answers.append((owner, bytes(answer)))
        silent += [key.data[0] for key in selector.get_map().values()]
    states, problems = [], []
    if pid is None and not answers and not silent:
        refused = (one for one in _own_folders()[1] if isinstance(one, PermissionError))
        problems += [f"runs cannot be watched: {one}" for one in refused]
    for owner in dict.fromkeys(silent):
        problems.append(
            f"process {owner} has not answered within {timeout:g} s; it may be stopped, or be in a "
            "call that lets no other thread run"
        )
    for owner, told in answers:
        # A run that ends just now tells nothing.
        if told:
            try:
                states.append(_state(owner, told))
            except ValueError as error:
                problems.append(str(error))
    states.sort(key=lambda state: state.order)
    return Answers(tuple(states), tuple(problems), tuple(silent))


def _state(pid: int, answer: bytes) -> RunState:
    if not answer.endswith(b"\n"):
        raise ValueError(
            f"the answer of process {pid} was cut off after {len(answer)} bytes: this process "
            "reads too slowly, or that one is ending"
        )
    try:
        content: Any = json.loads(answer)
        if content["version"] == VERSION and "error" not in content:
            return RunState.from_json(content["state"])
        told = content.get("error", f"version {content['version']} of the protocol is spoken")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
        raise ValueError(
            f"process {pid} answers with what is no state of a run: {answer[:80]!r}"
        ) from failure
    raise ValueError(f"process {pid}: {told} (this is version {VERSION})")


class Publisher:
    """A thread that answers watchers with the result of ``state``; None when the run is over.

    If there can be no socket, the run goes on without it, and the log says why.
    """

    def __init__(self, state: Callable[[], RunState | None]) -> None:
        self._state = state
        self._closed = False
        #: Processor seconds that answering has taken.
        self.seconds = 0.0
        self._process = os.getpid()
        try:
            self._listener, self._path = _listen()
        except OSError as error:
            self._closed = True
            _log.warning("the run cannot be watched from other processes: %s", error)
            return
        self._thread = threading.Thread(
            target=self._serve, name="dataparallel monitor", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more. May be called anywhere, also while garbage is collected."""
        # In a forked child the thread and the socket's file are the parent's.
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._path.unlink()
        # Wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # No file descriptor is left: that may pass.
                if not self._closed:
                    time.sleep(_MAX_REST)
                continue
            began = time.perf_counter()
            # A watcher may go away.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE)
                connection.sendall(self._answer())
            self.seconds = time.thread_time()
            # So that watchers take little of the training's time.
            time.sleep(min(9 * (time.perf_counter() - began), _MAX_REST))
        self._listener.close()

    def _answer(self) -> bytes:
        try:
            state = self._state()
            if state is None:
                return b""
            content: dict[str, Any] = {"state": state.to_json()}
        except Exception as error:
            told = f"the run cannot tell its state: {type(error).__name__}: {error}"
            content = {"error": told}
        return json.dumps({"version": VERSION, **content}).encode() + b"\n"


# --- where the sockets are -----------------------------------------------------------------------


def _folders() -> list[Path]:
    """Return the folders of this user's sockets, the usual one first."""
    if given := os.environ.get(VARIABLE):
        return [Path(given)]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    others = [Path(runtime, "dataparallel")] if runtime else []
    return [Path(USUAL.format(os.geteuid())), *others]


def _check(folder: Path) -> None:
    """Raise an OSError if a folder is not this user's alone, or is not there."""
    found, user = folder.lstat(), os.geteuid()
    if found.st_uid != user or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}, and is no directory of user {user} alone; "
            "have it removed, close it for others with chmod 700, or name another one in "
            f"{VARIABLE}"
        )


def _own_folders(*, make: bool = False) -> tuple[list[Path], list[OSError]]:
    """Return the folders that are this user's alone, and why others are not; one can be made."""
    found: list[Path] = []
    failures: list[OSError] = []
    for folder in _folders():
        try:
            if make and not found:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
            _check(folder)
            found.append(folder)
        except OSError as error:
            failures.append(error)
    return found, failures


def _listen() -> tuple[socket.socket, Path]:
    found, failures = _own_folders(make=True)
    if not found:
        raise failures[0]
    folder = found[0]
    runs()
    paths = (folder / f"{os.getpid()}.{number}.sock" for number in _numbers)
    # One that is there is that of a container's process, which has the same number.
    path = next(one for one in paths if not os.path.lexists(one))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path.with_suffix(".new")))
        listener.listen(128)
        path.with_suffix(".new").rename(path)
    except BaseException:
        listener.close()
        raise
    return listener, path


def _sockets() -> list[tuple[int, int, Path]]:
    """Process, number and path of each socket; in order, with those that dead processes left."""
    paths = (path for folder in _own_folders()[0] for path in folder.iterdir())
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    found = [(int(match[1]), int(match[2]), path) for match, path in matches if match]
    return sorted(found)


def _is_there(path: Path) -> bool:
    """True if a run listens, also one that is busy."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):
        return _connect(probe, path)
    return True


def _connect(connection: socket.socket, path: Path) -> bool:
    """Connect without waiting; False if the process is dead, and then its socket is removed.

    Raises:
        BlockingIOError: Nobody accepts, and the queue is full.
    """
    connection.setblocking(False)
    try:
        connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
        return False
    return True
