"""Interpreters that start in a moment and end as real ones do.

A process of multiprocessing ends by ``os._exit``, so nothing is seen of the end of an interpreter:
of daemon threads that are still at work then, for one. To start an interpreter and to import torch
takes seconds. So one is started, which forks; each child leaves the loop, calls its function, and
comes to the end of the script.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

ROOT = pathlib.Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How an interpreter has ended.

    Attributes:
        status: The exit status; negative for the number of a signal.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
        seconds: How long it took.
    """

    status: int
    out: str
    err: str
    seconds: float


class ExitServer:
    """Runs functions of a module in interpreters of their own. See the fixture ``exits``."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.exit_server", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"},
        )
        assert self._read()["ready"][0][0] == 1, "other threads do not survive the fork"

    def run(self, *calls: tuple[str, Sequence[object]], timeout: float = 30.0) -> list[Ended]:
        """Call functions, each in an interpreter of its own, all at the same time.

        Args:
            calls: Names of functions and their arguments.
            timeout: Seconds after which an interpreter is killed; its stacks are in ``err``.
        """
        with tempfile.TemporaryDirectory(prefix="exits-") as folder:
            job = {"calls": calls, "folder": folder, "timeout": timeout}
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
            texts = pathlib.Path(folder)
            return [
                Ended(
                    int(status),
                    (texts / f"{index}.out").read_text(),
                    (texts / f"{index}.err").read_text(),
                    seconds,
                )
                for index, (status, seconds) in enumerate(self._read()["ended"])
            ]

    def close(self) -> None:
        """End the server."""
        self._process.communicate(timeout=30)

    def __enter__(self) -> ExitServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> dict[str, list[tuple[float, float]]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server of interpreters has ended"
        answer: dict[str, list[tuple[float, float]]] = json.loads(line)
        return answer


# --- in the server ---------------------------------------------------------------------------


def _serve() -> tuple[str, list[object]] | None:
    """Fork for every call; in a child, the call. None at the end."""
    while line := sys.stdin.readline():
        job = json.loads(line)
        started: list[int] = []
        for index, call in enumerate(job["calls"]):
            sys.stdout.flush()
            process = os.fork()
            if process == 0:
                _redirect(pathlib.Path(job["folder"]), index)
                function, args = call
                return function, args
            started.append(process)
        ended = _wait_for(started, job["timeout"])
        print(json.dumps({"ended": ended}), flush=True)
    return None


def _redirect(folder: pathlib.Path, index: int) -> None:
    sys.stdin.close()
    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{index}.{suffix}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    import faulthandler

    # Late: shows the stacks of what is to be killed.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _wait_for(processes: list[int], timeout: float) -> list[tuple[int, float]]:
    begin = time.monotonic()
    ended: dict[int, tuple[int, float]] = {}
    signals = [(begin + timeout + 0.5, signal.SIGKILL), (begin + timeout, signal.SIGUSR1)]
    while len(ended) < len(processes):
        for process in processes:
            if process in ended:
                continue
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                seconds = time.monotonic() - begin
                ended[process] = (os.waitstatus_to_exitcode(status), seconds)
        if signals and time.monotonic() > signals[-1][0]:
            _, number = signals.pop()
            for process in processes:
                if process not in ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
        time.sleep(0.005)
    return [ended[process] for process in processes]


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    # At its end an interpreter looks for garbage in all that it has imported.
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": [(threading.active_count(), 0.0)]}), flush=True)
    call = _serve()
    if call is not None:
        # What it returns lives until the end of the interpreter.
        kept = getattr(module, call[0])(*call[1])
