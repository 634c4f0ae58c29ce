"""Modules with buffers, under our wrapper and under torch's, and how their states are compared."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp

State: TypeAlias = dict[str, Tensor]

_DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float32, torch.uint8)


class Net(nn.Module):
    """Batch norm, and buffers of other kinds."""

    steps: Tensor
    turned: Tensor
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        for dtype in _DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.zeros(3).to(dtype))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1 + self.rank
        output: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return output


def make_net(rank: int) -> Net:
    """Other values in each process."""
    torch.manual_seed(7 + rank)
    net = Net()
    for tensor in net.buffers():
        tensor.copy_((torch.rand(tensor.shape) * 5).to(tensor.dtype) + rank)
    return net


def wrap(module: nn.Module, replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    if replicas:
        return dp.DistributedDataParallel(module, ["cpu"] * replicas, **options)
    torchs: Any = nn.parallel.DistributedDataParallel
    if "forward_sync_buffers" in options and "forward_sync_buffers" not in _options_of(torchs):
        # Newer than the oldest torch, which has one option for the start and for forwards.
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        options = {"broadcast_buffers": options["forward_sync_buffers"]}
    with warnings.catch_warnings():
        # An option is about to go there.
        warnings.simplefilter("ignore", FutureWarning)
        return torchs(module, **options)


def _options_of(wrapper: Any) -> Sequence[str]:
    return list(inspect.signature(wrapper).parameters)


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_equal(ours: Sequence[State], theirs: Sequence[State], *, exactly: bool = True) -> None:
    rtol, atol = (0.0, 0.0) if exactly else (1e-5, 1e-6)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, tensor in mine.items():
            where = _located(f"{name} of entry {rank}")
            torch.testing.assert_close(tensor, other[name], rtol=rtol, atol=atol, msg=where)


def _located(where: str) -> Callable[[str], str]:
    return lambda message: f"{where}: {message}"


OPTIONS = [
    {},
    {"broadcast_buffers": True},
    {"broadcast_buffers": False},
    {"forward_sync_buffers": True},
    {"forward_sync_buffers": False},
    {"init_sync": False},
]


class Shift(nn.Module):
    """The output tells which buffer each replica has."""

    shift: Tensor

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("shift", torch.tensor([shift]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x * self.weight + self.shift
        return output
