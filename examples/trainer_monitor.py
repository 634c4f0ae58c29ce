"""Watch a model that Trainer of Hugging Face trains on several devices in one process.

Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import dataparallel
from dataparallel.monitor import StepMonitor


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Adds the monitor's metrics, under ``monitor/``, to what Trainer logs.

    Example::

        callback = MonitorCallback.add_to(trainer)
        trainer.train()
        print(callback.monitor.summary())

    Attributes:
        monitor: What watches, or has watched; None before training.
    """

    def __init__(self) -> None:
        self.monitor: StepMonitor | None = None

    @classmethod
    def add_to(cls, trainer: Trainer) -> MonitorCallback:
        """A callback that comes before those that report to TensorBoard and others."""
        callback = cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._leave()
        self.monitor = StepMonitor(find_wrapper(more["model"]))
        self.monitor.__enter__()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.monitor is None or not self.monitor.steps:
            return
        metrics = self.monitor.summary().as_metrics()
        named = {f"monitor/{name}": value for name, value in metrics.items()}
        # The reporters get the one, and checkpoints keep the other.
        more["logs"].update(named)
        state.log_history[-1].update(named)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)


def find_wrapper(module: nn.Module) -> dataparallel.DataParallel[Any]:
    """The wrapper in a module."""
    for part in module.modules():
        if isinstance(part, dataparallel.DataParallel):
            return part
    raise ValueError(
        f"{type(module).__name__} has no dataparallel.DataParallel in it; wrap its network"
    )


class Classifier(nn.Module):
    """A module as Trainer wants it, whose network runs on all devices."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(devices[0])
        self.model = dataparallel.DataParallel(net, devices)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model.loss(self.criterion, x, labels)}


def make_trainer(folder: pathlib.Path, devices: list[str]) -> Trainer:
    """A trainer with made-up data."""
    samples = [{"x": x, "labels": x[:10].argmax()} for x in torch.randn(512, 64)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=64,
        num_train_epochs=3,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(Classifier(devices), arguments, train_dataset=samples)


def main() -> int:
    """Train, and print what the monitor has seen."""
    trainer = make_trainer(pathlib.Path("out", "trainer"), ["cpu", "cpu"])
    callback = MonitorCallback.add_to(trainer)
    trainer.train()
    assert callback.monitor is not None
    print(callback.monitor.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
