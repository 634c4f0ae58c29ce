"""The run that is watched, as it was when it was last asked."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from dataparallel.monitor.attach import Attachment, runs
from dataparallel.monitor.run import RunInfo, RunState


class RunWatch:
    """Asks a run for its state, once per sample, and remembers it for the sources.

    Example::

        watch = RunWatch(Attachment(4711).state, pid=4711)
        watch()             # RunState(pid=4711, ...)
        watch.latest        # the same, without asking again

    Args:
        ask: Tells the state; None when the run is gone.
        pid: The process of the run.

    Attributes:
        pid: As given.
        latest: What was told last; None when that was nothing.
        has_ended: Whether the run is gone.
    """

    def __init__(self, ask: Callable[[], RunState | None], pid: int) -> None:
        self._ask = ask
        self.pid = pid
        self.latest: RunState | None = None
        self.has_ended = False
        self._info: RunInfo | None = None
        self._listeners: list[Callable[[RunInfo], None]] = []

    def listen(self, listener: Callable[[RunInfo], None]) -> None:
        """Tell what does not change while a run goes on, when it is known and when it is new."""
        self._listeners.append(listener)

    def __call__(self) -> RunState | None:
        """Ask the run.

        Raises:
            TimeoutError: It has not answered in time.
        """
        self.latest = None
        self.latest = self._ask()
        self.has_ended = self.latest is None
        if self.latest is not None and self.latest.info != self._info:
            self._info = self.latest.info
            for listener in self._listeners:
                listener(self._info)
        return self.latest

    def is_over(self) -> bool:
        """Whether the run is gone and its process too, so that no other run can follow."""
        if not self.has_ended:
            return False
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def notes(self) -> tuple[str, ...]:
        """What a user should know about it."""
        return (f"the run of process {self.pid} has ended",) if self.has_ended else ()


def watch_run(chosen: str, timeout: float = 1.0) -> RunWatch:
    """Attach to a run.

    Args:
        chosen: The number of its process, or ``"auto"`` for the only one that there is.
        timeout: How long an answer may take, in seconds. Default: 1.

    Raises:
        ValueError: There is no such run; the message lists those that there are.
    """
    if chosen != "auto":
        if not chosen.isdecimal() or len(chosen) > 18:
            raise ValueError(
                f"--attach takes the number of a process, or auto, but got "
                f"{chosen[:40]!r}; {_known()}"
            )
        pid = int(chosen)
    else:
        found = runs()
        if len(found) != 1:
            raise ValueError(f"--attach auto takes the only run that there is, but {_known()}")
        pid = found[0]
    return RunWatch(Attachment(pid, timeout).state, pid)


def _known() -> str:
    found = runs()
    if not found:
        return (
            "no run can be watched now: put the training loop into "
            "`with dataparallel.monitor.StepMonitor(model):`"
        )
    return f"these processes can be watched: {', '.join(map(str, found))}"
