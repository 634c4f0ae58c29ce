"""Programs and notebooks whose text knows nothing of the monitor are watched as they are."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataparallel.monitor.attach import Answers
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools import cli
from dataparallel.tools.monitor import run_command
from dataparallel.tools.monitor.recording import read_recording
from tests.monitor.cases import FakeSampler, make_run

#: It trains until its end is asked for, so that it is seen however slow the machine is.
TRAINING = """
import builtins, os, sys, time
import torch, torch.distributed as dist
from torch import nn
is_one_of_several = "RANK" in os.environ
if is_one_of_several:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
model = nn.Linear(8, 8)
if is_one_of_several:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
is_over = torch.zeros(())
while not is_over:
    time.sleep(0.05 * rank)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    is_over.fill_(os.path.exists("end"))
    if is_one_of_several:
        dist.all_reduce(is_over)
print("is customized" if hasattr(builtins, "customized") else "is not")
print("arguments", *sys.argv[1:], sum(p.sum().item() < 1e9 for p in model.parameters()))
sys.exit(3)
"""


def started(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "runs").mkdir(mode=0o700)
    environment = {"DATAPARALLEL_MONITOR_DIR": str(folder / "runs"), **environment}
    command = [sys.executable, "-m", "dataparallel", "monitor", "run", "--interval", "0.1"]
    return subprocess.Popen(
        [*command, "--record", "run.jsonl", "--", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_seen(folder: Path, num_ranks: int = 1) -> bool:
    """True if a recording has some steps of so many ranks."""
    path = folder / "run.jsonl"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    seen: set[int] = set()
    for line in lines[-3:]:
        runs: list[dict[str, Any]] = json.loads(line).get("runs", []) if line.endswith("}") else []
        seen |= {
            run["rank"] for run in runs if run["kinds"].get("train", {"steps": 0})["steps"] > 10
        }
    return len(seen) == num_ranks


def test_a_program_is_watched_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *launcher, "train.py", "--name", "a b"]
    program = started(tmp_path, *words, PYTHONPATH=str(own))
    while not has_seen(tmp_path, 2):
        assert program.poll() is None, program.communicate()
        time.sleep(0.05)
    (tmp_path / "end").touch()
    told, report = program.communicate()
    # That of torchrun is its own.
    assert program.returncode == 1, report
    assert "arguments --name a b 2" in told and "is customized" in told
    assert "sitecustomize" not in report
    assert "optimizer of SGD" in report and "change first" in report
    assert "Rank 1 is slow in 'input'" in " ".join(report.split())
    samples = read_recording(tmp_path / "run.jsonl").samples
    assert {run.rank for one in samples for run in one.runs} == {0, 1}


def test_a_program_that_trains_nothing_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    program = [sys.executable, "-c", "import torch.optim; print(1)"]
    assert cli.main(["monitor", "run", "--record", str(path), "--", *program]) == 0
    told, report = capfd.readouterr()
    assert told == "1\n" and "nothing of it was seen" in report
    assert not path.exists()


def test_a_program_with_a_monitor_of_its_own_is_watched_once(tmp_path: Path) -> None:
    own = "from dataparallel.monitor import StepMonitor\nmonitor = StepMonitor(model).__enter__()\n"
    text = TRAINING.replace("is_over = ", f"{own}is_over = ", 1)
    (tmp_path / "train.py").write_text(text)
    program = started(tmp_path, sys.executable, "train.py", "--name", "a b")
    while not has_seen(tmp_path):
        assert program.poll() is None, program.communicate()
        time.sleep(0.05)
    (tmp_path / "end").touch()
    told, report = program.communicate()
    assert program.returncode == 3 and "arguments --name a b 2" in told
    assert "Linear" in report and "optimizer of SGD" not in report


@pytest.mark.parametrize("wrapper", ["DataParallel", "DistributedDataParallel"])
def test_replicas_of_a_wrapper_are_seen(wrapper: str, tmp_path: Path) -> None:
    wrap = f"dataparallel.{wrapper}(model, ['cpu', 'cpu'])"
    # As where a cell of a notebook has run again.
    twice = f"import dataparallel\nfirst, model = {wrap}, {wrap}\n"
    text = TRAINING.replace("optimizer = ", f"{twice}optimizer = ", 1)
    (tmp_path / "train.py").write_text(text)
    program = started(tmp_path, sys.executable, "train.py")
    while not has_seen(tmp_path):
        assert program.poll() is None, program.communicate()
        time.sleep(0.05)
    (tmp_path / "end").touch()
    _, report = program.communicate()
    assert program.returncode == 3 and wrapper in report
    samples = read_recording(tmp_path / "run.jsonl").samples
    (run,) = [one.runs for one in samples if one.runs][-1]
    assert run.last is not None
    assert [replica.samples for replica in run.last.replicas] == [2, 2]


def test_ctrl_c_and_an_end_from_outside_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    program = started(tmp_path, sys.executable, "train.py")
    while not has_seen(tmp_path):
        assert program.poll() is None, program.communicate()
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    _, report = program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGTERM
    assert "optimizer of SGD" in report and "change first" in report


def test_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["monitor", "run"]) == 2
    assert "there is no program to run: write it behind --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program", "status"),
    [
        ("--alert finding>=error --exit-code", "exit 0", 3),
        ("--alert finding>=error", "exit 0", 0),
        ("--alert nothing --exit-code", "exit 0", 0),
        # That of a program that failed says more.
        ("--alert finding>=error --exit-code", "exit 5", 5),
    ],
)
def test_an_alert_may_be_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, program: str, status: int
) -> None:
    monkeypatch.setattr(run_command, "open_sampler", lambda arguments, watch: FakeSampler())
    command = ["monitor", "run", "--record", str(tmp_path / "run.jsonl"), *words.split()]
    assert cli.main([*command, "--", "sh", "-c", program]) == status


def test_a_process_that_is_silent_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are not shown, whether they answer or not."""
    path, end = tmp_path / "run.jsonl", tmp_path / "end"
    looks = itertools.count()

    def ask(*_: object) -> Answers:
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
        if next(looks) == 0:
            return Answers(tuple(make_run(pid=pid) for pid in pids), ())
        end.touch()
        return Answers((), (), tuple(pids))

    monkeypatch.setattr(run_command, "ask", ask)
    monkeypatch.setattr(
        run_command, "open_sampler", lambda _, watch: Sampler([], interval=0.01, runs=watch)
    )
    program = f"while [ ! -e {end} ]; do sleep 0.01; done"
    assert cli.main(["monitor", "run", "--record", str(path), "--", "sh", "-c", program]) == 0
    first, second, *_ = read_recording(path).samples
    assert [[run.answers for run in one.runs] for one in (first, second)] == [[True], [False]]


