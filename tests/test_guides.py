"""The guide for several machines, in networks of their own."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.faults import partition
from tests.test_docstrings import ROOT, blocks_of

PAGE = ROOT / "docs" / "guides" / "nodes.md"
(BLOCK,) = blocks_of(PAGE)
SCRIPT = BLOCK.code

#: Until the training of a machine has come to its first step.
_START = 60.0


def commands() -> list[str]:
    """Return the guide's commands for the first machine, with its exports."""
    text = PAGE.read_text().replace("\\\n", " ")
    found = [line.strip() for line in re.findall(r"^    .*torchrun .*$", text, re.MULTILINE)]
    assert [("--rdzv-backend" in line) for line in found] == [False, True]
    return found


def on_machine(rank: int, command: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of a command of the guide on a machine."""
    if rank == 1:
        command = command.replace("--node-rank 0", "--node-rank 1")
        command = command.replace("is_host=1", "is_host=0")
        command = command.replace("--local-addr 10.99.0.1", "--local-addr 10.99.0.2")
    settings, _, options = command.partition("torchrun ")
    # The network was named for the processes of the tests; here only the guide does.
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    env |= dict(each.split("=") for each in settings.split()) | {"OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "torch.distributed.run", *shlex.split(options)], env


def start(rank: int, command: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    arguments, env = on_machine(rank, command)
    (folder / str(rank)).mkdir()
    return subprocess.Popen(
        [*arguments[:-1], str(folder / arguments[-1])],
        cwd=folder / str(rank),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(rank: int, world_size: int, command: str, folder: pathlib.Path) -> str:
    """Train on one of the machines, and return what it prints."""
    running = start(rank, command, folder)
    output, errors = running.communicate()
    if running.returncode:
        raise RuntimeError(errors)
    return output


def test_two_machines(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition.require()
    (tmp_path / "train.py").write_text(SCRIPT)
    told = partition.run(train, commands()[1], tmp_path, timeout=150)
    for rank, text in enumerate(told):
        assert re.fullmatch(rf"rank {rank} of 2: 2 replicas, loss \d\.\d{{4}}\n", text), text

    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    exec(SCRIPT, {"__name__": "__main__"})
    alone = torch.load("net.pt")
    for name, weight in torch.load(tmp_path / "0" / "net.pt").items():
        torch.testing.assert_close(weight, alone[name])


def lose_a_machine(rank: int, world_size: int, command: str, folder: pathlib.Path) -> str:
    """Both train; then torchrun and its process are killed on machine 1. Gives what 0 prints."""
    running = start(rank, command, folder)
    if rank == 0:
        return running.communicate()[1]
    begin = time.monotonic()
    while not (folder / "1" / "stepped").exists():
        assert time.monotonic() < begin + _START, "no step was made"
        time.sleep(0.05)
    listed = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True)
    for pid in (running.pid, *map(int, listed.stdout.split())):
        os.kill(pid, signal.SIGKILL)
    return ""


def test_a_machine_that_fails(tmp_path: pathlib.Path) -> None:
    partition.require()
    endless = SCRIPT.replace("range(2)", "range(10**9)")
    text = endless.replace("sampler.set_epoch(epoch)", "open('stepped', 'w').close()")
    assert text != endless != SCRIPT
    # On a busy machine the store may take seconds to answer.
    patient = "from dataparallel.comm import failures\nfailures._ANSWER = 8.0\n"
    (tmp_path / "train.py").write_text(patient + text)
    printed, _ = partition.run(lose_a_machine, commands()[0], tmp_path, timeout=150)
    # The next act of rank 0 differs from time to time.
    named = re.search(
        r"CollectiveError: rank 0\b.* rank 1 \(process \d+ on .*\) has ended", printed
    )
    assert named, printed
    assert "failed (exitcode: 1)" in printed
