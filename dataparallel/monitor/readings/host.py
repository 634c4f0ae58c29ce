"""Readings of the host, and of the threads of the run that is watched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from dataparallel.monitor.readings.cgroup import UsableMemory, memory, swap
from dataparallel.monitor.readings.processors import BusyShare, usable_processors
from dataparallel.monitor.readings.reading import HostReading
from dataparallel.monitor.readings.source import SHORTEST_SPAN


class HostReader:
    """A reader of the usable processors and memory, and of the threads of processes.

    ``processes`` tells these processes, and what is put before the names of their threads.
    """

    def __init__(
        self,
        processes: Callable[[], Mapping[int, str]] = dict,
        *,
        busy: Callable[[], float | None] | None = None,
    ) -> None:
        self._processes = processes
        self._busy = BusyShare() if busy is None else busy
        self._num_cpus = usable_processors().count
        self._threads: dict[int, ThreadLoads] = {}

    def read(self) -> HostReading:
        """Read the host now."""
        now = memory()
        spare: UsableMemory | None = None
        load: tuple[float, float, float] | None = None
        with contextlib.suppress(OSError, RuntimeError):
            load = psutil.getloadavg()
        with contextlib.suppress(OSError, RuntimeError):
            spare = swap()
        names = self._processes()
        self._threads = {pid: self._threads.get(pid) or ThreadLoads(pid) for pid in names}
        threads = {
            f"{name} {thread}".strip(): load
            for pid, name in names.items()
            for thread, load in self._threads[pid].read().items()
        }
        return HostReading(
            utilization=self._busy(),
            num_cpus=self._num_cpus,
            memory_used=float(now.used),
            memory_total=float(now.total),
            threads=threads,
            load=load,
            swap_used=None if spare is None else float(spare.used),
            swap_total=None if spare is None else float(spare.total),
        )


class ThreadLoads:
    """The load that each thread of a process has put on a processor since the last time.

    It only has threads with a meaning: those of the replicas, those in which accelerators'
    gradients are computed, and the first one, as ``"main"``. Threads of one name are added up: they
    belong to the same replica of several wrappers.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = float("-inf")
        self._before: dict[int, float] = {}
        self._loads: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Per name of a thread its load, from 0 to 1; nothing the first time."""
        now = time.monotonic()
        span = now - self._since
        if span < SHORTEST_SPAN:
            return dict(self._loads)
        threads = _times(self._pid)
        loads: dict[str, float] = {}
        for thread, (name, spent) in threads.items():
            if thread in self._before:
                busy = (spent - self._before[thread]) / span
                loads[name] = loads.get(name, 0.0) + min(1.0, max(0.0, busy))
        self._since, self._loads = now, loads
        self._before = {thread: spent for thread, (_, spent) in threads.items()}
        return dict(sorted(loads.items()))


def _times(pid: int) -> dict[int, tuple[str, float]]:
    """By number: the name of a thread, and for how many seconds it has been busy."""
    found: dict[int, tuple[str, float]] = {}
    with contextlib.suppress(psutil.Error):
        for thread in psutil.Process(pid).threads():
            # It may end at any moment, and Linux alone tells names.
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()
                name = "main" if thread.id == pid else name
                if name == "main" or name.startswith(("replica-", "pt_autograd")):
                    found[thread.id] = (name, thread.user_time + thread.system_time)
    return found
