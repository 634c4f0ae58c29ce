"""Replicas in threads that switch all the time, with delays at random places, many times."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import LocalGroup, all_reduce
from dataparallel.comm import link
from tests.cluster import Cluster
from tests.faults.harness import Figures
from tests.models import grads_of

GROUP = LocalGroup(30)
DELAYS = random.Random(7)


def pause(*_: object) -> None:
    """Give the others a chance in one of three cases, and time in one of six."""
    number = DELAYS.random()
    if number < 1 / 3:
        time.sleep(0.0002 * (number < 1 / 6))


class Net(nn.Module):
    """With a meeting in forward, and delays in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pause()
        hidden = torch.tanh(self.first(x))
        if dp.current_replica() is not None:
            pause()
            all_reduce(hidden.detach().sum(0), "sum", GROUP)
        if hidden.requires_grad:
            hidden.register_hook(pause)
        output: Tensor = self.last(hidden)
        return output


def check_step(net: nn.Module, model: nn.Module, inputs: list[Tensor], rank: int = 0) -> None:
    """The gradients of the mean over the inputs of all processes, of which this one has one."""
    net.zero_grad()
    for x in inputs:
        (net(x).pow(2).mean() / len(inputs)).backward()
    wanted = [each.clone() for each in grads_of(net) if each is not None]
    model.zero_grad()
    model(inputs[rank]).pow(2).mean().backward()
    torch.testing.assert_close(grads_of(model), wanted)


@contextlib.contextmanager
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_replicas(replicas: int, repeats: Callable[..., int], figures: Figures) -> None:
    steps = repeats(quick=10, long=1000)
    for wrapper in (dp.DataParallel, dp.DistributedDataParallel):
        net = Net()
        model: Any = wrapper(net, ["cpu"] * replicas)
        with tiny_switch_interval():
            for _ in range(steps):
                check_step(net, model, [torch.randn(16, 4)])
        model.close()
    what = f"{replicas} replicas, random delays: steps without a deadlock and with right gradients"
    figures.record(what, steps, "steps", steps, repeats=steps, at_least=True)


def train_over_a_backend_that_blocks(rank: int, world_size: int, replicas: int, steps: int) -> None:
    """A collective that is launched blocks until all processes have launched it.

    Every other time with the interpreter's lock held for a while.
    """
    launch = link.ProcessLink._launch

    def blocking(self: Any, operation: str, what: str, start: Any, *tensors: Any) -> Any:
        def wait(group: dist.ProcessGroup) -> Any:
            deadline = time.monotonic() + 0.0005 * (DELAYS.random() < 0.5)
            while time.monotonic() < deadline:
                pass
            work = start(group)
            work.wait()
            return work

        return launch(self, operation, what, wait, *tensors)

    with pytest.MonkeyPatch.context() as patch, tiny_switch_interval():
        patch.setattr(link.ProcessLink, "_launch", blocking)
        net = Net()
        model = dp.DistributedDataParallel(net, ["cpu"] * replicas, bucket_cap_mb=0.0001)
        for step in range(steps):
            torch.manual_seed(step)
            check_step(net, model, [torch.randn(16, 4) for _ in range(world_size)], rank)
        model.close()
    dist.barrier()


def test_a_backend_that_blocks(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures
) -> None:
    steps = repeats(quick=10, long=1000)
    for replicas in (1, 2, 4):
        cluster.run(train_over_a_backend_that_blocks, 2, replicas, steps, timeout=500)
    what = "2 processes x 1, 2, 4 replicas, a backend that blocks: steps without a deadlock"
    figures.record(what, steps, "steps", steps, repeats=steps, at_least=True)
