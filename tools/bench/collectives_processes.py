"""One process with one member: torch's collectives in place, torch's functional ones and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import collectives as ours
from dataparallel import torch_internals
from dataparallel.tools.bench.collectives_tasks import (
    CollectivesTask,
    elements,
    phase,
    repetitions,
)
from dataparallel.tools.bench.collectives_timing import seconds_of, wait_for
from dataparallel.tools.bench.collectives_values import known_input, known_result, largest_error
from dataparallel.tools.bench.seat import Seat
from dataparallel.tools.bench.summary import largest

Call = Callable[[Tensor], Tensor]


class Processes:
    """One of several processes that do collectives together.

    Ours and torch's functional ones are called in turn, on the same input and in the same process
    group; torch's all_reduce in place, which is the peer of replicas, by itself.

    Args:
        task: What to measure.
    """

    def __init__(self, task: CollectivesTask) -> None:
        self.task = task
        self.seat = Seat(task)
        self.inputs = {
            size: known_input(elements(size, task.world_size), task.rank).to(self.seat.device)
            for size in task.sizes
        }
        self.in_place = {
            size: torch.empty_like(x)
            for size, x in self.inputs.items()
            if task.forms != ("process",)
        }
        operations = task.operations if "process" in task.forms else ()
        theirs = torch_internals.functional_collectives
        self.forms = {name: {"ours": _call(ours, name), "torch": _call(theirs, name)}
                      for name in operations}  # fmt: skip

    def check(self, steps: int) -> dict[str, Any]:
        """Do each collective some times, and look at every element.

        Returns:
            By phase, the largest error of an element of this process's result.
        """
        errors: dict[str, float] = {}
        for size, source in self.inputs.items():
            for name, forms in self.forms.items():
                calls = {phase(form, name, size): call for form, call in forms.items()}
                errors |= self._errors(calls, name, source, steps)
            if size in self.in_place:
                calls = {phase("gloo", "all_reduce", size): _reduce_a_copy}
                errors |= self._errors(calls, "all_reduce", source, steps)
        return {"errors": errors}

    def _errors(
        self, calls: Mapping[str, Call], name: str, source: Tensor, steps: int
    ) -> dict[str, float]:
        place = self.task.rank, self.task.world_size
        expected = known_result(name, source.numel(), *place)
        return {
            key: largest([largest_error(call(source), expected) for _ in range(steps)])
            for key, call in calls.items()
        }

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat.

        Args:
            steps: Of the largest size; see :func:`repetitions`.

        Returns:
            By phase, seconds of each call, until the result is there.
        """
        seconds: dict[str, list[float]] = {}
        for size, source in self.inputs.items():
            times = repetitions(size, self.task.sizes, steps)
            if size in self.in_place:
                # Sums of sums would leave the range of numbers; those of zeros do not.
                target = self.in_place[size].zero_()
                calls: dict[str, Call] = {phase("gloo", "all_reduce", size): _reduce_in_place}
                seconds |= self._take_turns(calls, target, times)
            for name, forms in self.forms.items():
                calls = {phase(form, name, size): call for form, call in forms.items()}
                seconds |= self._take_turns(calls, source, times)
        return seconds

    def _take_turns(
        self, calls: Mapping[str, Call], tensor: Tensor, times: int
    ) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {key: [] for key in calls}
        bound = {key: functools.partial(call, tensor) for key, call in calls.items()}
        wait, order = wait_for(self.seat.device), list(calls)
        self.seat.barrier()
        for _ in range(times):
            for key in order:
                seconds[key].append(seconds_of(bound[key], wait))
            # Nobody is always the one who comes after the other.
            order.reverse()
        return seconds

    def finish(self) -> dict[str, Any]:
        """Check once more, and leave the process group."""
        answer = self.check(1)
        self.seat.leave()
        return answer


def _call(module: Any, name: str) -> Call:
    """A functional collective and its wait, by the same words for ours and for torch's."""
    function = getattr(module, name)
    group = dist.group.WORLD
    details: dict[str, tuple[Any, ...]] = {
        "all_reduce": ("sum",),
        "all_gather_tensor": (0,),
        "reduce_scatter_tensor": ("sum", 0),
        "all_to_all_single": (None, None),
    }
    arguments = (*details[name], group)

    def call(tensor: Tensor) -> Tensor:
        result: Tensor = function(tensor, *arguments).wait()
        return result

    return call


def _reduce_in_place(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def _reduce_a_copy(tensor: Tensor) -> Tensor:
    return _reduce_in_place(tensor.clone())
