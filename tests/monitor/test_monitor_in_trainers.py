"""A monitor around Trainer of Hugging Face; the guide shows it in Lightning."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def _own_folder(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"needs the package {name}")


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
            net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
            self.model = dp.DistributedDataParallel(net, ["cpu", "cpu"])

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

    class LogMonitor(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
            metrics = monitor.summary().as_metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    with StepMonitor(classifier.model) as monitor:
        # A reporter sees what earlier callbacks have added.
        trainer.callback_handler.callbacks.insert(0, LogMonitor())
        trainer.train()
    assert [one["step"] for one in trainer.state.log_history] == [8, 16, 24, 24]
    for logs in (trainer.state.log_history, reported):
        assert len(logs) == 4
        for metrics in logs:
            # The shares of the phases of each replica add up to a step.
            for replica in ("replica0/", "replica1/"):
                shares = [v for k, v in metrics.items() if k.startswith(replica) and "share" in k]
                assert sum(shares) == pytest.approx(1.0, rel=0.02)
            assert metrics["samples_per_second"] > 0 and metrics["step_seconds"] > 0
    assert runs() == []
