"""The examples, as a user starts them, and notebooks."""

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
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from tests.launched import launched

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLES = _ROOT / "examples"
_SHORT = ("one_process.py", "one_process_per_gpu.py", "hybrid.py", "resume.py")
_LEARNED = r"epoch 5/5: loss 0\.\d+, test accuracy 9\d\.\d%"


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


@pytest.mark.parametrize("virtual", [False, True])
def test_one_process(virtual: bool, tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "one_process.py", 1, tmp_path, virtual=virtual)
    assert re.search(_LEARNED, printed), printed
    assert "training steps of" in printed
    devices = [f"virtual:{i}" for i in range(4)] if virtual else ["cpu"]
    assert all(device in printed for device in devices)
    state = torch.load(tmp_path / "net.pt", map_location="cpu")
    assert sorted(state) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_one_process_per_gpu_under_torchrun(tmp_path: pathlib.Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(_EXAMPLES / "one_process_per_gpu.py")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert re.search(_LEARNED, done.stdout), done.stdout
    on_accelerators = launched(_EXAMPLES / "one_process_per_gpu.py", 2, tmp_path, virtual=True)
    assert losses(on_accelerators) == losses(done.stdout)
    assert len(losses(done.stdout)) == 5


@pytest.mark.parametrize(
    ("virtual", "shares"),
    [(True, ["virtual:0, virtual:1", "virtual:2, virtual:3"]), (False, ["cpu, cpu"] * 2)],
)
def test_hybrid(virtual: bool, shares: list[str], tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "hybrid.py", 2, tmp_path, virtual=virtual)
    for rank, share in enumerate(shares):
        assert f"rank {rank} trains on: {share}" in printed
    assert len(losses(printed)) == 5
    assert losses(printed)[-1] < 0.5 * losses(printed)[0]


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    states = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        if name == "killed":
            kill_at_step_100(tmp_path / name)
        printed = launched(_EXAMPLES / "resume.py", 1, tmp_path / name, virtual=False)
        begin = int(re.findall(r"begins at step (\d+)", printed)[0])
        assert 0 < begin < 400 if name == "killed" else begin == 0
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))
        assert checkpoint.load(tmp_path / name / "out" / "resume", net).step == 400
        states.append(net.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def kill_at_step_100(folder: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(_EXAMPLES / "resume.py")],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        # At whatever the training and the thread that saves are doing just then.
        for line in process.stdout:
            if line.startswith("step 100:"):
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


# --- notebooks -------------------------------------------------------------------------------


class Notebook:
    """Cells executed one after another in one kernel."""

    def __init__(self, folder: pathlib.Path) -> None:
        environment = os.environ | {"DATAPARALLEL_VIRTUAL_DEVICES": "4", "OMP_NUM_THREADS": "1"}
        self.manager, self.client = start_new_kernel(
            cwd=str(folder), env=environment, startup_timeout=60
        )

    def run(self, code: str, interrupt_at: str = "") -> list[tuple[str, dict[str, Any]]]:
        """What a cell prints and shows, and its error; interrupted once it has printed that."""
        self.client.execute(code)
        found: list[tuple[str, dict[str, Any]]] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=5)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            found.append((kind, content))
            if interrupt_at and kind == "stream" and interrupt_at in content["text"]:
                self.manager.interrupt_kernel()
                interrupt_at = ""
        raise TimeoutError(f"the cell has not ended within 60 s; it has shown {found}")

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def printed_by(shown: list[tuple[str, dict[str, Any]]]) -> str:
    assert not [content["traceback"] for kind, content in shown if kind == "error"]
    return "".join(content["text"] for kind, content in shown if kind == "stream")


@pytest.fixture
def notebook(tmp_path: pathlib.Path) -> Iterator[Notebook]:
    one = Notebook(tmp_path)
    yield one
    one.close()


