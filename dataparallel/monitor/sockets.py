"""Where the sockets of runs lie, and how they are named.

Note [Sockets of runs]
~~~~~~~~~~~~~~~~~~~~~~
Each run has a Unix domain socket, ``PID.NUMBER.sock``, in a folder that only this user can enter;
who can enter it may watch. Watchers look in all folders in which runs may have put theirs, since a
run that cron or a scheduler has started has another environment than the watcher's shell.

Whoever connects sends one line and gets one line, both JSON, and the connection is closed::

    {"version": 1, "get": "state"}
    {"version": 1, "state": {"pid": 4711, ...}}      or      {"version": 1, "error": "..."}

A socket on which nobody listens is what a dead process has left behind. Whether it is dead cannot
be told from its number: that may have been given to another process, or belong to a container. So
a socket gets its name when it is listening already.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Version of the protocol.
VERSION = 1
#: Greatest length of a request, and of an answer.
MAX_REQUEST = 4096
MAX_ANSWER = 16 << 20

#: Variable that names the one folder to use.
VARIABLE = "DATAPARALLEL_MONITOR_DIR"
#: So long may the path of a socket be: 107 bytes on Linux, 103 on macOS.
_MAX_PATH = 103
_NAME = re.compile(r"(\d+)\.(\d+)\.sock")


@dataclass(frozen=True, order=True)
class SocketFile:
    """A socket of a run.

    Attributes:
        pid: The process.
        number: Which of its monitors; a later one has a greater number.
        path: Where it lies.
    """

    pid: int
    number: int
    path: str


def missing() -> str | None:
    """Why there are no such sockets here; None where there are."""
    if hasattr(socket, "AF_UNIX") and hasattr(os, "geteuid"):
        return None
    return "it takes Unix domain sockets, which Python does not have on this platform"


def folders() -> list[Path]:
    """Where sockets of this user may lie, the best place first."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return [Path(chosen)]
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    of_user = [Path(runtime)] if runtime else []
    of_user.append(Path(f"/run/user/{user}"))
    of_all = [Path(tempfile.gettempdir()), Path("/tmp")]
    found = [parent / "dataparallel" for parent in of_user]
    found += [parent / f"dataparallel-{user}" for parent in of_all]
    return list(dict.fromkeys(found))


def check_folder(folder: Path) -> None:
    """A folder is this user's alone.

    Raises:
        OSError: It is not, or it is not there.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no directory")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to the user with number {found.st_uid}, not to {os.geteuid()}"
        )
    if found.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users; close it with: chmod 700 {folder}")


def listen(pid: int, number: int) -> tuple[socket.socket, SocketFile]:
    """A socket that listens, in the first folder in which that works.

    Args:
        pid: The process.
        number: The least number that the socket may have.

    Raises:
        OSError: It works nowhere.
    """
    reasons = []
    for folder in folders():
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_folder(folder)
            remove_stale(folder)
            return _listen_in(folder, pid, number)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


def _listen_in(folder: Path, pid: int, number: int) -> tuple[socket.socket, SocketFile]:
    # A process of a container may have the same number and use the same folder.
    while os.path.lexists(folder / f"{pid}.{number}.sock"):
        number += 1
    path = str(folder / f"{pid}.{number}.sock")
    unnamed = str(folder / f"{pid}.{number}.new")
    if len(os.fsencode(path)) > _MAX_PATH:
        raise OSError(f"{folder} has too long a name for a socket; set {VARIABLE} to a shorter one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unnamed)
        listener.bind(unnamed)
        os.chmod(unnamed, 0o600)
        listener.setblocking(False)
        listener.listen(128)
        os.rename(unnamed, path)
    except BaseException:
        listener.close()
        raise
    return listener, SocketFile(pid, number, path)


def remove_stale(folder: Path) -> None:
    """Remove the sockets of a folder on which nobody listens."""
    for found in _in_folder(folder):
        if _is_stale(found.path):
            with contextlib.suppress(OSError):
                os.unlink(found.path)


def files() -> list[SocketFile]:
    """The sockets of this user's runs, and what dead ones have left behind; in order."""
    return _all(remove=False)


def listening() -> list[SocketFile]:
    """The sockets on which runs of this user listen, in order; others are removed."""
    return _all(remove=True)


def _all(*, remove: bool) -> list[SocketFile]:
    found: list[SocketFile] = []
    for folder in [] if missing() else folders():
        # A folder that is not this user's alone holds nobody's run.
        with contextlib.suppress(OSError):
            check_folder(folder)
            if remove:
                remove_stale(folder)
            found += _in_folder(folder)
    return sorted(found)


def _in_folder(folder: Path) -> Iterator[SocketFile]:
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match:
            yield SocketFile(int(match[1]), int(match[2]), str(folder / name))


def _is_stale(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            # It is gone, or somebody listens but is busy.
            return False
    return False
