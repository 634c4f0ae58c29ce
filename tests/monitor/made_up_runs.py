"""Runs that nobody has run: their states and steps, and a folder for their sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataparallel.monitor import attach
from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.monitor.run import RunInfo, RunState

INFO = RunInfo("Net", "DataParallel", ("cpu:0", "cpu:1"), (None, "GPU-1"), num_parameters=7)


def a_step(number: int = 1, time: float = 100.0) -> StepRecord:
    """One second: replica 1 computes half as long as replica 0, and then waits."""
    slow = (
        Segment("scatter", 0.0, 0.1),
        Segment("forward", 0.1, 0.3),
        Segment("backward", 0.3, 0.9),
        Segment("optimizer", 0.9, 1.0),
    )
    fast = (
        Segment("scatter", 0.0, 0.1),
        Segment("forward", 0.1, 0.2),
        Segment("idle", 0.2, 0.3),
        Segment("backward", 0.3, 0.6),
        Segment("idle", 0.6, 1.0),
    )
    replicas = (ReplicaStep(0, "cpu:0", 3, slow), ReplicaStep(1, "cpu:1", 2, fast))
    return StepRecord(number, "train", time, 1.0, 5, replicas)


def a_state(num_steps: int = 1, pid: int | None = None) -> RunState:
    return RunState(
        pid=os.getpid() if pid is None else pid,
        rank=0,
        time=102.0,
        started=99.0,
        num_steps=num_steps,
        num_samples=5 * num_steps,
        info=INFO,
        now=(("forward", 0.25), ("idle", 0.5)),
        totals=tuple(dict(one.seconds) for one in a_step().replicas),
        memory=(0, 1 << 20),
        last=a_step(num_steps),
    )


@pytest.fixture
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder with sockets; its name is short, as those of sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix="dp", dir="/tmp"))
    monkeypatch.setenv(attach.VARIABLE, str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
