"""Run a function in a fork of the test process, which costs a few milliseconds."""

from __future__ import annotations

import ctypes
import os
import pathlib
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests import forkserver

# Tests count what else is written.
_write = os.write
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT = 1, 32


class Fork:
    """A child that runs ``function(say, *args)``, where ``say(number)`` tells the test a number.

    Args:
        function: What it runs. It must not compute with several threads of torch.
        args: What it is given.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._read, write = os.pipe()
        self._rest = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = forkserver.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                function(lambda number: _write(write, b"%d\n" % number), *args)
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        os.close(write)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        os.close(self._read)

    def hear(self, timeout: float = 20.0) -> int | None:
        """The next number that it says; None at its end."""
        while b"\n" not in self._rest:
            assert select.select([self._read], [], [], timeout)[0], "the child says nothing"
            got = os.read(self._read, 4096)
            if not got:
                return None
            self._rest += got
        line, self._rest = self._rest.split(b"\n", 1)
        return int(line)

    def rest(self) -> list[int]:
        """The numbers that it said since, up to its end."""
        numbers = []
        while (number := self.hear()) is not None:
            numbers.append(number)
        return numbers

    def kill(self) -> None:
        """End it at once, if it lives."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Wait for its end; its exit code, or the negative number of the signal that ended it."""
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def succeed(function: Callable[..., None], *args: Any) -> None:
    """Run a function in a fork and assert that it raises nothing."""
    with Fork(function, *args) as child:
        child.rest()
        assert child.wait() == 0


def mount_small(path: str, size: int) -> bool:
    """In a fork: mount a file system of so many bytes that this process alone sees.

    Returns:
        Whether that is permitted here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return False
    # Without these, files can have no owner there.
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    options = f"size={size}".encode()
    return bool(libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, options) == 0)


def make_read_only(path: str) -> None:
    """In a fork after :func:`mount_small`: let nothing be written there any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(None, path.encode(), None, _MS_REMOUNT | _MS_RDONLY, None) == 0


def require_mounts(tmp_path: str) -> None:
    """Skip the test where a process may not mount file systems of its own."""

    def permitted(say: Callable[[int], None]) -> None:
        say(mount_small(tmp_path, 1 << 20))

    with Fork(permitted) as child:
        if not child.hear():
            pytest.skip("needs user namespaces (unshare -rm); this machine does not permit them")
