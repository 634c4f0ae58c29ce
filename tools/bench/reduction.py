"""One process's part of a contestant that reduces gradients, round by round."""

from __future__ import annotations

import time
from typing import Any

import torch

from dataparallel.tools.bench.contestants import ReducerTask
from dataparallel.tools.bench.gradient_sets import GRADIENT_SETS, KnownGradients, known_gradient
from dataparallel.tools.bench.seat import Seat


class Reduction:
    """Models whose backward is nearly all reduction, made ready for measuring.

    Each replica gets one sample, and each another, so that the replicas' gradients differ.

    Args:
        task: What to measure.
    """

    def __init__(self, task: ReducerTask) -> None:
        self.task = task
        self.seat = Seat(task)
        whole = torch.arange(1.0, task.replicas + 1.0).unsqueeze(1)
        # The bare module sees all samples at once.
        self.expected = known_gradient(whole, 1 if task.kind == "bare" else task.replicas)
        self.samples = self.seat.part(whole)
        self.modules = {
            name: KnownGradients(GRADIENT_SETS[name].shapes).to(self.seat.device)
            for name in task.gradients
        }
        self.models = {
            name: self.seat.wrap(module, task.bucket_cap_mb)
            for name, module in self.modules.items()
        }

    def check(self, steps: int) -> dict[str, Any]:
        """Do some rounds with each set.

        Returns:
            By set, the largest relative error of an element of a gradient in any of the rounds.
        """
        errors = {
            name: [self._error_of_one_round(name) for _ in range(steps)] for name in self.models
        }
        # A tensor's maximum, unlike Python's, is NaN if one of them is.
        largest = {name: torch.tensor(found).max().item() for name, found in errors.items()}
        return {"gradient_errors": largest}

    def _error_of_one_round(self, name: str) -> float:
        self._round(name)
        errors = []
        for parameter in self.modules[name].parameters():
            if parameter.grad is None:
                return float("inf")
            errors.append((parameter.grad - self.expected).abs().max())
        return torch.stack(errors).max().item() / self.expected

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat the round with each set.

        Returns:
            By set, seconds of each backward, until the devices have finished.
        """
        return {name: [self._round(name) for _ in range(steps)] for name in self.models}

    def _round(self, name: str) -> float:
        model = self.models[name]
        model.zero_grad()
        output = model(self.samples).mean()
        self.seat.synchronize()
        # Else the time in which one process waits for another's forward would count.
        self.seat.barrier()
        begin = time.perf_counter()
        output.backward()
        self.seat.synchronize()
        return time.perf_counter() - begin

    def finish(self) -> dict[str, Any]:
        """Do a last round with each set, and leave the contestant.

        Returns:
            What :meth:`check` returns.
        """
        answer = self.check(1)
        self.seat.leave(*self.models.values())
        return answer
