"""The callbacks of docs/monitor.md, in Lightning and in Trainer of Hugging Face."""

from __future__ import annotations

import csv
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import runs
from tests.monitor.made_up_runs import run_folder as run_folder

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"


@pytest.fixture(autouse=True)
def _own_folder(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"needs the package {name}")


def block_with(line: str) -> str:
    """The indented block of the page that begins with this line."""
    (block,) = re.findall(rf"^    {re.escape(line)}\n(?:(?:    .*)?\n)+", PAGE.read_text(), re.M)
    return textwrap.dedent(block)


def check(metrics: dict[str, float], num_replicas: int = 2) -> None:
    """The shares of the phases of each replica add up to a step."""
    shares = [0.0] * num_replicas
    for name, value in metrics.items():
        if name.startswith("replica") and name.endswith("_share"):
            shares[int(name.removeprefix("replica").split("/")[0])] += value
    assert shares == pytest.approx([1.0] * num_replicas, rel=0.02)
    assert metrics["samples_per_second"] > 0 and metrics["step_seconds"] > 0


def wrapped_net() -> dp.DistributedDataParallel[nn.Module]:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return dp.DistributedDataParallel(net, ["cpu", "cpu"])


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = library("lightning")
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped_net()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return self.model.loss(nn.functional.cross_entropy, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    code = block_with("class LogMonitor(lightning.Callback):").replace("% 50", "% 10")
    options = f"logger=CSVLogger({str(tmp_path)!r}), accelerator='cpu', enable_progress_bar=False, "
    code = code.replace("Trainer(", f"Trainer({options}")
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    names = {"lightning": lightning, "StepMonitor": StepMonitor, "CSVLogger": CSVLogger}
    exec(code, names | {"module": Module(), "loader": loader})
    (table,) = tmp_path.rglob("metrics.csv")
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    for row in rows:
        check({name: float(value) for name, value in row.items() if value})
    assert runs() == []


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = library("transformers")
    library("accelerate")
    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            reported.append(dict(more["logs"]))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped_net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.model.loss(nn.functional.cross_entropy, x, labels)}

    classifier = Classifier()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=64,
        num_train_epochs=3,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    samples = [{"x": x, "labels": x[:10].argmax()} for x in torch.randn(512, 64)]
    trainer = transformers.Trainer(
        classifier, arguments, train_dataset=samples, callbacks=[Reporter()]
    )
    names = {"transformers": transformers, "StepMonitor": StepMonitor, "trainer": trainer}
    code = block_with("class LogMonitor(transformers.TrainerCallback):")
    exec(code, names | {"model": classifier.model})
    assert [one["step"] for one in trainer.state.log_history] == [8, 16, 24, 24]
    for logs in (trainer.state.log_history, reported):
        assert len(logs) == 4
        for one in logs:
            check(one)
    assert runs() == []
