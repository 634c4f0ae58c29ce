"""Watch a run from another process."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from types import TracebackType
from typing import Any

from dataparallel.monitor import sockets
from dataparallel.monitor.run import RunState

#: Between two attempts to reach a run that has no time, in seconds.
_PAUSE = 0.02


def runs() -> list[int]:
    """The processes of this user whose runs can be watched.

    Example::

        for pid in runs():
            print(pid, Attachment(pid).state())

    Returns:
        Their numbers, in ascending order.
    """
    return sorted({found.pid for found in sockets.listening()})


class Attachment:
    """Asks a run for its state. See Note [Sockets of runs].

    Example::

        with StepMonitor(model), Attachment(os.getpid()) as run:
            print(run.state())

    Args:
        pid: The process; one of :func:`runs`.
        timeout: How long an answer may take, in seconds. Default: 2.
        number: Which monitor of the process, counted from 0. Default: the newest that there is.

    Raises:
        ValueError: The process has no run that can be watched.
        TypeError: ``pid`` is no integer.
    """

    def __init__(self, pid: int, timeout: float = 2.0, number: int | None = None) -> None:
        if isinstance(pid, bool) or not isinstance(pid, int):
            raise TypeError(f"pid is the number of a process, but got {pid!r}")
        if not timeout > 0:
            raise ValueError(f"timeout is a time in seconds above 0, but got {timeout}")
        self._pid = pid
        self._number = number
        self._timeout = timeout
        self._closed = False
        if not any(map(self._is_ours, sockets.listening())):
            raise ValueError(_no_run(pid, number))

    def state(self) -> RunState | None:
        """The run as it is now.

        Returns:
            The state; None when the run has ended.

        Raises:
            TimeoutError: The process has not answered in time.
            ValueError: What it answered cannot be understood.
            RuntimeError: The attachment is closed.
        """
        if self._closed:
            raise RuntimeError("this attachment is closed; make another Attachment")
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                for file in self._files():
                    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                        return self._read(self._ask(file.path, deadline))
                return None
            except TimeoutError:
                raise self._too_late() from None
            except OSError:
                # Too many ask at once, or the monitor closes just now.
                time.sleep(_PAUSE)

    def close(self) -> None:
        """Ask no more."""
        self._closed = True

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _files(self) -> list[sockets.SocketFile]:
        """The sockets of the process, the newest first."""
        return [found for found in reversed(sockets.files()) if self._is_ours(found)]

    def _is_ours(self, file: sockets.SocketFile) -> bool:
        return file.pid == self._pid and self._number in (None, file.number)

    def _ask(self, path: str, deadline: float) -> bytes:
        """One line; an OSError where there is none."""
        request = json.dumps({"version": sockets.VERSION, "get": "state"}).encode() + b"\n"
        received = bytearray()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_left(deadline))
            connection.connect(path)
            connection.sendall(request)
            while not received.endswith(b"\n"):
                connection.settimeout(_left(deadline))
                part = connection.recv(1 << 16)
                if not part:
                    raise ConnectionResetError("the connection has ended before the answer")
                received += part
                if len(received) > sockets.MAX_ANSWER:
                    raise ValueError(f"process {self._pid} answers without end")
        return bytes(received)

    def _too_late(self) -> TimeoutError:
        return TimeoutError(
            f"process {self._pid} has not answered within {self._timeout:g} seconds; it may be "
            "stopped, or be in a call that lets no other thread run; try again"
        )

    def _read(self, answer: bytes) -> RunState | None:
        try:
            content: Any = json.loads(answer)
            version, error = content["version"], content.get("error")
            state: Any = content["state"] if error is None else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
            raise ValueError(
                f"process {self._pid} answers with what is no state of a run: {answer[:80]!r}"
            ) from failure
        if version != sockets.VERSION:
            raise ValueError(
                f"process {self._pid} speaks version {version} of the protocol, but this is "
                f"version {sockets.VERSION}; watch it with the dataparallel that it uses"
            )
        if error is not None:
            raise ValueError(f"process {self._pid}: {error}")
        return RunState.from_json(state)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _no_run(pid: int, number: int | None) -> str:
    reason = sockets.missing()
    if reason is not None:
        return f"runs cannot be watched here: {reason}"
    found = sockets.listening()
    of_process = [one.number for one in found if one.pid == pid]
    if of_process:
        return f"process {pid} has no monitor {number}; it has {', '.join(map(str, of_process))}"
    others = sorted({one.pid for one in found})
    there = (
        f"these have: {', '.join(map(str, others))}" if others else "no process of this user has"
    )
    return (
        f"process {pid} has no run that can be watched, but {there}. A run can be watched inside "
        "`with dataparallel.monitor.StepMonitor(model):`, by the user who has started it"
    )
