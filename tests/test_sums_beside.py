"""Sums over links, made beside a backward: later reads and writes of their memory wait.

The checker of races sees it where a wait is missing, whatever the numbers are.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel import DistributedDataParallel, virtual
from dataparallel.comm.errors import CollectiveError
from tests.cluster import Cluster
from tests.ddp_cases import FailInBackward
from tests.models import assert_all_close

DEVICES = [f"virtual:{i}" for i in range(4)]
WIDTH = 40
STEPS = 6


class Net(nn.Module):
    """Layers of which the first one may fail in backward, when all others have come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        error = ArithmeticError("on purpose") if self.fails else None
        result: Tensor = self.rest(FailInBackward.apply(self.first(x), error))
        return result


def batch(rank: int, seed: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def use_memory(devices: list[str]) -> None:
    """Write memory that is free."""
    for device in devices:
        for _ in range(8):
            torch.zeros(WIDTH * WIDTH, device=device).add_(1)


def train(
    rank: int, world_size: int, num_devices: int, accumulates: bool, fails: set[int], aside: bool
) -> list[Tensor]:
    """Return the parameters after some steps, of which some fail in backward, in all ranks.

    The thread stays on streams of its own where it is ``aside``.
    """
    # A backend as NCCL takes a device in one process.
    home, *others = DEVICES[rank * num_devices :][:num_devices]
    for device in (home, *others) if aside else ():
        torch.accelerator.set_stream(torch.Stream(device))
    torch.accelerator.set_device_index(torch.device(home).index)
    net = Net().to(home)
    model = DistributedDataParallel(net, [home, *others], bucket_cap_mb=0.01, timeout=20.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        # Gradients that stayed are written in place.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if accumulates:
            with model.no_sync():
                model(batch(rank, step + 20).to(home)).square().mean().backward()
        net.fails = step in fails
        loss = model(batch(rank, step).to(home)).square().mean()
        net.fails = False
        if world_size > 1:
            # Where a rank fails before another one has begun, that one may pair its steps anew.
            dist.barrier()
        try:
            loss.backward()
        except (ArithmeticError, CollectiveError) as error:
            assert step in fails and "on purpose" in str(error)
        else:
            assert step not in fails
            optimizer.step()
        # Nothing of a failed step stays.
        del loss
        gc.collect()
        use_memory([home, *others])
    model.close()
    return [p.detach().cpu() for p in net.parameters()]


def train_strictly(*args: Any) -> list[Tensor]:
    """Train in a thread, whose streams end with it."""
    with virtual.strict_mode(), ThreadPoolExecutor(1) as pool:
        return pool.submit(train, *args).result()


def expected(world_size: int, accumulates: bool, fails: set[int]) -> list[Tensor]:
    """Return those of the bare module."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in sorted({*range(STEPS)} - fails):
        optimizer.zero_grad()
        for rank in range(world_size):
            for seed in (step, step + 20)[: 1 + accumulates]:
                (net(batch(rank, seed)).square().mean() / world_size).backward()
        optimizer.step()
    return list(net.parameters())


FAILS = pytest.mark.parametrize("fails", [set(), {2, 4}, {3}], ids=str)


@FAILS
@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_gradients_are_used_at_once_and_so_is_the_memory_of_those_of_replicas(
    num_devices: int, aside: bool, fails: set[int]
) -> None:
    got = train_strictly(0, 1, num_devices, False, fails, aside)
    assert_all_close(got, expected(1, False, fails), rtol=1e-4, atol=1e-6)


@FAILS
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,virtual:vccl"])
def test_gradients_of_several_processes_are_used_at_once(
    cluster: Cluster, backend: str, accumulates: bool, fails: set[int]
) -> None:
    """Accumulated gradients, which the user has, are added and sent beside the backward."""
    args = 2, accumulates, fails, False
    got = cluster.run(train_strictly, 2, *args, virtual=True, backend=backend)
    for each in got:
        assert_all_close(each, expected(2, accumulates, fails), rtol=1e-4, atol=1e-6)
