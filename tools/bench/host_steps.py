"""One contestant of `bench host`: stacks of tiny layers, a step of each, timed and counted."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import dataparallel
from dataparallel.tools.bench.harness import Task
from dataparallel.tools.bench.host_counts import PythonCalls, count_operators
from dataparallel.tools.bench.seat import Seat

#: Features of each layer: next to no arithmetic.
_WIDTH = 4
#: After the steps before, steady ones follow these: the first eleven learn an order and are timed.
_WARM_UP = 1
#: Small models repeat their step more often in a turn, up to so many times.
_MOST_REPEATS = 3


# Wrappers are loaded where they are used: they watch the optimizers of other models, too.


@dataclass(frozen=True, kw_only=True)
class HostTask(Task):
    """Train models with next to no arithmetic.

    A contestant without a wrapper runs ``replicas`` parts of the batch one after the other.

    Attributes:
        parameters: Number of parameters of each model, two per layer.
        batch: Number of samples.
    """

    module: ClassVar[str] = __name__

    parameters: tuple[int, ...]
    batch: int


def begin(task: dict[str, Any]) -> Host:
    """What a worker process measures with."""
    return Host(HostTask(**task))


class _Model:
    """A stack of layers, as a contestant trains it."""

    def __init__(self, seat: Seat, parameters: int, task: HostTask) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2)]
        for layer in layers:
            # So that a thousand of them neither shrink nor swell what passes through.
            nn.init.orthogonal_(layer.weight)
        self.model = seat.wrap(nn.Sequential(*layers).to(seat.device))
        parts = task.replicas if task.kind == "bare" else 1
        data = (torch.randn(task.batch, _WIDTH, device=seat.device) for _ in range(2))
        self.parts = list(zip(*(each.chunk(parts) for each in data), strict=True))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3 / len(layers))
        self.loss = 0.0

    def step(self, keep_loss: bool = False) -> Counter[str]:
        """Train once, and return the seconds of each phase, wall and processor time."""
        spent: Counter[str] = Counter()
        start = _now()
        self.optimizer.zero_grad()
        self.loss = 0.0
        for inputs, targets in self.parts:
            begin = _now()
            output = self.model(inputs)
            middle = _now()
            loss = nn.functional.mse_loss(output, targets, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            end = _now()
            _add(spent, "forward", begin, middle)
            _add(spent, "backward", middle, end)
            if keep_loss:
                self.loss += loss.item()
        self.optimizer.step()
        _add(spent, "step", start, _now())
        return spent


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _add(spent: Counter[str], phase: str, start: tuple[float, ...], end: tuple[float, ...]) -> None:
    for clock, before, after in zip(("wall", "processor"), start, end, strict=True):
        spent[f"{phase} {clock}"] += after - before  # type: ignore[assignment]


class Host:
    """The models of one contestant.

    Args:
        task: What to measure.
    """

    def __init__(self, task: HostTask) -> None:
        self.task = task
        self.seat = Seat(task)
        self.models = {number: _Model(self.seat, number, task) for number in task.parameters}

    def check(self, steps: int) -> dict[str, Any]:
        """By number of parameters: loss and norm of the gradient at each of the first steps."""
        said: dict[str, Any] = {}
        for number, model in self.models.items():
            losses, norms = [], []
            for _ in range(steps):
                model.step(keep_loss=True)
                losses.append(model.loss)
                grads = [each.grad for each in model.model.parameters() if each.grad is not None]
                norms.append(torch.nn.utils.get_total_norm(grads).item())
            said[str(number)] = {"losses": losses, "gradient_norms": norms}
        return said

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat the step of each model, and return the seconds of each phase."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        most = max(self.models)
        for number, model in self.models.items():
            for _ in range(steps * min(_MOST_REPEATS, most // number)):
                # What the devices still do must not make the host wait in the next step.
                self.seat.synchronize()
                for phase, each in model.step().items():
                    seconds[f"{number} {phase}"].append(each)
        return seconds

    def finish(self) -> dict[str, Any]:
        """By number of parameters: what a steady step does, counted."""
        calls = PythonCalls(self.seat.slots)
        counts: dict[str, Any] = {}
        for number, model in self.models.items():
            if self.task.kind == "ours":
                # Its threads must begin anew to be counted; what it has learned, it keeps.
                dataparallel.DataParallel.close(model.model)  # type: ignore[arg-type]
            for _ in range(_WARM_UP):
                model.step()
            counts[str(number)] = {
                **calls.count(model.step),
                **count_operators(model.step, self.seat.device),
            }
        self.seat.leave(*(each.model for each in self.models.values()))
        return counts
