"""A training that torchrun starts again after faults; run as a script it is one of its processes.

Every process appends what it does to one file, a JSON object per line, with the time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from dataparallel.extras.elastic import init_process_group
from tests.faults.injector import Fault, Injector

#: Steps from one generation of the checkpoint to the next.
EVERY = 3
# Seconds until a process that waits for more of them gives up.
_LONGEST_WAIT = 300.0


class Journal:
    """What the processes did and when, in one file that outlives them."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "time": time.time(), "restart": restart(), **fields}
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def restart() -> int:
    """How often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def build() -> nn.Module:
    """A small net with dropout, whose random numbers have to go on where they were."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one process for one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def train(
    rank: int, world_size: int, folder: str, steps: int, plan: list[Fault], needed: int = 1
) -> str:
    """Train up to a step, from the last generation on; returns a digest of the weights.

    Args:
        rank, world_size: Of this process.
        folder: Where the journal and the generations are.
        steps: How many the training has.
        plan: Which faults happen.
        needed: With fewer processes the second half is not begun; torchrun ends the wait.
    """
    journal = Journal(pathlib.Path(folder, "journal"))
    injector = Injector(plan, pathlib.Path(folder, "happened"))
    model = dp.DistributedDataParallel(build(), ["cpu", "cpu"])
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    saved = pathlib.Path(folder, "saved")
    first = checkpoint.load(saved, model, optimizer, missing_ok=True).step
    journal.write("resume", rank=rank, step=first)
    for step in range(first, steps):
        if step == steps // 2 and world_size < needed:
            time.sleep(_LONGEST_WAIT)
            raise AssertionError(f"only {world_size} of {needed} processes came")
        journal.write("begin", rank=rank, step=step)
        injector.at(rank, step)
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        journal.write("end", rank=rank, step=step, loss=loss.item())
        if (step + 1) % EVERY == 0:
            checkpoint.save(saved, model, optimizer, step=step + 1)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
    model.close()
    return hashlib.sha256(weights).hexdigest()


def losses(journal: Journal) -> dict[tuple[int, int], float]:
    """The loss of every rank and step; of steps that were repeated, the last one."""
    return {
        (line["rank"], line["step"]): line["loss"]
        for line in journal.read()
        if line["event"] == "end"
    }


def recoveries(journal: Journal, world_size: int) -> list[float]:
    """Seconds from each fault to the end of the first step that all processes have done again."""
    lines = journal.read()
    attempts = sorted({line["restart"] for line in lines if line["event"] == "end"})
    seconds = []
    for before, after in itertools.pairwise(attempts):
        fault = max(line["time"] for line in lines if line["restart"] == before)
        ends = [
            min(
                line["time"]
                for line in lines
                if (line["restart"], line.get("rank"), line["event"]) == (after, rank, "end")
            )
            for rank in range(world_size)
        ]
        seconds.append(max(ends) - fault)
    return seconds


def main() -> None:
    """One process under torchrun.

    The arguments are the folder, the number of steps, ranks and steps to kill, and how many
    processes are needed.
    """
    torch.set_num_threads(1)
    folder, steps, kills = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    Journal(pathlib.Path(folder, "journal")).write("process", pid=os.getpid())
    init_process_group(timeout=20)
    plan = [Fault(rank, step, "kill") for rank, step in kills]
    needed = int(sys.argv[4])
    digest = train(dist.get_rank(), dist.get_world_size(), folder, steps, plan, needed)
    Journal(pathlib.Path(folder, "journal")).write("digest", rank=dist.get_rank(), digest=digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
