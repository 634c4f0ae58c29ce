"""One process's part of a training contestant: a model, a batch, a step that is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.monitor import StepMonitor
from dataparallel.tools.bench.cases import CASES, criterion
from dataparallel.tools.bench.harness import Task
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.seat import Seat

Optimizer = Literal["sgd", "adamw"]

_OPTIMIZERS: dict[Optimizer, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task):
    """Train a model.

    Attributes:
        case: Name of the model.
        batch: Number of samples of the whole batch; a multiple of ``replicas``.
        loss: Whether ours takes the loss of the gathered output or of each replica.
        optimizer: Which of torch's.
        bucket_cap_mb: Size limit of a bucket. Default: the wrapper's own.
        compiles: Whether the module of each contestant is compiled.
    """

    module: ClassVar[str] = __name__

    case: str
    batch: int
    loss: Literal["gathered", "replicas"] = "gathered"
    optimizer: Optimizer = "sgd"
    bucket_cap_mb: float | None = None
    compiles: bool = False


def begin(task: dict[str, Any]) -> Trainer:
    """What a worker process measures with."""
    return Trainer(TrainTask(**task))


class Trainer:
    """A model made ready for measuring.

    All contestants of a case start from the same weights and together see the same batch.

    Args:
        task: What to measure.
    """

    def __init__(self, task: TrainTask) -> None:
        self.task = task
        self.seat = Seat(task)
        _touch_libraries(self.seat)
        case = CASES[task.case]
        torch.manual_seed(0)
        inputs, targets = case.data(task.batch)
        self.inputs, self.targets = self.seat.part(inputs), self.seat.part(targets)
        del inputs, targets
        self.memory = MemoryGauge(self.seat.slots)
        torch.manual_seed(1)
        self.module: Any = case.build().to(self.seat.device)
        if task.compiles:
            # Not its method, which does nothing to an nn.Sequential. The bare module sees chunks at
            # first, then whole batches.
            self.module = torch.compile(self.module, dynamic=False)
        self.model = self.seat.wrap(self.module, task.bucket_cap_mb)
        self.optimizer = _OPTIMIZERS[task.optimizer](self.model.parameters())
        if task.kind == "watched" and isinstance(self.model, DataParallel):
            # For as long as the process lives; somebody may look at it meanwhile.
            self._monitor = StepMonitor(self.model).__enter__()

    # --- correctness -------------------------------------------------------------------------

    def check(self, steps: int) -> dict[str, Any]:
        """Train and return, per step, the loss of the whole batch and the norm of the gradient.

        The bare module accumulates the gradients of the replicas' chunks, so that batch norm sees
        the same batches for every contestant; all figures must then agree to rounding.
        """
        # Whatever is measured: others divide by gradients near zero.
        optimizer = _OPTIMIZERS["sgd"](self.model.parameters())
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            if self.task.kind == "bare":
                loss = _accumulate(self.model, self.inputs, self.targets, self.task.replicas)
            else:
                loss = self._loss()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(self.seat.mean(loss.detach()))
            norms.append(_gradient_norm(self.model))
        return {"losses": losses, "gradient_norms": norms}

    # --- measurement -------------------------------------------------------------------------

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat the step.

        Returns:
            Seconds of each repetition, until the devices have finished.
        """
        self.seat.barrier()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            self._loss().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.seat.synchronize()
            seconds.append(time.perf_counter() - begin)
        return {"step": seconds}

    def _loss(self) -> Tensor:
        if self.task.loss == "replicas" and isinstance(self.model, DataParallel):
            return self.model.loss(criterion, self.inputs, self.targets, weight="samples")
        return criterion(self.model(self.inputs), self.targets)

    def finish(self) -> dict[str, Any]:
        """Conclude, and leave the contestant.

        Returns:
            Peaks of memory.
        """
        peaks = {
            "host_bytes": self.memory.host_peak(),
            "device_bytes": self.memory.device_peak(),
        }
        self.seat.leave(self.model)
        return peaks


def _gradient_norm(model: nn.Module) -> float:
    # In a function of its own: a list that is kept would keep the gradients in memory.
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.nn.utils.get_total_norm(grads).item()


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """Backward of the mean loss, chunk by chunk."""
    total = torch.zeros((), device=inputs.device)
    for part, wanted in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
        loss = criterion(model(part), wanted) / chunks
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _touch_libraries(seat: Seat) -> None:
    """Train a little of everything, so that what this loads is not counted as the model's."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    model = seat.wrap(net.to(seat.device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images = torch.randn(2 * len(seat.slots), 1, 4, 4, device=seat.device)
    targets = torch.zeros(len(images), dtype=torch.long, device=seat.device)
    criterion(model(images), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if isinstance(model, DataParallel):
        model.close()
