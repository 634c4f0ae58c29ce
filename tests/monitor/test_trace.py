"""The timeline in the Trace Event Format."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dataparallel
from dataparallel.monitor import ReplicaStep, Segment, StepMonitor, StepRecord
from dataparallel.monitor.trace import write_timeline
from tests.monitor.made_up_runs import INFO, a_step

SECOND = 1_000_000


def some_steps(count: int = 3) -> list[StepRecord]:
    return [a_step(n, 1_790_000_000.0 + n) for n in range(1, count + 1)]


def events_in(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = json.loads(data)
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def slices(events: list[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


@pytest.mark.parametrize("name", ["timeline.json", "new/timeline.json.gz"])
def test_the_timeline_has_a_thread_per_replica(tmp_path: Path, name: str) -> None:
    events = events_in(write_timeline(some_steps(2), INFO, tmp_path / name, rank=3))
    for event in events:
        assert isinstance(event["name"], str) and event["pid"] == 3
        numbers = {"M": ["tid"], "X": ["tid", "ts", "dur"], "C": ["ts"]}[event["ph"]]
        assert all(type(event[key]) is int for key in numbers)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "replica 0 (cpu:0)", 1: "replica 1 (cpu:1)", 2: "steps"}
    (process,) = [e["args"] for e in events if e["name"] == "process_name"]
    assert process == {"name": "rank 3: DataParallel of Net"}
    for index, replica in enumerate(a_step().replicas):
        shown = slices(events, index)
        assert [e["name"] for e in shown] == [one.phase for one in replica.segments] * 2
        assert shown[-1]["args"] == {"step": 2, "samples": replica.samples}
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert counters == [{"samples": 5.0}] * 2
    assert slices(events, 2)[0]["name"] == "train step 1"
    for tid in range(3):
        # Each begins where the one before ended, after rounding too.
        row = slices(events, tid)
        assert [e["ts"] + e["dur"] for e in row[:-1]] == [e["ts"] for e in row[1:]]
        assert sum(e["dur"] for e in row) == 2 * SECOND


def test_a_replica_behind_the_host_keeps_its_own_times(tmp_path: Path) -> None:
    """Its steps take 1.5 s each while the host begins one each second."""
    slow = ReplicaStep(0, "cpu:0", 3, (Segment("forward", 0.0, 1.5),))
    steps = [
        dataclasses.replace(a_step(n, 1e9 + n), replicas=(slow, a_step().replicas[1]))
        for n in range(1, 4)
    ]
    first = (10**9 + 1) * SECOND
    for chosen, expected in (
        (steps, [first, first + 1_500_000, first + 3_000_000]),
        # Where steps are missing there is nothing to go by but the host.
        (steps[::2], [first, first + 2 * SECOND]),
    ):
        events = events_in(write_timeline(chosen, INFO, tmp_path / "all.json", rank=0))
        assert [e["ts"] for e in slices(events, 0)] == expected


def test_a_monitor_exports_what_it_has_seen(tmp_path: Path) -> None:
    model = dataparallel.DataParallel(
        torch.nn.Linear(2, 2, device="virtual:0"), ["virtual:0", "virtual:1"]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "timeline.json.gz"
    with StepMonitor(model, publish=False) as monitor:
        with pytest.raises(ValueError, match="no steps to write; a step is recorded when"):
            monitor.export_chrome_trace(path)
        for _ in range(3):
            model(torch.ones(6, 2, device="virtual:0")).sum().backward()
            optimizer.step()
    with pytest.raises(FileExistsError, match="File exists"):
        path.write_text("")
        monitor.export_chrome_trace(path / "below.json")
    shown = events_in(monitor.export_chrome_trace(path))
    steps = sum(e["dur"] for e in slices(shown, 2))
    for replica in (0, 1):
        row = slices(shown, replica)
        assert {"scatter", "forward", "backward"} <= {e["name"] for e in row}
        assert sum(e["dur"] for e in row) == pytest.approx(steps, rel=0.02)
