"""Worker processes that train: a step of each model is repeated, timed and counted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.tools.bench.cases import TrainCase, case_of, criterion
from dataparallel.tools.bench.harness import Task
from dataparallel.tools.bench.host_counts import PythonCalls, count_operators
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.seat import Seat

# Wrappers are loaded where they are used: they watch the optimizers of other models, too.


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task):
    """A task that trains models, each of which has its own turn.

    Attributes:
        cases: Names of the models.
        batch: Number of samples of the whole batch; a multiple of ``replicas``.
        chunks: In how many parts the bare module takes the batch, one after the other.
        loss: The place where ours takes the loss: the gathered output or each replica.
        optimizer: The optimizer, one of torch's.
        bucket_cap_mb: Size limit of a bucket. Default: the wrapper's own.
        compiles: True to compile the module of each contestant.
        counts: True to count the host's work in a step at the end.
    """

    cases: tuple[str, ...]
    batch: int
    chunks: int = 1
    loss: Literal["gathered", "replicas"] = "gathered"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    bucket_cap_mb: float | None = None
    compiles: bool = False
    counts: bool = False

    def begin(self) -> TrainMeasurement:
        """Make the object that measures, in the worker process."""
        return TrainMeasurement(self)

    def case(self, name: str) -> TrainCase:
        """Return a model by its name."""
        return case_of(name)


class TrainMeasurement:
    """Models made ready for measuring.

    All contestants of a case start from the same weights and together see the same batch.
    """

    def __init__(self, task: TrainTask) -> None:
        self.task = task
        self.seat = Seat(task)
        _touch_libraries(self.seat)
        batches = {name: _batch(name, task, self.seat) for name in task.cases}
        self.memory = MemoryGauge(self.seat.slots)
        self.steps = {name: _Step(name, task, self.seat, batches[name]) for name in task.cases}

    def check(self, steps: int) -> dict[str, Any]:
        """By case: per step, the loss of the whole batch and the norm of the gradient.

        The bare module accumulates the gradients of the replicas' chunks, so that batch norm sees
        the same batches for every contestant; all figures must then agree to rounding.
        """
        said: dict[str, Any] = {}
        for name, step in self.steps.items():
            # Whatever is measured: others divide by gradients near zero.
            optimizer = torch.optim.SGD(step.model.parameters(), lr=self.task.case(name).rate)
            chunks = step.split(self.task.replicas)
            losses, norms = [], []
            for _ in range(steps):
                parts: list[Tensor] = []
                step.once(chunks, optimizer, parts)
                losses.append(self.seat.mean(torch.stack(parts).sum()))
                norms.append(_gradient_norm(step.model))
            said[name] = {"losses": losses, "gradient_norms": norms}
        return said

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat the step of each case; seconds by case and phase.

        The seconds of the caller, such as ``"deep forward wall"`` and ``"deep step processor"``;
        and ``"deep finished"``: of the step until the devices have finished it.
        """
        self.seat.barrier()
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for name, step in self.steps.items():
            chunks = step.split(self.task.chunks)
            for _ in range(steps):
                begin = time.perf_counter()
                spent = step.once(chunks, step.optimizer)
                self.seat.synchronize()
                seconds[f"{name} finished"].append(time.perf_counter() - begin)
                for phase, each in spent.items():
                    seconds[f"{name} {phase}"].append(each)
        return seconds

    def finish(self) -> dict[str, Any]:
        """Peaks of memory, and by case what a steady step does, where that is counted; leave."""
        told: dict[str, Any] = {
            "host_bytes": self.memory.host_peak(),
            "device_bytes": self.memory.device_peak(),
        }
        if self.task.counts:
            calls = PythonCalls(self.seat.slots)
            told["counts"] = {name: self._count(each, calls) for name, each in self.steps.items()}
        self.seat.leave(*(step.model for step in self.steps.values()))
        return told

    def _count(self, step: _Step, calls: PythonCalls) -> dict[str, Any]:
        chunks = step.split(self.task.chunks)
        if self.seat.is_ours:
            # Its threads must begin anew to be counted. Its own method would end more than those,
            # and what it has learned would be lost.
            dataparallel.DataParallel.close(step.model)

        def once() -> None:
            step.once(chunks, step.optimizer)

        once()
        return {**calls.count(once), **count_operators(once, self.seat.device)}


class _Step:
    """A case as a contestant trains it: model, batch and optimizer."""

    def __init__(self, name: str, task: TrainTask, seat: Seat, batch: Sequence[Tensor]) -> None:
        self._batch = batch
        self._is_bare = task.kind == "bare"
        self._by_replicas = task.loss == "replicas" and seat.is_ours
        case = task.case(name)
        self._criterion = case.criterion
        torch.manual_seed(1)
        module: Any = case.build().to(seat.device)
        if task.compiles:
            # Not its method, which does nothing to an nn.Sequential. The bare module sees chunks at
            # first, then whole batches.
            module = torch.compile(module, dynamic=False)
        self.model = seat.wrap(module, task.bucket_cap_mb)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if task.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=case.rate)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        if task.kind == "watched":
            from dataparallel.monitor import StepMonitor

            # For as long as the process lives; somebody may look at it meanwhile.
            self._monitor = StepMonitor(self.model).__enter__()

    def split(self, chunks: int) -> list[tuple[Tensor, ...]]:
        """Return the batch for the bare module, in so many parts; others take it whole."""
        number = chunks if self._is_bare else 1
        return list(zip(*(each.chunk(number) for each in self._batch), strict=True))

    def once(
        self,
        chunks: Sequence[tuple[Tensor, ...]],
        optimizer: torch.optim.Optimizer,
        losses: list[Tensor] | None = None,
    ) -> dict[str, float]:
        """Train, note losses, and return the seconds of each phase, wall and processor time."""
        spent: defaultdict[str, float] = defaultdict(float)
        start = _now()
        optimizer.zero_grad()
        for inputs, targets in chunks:
            begin = _now()
            loss = self._loss(inputs, targets)
            if len(chunks) > 1:
                loss = loss / len(chunks)
            middle = _now()
            loss.backward()  # type: ignore[no-untyped-call]
            if losses is not None:
                losses.append(loss.detach())
            # The loss must not count as the optimizer's memory.
            del loss
            _add(spent, "forward", begin, middle)
            _add(spent, "backward", middle, _now())
        optimizer.step()
        _add(spent, "step", start, _now())
        return spent

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._by_replicas:
            loss: Tensor = self.model.loss(self._criterion, inputs, targets, weight="samples")
            return loss
        return self._criterion(self.model(inputs), targets)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _add(
    spent: dict[str, float], phase: str, start: tuple[float, float], end: tuple[float, float]
) -> None:
    for clock, before, after in zip(("wall", "processor"), start, end, strict=True):
        spent[f"{phase} {clock}"] += after - before


def _batch(name: str, task: TrainTask, seat: Seat) -> list[Tensor]:
    torch.manual_seed(0)
    return [seat.part(whole) for whole in task.case(name).data(task.batch)]


def _gradient_norm(model: nn.Module) -> float:
    # In a function of its own: a list that is kept would keep the gradients in memory.
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.nn.utils.get_total_norm(grads).item()


def _touch_libraries(seat: Seat) -> None:
    """Train a little of everything, so that what this loads is not counted as the model's."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    model = seat.wrap(net.to(seat.device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images = torch.randn(2 * len(seat.slots), 1, 4, 4, device=seat.device)
    targets = torch.zeros(len(images), dtype=torch.long, device=seat.device)
    criterion(model(images), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if seat.is_ours:
        model.close()
