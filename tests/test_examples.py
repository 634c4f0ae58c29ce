"""The examples, as a user starts them, and notebooks."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
import pytest
import torch
from jupyter_client.manager import KernelManager
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from tests.launched import launched

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLES = _ROOT / "examples"
_SHORT = ("one_process.py", "one_process_per_gpu.py", "hybrid.py", "resume.py")
_POOLS = ("pool_embed.py", "pool_classify.py", "pool_generate.py", "pool_serve.py", "pool_sweep.py")
_LEARNED = r"epoch 5/5: loss 0\.\d+, test accuracy 9\d\.\d%"


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


def test_all_examples_are_tried() -> None:
    elsewhere = {"notebook.ipynb", "kaggle.ipynb"}
    elsewhere |= {"train_digits.py", "parameter_server.py", "memory.py"}
    there = {path.name for path in _EXAMPLES.iterdir() if path.is_file()}
    assert there == {*_SHORT, *_POOLS, *elsewhere}
    # One reads the first ones in a minute.
    for names, most in ((_SHORT, 40), (_POOLS, 88)):
        for name in names:
            lines = (_EXAMPLES / name).read_text().splitlines()
            assert sum(bool(line.strip()) for line in lines) <= most, name
            assert len(lines) <= 1.25 * most, name


@pytest.mark.parametrize("virtual", [False, True])
def test_one_process(virtual: bool, tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "one_process.py", 1, tmp_path, virtual=virtual)
    assert re.search(_LEARNED, printed), printed
    assert "training steps of" in printed
    devices = [f"virtual:{i}" for i in range(4)] if virtual else ["cpu"]
    assert all(device in printed for device in devices)
    state = torch.load(tmp_path / "net.pt", map_location="cpu")
    assert sorted(state) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_one_process_per_gpu(tmp_path: pathlib.Path) -> None:
    script = _EXAMPLES / "one_process_per_gpu.py"
    first, second = (launched(script, 2, tmp_path, virtual=each) for each in (False, True))
    assert re.search(_LEARNED, first), first
    assert losses(first) == losses(second)
    assert len(losses(first)) == 5


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


def test_a_net_whose_state_fits_on_no_device_is_trained(tmp_path: pathlib.Path) -> None:
    printed = launched(_EXAMPLES / "memory.py", 1, tmp_path, virtual=True)
    assert re.search(r"^home runs out of memory: virtual:\d", printed, re.MULTILINE), printed
    peaks = re.findall(r"virtual:\d: peak .* MiB, (\d\.\d+) times the parameters", printed)
    assert len(peaks) == 4 and max(map(float, peaks)) < 3
    assert losses(printed)[-1] < 0.2 * losses(printed)[0]
    assert float(re.findall(r"to the bare module's: (.*)", printed)[0]) < 1e-5


# --- pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize(
    ("script", "options", "printed"),
    [
        ("pool_embed.py", ("--texts", "500", "--no-progress"), ["embedded 500 texts on: DEVICES"]),
        (
            "pool_classify.py",
            ("--no-progress",),
            ["rows: 200 images", "100.0% of 600 images are right, on: DEVICES"],
        ),
        ("pool_generate.py", (), ["12/12: ", "generated on: DEVICES", "model: 12 of 12 texts"]),
        ("pool_serve.py", ("--requests", "100"), ["on: DEVICES", "100 requests in ", "latency: "]),
        ("pool_sweep.py", ("--no-progress",), ["6 trainings on: DEVICES", "best rate: 0."]),
    ],
)
def test_a_pool_computes_what_the_bare_module_does(
    script: str, options: tuple[str, ...], printed: list[str], virtual: bool, tmp_path: pathlib.Path
) -> None:
    skip_without_transformers(script)
    text = launched(_EXAMPLES / script, 1, tmp_path, *options, virtual=virtual)
    devices = ", ".join(f"virtual:{i}" for i in range(4)) if virtual else "cpu, cpu"
    for part in printed:
        assert part.replace("DEVICES", devices) in text, text
    if script != "pool_generate.py":
        (difference,) = re.findall(r"^.*difference .*: (\d\.\de[+-]\d\d)$", text, re.MULTILINE)
        assert float(difference) < 1e-4, text


@pytest.mark.parametrize("script", _POOLS)
def test_a_pool_tells_its_options(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_transformers(script)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(_EXAMPLES / script), run_name="__main__")
    assert f"python examples/{script}\n" in re.sub(" {2,}.*", "", capsys.readouterr().out)


def skip_without_transformers(script: str) -> None:
    if script == "pool_generate.py":
        pytest.importorskip("transformers")


# --- notebooks -------------------------------------------------------------------------------


@pytest.fixture
def run_cell(tmp_path: pathlib.Path) -> Iterator[Callable[[str], list[tuple[str, dict[str, Any]]]]]:
    """Executes cells one after another in one kernel; gives what a cell prints and shows."""
    environment = os.environ | {"DATAPARALLEL_VIRTUAL_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    # Not by TCP, whose ports another process may take before the kernel has them.
    manager = KernelManager(transport="ipc", ip=str(tmp_path / "kernel"))
    manager.start_kernel(cwd=str(tmp_path), env=environment)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def run(code: str) -> list[tuple[str, dict[str, Any]]]:
        client.execute(code)
        found: list[tuple[str, dict[str, Any]]] = []
        while True:
            message = client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            found.append((kind, content))

    yield run
    manager.shutdown_kernel(now=True)
    client.stop_channels()


def test_the_notebook(run_cell: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    text = nbformat.read(_EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(text)
    cells = [cell for cell in text.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without what a run has printed"
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 40
    shown = [message for cell in cells for message in run_cell(cell.source)]
    assert not [content["traceback"] for kind, content in shown if kind == "error"]
    printed = "".join(content["text"] for kind, content in shown if kind == "stream")
    assert re.search(r"epoch 5/5: loss 0\.\d+", printed), printed
    assert re.search(r"test accuracy 9\d\.\d%", printed), printed
    results = [content["data"] for kind, content in shown if kind == "execute_result"]
    assert "index=3" in results[0]["text/plain"]
    assert results[1]["text/plain"].startswith("equal: the wrapper computes what the bare module")
    assert "training steps of" in results[2]["text/plain"]
    assert (tmp_path / "net.pt").exists()


@pytest.fixture
def kaggle() -> list[str]:
    """The code of the notebook for Kaggle, cell after cell."""
    text = nbformat.read(_EXAMPLES / "kaggle.ipynb", as_version=4)
    nbformat.validate(text)
    assert "has not been run on Kaggle yet" in text.cells[0].source
    cells = [cell for cell in text.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without what a run has printed"
    return [cell.source for cell in cells]


@pytest.mark.slow
def test_the_notebook_for_kaggle(run_cell: Callable[..., Any], kaggle: list[str]) -> None:
    shown = [message for source in kaggle for message in run_cell(source)]
    assert not [content["traceback"] for kind, content in shown if kind == "error"]
    printed = "".join(content["text"] for kind, content in shown if kind == "stream")
    assert "equal: the wrapper computes what the bare module does" in printed, printed
    rows = re.findall(r"^(\w.{26})( +[\d.]+){5} +(\d\.\d{4})$", printed, re.MULTILINE)
    names = [name.strip() for name, _, _ in rows]
    assert names == [
        "bare module, one GPU",
        "dataparallel, one process",
        "torch DDP, two processes",
    ], printed
    assert len({round(float(loss), 3) for _, _, loss in rows}) == 1, "all have trained the same"


def test_the_notebook_for_kaggle_refuses_an_old_torch(
    kaggle: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu126")
    with pytest.raises(RuntimeError, match=r"torch 2\.10\.1.* needs 2\.11 .*\n.*pip install"):
        exec(kaggle[0], {})


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_notebook_for_kaggle_installs_from_a_clone_and_leaves_torch_alone(
    is_folder: bool, kaggle: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    if is_folder:
        source.mkdir()
        (source / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(kaggle[1].replace("/kaggle/input/dataparallel", str(source)), {})
    assert commands[-1][1:3] == ["-m", "pip"] and "--no-deps" in commands[-1]
    assert commands[-1][-1] == "./clone" and (tmp_path / "clone").exists() == is_folder
    cloned = [["git", "clone", "--depth", "1", str(source), "clone"]]
    assert commands[:-1] == ([] if is_folder else cloned)


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


def test_each_process_takes_a_share_of_the_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    default_devices = runpy.run_path(str(_DIGITS), run_name="digits")["default_devices"]
    for processes, share in ((1, [0, 1, 2, 3]), (2, [2, 3]), (3, [2]), (4, [3])):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_RANK", str(processes - 1))
        assert default_devices() == tuple(dp.accelerators()[i] for i in share)


# --- the README ------------------------------------------------------------------------------


def test_the_commands_in_the_readme_exist() -> None:
    text = (_ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (_ROOT / "Makefile").read_text()
    assert {"train", "test", "gpu"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
