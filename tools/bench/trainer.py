"""One process's part of a contestant: a model, a batch, and a step that is repeated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor, nn

from dataparallel import DataParallel, devices
from dataparallel.tools.bench.cases import CASES, criterion
from dataparallel.tools.bench.contestants import Task
from dataparallel.tools.bench.memory import MemoryGauge

#: How long a process waits for the others of its contestant.
_TIMEOUT = timedelta(seconds=120)


class Trainer:
    """A model made ready for measuring.

    All contestants of a case start from the same weights and together see the same batch.

    Args:
        task: What to measure.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        _enable_virtual_devices(task)
        self.slots = devices.parse_devices(task.devices)
        on_cpu = sum(not devices.is_accelerator(slot) for slot in self.slots)
        # Ours divides the intra-op threads between its CPU slots, so it gets those of all.
        torch.set_num_threads(task.threads * max(1, on_cpu if task.kind == "ours" else 1))
        self.device = self.slots[task.rank if task.kind == "ddp" else 0]
        if task.kind == "ddp":
            self._join()
        _touch_kernels(self.device)
        case = CASES[task.case]
        torch.manual_seed(0)
        inputs, targets = case.data(task.batch)
        if task.kind == "ddp":
            inputs = inputs.chunk(task.world_size)[task.rank].clone()
            targets = targets.chunk(task.world_size)[task.rank].clone()
        self.inputs, self.targets = inputs.to(self.device), targets.to(self.device)
        self.memory = MemoryGauge(self.slots if task.kind == "ours" else (self.device,))
        torch.manual_seed(1)
        self.model = self._wrap(case.build().to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def _join(self) -> None:
        torch.distributed.init_process_group(
            torch.distributed.get_default_backend_for_device(self.device),
            init_method=f"file://{self.task.meeting_point}",
            rank=self.task.rank,
            world_size=self.task.world_size,
            timeout=_TIMEOUT,
        )

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self.task.kind == "ours":
            return DataParallel(module, self.slots)
        if self.task.kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        return module

    # --- correctness -------------------------------------------------------------------------

    def check(self, steps: int) -> tuple[list[float], list[float]]:
        """Train and return, per step, the loss of the whole batch and the norm of the gradient.

        The bare module accumulates the gradients of the replicas' chunks, so that batch norm sees
        the same batches for every contestant; all figures must then agree to rounding.
        """
        losses, norms = [], []
        for _ in range(steps):
            self.optimizer.zero_grad()
            if self.task.kind == "bare":
                loss = self._accumulate(len(self.slots))
            else:
                loss = self._loss()
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(self._mean_over_processes(loss.detach()))
            grads = [each.grad for each in self.model.parameters() if each.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(grads).item())
        return losses, norms

    def _accumulate(self, chunks: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        parts = zip(self.inputs.chunk(chunks), self.targets.chunk(chunks), strict=True)
        for inputs, targets in parts:
            loss = criterion(self.model(inputs), targets) / chunks
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _mean_over_processes(self, loss: Tensor) -> float:
        if self.task.kind == "ddp":
            torch.distributed.all_reduce(loss)
            loss /= self.task.world_size
        return loss.item()

    # --- measurement -------------------------------------------------------------------------

    def run(self, steps: int) -> list[float]:
        """Repeat the step.

        Returns:
            Seconds of each repetition, until the devices have finished.
        """
        repeat = self._repeated()
        if self.task.kind == "ddp":
            torch.distributed.barrier()
        seconds = []
        with torch.no_grad() if self.task.mode == "inference" else contextlib.nullcontext():
            for _ in range(steps):
                begin = time.perf_counter()
                repeat()
                for slot in self.slots:
                    devices.synchronize(slot)
                seconds.append(time.perf_counter() - begin)
        return seconds

    def _repeated(self) -> Callable[[], object]:
        modes: dict[str, Callable[[], object]] = {
            "step": self._step,
            "forward-backward": self._forward_backward,
            "forward": lambda: self.model(self.inputs),
            "inference": lambda: self.model(self.inputs),
        }
        return modes[self.task.mode]

    def _step(self) -> None:
        self._forward_backward()
        self.optimizer.step()

    def _forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self._loss().backward()  # type: ignore[no-untyped-call]

    def _loss(self) -> Tensor:
        if self.task.loss == "replicas" and isinstance(self.model, DataParallel):
            return self.model.loss(criterion, self.inputs, self.targets, weight="samples")
        return criterion(self.model(self.inputs), self.targets)

    def close(self) -> None:
        """End threads and leave the process group."""
        if isinstance(self.model, DataParallel):
            self.model.close()
        if self.task.kind == "ddp":
            torch.distributed.destroy_process_group()


def _enable_virtual_devices(task: Task) -> None:
    wanted = [name for name in task.devices if name.split(":")[0] == "virtual"]
    if wanted:
        import dataparallel.virtual

        indices = [int(name.split(":")[1]) if ":" in name else 0 for name in wanted]
        dataparallel.virtual.enable(max(indices) + 1)


def _touch_kernels(device: torch.device) -> None:
    """Run a little of everything, so that the libraries this loads are not counted as memory."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outputs = net(torch.randn(2, 1, 4, 4, device=device))
    criterion(outputs, torch.tensor([0, 1], device=device)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
