"""The examples, as a user starts them, for a short while."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dataparallel import checkpoint

_ROOT = pathlib.Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"
_PNG = b"\x89PNG"


def run(script: str, *options: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a script, in several processes under torchrun, which have four virtual devices."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    devices = {"DATAPARALLEL_VIRTUAL_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher[: 5 * (processes > 1)], str(_EXAMPLES / script), *options],
        env=os.environ | (devices if processes > 1 else {}),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("script", ["train_digits.py", "train_chars.py", "train_elastic.py"])
def test_help_names_the_options_and_ends_with_examples(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_EXAMPLES / script)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    monkeypatch.syspath_prepend(str(_EXAMPLES))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--devices", "--epochs", "--batch-size", "--lr", "--seed", "--output"):
        assert option in shown
    assert f"examples:\n  python examples/{script}" in shown


@pytest.mark.parametrize("devices", ["cpu,cpu", "virtual:0,virtual:1"])
def test_digits_are_learnt_saved_and_drawn(devices: str, tmp_path: pathlib.Path) -> None:
    options = ("--epochs", "4", "--min-accuracy", "0.9", "--devices", devices)
    finished = run("train_digits.py", *options, "--output", str(tmp_path / "new"))
    assert finished.returncode == 0, finished.stderr
    assert "test accuracy 9" in finished.stdout
    state = load_file(tmp_path / "new" / "digits.safetensors")
    assert all(not name.startswith("module.") for name in state)
    assert all(tensor.device == torch.device("cpu") for tensor in state.values())
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(_PNG)
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_too_low_an_accuracy_is_a_failure(tmp_path: pathlib.Path) -> None:
    options = ("--epochs", "1", "--min-accuracy", "1.0", "--lr", "0.0001")
    finished = run("train_digits.py", *options, "--output", str(tmp_path))
    assert finished.returncode == 1
    assert "the accuracy is below 100.00%" in finished.stdout


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What the examples share."""
    monkeypatch.syspath_prepend(str(_EXAMPLES))
    device = torch.accelerator.current_device_index()
    yield importlib.import_module("common")
    torch.accelerator.set_device_index(device)


def test_without_torchrun_an_example_takes_all_accelerators(common: ModuleType) -> None:
    assert common.choose_devices(None) == [f"virtual:{i}" for i in range(4)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_an_example_takes_the_cpu_twice(
    processes: int, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert common.choose_devices(None) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (3, [[0], [1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
        (6, [[0], [1], [2], [3], [0], [1]]),
    ],
)
def test_under_torchrun_an_example_takes_its_share_of_the_accelerators(
    processes: int,
    shares: list[list[int]],
    common: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for rank, share in enumerate(shares):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert common.choose_devices("cpu,virtual:3") == ["cpu", "virtual:3"]
        assert common.choose_devices(None) == [f"virtual:{i}" for i in share]
        assert torch.accelerator.current_device_index() == share[0]
    shared = "6 processes take 4 accelerators in turn" in capsys.readouterr().out
    assert shared == (processes > 4)


def test_two_processes_of_torchrun_train_on_two_devices_each(tmp_path: pathlib.Path) -> None:
    finished = run("train_digits.py", "--epochs", "1", "--output", str(tmp_path), processes=2)
    assert finished.returncode == 0, finished.stderr
    for rank, devices in enumerate(["virtual:0, virtual:1", "virtual:2, virtual:3"]):
        said = rf"rank {rank} of 2: .* one replica on each of: {devices}$"
        assert re.search(said, finished.stdout, re.MULTILINE), finished.stdout
    assert finished.stdout.count("test accuracy") == 1
    assert load_file(tmp_path / "digits.safetensors")


def test_letters_are_learnt_and_written(tmp_path: pathlib.Path) -> None:
    finished = run(
        "train_chars.py", "--epochs", "1", "--batch-size", "4", "--output", str(tmp_path)
    )
    assert finished.returncode == 0, finished.stderr
    assert "nats per letter (unigram" in finished.stdout
    assert "what the model writes" in finished.stdout
    assert (tmp_path / "chars.png").read_bytes().startswith(_PNG)


class _Killed(BaseException):
    """The end of a process, in a test that needs no other one."""


def test_training_goes_on_from_the_last_step_of_an_epoch(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(*_: int) -> None:
        checkpoint.close()
        torch.distributed.destroy_process_group()
        raise _Killed

    monkeypatch.syspath_prepend(str(_EXAMPLES))
    monkeypatch.setattr("os.kill", kill)
    # Three steps each.
    options = ("--epochs", "3", "--batch-size", "600", "--devices", "cpu", "--save-every", "3")
    script = _EXAMPLES / "train_elastic.py"
    monkeypatch.setattr(
        "sys.argv", [str(script), *options, "--fail-at-step", "3", "--output", str(tmp_path)]
    )
    # Torch puts one of its own in its place.
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    main = runpy.run_path(str(script))["main"]
    with pytest.raises(_Killed):
        main()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main() == 0
    said = capsys.readouterr().out
    assert "1 processes begin at step 3 (restart 1)\nepoch 2/3, step 6: loss" in said


class NetWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), y)


class MaskedNet(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape == (8,)
        return x * mask


def test_the_code_in_the_readme_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (_ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 8
    names: dict[str, Any] = {
        "torch": torch,
        "criterion": nn.CrossEntropyLoss(),
        "x": torch.randn(6, 8),
        "y": torch.tensor([1, 2, 0, 1, 2, 0]),
        "mask": torch.ones(8),
        "net_with_loss": NetWithLoss(),
        "masked_net": MaskedNet(),
    }
    names["loader"] = [(names["x"], names["y"])]
    # The first block leaves out the devices, which are four virtual ones here.
    names["net"] = nn.Linear(8, 3)
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert {p.device for p in names["net"].parameters()} == {torch.device("virtual:0")}
    names["net"] = nn.Linear(8, 3)
    for block in blocks[1:]:
        exec(compile(block, "README.md", "exec"), names)
    checkpoint.close()
    said = [line for line in capsys.readouterr().out.splitlines() if " samples in " in line]
    assert sorted(said) == [f"3 samples in replica {i} on cpu" for i in (0, 1)]


def test_the_commands_in_the_readme_exist() -> None:
    text = (_ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (_ROOT / "Makefile").read_text()
    assert {"train", "test", "train-chars"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
