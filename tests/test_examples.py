"""The examples, as a user starts them."""

from __future__ import annotations

import os
import pathlib
import queue
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from tests.launched import launched

_ROOT = pathlib.Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"
_SHORT = ("one_process.py", "one_process_per_gpu.py", "hybrid.py", "resume.py")


def start(
    script: str, *options: str, folder: pathlib.Path, processes: int = 1
) -> subprocess.Popen[str]:
    """Start a script in a folder as a user does, in several processes under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *launcher[: 5 * (processes > 1)], str(_EXAMPLES / script), *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """What a script has printed, which is to end well and without a warning."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    return printed


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize("script", _SHORT)
def test_an_example_is_read_in_a_minute(script: str) -> None:
    lines = (_EXAMPLES / script).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
    assert len(lines) <= 50


def test_all_examples_are_tried() -> None:
    elsewhere = {"notebook.ipynb", "train_digits.py", "parameter_server.py"}
    there = {path.name for path in _EXAMPLES.iterdir() if path.is_file()}
    assert there == {*_SHORT, *elsewhere}


def test_one_process(tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "one_process.py", 1, tmp_path, virtual=False)
    check_one_process(printed, ["cpu"])
    state = torch.load(tmp_path / "net.pt")
    assert sorted(state) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_one_process_with_four_accelerators(tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "one_process.py", 1, tmp_path, virtual=True)
    check_one_process(printed, [f"virtual:{i}" for i in range(4)])


def check_one_process(printed: str, devices: list[str]) -> None:
    assert re.search(r"epoch 5/5: loss 0\.\d+, test accuracy 9\d\.\d%", printed), printed
    assert "training steps of" in printed
    assert all(device in printed for device in devices)


def test_one_process_per_gpu(tmp_path: pathlib.Path) -> None:
    alone = end(start("one_process_per_gpu.py", folder=tmp_path, processes=2))
    assert re.search(r"epoch 5/5: loss 0\.\d+, test accuracy 9\d\.\d%", alone), alone
    on_accelerators = launched(_EXAMPLES / "one_process_per_gpu.py", 2, tmp_path, virtual=True)
    assert losses(on_accelerators) == losses(alone)
    assert len(losses(alone)) == 5


