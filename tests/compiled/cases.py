"""Modules that are compiled in several ways, and how they are compared."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel
from tests.models import assert_all_close, grads_of

Wrapper: TypeAlias = Callable[..., DataParallel[nn.Module]]
WRAPPERS = [DataParallel, dataparallel.DistributedDataParallel]


class Net(nn.Module):
    """A residual block with parts that are compiled for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.second(torch.tanh(self.norm(self.first(x))))
        return output


def compile_whole(net: nn.Module, **options: Any) -> nn.Module:
    module: Any = torch.compile(net, **options)
    assert isinstance(module, nn.Module)
    return module


def compile_in_place(net: nn.Module, **options: Any) -> nn.Module:
    net.compile(**options)
    return net


def compile_parts(net: nn.Module, **options: Any) -> nn.Module:
    net.first = compile_whole(net.get_submodule("first"), **options)
    net.get_submodule("second").compile(**options)
    return net


def compile_nested(net: nn.Module, **options: Any) -> nn.Module:
    return compile_whole(compile_parts(net, **options), **options)


def compile_method(net: nn.Module, **options: Any) -> nn.Module:
    vars(net)["forward"] = torch.compile(net.forward, **options)
    return net


HOW = [
    (compile_whole, "aot_eager"),
    (compile_in_place, "eager"),
    (compile_parts, "eager"),
    (compile_nested, "eager"),
    (compile_method, "eager"),
]


def compare(
    model: DataParallel[nn.Module], bare: nn.Module, *shape: int, device: str = "cpu"
) -> None:
    """One forward and backward: outputs and gradients are those of the bare module."""
    x = torch.randn(*shape, dtype=torch.double, device=device)
    results = []
    for module in (bare, model):
        module.zero_grad()
        output = module(x)
        output.pow(2).sum().backward()
        results.append([output, *grads_of(module)])
    assert_all_close(results[1], results[0])


def twins(device: str = "cpu", build: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    bare = build().double().to(device)
    return bare, copy.deepcopy(bare)


class Watched(nn.Module):
    """Notes when it runs, and may wait for the other replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(nn.Linear(4, 4), backend="eager")
        self.spans: list[tuple[float, float]] = []
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        begin = time.monotonic()
        if self.barrier is not None:
            self.barrier.wait(10.0)
        output = self.work(x)
        time.sleep(0.01)
        self.spans.append((begin, time.monotonic()))
        return output

    def work(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output

    def overlapped(self) -> bool:
        spans, self.spans[:] = sorted(self.spans), []
        return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
