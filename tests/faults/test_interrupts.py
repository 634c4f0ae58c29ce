"""Ctrl-C at any moment of a step: the caller has control back, threads end, the next step works."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import LocalGroup, all_reduce
from dataparallel.comm import link
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.failures import failures_of
from tests.cluster import Cluster
from tests.faults.harness import Figures
from tests.faults.leaks import replica_threads
from tests.models import WRAPPERS

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal"),
    # The warning comes from an interrupt in a finalizer, which cannot raise.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

GROUP = LocalGroup(30)


class Net(nn.Module):
    """Replicas that compute, that run Python code, and that wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        replica = dp.current_replica()
        if replica is not None:
            deadline = time.monotonic() + self.seconds * (replica.index == 1)
            while time.monotonic() < deadline:
                x.add_(0)
            all_reduce(x.detach().sum(0), "sum", GROUP)
        output: Tensor = self.layers(x)
        return output


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).pow(2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def seconds_until_no_replicas(besides: set[threading.Thread]) -> float:
    begin = time.monotonic()
    while replica_threads() - besides and time.monotonic() - begin < 30:
        time.sleep(0.002)
        if time.monotonic() - begin > 0.2:
            # A wrapper that was interrupted while it borrowed its threads may be in a cycle.
            gc.collect()
    return time.monotonic() - begin


def interrupted(run: Callable[[], object], delay: float) -> float:
    """Run again and again until Ctrl-C comes; how long after the signal that is noticed."""
    sent = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay, send)
    with contextlib.suppress(KeyboardInterrupt):
        timer.start()
        while True:
            run()
    seconds = time.monotonic() - sent[0]
    timer.join()
    return seconds


@WRAPPERS
def test_ctrl_c_at_any_moment(
    wrapper: Callable[..., Any], repeats: Callable[..., int], figures: Figures
) -> None:
    before = replica_threads()
    net, x = Net(), torch.randn(32, 16)
    wanted = step(net, x)
    model = wrapper(net, ["cpu"] * 3)
    step(model, x)
    draw = random.Random(1)
    control, ended = [], []
    count = repeats(quick=8, long=50)
    for number in range(count):
        # Every other time most likely while two replicas wait for the third, which never comes.
        net.seconds = 60.0 if number % 2 else 0.0
        control.append(interrupted(lambda: step(model, x), 0.02 + draw.random() / 20))
        net.seconds = 0.0
        model.close()
        ended.append(control[-1] + seconds_until_no_replicas(before))
        torch.testing.assert_close(step(model, x), wanted)
    model.close()
    for what, limit, found in (("control is back", 1.0, control), ("no thread runs", 2.0, ended)):
        what = f"Ctrl-C until {what} ({wrapper.__name__}), p100"
        figures.record(what, max(found), "s", limit, repeats=count)


# --- a backward that waits for other processes -------------------------------------------------


def press(*args: object, **kwargs: object) -> bool:
    raise KeyboardInterrupt


def flats(model: Any) -> set[int]:
    return {bucket.storage.flat.data_ptr() for bucket in model.reducer.buckets.all}


def interrupt_a_backward(rank: int, world_size: int) -> tuple[str, bool, bool]:
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(nn.Linear(16, 1), ["cpu"], timeout=30.0)
    x, text = torch.ones(4, 16), ""
    wanted = step(model, x)
    kept = [bucket.storage for bucket in model.reducer.buckets.all]
    before = flats(model)
    if rank == 0:
        loss = model(x).pow(2).mean()
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "wait_briefly", press)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        assert time.monotonic() - begin < 3
    # Rank 1 comes only now.
    torch.distributed.barrier()
    if rank == 1:
        # It may have heard already, and is then at the next step.
        with contextlib.suppress(CollectiveError):
            world: Any = torch.distributed.group.WORLD
            while not failures_of(world).while_waiting():
                time.sleep(0.01)
        processes: Any = model._training.processes
        text = processes.control.broken
        with pytest.raises(CollectiveError, match=r"step is left out, as in .* rank 0 .* Keyb"):
            step(model, x)
    equal = all(map(torch.equal, step(model, x), wanted))
    # Messages in flight still write to it.
    is_new = not before & flats(model)
    del kept
    model.close()
    return text, equal, is_new


def test_ctrl_c_in_a_backward_that_waits_for_others(cluster: Cluster) -> None:
    mine, other = cluster.run(interrupt_a_backward, 2)
    assert "failed in backward, after its last bucket was sent: Keyb" in other[0]
    assert mine[1:] == other[1:] == (True, True)


def interrupt_the_beginning(rank: int, world_size: int) -> bool:
    model = dp.DistributedDataParallel(nn.Linear(16, 1), ["cpu"], timeout=5.0, average="samples")
    x = torch.ones(4, 16)
    processes: Any = model._training.processes
    loss = model(x).pow(2).mean()
    processes.control.all_reduce = press
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert processes.is_broken
    first = step(model, x)
    return all(map(torch.equal, first, step(model, x)))


def test_ctrl_c_while_a_round_begins(cluster: Cluster) -> None:
    assert cluster.run(interrupt_the_beginning, 2) == [True] * 2
