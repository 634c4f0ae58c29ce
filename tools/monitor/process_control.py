"""The end of processes on the devices, as far as the user may end them."""

from __future__ import annotations

import os
import signal

import psutil


def end_process(pid: int, how: signal.Signals, *, started: float | None) -> None:
    """Send a signal to a process, as far as the user may.

    It must be the one that was ``started`` then: its number may belong to another one by now.

    Raises:
        PermissionError: It is somebody else's, the first one, this one, or cannot be seen.
        ProcessLookupError: It is gone.
    """
    if pid <= 1 or pid == os.getpid():
        what = "this monitor itself" if pid > 1 else "what all others live by"
        raise PermissionError(f"process {pid} is {what}; it is not ended from here")
    if started is None:
        raise PermissionError(
            f"process {pid} cannot be seen from here; in a container, start it with --pid=host"
        )
    try:
        process = psutil.Process(pid)
        # Only nearly: the time of the boot, from which it is counted, is adjusted now and then.
        if abs(process.create_time() - started) >= 1.0:
            raise ProcessLookupError(f"process {pid} is gone")
        process.send_signal(how)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"process {pid} is gone") from None
    except psutil.AccessDenied:
        raise PermissionError(f"process {pid} is somebody else's") from None
