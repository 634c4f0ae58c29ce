"""Processes that torchrun starts again: they find each other, and go on where they were."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from subprocess import Popen
from typing import TypeAlias

import psutil
import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from tests.cluster import Cluster, free_port
from tests.faults import soak, training
from tests.faults.harness import Figures
from tests.faults.soak import Summary, summary
from tests.faults.training import Fault, Settings, journal

#: Starts an agent of torchrun, which is one machine, and gives it and the file that it writes.
Launch: TypeAlias = Callable[..., tuple[Popen[bytes], pathlib.Path]]


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Launch]:
    """The agents of a test end with it."""
    with contextlib.ExitStack() as stack:

        def start(
            command: list[str], cwd: pathlib.Path = training.ROOT, **variables: str
        ) -> tuple[Popen[bytes], pathlib.Path]:
            log = tmp_path / f"agent{len(list(tmp_path.glob('agent*')))}"
            return stack.enter_context(training.started(command, log, cwd, **variables)), log

        yield start


def wait_for(agents: list[tuple[Popen[bytes], pathlib.Path]], timeout: float) -> None:
    """Wait for agents, which have to be content."""
    for agent, log in agents:
        status = agent.wait(timeout)
        assert status == 0, f"{log.name} ended with {status}:\n{log.read_text()[-6000:]}"


def options_of(rendezvous: str, restarts: int, processes: int = 2) -> list[str]:
    """Return the options of one agent; several get the same."""
    options = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    if rendezvous == "standalone":
        return ["--standalone", *options]
    if rendezvous == "static":
        return ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *options]
    endpoint = f"127.0.0.1:{free_port()}"
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "a"]
    return [*options, "--local-addr", "127.0.0.1"]


def with_kills(folder: pathlib.Path, number: int) -> Settings:
    """Two processes; no two kills are so near that the same steps are repeated twice."""
    chance = random.Random(number)
    plan = [
        Fault(chance.randrange(2), 2 + 4 * i + chance.randrange(4), "kill") for i in range(number)
    ]
    return Settings(str(folder), 4 * number + 4, plan)


def as_undisturbed(cluster: Cluster, settings: Settings) -> Summary:
    """Return the events; the weights are those of a run without faults."""
    quiet = pathlib.Path(settings.folder, "undisturbed")
    quiet.mkdir()
    cluster.run(training.train, 2, replace(settings, folder=str(quiet), plan=[]), timeout=120)
    found, expected = summary(settings.folder), summary(quiet)
    assert len(found.digests) == 2 and found.digests == expected.digests
    assert found.faults == [str(fault) for fault in settings.plan]
    return found


@pytest.mark.parametrize(
    "rendezvous",
    [
        "c10d",
        pytest.param("static", marks=pytest.mark.long_faults),
        pytest.param("standalone", marks=pytest.mark.long_faults),
    ],
)
def test_killed_processes_are_replaced_and_training_goes_on_exactly(
    rendezvous: str,
    launch: Launch,
    cluster: Cluster,
    tmp_path: pathlib.Path,
    repeats: Callable[..., int],
    figures: Figures,
) -> None:
    number = repeats(quick=1, long=50)
    settings = with_kills(tmp_path, number)
    agent = launch(training.torchrun(settings, *options_of(rendezvous, number)))
    wait_for([agent], 40.0 + 10.0 * number)
    found = as_undisturbed(cluster, settings)
    # No more than the steps since the last generation.
    assert found.restarts == number == len(found.gaps)
    assert max(found.lost) < settings.disk_every
    what = f"torchrun {rendezvous}: kill -9 of a rank to the next step of all"
    figures.record(f"{what}, p100", max(found.gaps), "s", 5.0, repeats=number)
    if number > 1:
        median = statistics.median(found.gaps)
        figures.record(f"{what}, median", median, "s", 2.5, repeats=number)


@pytest.mark.long_faults
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_machines(
    rendezvous: str, launch: Launch, cluster: Cluster, tmp_path: pathlib.Path, figures: Figures
) -> None:
    """Two agents, each of which counts the restarts in its own way."""
    number = 15
    settings = with_kills(tmp_path, number)
    options = [*options_of(rendezvous, 2 * number, 1), "--nnodes", "2"]
    nodes = [["--node-rank", str(node)] if rendezvous == "static" else [] for node in range(2)]
    agents = [launch(training.torchrun(settings, *options, *node)) for node in nodes]
    wait_for(agents, 40.0 + 20.0 * number)
    as_undisturbed(cluster, settings)
    what = f"two agents of torchrun, {rendezvous}: kills of a rank not recovered"
    figures.record(what, 0, "failures", 0, repeats=number)


@pytest.mark.long_faults
def test_a_machine_that_joins_later(launch: Launch, tmp_path: pathlib.Path) -> None:
    """The one that is there is started again together with it, from the last generation on."""
    settings = Settings(str(tmp_path), 20, needed=2)
    options = [*options_of("c10d", 3, 1), "--nnodes", "1:2"]
    options += ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]
    command = training.torchrun(settings, *options)
    # See docs/elastic.md.
    agents = [launch(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")]
    wait_until(lambda: summary(tmp_path).done > settings.disk_every)
    agents.append(launch(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    wait_for(agents, 120.0)
    starts = [
        (line["rank"], line["step"]) for line in journal(tmp_path) if line["event"] == "start"
    ]
    at = settings.steps // 2 // settings.disk_every * settings.disk_every
    assert starts[0] == (0, 0) and sorted(starts[1:]) == [(0, at), (1, at)]
    found = summary(tmp_path)
    assert found.done == settings.steps and len(found.digests) == 2


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.long_faults
def test_the_example_ends_with_the_weights_of_an_undisturbed_run(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", *options_of("standalone", 1)]
    states = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        script = str(training.ROOT / "examples" / "resume.py")
        agent, log = launch([*command, script], tmp_path / name)
        if name == "killed":
            wait_until(lambda log=log: "step 100:" in log.read_text())  # type: ignore[misc]
            os.kill(random.choice(psutil.Process(agent.pid).children()).pid, signal.SIGKILL)
        wait_for([(agent, log)], 120.0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))
        assert checkpoint.load(tmp_path / name / "out" / "resume", net).step == 400
        states.append(net.state_dict())
        begun = [int(step) for step in re.findall(r"begins at step (\d+)", log.read_text())]
        assert len(begun) == (2 if name == "whole" else 4)
        assert begun[:2] == [0, 0] and all(step > 0 for step in begun[2:])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.long_faults
def test_a_short_soak(tmp_path: pathlib.Path) -> None:
    result = tmp_path / "result.md"
    arguments = ["--minutes", "1", "--folder", str(tmp_path), "--write", str(result)]
    # Starting again takes too large a part of a minute for the goodput that is asked for.
    assert soak.main(arguments) in (0, 2)
    text = result.read_text()
    assert "the same bits as without faults | yes |" in text
    assert "| faults that happened | 4 | all 4 | yes |" in text
