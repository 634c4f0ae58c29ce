"""The worker process of a benchmark: it stays alive and measures when it is told to.

It reads one JSON object per line from its standard input and answers each with one on its standard
output: ``{"do": "start", "subject": "train", "task": {..}}``, then ``check``, ``run`` and
``finish``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol

from dataparallel.tools.bench.collectives_seats import take_seat
from dataparallel.tools.bench.collectives_tasks import CollectivesTask
from dataparallel.tools.bench.contestants import ReducerTask, TrainTask
from dataparallel.tools.bench.reduction import Reduction
from dataparallel.tools.bench.trainer import Trainer


class Measurement(Protocol):
    """What a subject does in one process."""

    def check(self, steps: int) -> dict[str, Any]: ...
    def run(self, steps: int) -> dict[str, list[float]]: ...
    def finish(self) -> dict[str, Any]: ...


def begin(subject: str, task: dict[str, Any]) -> Measurement:
    """Set up what a task asks for.

    Args:
        subject: ``"train"``, ``"reducer"`` or ``"collectives"``.
        task: The fields of the subject's task.
    """
    if subject == "train":
        return Trainer(TrainTask(**task))
    if subject == "collectives":
        return take_seat(CollectivesTask(**task))
    return Reduction(ReducerTask(**task))


def main() -> int:
    """Answer requests until ``finish`` or the end of the input."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measurement: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "start":
            measurement = begin(request["subject"], request["task"])
        elif request["do"] == "check":
            answer = measurement.check(request["steps"])
        elif request["do"] == "run":
            answer = measurement.run(request["steps"])
        else:
            answer = measurement.finish()
        answers.write(json.dumps(answer) + "\n")
        if request["do"] == "finish":
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
