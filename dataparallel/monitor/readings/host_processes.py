"""The host's facts about processes."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable
from typing import Any

import psutil

#: Fields of a :class:`ProcessReading` that may be hidden, each on its own.
_FIELDS: dict[str, Callable[[psutil.Process], Any]] = {
    "user": lambda process: process.username(),
    "host_memory": lambda process: float(process.memory_info().rss),
    # Processes of the kernel have none.
    "command": lambda process: shlex.join(process.cmdline()) or None,
    "parent": lambda process: process.ppid(),
    "started": lambda process: process.create_time(),
}


class HostProcesses:
    """The host's facts about a process: its name, its user, its load."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._told: dict[int, dict[str, Any] | None] = {}

    def describe(self, pid: int) -> dict[str, Any] | None:
        """Return the host's fields of a :class:`ProcessReading`; None if there is no such
        process. Hidden values are left out, and the load is told from the second time on.

        Until :meth:`keep` it is read once, on however many devices the process is: the load counts
        from the last look.
        """
        if pid not in self._told:
            self._told[pid] = self._read(pid)
        return self._told[pid]

    def _read(self, pid: int) -> dict[str, Any] | None:
        process = self._known.get(pid)
        try:
            if process is not None and process.is_running():
                told: dict[str, Any] = {"cpu": process.cpu_percent() / 100}
            else:
                # Its number may belong to another one by now.
                process = self._known[pid] = psutil.Process(pid)
                process.cpu_percent()
                told = {}
            # One that has ended and that nobody has waited for still has a number.
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            told["name"] = process.name()
        except psutil.Error:
            return None
        for name, ask in _FIELDS.items():
            with contextlib.suppress(psutil.Error, KeyError):
                told[name] = ask(process)
        return told

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all processes but these, and read them anew the next time."""
        self._told.clear()
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}
