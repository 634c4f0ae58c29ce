"""The worker process of a benchmark: it stays alive and measures when it is told to.

It reads one JSON object per line from its standard input and answers each with one on its standard
output: ``{"do": "start", "task": {..}}``, then ``check``, ``run`` and ``finish``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from dataparallel.tools.bench.contestants import Task


def main() -> int:
    """Answer requests until ``finish`` or the end of the input."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    trainer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            from dataparallel.tools.bench.trainer import Trainer

            trainer = Trainer(Task(**request["task"]))
            answer: dict[str, Any] = {}
        elif request["do"] == "check":
            losses, norms = trainer.check(request["steps"])
            answer = {"losses": losses, "gradient_norms": norms}
        elif request["do"] == "run":
            answer = {"seconds": trainer.run(request["steps"])}
        else:
            answer = {
                "host_bytes": trainer.memory.host_peak(),
                "device_bytes": trainer.memory.device_peak(),
            }
            trainer.close()
        answers.write(json.dumps(answer) + "\n")
        if request["do"] == "finish":
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
