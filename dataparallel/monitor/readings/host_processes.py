"""The host's facts about processes."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil

from dataparallel.monitor.readings.placement import labels_of

_Facts = Mapping[str, Callable[[psutil.Process], Any]]

#: Fields of a :class:`ProcessReading` that stay while a process has its name; each may be hidden.
_LASTING: _Facts = {
    "user": lambda process: process.username(),
    # Processes of the kernel have none.
    "command": lambda process: shlex.join(process.cmdline()) or None,
    # If it ends, another one takes its place; that is not worth a look at each sample.
    "parent": lambda process: process.ppid(),
    "started": lambda process: process.create_time(),
    "labels": lambda process: labels_of(process.pid),
}
#: Fields that change.
_CHANGING: _Facts = {
    "host_memory": lambda process: float(process.memory_info().rss),
    "running": lambda process: max(0.0, time.time() - process.create_time()),
}


class HostProcesses:
    """The host's facts about a process: its name, its user, its load."""

    def __init__(self) -> None:
        #: By number: the process, its name, and what stays.
        self._known: dict[int, tuple[psutil.Process, str, dict[str, Any]]] = {}
        self._told: dict[int, dict[str, Any] | None] = {}

    def describe(self, pid: int) -> dict[str, Any] | None:
        """Return the host's fields of a :class:`ProcessReading`; None if there is no such
        process. Hidden values are left out, and the load is told from the second time on.

        Until :meth:`keep` it is read once, on however many devices the process is: the load counts
        from the last look.
        """
        if pid not in self._told:
            try:
                self._told[pid] = self._read(pid)
            except psutil.Error:
                self._told[pid] = None
        return self._told[pid]

    def _read(self, pid: int) -> dict[str, Any] | None:
        found = psutil.Process(pid)
        process, before, lasting = self._known.get(pid, (found, None, {}))
        if process != found:
            # Its number belongs to another one by now.
            process, before = found, None
        with process.oneshot():
            # One that has ended and that nobody has waited for still has a number.
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            name, load = process.name(), process.cpu_percent() / 100
            if name != before:
                lasting = _ask(process, _LASTING)
            self._known[pid] = process, name, lasting
            told = {"name": name, **lasting, **_ask(process, _CHANGING)}
        return told if before is None else {**told, "cpu": load}

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all processes but these, and read them anew the next time."""
        self._told.clear()
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}


def _ask(process: psutil.Process, facts: _Facts) -> dict[str, Any]:
    told = {}
    for name, ask in facts.items():
        with contextlib.suppress(psutil.Error, KeyError):
            told[name] = ask(process)
    return told
