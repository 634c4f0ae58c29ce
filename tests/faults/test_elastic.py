"""Processes that torchrun starts again: they find each other, and go on where they were."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from tests.cluster import Cluster
from tests.faults import elastic_cases
from tests.faults.elastic_cases import EVERY, Journal
from tests.faults.harness import Figures
from tests.faults.injector import Fault, Injector

ROOT = pathlib.Path(__file__).parents[2]
BASELINE = "torch alone: static 2 of 11, --standalone 5 of 8, c10d 0 of 2 recovered"


class Launch:
    """The agents of one run, which end with the test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self.agents: list[subprocess.Popen[str]] = []

    def start(
        self,
        *options: str,
        program: Sequence[str],
        folder: pathlib.Path = ROOT,
        **variables: str,
    ) -> None:
        """Start torchrun on one machine, in a folder; each call is one more."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1"}
        environment |= variables
        # Otherwise the agents and the processes would be told what this test found out.
        environment.pop("GLOO_SOCKET_IFNAME", None)
        command = [sys.executable, "-m", "torch.distributed.run", *options, *program]
        with open(self._folder / f"agent{len(self.agents)}", "w") as log:
            agent = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, text=True
            )
        self.agents.append(agent)

    def wait(self, timeout: float) -> None:
        """Wait for all agents, which have to be content."""
        for number, agent in enumerate(self.agents):
            status = agent.wait(timeout)
            said = (self._folder / f"agent{number}").read_text()
            assert status == 0, f"agent {number} ended with {status}:\n{said[-6000:]}"

    def end(self) -> None:
        """End what still runs; an agent that is told to ends its processes first."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Launch]:
    """Starts agents of torchrun."""
    launched = Launch(tmp_path)
    yield launched
    launched.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def options_of(rendezvous: str) -> list[str]:
    """What one agent is told; several get the same."""
    port = free_port()
    if rendezvous == "standalone":
        return ["--standalone"]
    if rendezvous == "static":
        return ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a"),
        *("--local-addr", "127.0.0.1"),
    ]


def program(
    folder: pathlib.Path, steps: int, kills: Sequence[tuple[int, int]], needed: int = 1
) -> list[str]:
    module = elastic_cases.__name__
    return ["-m", module, str(folder), str(steps), json.dumps(kills), str(needed)]


def kill_places(number: int, world_size: int, *, seed: int) -> list[tuple[int, int]]:
    """Ranks and steps; no two of them so near that the same steps are repeated twice."""
    chance = random.Random(seed)
    return [(chance.randrange(world_size), 2 + 4 * i + chance.randrange(4)) for i in range(number)]


def check_as_undisturbed(cluster: Cluster, folder: pathlib.Path, steps: int) -> None:
    """All losses and the weights are those of a run without faults, bit for bit."""
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    digests = cluster.run(elastic_cases.train, 2, str(undisturbed), steps, [])
    expected = elastic_cases.losses(Journal(undisturbed / "journal"))
    assert len(expected) == 2 * steps
    journal = Journal(folder / "journal")
    assert elastic_cases.losses(journal) == expected
    lines = journal.read()
    found = {line["rank"]: line["digest"] for line in lines if line["event"] == "digest"}
    assert [found[rank] for rank in range(2)] == digests


def check_little_was_lost(folder: pathlib.Path, kills: Sequence[tuple[int, int]]) -> None:
    """Every fault happened, and repeated were no more than the steps since the last generation."""
    Injector([Fault(*each, "kill") for each in kills], folder / "happened").check()
    lines = Journal(folder / "journal").read()
    resumed = [line for line in lines if line["event"] == "resume"]
    # In the order of time; the first of each rank is the beginning.
    starts = [line["step"] for line in resumed if line["rank"] == 0][1:]
    reached = sorted(step for _, step in kills)
    assert all(0 <= at - start < EVERY for at, start in zip(reached, starts, strict=True))


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
    kills = kill_places(number, 2, seed=number)
    steps = 4 * number + 4
    options = [*options_of(rendezvous), "--nproc-per-node", "2", "--max-restarts", str(number)]
    launch.start(*options, program=program(tmp_path, steps, kills))
    launch.wait(40.0 + 10.0 * number)
    check_as_undisturbed(cluster, tmp_path, steps)
    check_little_was_lost(tmp_path, kills)
    seconds = elastic_cases.recoveries(Journal(tmp_path / "journal"), 2)
    assert len(seconds) == number
    found = [("p100", max(seconds), 5.0)]
    if number > 1:
        found.append(("median", statistics.median(seconds), 2.0))
    for what, value, limit in found:
        figures.record(
            goal=12,
            what=f"torchrun {rendezvous}: kill -9 of a rank to the first step of all, {what}",
            value=value,
            unit="s",
            limit=limit,
            repeats=number,
            baseline=BASELINE,
            details="losses and weights bit-equal to an undisturbed run",
        )


