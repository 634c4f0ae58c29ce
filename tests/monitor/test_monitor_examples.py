"""The monitor in a plain loop, in Lightning and in Trainer of Hugging Face."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.monitor.attach import runs
from tests.monitor.made_up_runs import run_folder as run_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _own_folder(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(name: str, *libraries: str) -> Any:
    """The example as a module."""
    for library in libraries:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(library, reason=f"needs the package {library}")
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module: ModuleType = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def check(metrics: dict[str, float], num_replicas: int = 2) -> None:
    """Of what the examples log."""
    shares = [0.0] * num_replicas
    for name, value in metrics.items():
        if name.startswith("replica") and name.endswith("_share"):
            shares[int(name.removeprefix("replica").split("/")[0])] += value
    assert shares == pytest.approx([1.0] * num_replicas, rel=0.02)
    assert metrics["samples_per_second"] > 0 and metrics["step_seconds"] > 0


def test_a_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "25", "--every", "10", "--output", str(tmp_path / "new")]
    assert load("monitor_plain").main(options) == 0
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [one["step"] for one in logged] == [10, 20, 25]
    for one in logged:
        check(one)
    assert (tmp_path / "new" / "timeline.json.gz").stat().st_size > 0
    printed = capsys.readouterr().out
    assert f"dataparallel monitor top --attach {os.getpid()}" in printed
    assert "24 training steps" in printed
    assert runs() == []


def test_a_plain_loop_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    example = load("monitor_plain")
    model = example.dataparallel.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    with (
        pytest.raises(RuntimeError, match="no more data"),
        example.MonitorLog(model, tmp_path / "new", every=1) as log,
    ):
        assert runs() == [os.getpid()]
        model(torch.ones(4, 2)).sum().backward()
        raise RuntimeError("no more data")
    assert len(log.monitor.steps) == 1
    assert not list((tmp_path / "new").iterdir()) and runs() == []


def test_help_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        load("monitor_plain").main(["--help"])
    assert "examples:\n  python examples/monitor_plain.py" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    example = load("lightning_monitor", "lightning")
    assert example.main() == 0
    (table,) = (tmp_path / "out" / "lightning").rglob("metrics.csv")
    with open(table) as file:
        rows = [row for row in csv.DictReader(file) if row["monitor/num_steps"]]
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40, 48]
    for row in rows:
        named = {name: value for name, value in row.items() if name.startswith("monitor/")}
        check({name.removeprefix("monitor/"): float(v) for name, v in named.items() if v})
    assert runs() == []


@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path: Path) -> None:
    example = load("trainer_monitor", "transformers", "accelerate")
    trainer = example.make_trainer(tmp_path, ["cpu", "cpu"])
    reported: list[dict[str, float]] = []

    class Reporter(example.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            reported.append(dict(more["logs"]))

    trainer.add_callback(Reporter())
    callback = example.MonitorCallback.add_to(trainer)
    trainer.train()
    assert [one["step"] for one in trainer.state.log_history] == [8, 16, 24, 24]
    for logs in (trainer.state.log_history, reported):
        assert len(logs) == 4
        for one in logs:
            check({name.removeprefix("monitor/"): v for name, v in one.items() if "/" in name})
    assert len(callback.monitor.steps) == 24
    assert runs() == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "library"), [("lightning_monitor", "lightning"), ("trainer_monitor", "transformers")]
)
def test_a_model_without_a_wrapper_is_refused(name: str, library: str) -> None:
    example = load(name, library)
    with pytest.raises(ValueError, match=r"Linear has no dataparallel\.DataParallel in it; wrap"):
        example.find_wrapper(nn.Linear(2, 2))
