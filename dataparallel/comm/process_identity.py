"""Which process of which machine a rank is, and whether that process is still there."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from dataclasses import dataclass

_PROC = pathlib.Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, so that others on its machine can see whether it has ended.

    Attributes:
        host: The name of the machine, for people.
        pid: The number of the process.
        space: What tells apart whose numbers of processes these are: one start of one machine, and
            one container on it; empty where that is not known.
        started: When the process was started, as the system counts; empty where that is not known.
            Another process may get the same number later.
    """

    host: str
    pid: int
    space: str
    started: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process."""
        pid = os.getpid()
        found = _stat(pid)
        return cls(socket.gethostname(), pid, _space(), found[1] if found else "")

    def was_there(self, moment: int) -> bool:
        """Whether this process had been started at a moment, see :func:`ticks`."""
        return self.started.isdigit() and moment >= int(self.started)

    def has_ended(self) -> bool:
        """Whether the process is certainly no longer there; False where nobody can know."""
        if not self.started or not self.space or self.space != _space():
            return False
        found = _stat(self.pid)
        if found is None:
            return False
        state, started = found
        # Whoever started it may not have taken note yet: then it is a zombie.
        return started != self.started or state in ("Z", "X")


def ticks() -> int:
    """The time now, as the system counts it for the start of processes; 0 where it is unknown."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _space() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process and when it was started; empty if there is none, None if unknown."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except OSError:
        # Some systems hide the processes of other users.
        return None
    # The name, which may have any character in it, is in parentheses.
    fields = text.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")
