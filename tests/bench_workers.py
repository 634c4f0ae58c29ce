"""Workers of a benchmark that are forked instead of started: those of a run start in a moment."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from subprocess import PIPE
from typing import IO

from dataparallel.tools.bench import worker
from tests import forkserver

_COMMAND = [sys.executable, "-m", worker.__name__]


class ForkedWorker:
    """Stands for ``subprocess.Popen`` where a benchmark starts its workers.

    Args:
        command: That of a worker.
        stdin: ``subprocess.PIPE``.
        stdout: ``subprocess.PIPE``.
        stderr: An open file.
        text: True.
    """

    def __init__(
        self, command: list[str], *, stdin: int, stdout: int, stderr: IO[str], text: bool
    ) -> None:
        assert (command, stdin, stdout, text) == (_COMMAND, PIPE, PIPE, True)
        context = forkserver.context()
        requests, requests_in = context.Pipe(duplex=False)
        answers, answers_in = context.Pipe(duplex=False)
        with Connection(os.dup(stderr.fileno())) as errors:
            self._process = context.Process(
                target=_work, args=(requests, answers_in, errors), daemon=True
            )
            self._process.start()
        self.stdin = os.fdopen(os.dup(requests_in.fileno()), "w")
        self.stdout = os.fdopen(os.dup(answers.fileno()))
        for end in (requests, requests_in, answers, answers_in):
            end.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _work(requests: Connection, answers: Connection, errors: Connection) -> None:
    for number, end in enumerate((requests, answers, errors)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0)
    status = worker.main()
    sys.stderr.flush()
    os._exit(status)
