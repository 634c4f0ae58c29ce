"""Watch a model that Lightning trains on several devices in one process.

Lightning moves the LightningModule to one device; the network in it is wrapped, and uses them all.
Needs ``pip install lightning``.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.monitor import StepMonitor


class MonitorCallback(lightning.Callback):  # type: ignore[misc]
    """Logs the monitor's metrics, under ``monitor/``, with the trainer's logger.

    Example::

        trainer = lightning.Trainer(callbacks=[MonitorCallback(every=50)])

    Args:
        every: Steps of the optimizer from one time to the next. Default: 50.

    Attributes:
        monitor: What watches, or has watched; None before training.
    """

    def __init__(self, every: int = 50) -> None:
        self.monitor: StepMonitor | None = None
        self._every = every
        self._logged = 0

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        self.monitor = StepMonitor(find_wrapper(module))
        self.monitor.__enter__()

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        done = trainer.global_step
        if done % self._every == 0 and done != self._logged:
            self._logged = done
            self._log(trainer)

    def on_train_end(self, trainer: Any, module: nn.Module) -> None:
        self._leave()
        self._log(trainer)

    def on_exception(self, trainer: Any, module: nn.Module, error: BaseException) -> None:
        self._leave()

    def _log(self, trainer: Any) -> None:
        assert self.monitor is not None
        metrics = self.monitor.summary().as_metrics()
        named = {f"monitor/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

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


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule whose network runs on all devices."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(devices[0])
        self.model = dataparallel.DataParallel(net, devices)
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return self.model.loss(self.criterion, x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> int:
    """Train on made-up data; the numbers go to ``out/lightning``."""
    from lightning.pytorch.loggers import CSVLogger

    x = torch.randn(2048, 64)
    data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
    callback = MonitorCallback(every=10)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[callback],
        logger=CSVLogger("out", "lightning"),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(["cpu", "cpu"]), torch.utils.data.DataLoader(data, batch_size=128))
    assert callback.monitor is not None
    print(callback.monitor.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
