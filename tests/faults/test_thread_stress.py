"""Replicas in threads that switch all the time, with delays at random places, many times."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import LocalGroup, all_reduce
from dataparallel.comm.link import Pending, ProcessLink
from tests.cluster import Cluster
from tests.faults.harness import Figures

GROUP = LocalGroup(30)
DELAYS = random.Random(7)

#: Whose locks may be held while a collective is given to the backend: they keep the launches in
#: order, and who waits for them wants to launch, too.
ALLOWED = {"dataparallel.comm.link", "dataparallel.reducer.exchange"}


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


def gradients(model: nn.Module, net: nn.Module, x: Tensor) -> list[Tensor]:
    for parameter in net.parameters():
        parameter.grad = None
    model(x).pow(2).mean().backward()
    grads = [parameter.grad for parameter in net.parameters()]
    return [grad for grad in grads if grad is not None]


@contextlib.contextmanager
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_replicas(replicas: int, repeats: Callable[..., int], figures: Figures) -> None:
    """Goal 18, in one process."""
    steps = repeats(quick=20, long=1000)
    begin = time.monotonic()
    for wrapper in (dp.DataParallel, dp.DistributedDataParallel):
        net = Net()
        model: Any = wrapper(net, ["cpu"] * replicas)
        with tiny_switch_interval():
            for _ in range(steps):
                x = torch.randn(16, 4)
                wanted = [grad.clone() for grad in gradients(net, net, x)]
                torch.testing.assert_close(gradients(model, net, x), wanted)
        model.close()
    _record(figures, f"{replicas} replicas, random delays", steps, time.monotonic() - begin)


def _record(figures: Figures, what: str, steps: int, seconds: float) -> None:
    figures.record(
        goal=18,
        what=f"{what}, switch interval 1 us: steps without a deadlock and with right gradients",
        value=steps,
        unit=f"of {steps}",
        limit=steps,
        at_least=True,
        repeats=steps,
        baseline="-",
        details=f"{seconds:.1f} s",
    )


# --- a backend that blocks -------------------------------------------------------------------


class WatchedLock:
    """A lock that knows which thread is in a ``with`` block of it."""

    held = threading.local()

    def __init__(self, lock: Any, owner: str) -> None:
        self._lock = lock
        self._owner = owner

    def __enter__(self) -> Any:
        entered = self._lock.__enter__()
        self.holders().append(self._owner)
        return entered

    def __exit__(self, *error: object) -> None:
        self.holders().remove(self._owner)
        self._lock.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    @classmethod
    def holders(cls) -> list[str]:
        found: list[str] = cls.held.__dict__.setdefault("owners", [])
        return found


@contextlib.contextmanager
def watched_locks() -> Iterator[None]:
    """Locks that the package makes within the block tell who holds them."""

    def factory(make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            owner = sys._getframe(1).f_globals.get("__name__", "")
            return WatchedLock(make(), owner) if owner.startswith("dataparallel") else make()

        return made

    lock, rlock = threading.Lock, threading.RLock
    module: Any = threading
    module.Lock, module.RLock = factory(lock), factory(rlock)
    try:
        yield
    finally:
        module.Lock, module.RLock = lock, rlock


@contextlib.contextmanager
def blocking_backend(found: list[str]) -> Iterator[list[str]]:
    """A collective that is launched blocks until all processes have launched it.

    Every other time with the interpreter's lock held for a while.

    Args:
        found: Gets the owners of locks that were held meanwhile.

    Returns:
        On entry a list that gets what was launched.
    """
    launched: list[str] = []
    launch = ProcessLink._launch

    parameters = inspect.signature(launch)

    def blocking(self: ProcessLink, *args: Any, **kwargs: Any) -> Pending:
        bound = parameters.bind(self, *args, **kwargs)
        inner = bound.arguments["start"]

        def start(group: dist.ProcessGroup) -> Any:
            found.extend(owner for owner in WatchedLock.holders() if owner not in ALLOWED)
            if DELAYS.random() < 0.5:
                deadline = time.monotonic() + 0.0005
                while time.monotonic() < deadline:
                    pass
            work = inner(group)
            work.wait()
            launched.append(self.name)
            return work

        bound.arguments["start"] = start
        return launch(*bound.args, **bound.kwargs)

    ProcessLink._launch = blocking  # type: ignore[method-assign]
    try:
        yield launched
    finally:
        ProcessLink._launch = launch  # type: ignore[method-assign]


def train_over_blocking_backend(
    rank: int, world_size: int, replicas: int, steps: int
) -> tuple[int, list[str]]:
    """How many launches there were, and which locks were held in them."""
    found: list[str] = []
    with watched_locks(), blocking_backend(found) as launched, tiny_switch_interval():
        net = Net()
        model = dp.DistributedDataParallel(net, ["cpu"] * replicas, bucket_cap_mb=0.0001)
        for step in range(steps):
            inputs = [torch.randn(16, 4, generator=_generator(step, r)) for r in range(world_size)]
            each = [[g.clone() for g in gradients(net, net, x)] for x in inputs]
            wanted = [torch.stack(grads).mean(0) for grads in zip(*each, strict=True)]
            torch.testing.assert_close(gradients(model, net, inputs[rank]), wanted)
        model.close()
    dist.barrier()
    return len(launched), found


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def test_a_backend_that_blocks(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures
) -> None:
    """Goal 18, over processes: no lock is held into a collective."""
    steps = repeats(quick=10, long=1000)
    begin = time.monotonic()
    for replicas in (1, 2, 4):
        results = cluster.run(train_over_blocking_backend, 2, replicas, steps, timeout=500)
        for launches, found in results:
            assert launches >= steps
            assert found == []
    what = "2 processes x 1, 2, 4 replicas, a backend that blocks, no lock held into a collective"
    _record(figures, what, steps, time.monotonic() - begin)
