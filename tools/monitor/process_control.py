"""The actions of a user on the processes of the devices: to look at them, and to end them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Literal, TypeAlias

import psutil

from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.reading import ProcessReading

#: Ctrl-C, a request to end, and an end that cannot be refused.
How: TypeAlias = Literal["interrupt", "terminate", "kill"]


def end_process(pid: int, how: How, *, started: float | None) -> None:
    """End a process, as far as the user may.

    It must be the one that was ``started`` then: its number may belong to another one by now.

    Raises:
        PermissionError: It is somebody else's, the first one, this one, or cannot be seen.
        ProcessLookupError: It is gone.
    """
    process = may_end(pid, started=started)
    try:
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            (process.terminate if how == "terminate" else process.kill)()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"process {pid} is gone") from None
    except psutil.AccessDenied:
        raise PermissionError(f"process {pid} is somebody else's") from None


def may_end(pid: int, *, started: float | None) -> psutil.Process:
    """Return the process, if :func:`end_process` would end it; raise what that raises."""
    if pid <= 1 or pid == os.getpid():
        what = "this monitor itself" if pid > 1 else "what all others live by"
        raise PermissionError(f"process {pid} is {what}; it is not ended from here")
    try:
        process = _find(pid, started)
        user = process.username()
        mine = os.geteuid() in (0, process.uids().real)
    except psutil.AccessDenied:
        user, mine = "somebody else", False
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"process {pid} is gone") from None
    if not mine:
        raise PermissionError(
            f"process {pid} belongs to {user}; only that user and root may end it"
        )
    return process


def environment(pid: int, *, started: float | None) -> dict[str, str]:
    """Return the environment of a process at its start; raise what :func:`end_process` does."""
    try:
        return dict(_find(pid, started).environ())
    except psutil.AccessDenied:
        raise PermissionError(f"the environment of process {pid} is somebody else's") from None
    except psutil.Error:
        raise ProcessLookupError(f"process {pid} is gone") from None


def _find(pid: int, started: float | None) -> psutil.Process:
    if started is None:
        raise PermissionError(
            f"process {pid} cannot be seen from here; in a container, start it with --pid=host"
        )
    process = psutil.Process(pid)
    # Only nearly: the time of the boot, from which it is counted, is adjusted now and then.
    is_same = abs(process.create_time() - started) < 1.0
    if not is_same or process.status() == psutil.STATUS_ZOMBIE:
        raise ProcessLookupError(f"process {pid} is gone")
    return process


def ancestors(processes: Iterable[ProcessReading], host: HostProcesses) -> list[ProcessReading]:
    """Return the parents of processes, and their parents."""
    found: dict[int, ProcessReading] = {}
    for process in processes:
        pid = process.parent
        while pid and pid not in found:
            told = host.describe(pid)
            if told is None:
                break
            found[pid] = ProcessReading("", pid, **told)
            pid = told.get("parent")
    host.keep(found)
    return list(found.values())
