"""Where a worker process finds its part of a measurement of collectives."""

from __future__ import annotations

from dataparallel.tools.bench.collectives_processes import Processes
from dataparallel.tools.bench.collectives_tasks import CollectivesTask
from dataparallel.tools.bench.collectives_threads import Memory, Replicas


def take_seat(task: CollectivesTask) -> Replicas | Processes | Memory:
    """What the task's kind asks for, made ready for measuring."""
    if task.kind == "ours":
        return Replicas(task)
    return Processes(task) if task.kind == "ddp" else Memory(task)
