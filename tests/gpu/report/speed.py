"""Steps on 1, 2, 4 and 8 devices beside torch DDP and nn.DataParallel, interleaved in one run."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from tests.gpu.report.subject import in_processes, kind, spread, stop, synchronize, table

#: By millions of parameters: width and layers, of 12 x width^2 parameters each.
SHAPES = {25: (512, 8), 300: (1024, 24), 1000: (2048, 20)}
_ROUNDS, _STEPS = 5, 3
_SAMPLES, _TOKENS = 8, 128
#: Bytes per parameter of four contestants with gradients, and copies that are on their way.
_COPIES = 12
_HEAD = ["model", "devices", "samples/s", "speed-up", "torch DDP / ours", "nn.DataParallel / ours"]

Rounds = dict[str, list[float]]


def main(given: argparse.Namespace) -> None:
    """Measure with each number of devices that there is."""
    names, dtype = given.devices, getattr(torch, given.dtype)
    if kind(names) == "cuda":
        needed = given.millions * 1e6 * dtype.itemsize * _COPIES
        there = min(int(torch.cuda.get_device_properties(name).total_memory) for name in names)
        if there < needed:
            stop(f"needs {needed / 2**30:.0f} GiB per GPU; there are {there / 2**30:.0f}")
    rows = []
    counts = sorted({int(text) for text in given.counts.split(",")})
    for count in (count for count in counts if count <= len(names)):
        limit = 100.0 + 10 * count
        rounds = in_processes(measure, count, names, given.millions, given.dtype, timeout=limit)[0]
        rows.append([f"{given.millions} M, {given.dtype}", count, *_cells(rounds, count)])
    if more := [str(count) for count in counts if count > len(names)]:
        print(f"not run: {', '.join(more)} devices; there are {len(names)}")
    table(f"Speed; each device has {_SAMPLES} samples of {_TOKENS} tokens", _HEAD, rows)


def _cells(rounds: Rounds, count: int) -> list[str]:
    """Return figures of ours, and others' times over ours: round by round, then the median."""
    ours = rounds["ours"]

    def over(peer: str) -> str:
        if peer not in rounds:
            return "not run"
        return spread([b / a for a, b in zip(ours, rounds[peer], strict=True)])

    speed_up = [count * bare / a for a, bare in zip(ours, rounds["bare"], strict=True)]
    rate = f"{count * _SAMPLES / statistics.median(ours):.0f}"
    return [rate, spread(speed_up), over("torch DDP"), over("nn.DataParallel")]


def build(millions: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a transformer; elsewhere a tiny one."""
    width, layers = SHAPES[millions] if device.type == "cuda" else (16, 2)
    torch.manual_seed(0)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return net.to(dtype)


def batch(net: nn.Module, replicas: int) -> torch.Tensor:
    """Return a batch of equal parts for some replicas of a model."""
    first = next(net.parameters())
    samples, tokens = (_SAMPLES, _TOKENS) if first.device.type == "cuda" else (2, 4)
    width: int = first.shape[-1]
    return torch.randn(replicas * samples, tokens, width, device=first.device, dtype=first.dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Make one step of training."""
    optimizer.zero_grad()
    model(x).float().pow(2).mean().backward()
    optimizer.step()


def trainer(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a step of a model with its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return functools.partial(step, model, optimizer, x)


def measure(rank: int, size: int, names: Sequence[str], millions: int, dtype: str) -> Rounds:
    """Time the contestants in turn; rank 0 alone has some of them, all ranks have torch DDP."""
    names = names[:size]
    device, kept = torch.device(names[rank]), getattr(torch, dtype)
    if device.type == "virtual":
        # Deferred operations have the types that CUDA's have; the CPU's differ in bfloat16.
        dp.virtual.set_strict(False)
    made = functools.partial(build, millions, device, kept)
    contestants: dict[str, Callable[[], None]] = {}
    ours: Any = None
    if rank == 0:
        bare, net = made(), made()
        contestants["bare"] = trainer(bare, batch(bare, 1))
        ours = dp.DistributedDataParallel(net, list(names), process_group=False)
        contestants["ours"] = trainer(ours, batch(net, size))
        if device.type == "cuda":
            old = nn.DataParallel(made(), [torch.device(name).index for name in names])
            contestants["nn.DataParallel"] = trainer(old, batch(old, size))
    net = made()
    peer = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    contestants["torch DDP"] = trainer(peer, batch(net, 1))
    rounds: Rounds = {name: [] for name in contestants}
    for number in range(_ROUNDS + 1):
        for name, run in contestants.items():
            if name == "torch DDP":
                _meet()
            seconds = _time(run, names if name != "torch DDP" else [names[rank]])
            # The first one is for warming up.
            if number:
                rounds[name].append(seconds)
        _meet()
    if ours is not None:
        ours.close()
    return rounds


def _meet() -> None:
    """Wait for the other ranks on the host, so that no kernel of NCCL's waits on a device."""
    dist.all_reduce(torch.zeros(1))


def _time(run: Callable[[], None], names: Sequence[str]) -> float:
    steps = _STEPS if names[0].startswith("cuda") else 1
    synchronize(names)
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize(names)
    return (time.perf_counter() - begin) / steps
