"""Errors of compiled modules and of their backends, and interrupts while a replica compiles."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.threads.turns import turns
from tests.compiled.cases import Watched, compare, compile_whole, twins


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
    # The others would have failed alike.
    assert len(calls) == 1
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
    assert turns._owner is None and not turns._running


def test_replicas_that_wait_for_each_other_in_their_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "timeout", 0.5)
    module = Watched()
    module.barrier = threading.Barrier(2)
    module.barrier.wait = functools.partial(module.barrier.wait, 2.0)  # type: ignore[method-assign]
    module.forward = functools.partial(_meets_on_its_own, module)  # type: ignore[method-assign]
    model = DataParallel(module, ["cpu"] * 2)
    with pytest.raises(threading.BrokenBarrierError, match="in replica 0") as caught:
        model(torch.randn(4, 4))
    assert "current_rendezvous" in "".join(getattr(caught.value, "__notes__", []))


def _meets_on_its_own(module: Watched, x: Tensor) -> Tensor:
    assert module.barrier is not None
    module.barrier.wait()
    output: Tensor = module.layer(x)
    return output
