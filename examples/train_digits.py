"""Train a small convolutional network on handwritten digits, on all devices of this machine.

Under torchrun each process trains replicas of its own, on its part of every batch.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Iterator

import matplotlib
import torch
from common import (
    ReplicaClock,
    TrainingProgress,
    choose_devices,
    console,
    describe_run,
    join_processes,
    load_checkpoint,
    option_parser,
    save_checkpoint,
    typical_step,
)
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from dataparallel import DistributedDataParallel
from dataparallel.monitor import StepMonitor, StepRecord
from dataparallel.tools.monitor.step_picture import draw_step

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPOCHS = 12


def main() -> int:
    """Train, save, reload, plot. Returns 1 if the accuracy is below what is asked for."""
    options = parse_options()
    rank, world_size = join_processes()
    torch.manual_seed(options.seed)
    train_x, train_y, test_x, test_y = load_data()
    devices = choose_devices(options.devices)
    net = build_net().to(devices[0])
    clock = ReplicaClock(net)
    describe_run(net, devices, world_size)

    # The last batch is not of one size in all processes, so the average goes by samples.
    model = DistributedDataParallel(net, device_ids=devices, average="samples")
    torch.manual_seed(options.seed + rank)
    begin = time.perf_counter()
    with StepMonitor(model) as monitor:
        losses, accuracies = train(model, (train_x, train_y), (test_x, test_y), options, clock)
    seconds = time.perf_counter() - begin

    checkpoint = options.output / "digits.safetensors"
    if rank == 0:
        save_checkpoint(checkpoint, model)
    model.close()
    if rank > 0:
        return 0
    console.print(
        f"test accuracy {accuracies[-1]:.2%} of {len(test_x)} digits after {seconds:.1f} s"
    )
    bare = build_net()
    load_checkpoint(checkpoint, bare)
    reloaded = accuracy(bare, test_x, test_y)
    console.print(f"{checkpoint}: the bare module with these weights has {reloaded:.2%}")
    plot = options.output / "digits.png"
    draw(plot, losses, accuracies, typical_step(monitor))
    console.print(f"{plot}: loss, accuracy, and what each replica did in one step")
    # On accelerators one digit may fall to the other side by rounding.
    if abs(reloaded - accuracies[-1]) > 0.005:
        console.print("[red]the reloaded weights have another accuracy[/red]")
        return 1
    if accuracies[-1] < options.min_accuracy:
        console.print(f"[red]the accuracy is below {options.min_accuracy:.2%}[/red]")
        return 1
    return 0


def train(
    model: DistributedDataParallel[nn.Module],
    data: tuple[Tensor, Tensor],
    test_data: tuple[Tensor, Tensor],
    options: argparse.Namespace,
    clock: ReplicaClock,
) -> tuple[list[float], list[float]]:
    """Train; returns the loss of each step, and the accuracy on the test data after each epoch."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = -(-len(data[0]) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.epochs * steps)
    accuracies = []
    with TrainingProgress(options.epochs, steps, clock) as progress:
        for epoch in range(options.epochs):
            model.train()
            for x, y in shuffled_batches(*data, options, epoch):
                output = model(x)
                loss = criterion(output, y.to(output.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                progress.step(loss, len(x))
            accuracies.append(accuracy(model, *test_data))
    return progress.losses, accuracies


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = option_parser(
        "train_digits",
        "Train on 8x8 handwritten digits.",
        epochs=EPOCHS,
        batch_size=64,
        lr=0.005,
        processes=True,
    )
    parser.add_argument(
        "--min-accuracy",
        type=float,
        metavar="X",
        help="exit with status 1 below it; default: 0.97, or 0 with less than the default epochs",
    )
    options = parser.parse_args()
    if options.min_accuracy is None:
        options.min_accuracy = 0.97 if options.epochs >= EPOCHS else 0.0
    return options


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images ``(N, 1, 8, 8)`` from 0 to 1 and labels ``(N,)``: four fifths train."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target
    )
    return images[train], labels[train], images[test], labels[test]


def build_net() -> nn.Module:
    """Three convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10)),
    )


def shuffled_batches(
    x: Tensor, y: Tensor, options: argparse.Namespace, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples once, in random order: of each batch the part of this process."""
    rank, world_size = join_processes()
    order = torch.Generator().manual_seed(options.seed * 1000 + epoch)
    for batch in torch.randperm(len(x), generator=order).split(options.batch_size):
        indices = batch[rank::world_size]
        yield x[indices], y[indices]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of the images that are recognised."""
    model.eval()
    recognised: Tensor = model(x).argmax(1).cpu() == y
    return recognised.float().mean().item()


def draw(
    path: pathlib.Path, losses: list[float], accuracies: list[float], step: StepRecord
) -> None:
    """Loss and accuracy above, the timeline below."""
    figure, (above, below) = plt.subplots(2, figsize=(9, 7), height_ratios=(3, 2))
    steps_per_epoch = len(losses) // len(accuracies)
    above.plot([(i + 1) / steps_per_epoch for i in range(len(losses))], losses, color="#4477aa",
               linewidth=1, label="training loss")  # fmt: skip
    above.set(xlabel="epoch", ylabel="training loss (nats)", yscale="log")
    above.set_title("Handwritten digits", loc="left")
    right = above.twinx()
    right.plot(range(1, len(accuracies) + 1), [100 * each for each in accuracies], color="#cc6677",
               marker="o", label="test accuracy")  # fmt: skip
    right.set_ylabel("test accuracy (%)")
    right.set_ylim(top=100.5)
    figure.legend(loc="center right", bbox_to_anchor=(0.98, 0.5), bbox_transform=above.transAxes)
    draw_step(below, step)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
