"""What checks cost a step of training, on average."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import DistributedDataParallel, collectives
from dataparallel.comm.checks import PERIOD
from tests.cluster import Cluster
from tests.faults.harness import Figures

MODES: tuple[Literal["off", "sampled", "always"], ...] = ("off", "sampled", "always")

#: Steps of each mode in a block.
STEPS = (PERIOD, PERIOD, PERIOD // 4)


def measure(rank: int, world_size: int, port: int, blocks: int) -> tuple[list[float], list[int]]:
    """The median step in each mode, in ms, and how many checks there were in a block."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    models = []
    for mode in MODES:
        collectives.set_checks(mode)
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        models.append(DistributedDataParallel(net))
    collectives.set_checks("sampled")
    x = torch.randn(32, 256)
    seconds: list[list[float]] = [[] for _ in MODES]
    checks = [0 for _ in MODES]
    for block in range(blocks + 1):
        for number, model in enumerate(models):
            links = [model.reducer.processes.buckets, model.reducer.processes.control]  # type: ignore[union-attr]
            before = sum(link.checks.num_checks for link in links)
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS[number]):
                model.zero_grad()
                model(x).sum().backward()
            # The first block warms up, and has the first steps.
            if block:
                seconds[number].append(time.perf_counter() - started)
                checks[number] = sum(link.checks.num_checks for link in links) - before
    for model in models:
        model.close()
    dist.destroy_process_group()
    pairs = zip(seconds, STEPS, strict=True)
    return [1e3 * statistics.median(each) / steps for each, steps in pairs], checks


def test_checks_cost_little(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    blocks = repeats(quick=1, long=40)
    found = cluster.run(measure, 2, port, blocks, init_group=False, timeout=600)
    for _, checks in found:
        # A step has its plan, the one bucket, and its end.
        assert checks == [0, 3, 3 * STEPS[2]]
    off, sampled, always = found[0][0]
    figures.record(
        goal=7,
        what=f"average step cost of checks, every {PERIOD}th step (4 x Linear(256), 2 ranks)",
        value=100 * max(0.0, always - off) / PERIOD / off,
        unit="%",
        limit=2.0,
        repeats=blocks,
        baseline="DETAIL cannot make a wrapper",
        details=f"step {off:.2f} ms unchecked, {always:.2f} checked, {sampled:.2f} sampled",
    )