def test_hybrid(tmp_path: pathlib.Path) -> None:
    for virtual, shares in (
        (True, ["virtual:0, virtual:1", "virtual:2, virtual:3"]),
        (False, ["cpu, cpu", "cpu, cpu"]),
    ):
        printed = launched(_EXAMPLES / "hybrid.py", 2, tmp_path, virtual=virtual)
        for rank, share in enumerate(shares):
            assert f"rank {rank} trains on: {share}" in printed
        assert len(losses(printed)) == 5
        assert losses(printed)[-1] < 0.5 * losses(printed)[0]


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    killed = start("resume.py", folder=tmp_path / "killed")
    assert killed.stdout is not None
    # At whatever the training and the thread that saves are doing just then.
    for line in killed.stdout:
        if line.startswith("step 100:"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    again = launched(_EXAMPLES / "resume.py", 1, tmp_path / "killed", virtual=False)
    assert 0 < int(re.findall(r"begins at step (\d+)", again)[0]) < 400
    (tmp_path / "whole").mkdir()
    launched(_EXAMPLES / "resume.py", 1, tmp_path / "whole", virtual=False)
    states = []
    for name in ("whole", "killed"):
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))
        assert checkpoint.load(tmp_path / name / "out" / "resume", net).step == 400
        states.append(net.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_notebook(tmp_path: pathlib.Path) -> None:
    notebook = nbformat.read(_EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without what a run has printed"
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 40
    environment = os.environ | {"DATAPARALLEL_VIRTUAL_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    manager, client = start_new_kernel(cwd=str(tmp_path), env=environment, startup_timeout=60)
    try:
        shown = [message for cell in cells for message in outputs_of(client, cell.source)]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    printed = "".join(content["text"] for kind, content in shown if kind == "stream")
    assert re.search(r"epoch 5/5: loss 0\.\d+", printed), printed
    assert re.search(r"test accuracy 9\d\.\d%", printed), printed
    results = [content["data"] for kind, content in shown if kind == "execute_result"]
    assert "index=3" in results[0]["text/plain"]
    assert "training steps of" in results[1]["text/html"]
    assert (tmp_path / "net.pt").exists()


def outputs_of(client: Any, code: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a cell; what it prints and shows."""
    client.execute(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=5)
        except queue.Empty:
            continue
        kind, content = message["msg_type"], message["content"]
        assert kind != "error", "\n".join(content["traceback"])
        if kind == "status" and content["execution_state"] == "idle":
            return
        yield kind, content
    raise TimeoutError(f"the cell has not ended within 60 s:\n{code}")


# --- the digits ------------------------------------------------------------------------------


def test_digits_are_learned_saved_and_drawn(tmp_path: pathlib.Path) -> None:
    options = ("--epochs", "4", "--min-accuracy", "0.9", "--output", "new/folder")
    printed = end(start("train_digits.py", *options, folder=tmp_path))
    assert "rank 0 trains on: cpu, cpu\n" in printed
    assert re.search(r"^Test accuracy 9\d\.\d\d% after", printed, re.MULTILINE), printed
    assert len(losses(printed)) == 4
    written = tmp_path / "new" / "folder"
    state = torch.load(written / "digits.pt")
    assert state["0.weight"].shape == (32, 1, 3, 3)
    assert (written / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(written.iterdir())) == 2


def test_two_processes_train_on_two_accelerators_each(tmp_path: pathlib.Path) -> None:
    options = ("--epochs", "1", "--batch-size", "128", "--output", "two")
    printed = launched(_EXAMPLES / "train_digits.py", 2, tmp_path, *options, virtual=True)
    for rank, devices in enumerate(["virtual:0, virtual:1", "virtual:2, virtual:3"]):
        assert f"rank {rank} trains on: {devices}" in printed
    assert printed.count("Test accuracy") == 1
    assert torch.load(tmp_path / "two" / "digits.pt", map_location="cpu")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the script in this process, or gives what it defines."""

    def run(*options: str, name: str = "__main__") -> dict[str, Any]:
        script = str(_EXAMPLES / "train_digits.py")
        monkeypatch.setattr(sys, "argv", [script, *options])
        return runpy.run_path(script, run_name=name)

    return run


def test_help_names_the_options(
    digits: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        digits("--help")
    shown = capsys.readouterr().out
    for option in ("--devices", "--epochs", "--batch-size", "--lr", "--seed", "--output"):
        assert option in shown
    assert "torchrun --nproc-per-node 2 examples/train_digits.py" in shown


def test_too_low_an_accuracy_is_a_failure(
    digits: Callable[..., dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    options = ("--epochs", "1", "--batch-size", "512", "--lr", "1e-5", "--devices", "cpu")
    with pytest.raises(SystemExit, match=r"the accuracy is below 99\.00%"):
        digits(*options, "--min-accuracy", "0.99", "--output", str(tmp_path))


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (3, [[0], [1], [2]]),
        (4, [[0], [1], [2], [3]]),
    ],
)
def test_each_process_takes_a_share_of_the_accelerators(
    processes: int,
    shares: list[list[int]],
    digits: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default_devices = digits(name="train_digits")["default_devices"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for rank, share in enumerate(shares):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert default_devices() == tuple(dp.accelerators()[i] for i in share)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_each_process_takes_the_cpu_twice(
    processes: int, digits: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    default_devices = digits(name="train_digits")["default_devices"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert default_devices() == ["cpu", "cpu"]


# --- the README ------------------------------------------------------------------------------


def test_the_commands_in_the_readme_exist() -> None:
    text = (_ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (_ROOT / "Makefile").read_text()
    assert {"train", "test", "gpu"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
