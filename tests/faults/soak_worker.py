"""One process of the training that a soak test disturbs; torchrun starts it, again and again.

It does what a user's script would: it makes the process group, loads what was saved, trains, and
saves every step to memory and now and then to the disk. After an error it loads again, in the same
process; if that fails too, it ends, and torchrun starts all processes anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import checkpoint
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from dataparallel.extras.checkpoint import CheckpointError
from dataparallel.extras.elastic import init_process_group
from tests.faults import partition
from tests.faults.injector import Fault, InjectedError, Injector

#: What the training goes on after, in the same process.
SURVIVED = (CollectiveError, CollectiveTimeout, CheckpointError, InjectedError)


@dataclass(frozen=True)
class Settings:
    """What a soak test does.

    Args:
        folder: Where everything is that stays: the plan, the journal, the generations on the disk.
        memory: Where every step is saved: a folder in memory.
        steps: How many steps the training has.
        pace: Seconds that a step takes at least; the processor waits, as for an accelerator.
        paced: How many steps keep the pace; the others take as long as they need. Default: all.
        disk_every: Steps between two generations on the disk.
        timeout: Seconds that a process waits for the others.
        outside: The network of the machine, in which nothing is cut.
        plan: Which faults happen.
    """

    folder: str
    memory: str
    steps: int
    pace: float
    paced: int | None = None
    disk_every: int = 100
    timeout: float = 20.0
    outside: str = ""
    plan: list[Fault] = field(default_factory=list)

    def write(self) -> None:
        """Keep the settings in their folder."""
        pathlib.Path(self.folder, "settings.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: str) -> Settings:
        """What :meth:`write` kept."""
        fields = json.loads(pathlib.Path(folder, "settings.json").read_text())
        fields["plan"] = [Fault(**each) for each in fields["plan"]]
        return Settings(**fields)


class Net(nn.Module):
    """A classifier whose dropout and statistics have to go on where they were, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points around eight centers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    y = torch.randint(8, (32,), generator=generator)
    centers = torch.linspace(-1, 1, 8 * 32).view(8, 32).sin()
    return centers[y] + 0.5 * torch.randn(32, 32, generator=generator), y


def digest_of(tensors: Iterable[Tensor]) -> str:
    """What tells other bits."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


class Training:
    """The training, and what happens to it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rank = dist.get_rank()
        folder = pathlib.Path(settings.folder)
        self._journal = folder / "journal"
        self._disk = str(folder / "saved")
        self._injector = Injector(settings.plan, folder / "happened")
        torch.manual_seed(0)
        self._model = dp.DistributedDataParallel(Net(), ["cpu", "cpu"], timeout=settings.timeout)
        torch.manual_seed(1 + self._rank)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self._optimizer, settings.steps
        )

    def run(self) -> None:
        """Train up to the last step, whatever happens."""
        step = self._load("start")
        failed = -1
        while step < self._settings.steps:
            begin = time.monotonic()
            try:
                with dp.telling_failures():
                    loss = self._step(step)
                    self._save(step + 1)
            except SURVIVED as error:
                self._note("error", step=step, kind=type(error).__name__, text=str(error)[:2000])
                if step == failed:
                    # What does not help in place is left to torchrun, as is an error in a load.
                    raise
                failed = step
                step = self._load("recovered")
                continue
            if self._settings.paced is None or step < self._settings.paced:
                time.sleep(max(0.0, self._settings.pace - (time.monotonic() - begin)))
            self._note("step", step=step, loss=loss, seconds=time.monotonic() - begin)
            step += 1
        state = digest_of(self._model.state_dict().values())
        self._note("end", step=step, digest=state, parameters=digest_of(self._model.parameters()))

    def _step(self, step: int) -> float:
        place = step % 3
        if place == 0:
            self._inject(step)
        x, y = batch(step, self._rank)
        output = self._model(x)
        if place == 1:
            output.register_hook(lambda grad: self._inject(step))
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        if place == 2:
            self._inject(step)
        return float(loss.detach())

    def _inject(self, step: int) -> None:
        for fault in self._injector.at(self._rank, step):
            # Only a partition of the network that all of them share comes here.
            partition.cut_loopback(fault.seconds or 0.0, self._settings.outside)

    def _state(self) -> tuple[Any, ...]:
        return self._model, self._optimizer, self._scheduler

    def _save(self, step: int) -> None:
        settings = self._settings
        options: dict[str, Any] = {"step": step, "keep": 2, "timeout": settings.timeout}
        if settings.memory:
            checkpoint.save(settings.memory, *self._state(), **options)
        if step % settings.disk_every == 0:
            checkpoint.save(self._disk, *self._state(), **options, asynchronous=True)

    def _load(self, event: str) -> int:
        settings = self._settings
        with contextlib.suppress(*SURVIVED):
            checkpoint.close()
        places = [settings.memory, self._disk] if settings.memory else [self._disk]
        for place in places:
            # In memory is the newest, if anything is.
            options: dict[str, Any] = {"missing_ok": True, "timeout": settings.timeout}
            found = checkpoint.load(place, *self._state(), **options)
            if found.number is not None:
                break
        self._note(event, step=found.step, rejected=len(found.rejected))
        return found.step

    def _note(self, event: str, **fields: Any) -> None:
        if self._rank != 0 and event == "step":
            return
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        line = {"event": event, "rank": self._rank, "restart": restart, "time": time.time()}
        with open(self._journal, "ab", buffering=0) as file:
            file.write(json.dumps({**line, **fields}).encode() + b"\n")


def main() -> None:
    """Train; the argument is the folder with the settings."""
    torch.set_num_threads(1)
    settings = Settings.read(sys.argv[1])
    init_process_group("gloo", timeout=settings.timeout)
    Training(settings).run()
    checkpoint.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
