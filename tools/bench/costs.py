"""Worker processes that measure what a step is made of, for `bench scaling`."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, kernels
from dataparallel.comm.local import sums_of
from dataparallel.tools.bench.cases import CASES, criterion
from dataparallel.tools.bench.harness import Task
from dataparallel.tools.bench.seat import Seat

#: Bytes of the two collectives whose times tell latency and bandwidth.
SMALL, LARGE = 4 * 2**10, 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class CostTask(Task):
    """A task: the parts of a step of one replica, and the costs that several processes add."""

    case: str
    samples: int

    def begin(self) -> Meter:
        """Make the object that measures, in the worker process."""
        return Meter(self)


class Meter:
    """A meter of calls, each under its name. See Note [The projection]."""

    def __init__(self, task: CostTask) -> None:
        self.seat = Seat(task)
        self.device, case = self.seat.device, CASES[task.case]
        torch.manual_seed(0)
        self.module = case.build().to(self.device)
        self.batch, self.nothing = (
            [part.to(self.device) for part in case.data(samples)] for samples in (task.samples, 0)
        )
        # As many parameters, and next to nothing to compute.
        count = len(list(self.module.parameters()))
        layers = [nn.Linear(1, 1) for _ in range((count + 1) // 2)]
        self.probe = nn.Sequential(*layers).to(self.device)
        self.models: list[nn.Module] = []
        #: By name, what is repeated together.
        self.groups = self._between_processes() if task.joins else self._in_one_process()

    def _between_processes(self) -> list[dict[str, Callable[[], object]]]:
        reduce = torch.distributed.all_reduce
        return [
            {"small": functools.partial(reduce, torch.zeros(SMALL // 4))},
            {"large": functools.partial(reduce, torch.zeros(LARGE // 4))},
            {"probe 1": self._probing(1)},
        ]

    def _in_one_process(self) -> list[dict[str, Callable[[], object]]]:
        # The parameters stay as they are, however often the step is repeated.
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        # The cost of each tensor beside its bytes is a part of the probes.
        size = sum(each.numel() for each in self.module.parameters())
        one, other = torch.zeros(2, size, device=self.device)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return [
            {"forward": self._forward, "backward": self._backward, "optimizer": update},
            # Python and the dispatch of operators, without arithmetic.
            {"interpreter": functools.partial(_loss, copy.deepcopy(self.module), *self.nothing)},
            {"sum": lambda: sums_of([[one], [other]], self.device, in_place=True)},
            {"pack": lambda: kernels.flatten([one], other)},
            {"probe forward": functools.partial(self.probe, torch.ones(1, 1, device=self.device))},
            {"probe 0": self._probing(0)},
            {"probe 1": self._probing(1)},
            {"probe 2": self._probing(2)},
            {"probe buckets": self._probing(2, bucket_cap_mb=0.0)},
        ]

    def _forward(self) -> None:
        self.loss = _loss(self.module, *self.batch)

    def _backward(self) -> None:
        self.loss.backward()  # type: ignore[no-untyped-call]

    def _probing(self, replicas: int, bucket_cap_mb: float | None = None) -> Callable[[], object]:
        """Forward and backward of the probe; with 0 replicas, of the bare module."""
        model: nn.Module = self.probe
        if replicas:
            slots = [self.device] * replicas
            model = DistributedDataParallel(model, slots, bucket_cap_mb=bucket_cap_mb)
            self.models.append(model)
        inputs = torch.ones(max(replicas, 1), 1, device=self.device)
        targets = torch.zeros(len(inputs), dtype=torch.long, device=self.device)

        def step() -> None:
            self.probe.zero_grad()
            _loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]

        return step

    # --- as the harness asks ---------------------------------------------------------------------

    def check(self, steps: int) -> dict[str, Any]:
        """By parameter, bytes and the part of backward after which its gradient is there."""
        parameters = list(self.module.parameters())
        came: dict[Tensor, float] = {}
        passes: list[list[float]] = []

        def arrive(parameter: Tensor) -> None:
            came[parameter] = time.perf_counter()

        # torch declares no types for it.
        registering: list[Any] = [each.register_post_accumulate_grad_hook for each in parameters]
        hooks = [register(arrive) for register in registering]
        for _ in range(3 * steps):
            self._forward()
            begin = time.perf_counter()
            self._backward()
            length = time.perf_counter() - begin
            passes.append([(came[each] - begin) / length for each in parameters])
        for hook in hooks:
            hook.remove()
        return {
            "bytes": [each.nbytes for each in parameters],
            "ready": list(map(statistics.median, zip(*passes, strict=True))),
            "batch": sum(part.nbytes for part in self.batch),
        }

    def run(self, steps: int) -> dict[str, list[float]]:
        """Seconds of each call, until the devices have finished."""
        seconds: dict[str, list[float]] = {name: [] for calls in self.groups for name in calls}
        for calls in self.groups:
            for name, call in [*calls.items()] * steps:
                self.seat.barrier()
                begin = time.perf_counter()
                call()
                self.seat.synchronize()
                seconds[name].append(time.perf_counter() - begin)
        return seconds

    def finish(self) -> dict[str, Any]:
        """Leave the contestant."""
        self.seat.leave(*self.models)
        return {}


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    if isinstance(model, DataParallel):
        return model.loss(criterion, inputs, targets, weight="samples")
    return criterion(model(inputs), targets)
