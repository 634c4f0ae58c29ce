"""Train on handwritten digits so that a killed process costs seconds, and changes nothing.

torchrun starts all processes again when one has ended; they go on from the last checkpoint, in the
middle of an epoch, with the random numbers and the batches that would have come next.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from common import choose_devices, console, option_parser
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dataparallel as dp
from dataparallel import checkpoint

LAUNCH = "torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_elastic.py"


def main() -> int:
    """Train, from the last checkpoint on. Returns 1 if too little was learnt."""
    options = parse_options()
    dp.init_process_group(timeout=options.timeout)
    rank = dist.get_rank()
    console.quiet = rank > 0

    torch.manual_seed(options.seed)
    devices = choose_devices(options.devices)
    net = build_net().to(devices[0])
    model = dp.DistributedDataParallel(
        net, device_ids=devices, average="samples", timeout=options.timeout
    )
    # Dropout differs from process to process.
    torch.manual_seed(options.seed + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    data = load_data()
    sampler = checkpoint.ResumableSampler(data, options.batch_size, seed=options.seed)
    # A generator of its own: a new iterator would else take a random number from the training.
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())

    state = (model, optimizer)
    step = checkpoint.load(
        options.output, *state, sampler=sampler, missing_ok=True, timeout=options.timeout
    ).step
    console.print(f"{dist.get_world_size()} processes begin at step {step} (restart {restart()})")
    criterion = nn.CrossEntropyLoss()
    for epoch in range(sampler.epoch, options.epochs):
        loss = None
        for x, y in sampler.over(loader):
            if (
                step == options.fail_at_step
                and restart() == 0
                and rank == dist.get_world_size() - 1
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            output = model(x)
            loss = criterion(output, y.to(output.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                checkpoint.save(
                    options.output, *state, sampler=sampler, step=step, asynchronous=True
                )
        # None, where the checkpoint is that of the epoch's last step.
        if loss is not None:
            console.print(
                f"epoch {epoch + 1}/{options.epochs}, step {step}: loss {loss.item():.6f}"
            )
    checkpoint.save(options.output, *state, sampler=sampler, step=step)
    checkpoint.close()
    accuracy = accuracy_of(model, data)
    console.print(f"accuracy {accuracy:.2%} on the digits that it learnt from")
    model.close()
    dist.destroy_process_group()
    return 0 if accuracy >= options.min_accuracy else 1


def restart() -> int:
    """How often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = option_parser(
        "train_elastic",
        "Train so that a killed process costs seconds.",
        epochs=5,
        batch_size=64,
        lr=0.003,
        processes=True,
    )
    parser.epilog = f"{parser.epilog}\n  {LAUNCH} --fail-at-step 60"
    add = parser.add_argument
    add("--save-every", type=int, default=10, metavar="N", help="steps; default: 10")
    add("--fail-at-step", type=int, default=None, metavar="N",
        help="kill the last process there once, to see it recover; default: never")  # fmt: skip
    add("--timeout", type=float, default=60.0, metavar="S",
        help="seconds to wait for another process; default: 60")  # fmt: skip
    add("--min-accuracy", type=float, default=0.0, metavar="X",
        help="exit with status 1 below it; default: 0")  # fmt: skip
    return parser.parse_args()


def load_data() -> TensorDataset:
    """Images ``(N, 1, 8, 8)`` from 0 to 1, and labels ``(N,)``."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target))


def build_net() -> nn.Module:
    """Two convolutions and a linear layer, with dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 2 * 2, 10)),
    )


@torch.no_grad()
def accuracy_of(model: nn.Module, data: TensorDataset) -> float:
    """Share of the images that are recognised."""
    images, labels = data.tensors
    model.eval()
    recognised: Tensor = model(images).argmax(1).cpu() == labels
    return recognised.float().mean().item()


if __name__ == "__main__":
    sys.exit(main())
