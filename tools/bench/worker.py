"""The worker process of a benchmark: it stays alive and measures when it is told to.

It reads one JSON object per line from its standard input and answers each with one on its standard
output: ``{"do": "start", "module": "dataparallel.tools.bench.trainer", "task": {..}}``, then
``check``, ``run`` and ``finish``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Protocol


class Measurement(Protocol):
    """What the function ``begin`` of a module returns for the fields of a task."""

    def check(self, steps: int) -> dict[str, Any]:
        """Do some steps, and tell what shows that the results are right."""
        ...

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat; by phase, the seconds of each repetition."""
        ...

    def finish(self) -> dict[str, Any]:
        """Conclude, and leave the contestant."""
        ...


def main() -> int:
    """Answer requests until ``finish`` or the end of the input."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "start":
            module = importlib.import_module(request["module"])
            measurement: Measurement = module.begin(request["task"])
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
