"""A rank that raises or is killed in its second backward: the others are told, and may go on."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import dataparallel as dp
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from tests.cluster import RankDied
from tests.gpu.report.subject import in_processes, table

_FAILS = 1
#: Seconds until a survivor must have raised.
_LIMIT = 10.0


def main(given: argparse.Namespace) -> None:
    """Let one of up to four ranks fail, and judge what the others saw."""
    size = min(4, len(given.devices))
    found = in_processes(train, size, given.devices, given.how, timeout=40.0, expect_errors=True)
    failed = found.pop(_FAILS)
    survivors = [rank for rank in range(size) if rank != _FAILS]
    rows = [
        [given.how, rank, *(one if isinstance(one, tuple) else ("inf", repr(one)))]
        for rank, one in zip(survivors, found, strict=True)
    ]
    head = ["rank 1", "seconds until each other rank raised", "each named rank 1; later steps"]
    times = ", ".join(str(row[2]) for row in rows)
    said = "; ".join(sorted({str(row[3]) for row in rows}))
    table(f"A rank that fails in backward, {size} ranks", head, [[given.how, times, said]])
    if given.how == "killed" and not isinstance(failed, RankDied):
        raise SystemExit(f"rank {_FAILS} was not killed: {failed!r}")
    if given.how == "raised" and not isinstance(failed, tuple):
        raise SystemExit(f"rank {_FAILS} did not go on: {failed!r}")
    wanted = "yes" if given.how == "killed" else "yes, right"
    if any(row[3] != wanted or not float(row[2]) < _LIMIT for row in rows):
        raise SystemExit(f"each rank has to say {wanted!r} within {_LIMIT:.0f} s")


class Fails(nn.Module):
    """A layer whose backward fails when it is told how."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        if output.requires_grad:
            output.register_hook(lambda _: self.fail())
        return output

    def fail(self) -> None:
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raised":
            raise ZeroDivisionError("a bad batch")


def train(rank: int, size: int, names: Sequence[str], how: str) -> tuple[str, str]:
    """Return the seconds until this rank raised, and facts about its error and later steps."""
    device = torch.device(names[rank])
    net = Fails().to(device)
    model: Any = dp.DistributedDataParallel(net, [device], timeout=30.0)
    _step(model, rank)
    net.how = how if rank == _FAILS else ""
    begin = time.monotonic()
    said = "no error"
    try:
        # On a device the host may be past the collective that fails: the next forward tells.
        for _ in range(2):
            _step(model, rank)
    except (CollectiveError, CollectiveTimeout, RuntimeError, ZeroDivisionError) as error:
        said = "yes" if f"rank {_FAILS}" in str(error) or rank == _FAILS else f"no: {error}"
    seconds = f"{time.monotonic() - begin:.1f}"
    if how == "killed":
        return seconds, said
    net.how = ""
    model.check_replicas()
    values = [_step(model, rank) for _ in range(2)]
    right = values == [(size - 1) / 2] * 2
    return seconds, f"{said}, {'right' if right else f'wrong: {values}'}"


def _step(model: Any, rank: int) -> float:
    """Return a gradient: the mean of the ranks' numbers."""
    model.zero_grad()
    layer = model.module.layer
    model(torch.full((1, 4), float(rank), device=layer.weight.device)).sum().backward()
    gradient: float = layer.weight.grad[0, 0].item()
    return gradient
