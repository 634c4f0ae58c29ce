"""Worker processes as seen from the process that directs a measurement."""

from __future__ import annotations

import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from dataparallel.tools.bench.contestants import Contestant, Task

#: Seconds that a worker may take to import torch, build what it needs and make its model.
START_TIMEOUT = 300.0
#: Seconds that one round may take.
ROUND_TIMEOUT = 300.0


class WorkerError(RuntimeError):
    """A worker process died or did not answer in time."""


class Worker:
    """One worker process.

    Args:
        task: What it measures.
        label: How messages call it.
    """

    def __init__(self, task: Task, label: str) -> None:
        self.task = task
        self.label = label
        # Closed by close(), as the process is.
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dataparallel.tools.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, do: str, **details: Any) -> None:
        """Send a request; :meth:`answer` waits for what comes back."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def answer(self, timeout: float) -> dict[str, Any]:
        """Wait for the answer to the last request.

        Args:
            timeout: Seconds.

        Raises:
            WorkerError: The process ended, or did not answer in time.
        """
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty as error:
            raise self._failure(f"did not answer within {timeout:.0f} s") from error
        if not line:
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> WorkerError:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-15:]
        said = "\n".join(["; it said:", *(f"  {line}" for line in lines)]) if lines else ""
        return WorkerError(f"worker {self.label} {what}{said}")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                # A request that the process had not read is of no interest any more.
                continue
        self._errors.close()


class Team:
    """The workers of one contestant, directed as one.

    Args:
        contestant: Whose workers to start.
    """

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        several = len(contestant.tasks) > 1
        self._workers = [
            Worker(task, f"{contestant.name} (process {task.rank})" if several else contestant.name)
            for task in contestant.tasks
        ]

    def start(self) -> None:
        """Make the models ready."""
        for worker in self._workers:
            task = worker.task
            worker.ask("start", subject=task.subject, task=dataclasses.asdict(task))
        self._answers(START_TIMEOUT)

    def check(self, steps: int) -> list[dict[str, Any]]:
        """What each process says of the first ``steps`` steps."""
        return self._all("check", steps=steps)

    def run(self, steps: int) -> dict[str, list[float]]:
        """Seconds of each of ``steps`` repetitions, by phase; those of the slowest process."""
        answers = self._all("run", steps=steps)
        return {
            phase: [max(each) for each in zip(*(answer[phase] for answer in answers), strict=True)]
            for phase in answers[0]
        }

    def finish(self) -> list[dict[str, Any]]:
        """What each process concludes. The processes end."""
        return self._all("finish")

    def _all(self, do: str, **details: Any) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.ask(do, **details)
        return self._answers(ROUND_TIMEOUT)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        return [worker.answer(timeout) for worker in self._workers]

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            worker.close()
