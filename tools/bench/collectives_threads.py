"""What threads of one process do at the same time: all_reduce of replicas, and memory alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dataparallel import collectives
from dataparallel.threads.apply import parallel_apply
from dataparallel.tools.bench.collectives_tasks import (
    CollectivesTask,
    elements,
    phase,
    repetitions,
)
from dataparallel.tools.bench.collectives_timing import time_together
from dataparallel.tools.bench.collectives_values import known_input, known_result, largest_error
from dataparallel.tools.bench.seat import Seat
from dataparallel.tools.bench.summary import largest


class Replicas:
    """The replicas of one process, or of one among several, which all_reduce.

    Args:
        task: What to measure.
    """

    def __init__(self, task: CollectivesTask) -> None:
        self.task = task
        self.seat = Seat(task)
        self.form = "hybrid" if task.world_size > 1 else "local"
        first = task.rank * len(self.seat.slots)
        self.inputs = {
            size: [
                known_input(elements(size, task.replicas), member).to(slot)
                for member, slot in enumerate(self.seat.slots, first)
            ]
            for size in task.sizes
        }

    def check(self, steps: int) -> dict[str, Any]:
        """Reduce some times, and look at every element.

        Returns:
            By phase, the largest error of an element of any replica's result.
        """
        errors = {}
        for size, inputs in self.inputs.items():
            expected = known_result("all_reduce", inputs[0].numel(), 0, self.task.replicas)
            found = [
                largest_error(result, expected)
                for _ in range(steps)
                for result in parallel_apply(
                    [self._all_reduce] * len(inputs),
                    [(x,) for x in inputs],
                    devices=self.seat.slots,
                )
            ]
            errors[phase(self.form, "all_reduce", size)] = largest(found)
        return {"errors": errors}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat.

        Args:
            steps: Of the largest size; see :func:`repetitions`.

        Returns:
            By phase, seconds of each call, of the slowest replica.
        """
        seconds = {}
        for size, inputs in self.inputs.items():
            calls = [functools.partial(self._all_reduce, x) for x in inputs]
            times = repetitions(size, self.task.sizes, steps)
            self.seat.barrier()
            key = phase(self.form, "all_reduce", size)
            seconds[key] = time_together(calls, self.seat.slots, times)
        return seconds

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor, "sum", self.form)

    def finish(self) -> dict[str, Any]:
        """Check once more, and leave."""
        answer = self.check(1)
        self.seat.leave()
        return answer


class Memory:
    """As many threads, which copy memory and add it up without knowing of each other.

    Args:
        task: What to measure.
    """

    def __init__(self, task: CollectivesTask) -> None:
        self.task = task
        self.seat = Seat(task)
        self.blocks = {
            size: [
                tuple(_block(elements(size, task.replicas), slot) for _ in range(3))
                for slot in self.seat.slots
            ]
            for size in task.sizes
        }

    def check(self, steps: int) -> dict[str, Any]:
        """Nothing can be wrong here."""
        return {"errors": {}}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat; see :meth:`Replicas.run`."""
        seconds = {}
        for size, blocks in self.blocks.items():
            times = repetitions(size, self.task.sizes, steps)
            copies = [functools.partial(to.copy_, a) for to, a, _ in blocks]
            sums = [functools.partial(torch.add, a, b, out=to) for to, a, b in blocks]
            for name, calls in (("copy", copies), ("sum", sums)):
                of_one = time_together(calls, self.seat.slots, times)
                seconds[phase("memory", name, size)] = of_one
        return seconds

    def finish(self) -> dict[str, Any]:
        """Leave."""
        self.seat.leave()
        return self.check(0)


def _block(count: int, slot: torch.device) -> Tensor:
    # Written once, or the system would give all pages of zeros the same memory.
    return torch.empty(count, device=slot).fill_(1.0)
