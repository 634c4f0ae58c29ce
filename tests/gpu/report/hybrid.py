"""Several processes with several devices each: gradients of the bare module on the whole batch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.reducer.options import AverageKind
from tests.gpu.report.subject import in_processes

_STEPS = 3


def main(given: argparse.Namespace) -> None:
    """Compare a run of P processes x D devices."""
    processes, each = map(int, given.shape.split("x"))
    shares = [given.devices[each * rank : each * (rank + 1)] for rank in range(processes)]
    in_processes(compare, processes, given.devices, shares, timeout=45.0)
    print(f"gradients are those of the bare module: {shares}")


def compare(rank: int, size: int, names: Sequence[str], shares: Sequence[list[str]]) -> None:
    """Train on equal parts, and on odd ones weighted by their samples."""
    replicas = sum(map(len, shares))
    equal = [4 * len(share) for share in shares]
    odd = [4 * len(share) + 2 * i + 1 for i, share in enumerate(shares)]
    _train(rank, shares[rank], equal, "processes")
    _train(rank, shares[rank], odd, "samples")
    # A chunk has one sample, and some replicas have none.
    _train(rank, shares[rank], [max(1, replicas // size - 1)] * size, "processes")


def _train(rank: int, places: list[str], samples: Sequence[int], average: AverageKind) -> None:
    device = torch.device(places[0])
    bare, net = _net(device), _net(device)
    model: Any = dp.DistributedDataParallel(net, places, average=average, bucket_cap_mb=0.01)
    for step in range(_STEPS):
        whole = torch.randn(sum(samples), 20, generator=torch.Generator().manual_seed(step))
        mine = whole.split(list(samples))[rank]
        for called, batch in ((model, mine), (bare, whole)):
            called.zero_grad()
            called(batch.to(device)).pow(2).mean().backward()
        _assert_alike(net, bare)
        with torch.no_grad():
            for parameter in (*net.parameters(), *bare.parameters()):
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.05)
    model.check_replicas()
    model.close()


def _net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    return nn.Sequential(*layers).to(device)


def _assert_alike(net: nn.Module, bare: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), bare.parameters(), strict=True):
        grads: list[Tensor | None] = [mine.grad, theirs.grad]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
