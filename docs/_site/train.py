"""The job of the images: it trains on virtual devices until it is ended."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor

SECONDS = 45
NUM_RANKS, NUM_GPUS = 2, 8


class ConvNet(nn.Module):
    """Small enough for two cores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(48 * 16, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def train() -> None:
    """Train one rank on its share of the devices; the second one loads slowly later on."""
    dp.virtual.enable(NUM_GPUS)
    dp.init_process_group("gloo")
    rank, each = int(os.environ["RANK"]), NUM_GPUS // NUM_RANKS
    devices = [f"virtual:{each * rank + i}" for i in range(each)]
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(ConvNet().to(devices[0]), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    x, y = torch.randn(96, 3, 32, 32), torch.randint(10, (96,))
    begin = time.monotonic()
    with StepMonitor(model):
        while True:
            if rank and time.monotonic() - begin > SECONDS / 2:
                time.sleep(0.15)
            loss = model.loss(nn.functional.cross_entropy, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train()
