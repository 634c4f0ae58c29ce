"""Errors of compiled modules and of their backends, and interrupts while a replica compiles."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, current_replica
from dataparallel.threads import compile as compiling
from tests.compiled.cases import compare, compile_whole, twins


def test_an_error_of_the_backend() -> None:
    calls: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls.append(inputs)
        if len(calls) == 1:
            raise ZeroDivisionError("this backend fails at first")
        return graph.forward

    bare, net = twins()
    model = DataParallel(compile_whole(net, backend=backend), ["cpu"] * 3)
    with pytest.raises(Exception, match=r"(?s)this backend fails at first.*in replica 0 on device"):
        model(torch.randn(9, 4, dtype=torch.double))
    compare(model, bare, 9, 4)


def test_an_error_of_the_module() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                raise KeyError("two")
            return x + 1

    model = DataParallel(compile_whole(Fails(), backend="eager"), ["cpu"] * 2)
    with pytest.raises(KeyError, match=r"(?s)two.*in replica 1"):
        model(torch.zeros(5, 1))
    assert model(torch.zeros(6, 1)).sum() == 6


def test_an_interrupt_while_a_replica_compiles() -> None:
    interrupts = [signal.SIGINT]

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        while interrupts:
            os.kill(os.getpid(), interrupts.pop())
            time.sleep(0.5)
        return graph.forward

    bare, net = twins()
    model = DataParallel(compile_whole(net, backend=backend), ["cpu"] * 3)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(9, 4, dtype=torch.double))
    for _ in range(2):
        compare(model, bare, 9, 4)
    assert not compiling.lock._is_wanted() and not compiling.lock._running


class MeetsOnItsOwn(nn.Module):
    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self.first = torch.compile(nn.Linear(4, 4), backend="eager")
        self.second = torch.compile(nn.Tanh(), backend="eager")
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.wait()
        output: Tensor = self.second(x)
        return output


def test_replicas_that_wait_for_each_other_in_their_own_way() -> None:
    barriers = [threading.Barrier(2) for _ in range(3)]
    waits = iter([barrier for barrier in barriers for _ in range(2)])
    lock = threading.Lock()

    def wait() -> None:
        with lock:
            barrier = next(waits)
        barrier.wait(20.0)

    model = DataParallel(MeetsOnItsOwn(wait), ["cpu"] * 2)
    for _ in range(3):
        # In the first call replica 1 starts though replica 0 has not ended.
        assert model(torch.randn(4, 4)).shape == (4, 4)


def test_a_replica_that_runs_on_while_another_wants_to_compile_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling.lock, "timeout", 0.5)
    ended = threading.Event()

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(nn.Linear(4, 4), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            assert replica is not None
            if replica.index == 0:
                # Replica 1 has started meanwhile, and waits for what never happens.
                time.sleep(compiling._PATIENCE + 0.5)
                try:
                    output: Tensor = self.layer(x)
                finally:
                    ended.set()
                return output
            ended.wait(20.0)
            return x

    model = DataParallel(Uneven(), ["cpu"] * 2)
    with pytest.raises(TimeoutError, match=r"(?s)did not stop: .*replica-1.*current_r"):
        model(torch.randn(4, 4))
    assert not compiling.lock._is_wanted() and not compiling.lock._running