# --- notebooks -----------------------------------------------------------------------------------

#: Executes cells as the kernel of a notebook does.
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
def cell(text):
    result = shell.run_cell(text)
    result.raise_error()
    return result.result

cell("%load_ext dataparallel.monitor")
assert cell("%monitor") is None
cell("import torch")
cell('''
def train(num_outputs, num_steps):
    model = torch.nn.Linear(8, num_outputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(num_steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
''')
assert cell("%monitor") is None
optimizer = cell("optimizer = train(8, 30); optimizer")
first = cell("%monitor").num_steps
assert first > 20
# The same training goes on in another cell, and then there is another one.
cell("optimizer.step()")
cell("optimizer.step()")
assert cell("%monitor").num_steps >= first
cell("train(4, 9)")
assert 5 < cell("%monitor").num_steps < 9
cell("%unload_ext dataparallel.monitor")
cell("train(4, 9)")
from dataparallel.monitor.step_monitor import num_watching
assert num_watching() == 0
cell("%reload_ext dataparallel.monitor")
cell("train(4, 9)")
assert num_watching() == 1
"""


def test_a_notebook_is_watched_cell_by_cell(tmp_path: Path) -> None:
    environment = {**os.environ, "DATAPARALLEL_MONITOR_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", NOTEBOOK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("nothing was watched yet")
    assert "cannot be watched" not in done.stderr
