"""Train a convolutional network on handwritten digits, save its weights, and draw how it went.

python examples/train_digits.py                          all accelerators, or else two CPU replicas
python examples/train_digits.py --devices cpu,cpu,cpu,cpu --epochs 5
torchrun --nproc-per-node 2 examples/train_digits.py     each process takes half of the accelerators
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    options = parse_options()
    if WORLD_SIZE > 1:
        dp.init_process_group()
    devices = options.devices.split(",") if options.devices else default_devices()
    print(f"rank {RANK} trains on: {', '.join(map(str, devices))}", flush=True)
    digits = load_digits()  # 1797 images of 8x8 pixels
    x, y = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[360:], shuffled[:360]

    torch.manual_seed(options.seed)  # the same weights and the same order in every process
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10)),
    )
    # The last batch is not of one size in all processes, so the average goes by samples.
    model = dp.DistributedDataParallel(net, devices, average="samples")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = options.epochs * -(-len(train) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps)
    order = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed + RANK)  # other dropout masks in every process
    losses, accuracies = [], []
    begin = time.perf_counter()
    with StepMonitor(model) as monitor:
        for epoch in track(range(options.epochs), "training", disable=RANK > 0):
            model.train()
            shuffled = train[torch.randperm(len(train), generator=order)]
            for batch in shuffled.split(options.batch_size):
                mine = batch[RANK::WORLD_SIZE]
                loss = model.loss(nn.functional.cross_entropy, x[mine], y[mine])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                recognized = model(x[test]).argmax(1).cpu() == y[test]
            accuracies.append(recognized.float().mean().item())
            if RANK == 0:
                print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {accuracies[-1]:.2%}")
    seconds = time.perf_counter() - begin
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    if RANK == 0:
        title = f"Test accuracy {accuracies[-1]:.2%} after {seconds:.1f} s"
        options.output.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), options.output / "digits.pt")
        where = ", ".join(map(str, devices))
        draw(title, where, losses, accuracies).savefig(options.output / "digits.png")
        print(monitor.summary())
        print(f"{title}; weights and plot are in {options.output}")
    if accuracies[-1] < options.min_accuracy:
        sys.exit(f"the accuracy is below {options.min_accuracy:.2%}")


def default_devices() -> Sequence[torch.device | str]:
    """Return this process's share of the accelerators, or two CPU replicas if there are none."""
    number = len(dp.accelerators()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    first = number * int(os.environ.get("LOCAL_RANK", 0))
    return dp.accelerators()[first : first + number] or ["cpu", "cpu"]


def draw(title: str, where: str, losses: list[float], accuracies: list[float]) -> Figure:
    """Loss and accuracy."""
    figure = Figure(figsize=(9, 4), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
    figure.suptitle(f"Handwritten digits on {where}: {title[0].lower()}{title[1:]}")
    axes = figure.subplot_mosaic([["loss", "accuracy"]])
    epochs = [(i + 1) * len(accuracies) / len(losses) for i in range(len(losses))]
    axes["loss"].semilogy(epochs, losses, linewidth=1)
    axes["loss"].set(xlabel="epoch", ylabel="training loss (nats)")
    percents = [100 * each for each in accuracies]
    axes["accuracy"].plot(range(1, len(percents) + 1), percents, color="C1", marker=".")
    axes["accuracy"].set(xlabel="epoch", ylabel="test accuracy (%)")
    axes["accuracy"].locator_params(axis="x", integer=True)
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
    return figure


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each replica: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("out/digits"))
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="fail below, as 0.97")
    return parser.parse_args()


if __name__ == "__main__":
    main()