def test_the_notebook(notebook: Notebook, tmp_path: pathlib.Path) -> None:
    text = nbformat.read(_EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(text)
    cells = [cell for cell in text.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without what a run has printed"
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 40
    shown = [message for cell in cells for message in notebook.run(cell.source)]
    printed = printed_by(shown)
    assert re.search(r"epoch 5/5: loss 0\.\d+", printed), printed
    assert re.search(r"test accuracy 9\d\.\d%", printed), printed
    results = [content["data"] for kind, content in shown if kind == "execute_result"]
    assert "index=3" in results[0]["text/plain"]
    assert "training steps of" in results[1]["text/html"]
    assert (tmp_path / "net.pt").exists()


_SETUP = """
import itertools, threading, time
import torch
from torch import nn
from dataparallel import DataParallel
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
model = DataParallel(net, ["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 20); y = x[:, :1] * 2
def step():
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
class Slow(nn.Module):
    def forward(self, x):
        print("under way", flush=True)
        for _ in range(600):
            time.sleep(0.05)
        return x
"""
_INTERRUPTED = (
    """
for i in itertools.count():
    step()
    if i == 20:
        print("under way", flush=True)
""",
    "DataParallel(Slow(), ['cpu', 'cpu'])(x)",
)
_AFTER = """
threads = {t for t in threading.enumerate() if t.name.startswith("dataparallel-replica")}
losses = [step() for _ in range(200)]
print(torch.allclose(model(x), net(x), atol=1e-6), losses[-1] < losses[0], len(threads) <= 4)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_interrupted_cell_leaves_the_notebook_usable(notebook: Notebook) -> None:
    printed_by(notebook.run(_SETUP))
    for cell in _INTERRUPTED:
        shown = notebook.run(cell, interrupt_at="under way")
        assert [each["ename"] for kind, each in shown if kind == "error"] == ["KeyboardInterrupt"]
        assert printed_by(notebook.run(_AFTER)).split() == ["True"] * 3


# --- the digits ------------------------------------------------------------------------------

_DIGITS = _EXAMPLES / "train_digits.py"


def test_digits_are_learned_by_two_processes_saved_and_drawn(tmp_path: pathlib.Path) -> None:
    options = ("--epochs", "4", "--min-accuracy", "0.9", "--output", "new/folder")
    printed = launched(_DIGITS, 2, tmp_path, *options, virtual=False)
    assert "rank 0 trains on: cpu, cpu\n" in printed and "rank 1 trains on: cpu, cpu\n" in printed
    assert len(re.findall(r"^Test accuracy 9\d\.\d\d% after", printed, re.MULTILINE)) == 1, printed
    assert len(losses(printed)) == 4
    written = tmp_path / "new" / "folder"
    assert torch.load(written / "digits.pt")["0.weight"].shape == (32, 1, 3, 3)
    assert (written / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(written.iterdir())) == 2


def test_help_and_too_low_an_accuracy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(_DIGITS), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(_DIGITS), run_name="__main__")
    assert "torchrun --nproc-per-node 2 examples/train_digits.py" in capsys.readouterr().out
    options = "--epochs 1 --batch-size 512 --lr 1e-5 --devices cpu --min-accuracy 0.99 --output out"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(_DIGITS), *options.split()])
    with pytest.raises(SystemExit, match=r"the accuracy is below 99\.00%"):
        runpy.run_path(str(_DIGITS), run_name="__main__")


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_each_process_takes_a_share_of_the_accelerators(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_devices = runpy.run_path(str(_DIGITS), run_name="digits")["default_devices"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    shares = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 3: [[0], [1], [2]], 4: [[0], [1], [2], [3]]}
    for rank, share in enumerate(shares[processes]):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert default_devices() == tuple(dp.accelerators()[i] for i in share)


# --- the README ------------------------------------------------------------------------------


def test_the_commands_in_the_readme_exist() -> None:
    text = (_ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (_ROOT / "Makefile").read_text()
    assert {"train", "test", "gpu"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