@pytest.mark.long_faults
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_machines(
    rendezvous: str, launch: Launch, cluster: Cluster, tmp_path: pathlib.Path, figures: Figures
) -> None:
    """Two agents, each of which counts the restarts in its own way."""
    number = 15
    kills = kill_places(number, 2, seed=number)
    steps = 4 * number + 4
    options = [*options_of(rendezvous), "--nnodes", "2", "--nproc-per-node", "1"]
    for node in range(2):
        of_node = ["--node-rank", str(node)] if rendezvous == "static" else []
        again = ["--max-restarts", str(2 * number)]
        launch.start(*options, *of_node, *again, program=program(tmp_path, steps, kills))
    launch.wait(40.0 + 20.0 * number)
    check_as_undisturbed(cluster, tmp_path, steps)
    Injector([Fault(*each, "kill") for each in kills], tmp_path / "happened").check()
    figures.record(
        goal=12,
        what=f"two agents of torchrun, {rendezvous}: kills of a rank not recovered",
        value=0,
        unit="failures",
        limit=0,
        repeats=number,
        baseline=BASELINE,
    )


@pytest.mark.long_faults
def test_a_machine_that_joins_later(launch: Launch, tmp_path: pathlib.Path) -> None:
    """The one that is there is started again together with it, from the last generation on."""
    steps = 20
    options = [*options_of("c10d"), "--nnodes", "1:2", "--nproc-per-node", "1"]
    options += ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]
    program_of_all = program(tmp_path, steps, [], needed=2)

    def start() -> None:
        # See docs/elastic.md.
        launch.start(*options, program=program_of_all, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    start()
    journal = Journal(tmp_path / "journal")
    wait_until(lambda: any(line.get("step") == EVERY for line in journal.read()))
    start()
    launch.wait(120.0)
    lines = journal.read()
    resumed = [(line["rank"], line["step"]) for line in lines if line["event"] == "resume"]
    at = steps // 2 // EVERY * EVERY
    assert resumed[0] == (0, 0) and sorted(resumed[1:]) == [(0, at), (1, at)]
    assert {line["rank"] for line in lines if line["event"] == "digest"} == {0, 1}
    ends = elastic_cases.losses(journal)
    assert ends.keys() == {(0, i) for i in range(steps)} | {(1, i) for i in range(at, steps)}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.long_faults
def test_kills_at_any_moment(
    launch: Launch, cluster: Cluster, tmp_path: pathlib.Path, figures: Figures
) -> None:
    """While processes start, meet, load, train and save."""
    number = 30
    steps, chance = 400, random.Random(number)
    options = [*options_of("c10d"), "--nproc-per-node", "2", "--max-restarts", str(number)]
    launch.start(*options, program=program(tmp_path, steps, []))
    killed = 0
    for restart in range(number):
        processes = processes_of(tmp_path, restart)
        if len(processes) < 2:
            break
        time.sleep(chance.uniform(0.0, 2.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(processes), signal.SIGKILL)
            killed += 1
    launch.wait(300.0)
    check_as_undisturbed(cluster, tmp_path, steps)
    figures.record(
        goal=12,
        what="kill -9 at any moment, also of the start and of a save: recovered",
        value=killed,
        unit="kills",
        limit=5,
        at_least=True,
        repeats=killed,
        baseline=BASELINE,
    )


def processes_of(folder: pathlib.Path, restart: int) -> list[int]:
    """The processes after so many restarts, as soon as they are there; none after the last."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        lines = Journal(folder / "journal").read()
        if any(line["event"] == "digest" for line in lines):
            return []
        here = [each for each in lines if (each["event"], each["restart"]) == ("process", restart)]
        if len(here) == 2:
            return [line["pid"] for line in here]
        time.sleep(0.01)
    raise AssertionError(f"torchrun did not start the processes again (restart {restart})")


@pytest.mark.long_faults
def test_the_example_ends_with_the_weights_of_an_undisturbed_run(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    states = []
    for number, name in enumerate(("whole", "killed")):
        (tmp_path / name).mkdir()
        script = [str(ROOT / "examples" / "resume.py")]
        launch.start(*options, program=script, folder=tmp_path / name)
        log = tmp_path / f"agent{number}"
        if name == "killed":
            wait_until(lambda log=log: "step 100:" in log.read_text())  # type: ignore[misc]
            os.kill(random.choice(children_of(launch.agents[number].pid)), signal.SIGKILL)
        launch.wait(120.0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))
        assert checkpoint.load(tmp_path / name / "out" / "resume", net).step == 400
        states.append(net.state_dict())
        begun = [int(step) for step in re.findall(r"begins at step (\d+)", log.read_text())]
        assert len(begun) == (2 if name == "whole" else 4)
        assert begun[:2] == [0, 0] and all(step > 0 for step in begun[2:])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
