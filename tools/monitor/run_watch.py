"""The runs that are watched, as they were when they were last asked."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable

import psutil

from dataparallel.monitor.attach import Answers, ask, runs
from dataparallel.monitor.readings.visible_devices import named_by_run
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.tools.monitor.ranks import process_name

#: The seconds that the answers of runs may take.
_TIMEOUT = 1.0
_NONE = (
    "no run can be watched now: put the training loop into "
    "`with dataparallel.monitor.StepMonitor(model):`"
)


class RunWatch:
    """A watch that asks runs for their states once per sample, and remembers them for the sources.

    With a ``pid`` only this process is watched; without, runs of all processes come and go, and the
    watch is never over.

    Attributes:
        latest: The last states, also of processes that are there and do not answer.
    """

    def __init__(self, ask: Callable[[], Answers], pid: int | None = None) -> None:
        self._ask = ask
        self._pid = pid
        self._problems: tuple[str, ...] = ()
        self.latest: tuple[RunState, ...] = ()
        #: The processes that there were last.
        self._last: tuple[int, ...] = ()
        #: The process that is watched, once it has answered; None if it is not visible.
        self._process: psutil.Process | None = None
        self._infos: list[RunInfo] = []

    def __call__(self) -> tuple[RunState, ...]:
        """Ask the runs."""
        before, self.latest = self.latest, ()
        states, self._problems, silent = self._ask()
        # It may hang, which is when one wants to see it.
        told = {state.identity for state in states}
        known = (run for run in before if run.pid in silent and run.identity not in told)
        self.latest = (*states, *(run.without_answer(time.time()) for run in known))
        self._last = self.pids or self._last
        if self._pid in self.pids and self._process is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(self._pid)
        self._infos = [state.info for state in self.latest] or self._infos
        return self.latest

    def device_names(self) -> dict[str, str]:
        """Return the runs' names of devices, by identity, without those that mean several."""
        named: dict[str, str] = {}
        for info in self._infos:
            named |= named_by_run(info.devices, info.uuids)
        often = Counter(named.values())
        return {uuid: name for uuid, name in named.items() if often[name] == 1}

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the runs."""
        return tuple(dict.fromkeys(state.pid for state in self.latest))

    def names(self) -> dict[int, str]:
        """Return the words that tell each process from the others; empty for the only one."""
        return {state.pid: process_name(state, self.latest) for state in self.latest}

    def is_over(self) -> bool:
        """True if the process that is watched is gone, so that no other run of it can follow."""
        if self._pid is None or not self._last or self.latest or self._problems:
            return False
        return self._process is None or not _is_alive(self._process)

    def notes(self) -> tuple[str, ...]:
        """Return the notes that a user should know about the runs."""
        if self.latest or self._problems:
            return self._problems
        if not self._last:
            return (_NONE,)
        who = ", ".join(map(str, self._last))
        if len(self._last) == 1:
            return (f"the run of process {who} has ended",)
        return (f"the runs of processes {who} have ended",)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # Its parent may never wait for it, and its number may belong to another one by now.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def watch_runs(chosen: str) -> RunWatch:
    """Attach to the runs of a process, or with ``"auto"`` to all, also those that begin later.

    Raises:
        ValueError: The process has no run; the message lists those that have.
    """
    if chosen == "auto":
        return RunWatch(lambda: ask(None, _TIMEOUT))
    found = runs()
    known = f"these processes can be watched: {', '.join(map(str, found))}" if found else _NONE
    if not chosen.isdecimal() or len(chosen) > 18:
        raise ValueError(
            f"--attach takes the number of a process, or auto, but got {chosen[:40]!r}; {known}"
        )
    pid = int(chosen)
    if pid not in found:
        raise ValueError(f"process {pid} has no run that can be watched; {known}")
    return RunWatch(lambda: ask(pid, _TIMEOUT), pid)
