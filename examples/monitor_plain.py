"""Watch a training loop: log where its time goes, and keep a timeline of it."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from types import TracebackType
from typing import Any

import torch
from torch import nn

import dataparallel
from dataparallel.monitor import StepMonitor


class MonitorLog:
    """Appends a line of JSON with the monitor's metrics every so many steps.

    Example::

        with MonitorLog(model, folder, every=50) as log:
            for x, y in loader:
                ...
                optimizer.step()
                log.step()

    Args:
        model: The wrapper.
        folder: Where ``metrics.jsonl`` and, at the end, ``timeline.json.gz`` go.
        every: Steps from one line to the next.
    """

    def __init__(
        self, model: dataparallel.DataParallel[Any], folder: pathlib.Path, every: int
    ) -> None:
        self.monitor = StepMonitor(model)
        self._folder = folder
        self._every = every
        self._steps = 0

    def __enter__(self) -> MonitorLog:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.monitor.__enter__()
        return self

    def step(self) -> None:
        """A step is done."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._write()

    def _write(self) -> None:
        line = {"step": self._steps, **self.monitor.summary().as_metrics()}
        with open(self._folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.monitor.__exit__(kind, error, traceback)
        if kind is None and self.monitor.steps:
            self._write()
            self.monitor.export_chrome_trace(self._folder / "timeline.json.gz")


def main(arguments: list[str] | None = None) -> int:
    """Train a small network while it is watched."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    devices = options.devices.split(",")
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(devices[0])
    model = dataparallel.DataParallel(net, devices)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(f"watch it with: dataparallel monitor top --attach {os.getpid()}")
    with MonitorLog(model, options.output, options.every) as log:
        for _ in range(options.steps):
            x = torch.randn(256, 64, device=devices[0])
            y = x[:, :10].argmax(1)
            optimizer.zero_grad()
            model.loss(criterion, x, y).backward()
            optimizer.step()
            log.step()
    print(log.monitor.summary())
    print(f"{options.output / 'timeline.json.gz'} can be opened at https://ui.perfetto.dev")
    return 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="""examples:
  python examples/monitor_plain.py
  python examples/monitor_plain.py --devices cuda:0,cuda:1 --steps 1000
  python examples/monitor_plain.py --devices virtual:0,virtual:1   (accelerators in host memory)""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", default="cpu,cpu", metavar="LIST", help="default: cpu,cpu")
    add("--steps", type=int, default=100, metavar="N", help="default: 100")
    add("--every", type=int, default=20, metavar="N", help="steps between two lines; default: 20")
    add("--output", type=pathlib.Path, default=pathlib.Path("out", "monitor"), metavar="DIR",
        help="where metrics and timeline go; default: %(default)s")  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
