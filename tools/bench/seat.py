"""A worker process's place in its contestant: its devices, threads and process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import devices
from dataparallel.tools.bench.harness import Task

#: The time for which a process waits for the others of its contestant.
_TIMEOUT = timedelta(seconds=120)


class Seat:
    """The setup that precedes the model."""

    def __init__(self, task: Task) -> None:
        self.task = task
        enable_virtual_devices(task.devices)
        self.slots = devices.parse_devices(task.devices)
        self.device = self.slots[0]
        on_cpu = sum(not devices.is_accelerator(slot) for slot in self.slots)
        # Ours divides the intra-op threads between its CPU slots, so it gets those of all.
        torch.set_num_threads(task.threads * max(1, on_cpu))
        if task.joins:
            torch.distributed.init_process_group(
                _backend_for(self.device),
                init_method=f"file://{task.meeting_point}",
                rank=task.rank,
                world_size=task.world_size,
                timeout=_TIMEOUT,
            )

    def wrap(self, module: nn.Module, bucket_cap_mb: float | None = None) -> Any:
        """Return a module on the first device as this contestant trains it; or the bare one."""
        if self.task.kind == "bare":
            return module
        if self.task.kind == "ddp":
            return nn.parallel.DistributedDataParallel(
                module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
            )
        if self.task.wrapper == "dp":
            return dataparallel.DataParallel(module, self.slots)
        return dataparallel.DistributedDataParallel(
            module,
            self.slots,
            bucket_cap_mb=bucket_cap_mb,
            # With several processes that saves a copy.
            gradient_as_bucket_view=self.task.world_size > 1,
            capture=self.task.wrapper == "captured",
        )

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of a batch; all parts are of one size."""
        # A copy, so that the other parts need not stay in memory.
        part = whole.chunk(self.task.world_size)[self.task.rank]
        return (part.clone() if self.task.world_size > 1 else part).to(self.device)

    def barrier(self) -> None:
        """Wait for the other processes of the contestant."""
        if self.task.world_size > 1:
            torch.distributed.barrier()

    def mean(self, value: Tensor) -> float:
        """Mean of a number over the processes."""
        if self.task.world_size > 1:
            value = value.clone()
            torch.distributed.all_reduce(value)
            value /= self.task.world_size
        return value.item()

    def synchronize(self) -> None:
        """Wait until the devices have finished."""
        for slot in self.slots:
            devices.synchronize(slot)

    @property
    def is_ours(self) -> bool:
        """True if models get a wrapper of ours, which then has threads to close."""
        return self.task.kind in ("ours", "watched")

    def leave(self, *models: nn.Module) -> None:
        """End the models' threads and leave the process group."""
        for model in models:
            if isinstance(model, dataparallel.DataParallel):
                model.close()
        if self.task.joins:
            torch.distributed.destroy_process_group()


def _backend_for(device: torch.device) -> str:
    try:
        return torch.distributed.get_default_backend_for_device(device)
    except ValueError:
        # Virtual devices have none of their own.
        return "gloo"


def enable_virtual_devices(names: Sequence[str]) -> None:
    """Make the virtual devices among some devices, if they are not there yet."""
    wanted = [name for name in names if name.split(":")[0] == "virtual"]
    if wanted:
        count = 1 + max(int(name.split(":")[1]) if ":" in name else 0 for name in wanted)
        # DATAPARALLEL_VIRTUAL_DEVICES may have enabled more.
        if dataparallel.virtual.device_count() < count:
            dataparallel.virtual.enable(count)
