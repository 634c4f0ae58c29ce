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


def loaded(path: Path) -> dict[str, Any]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content: dict[str, Any] = json.loads(data)
    return content


def slices(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if event["ph"] == "X" and all(event.get(key) == value for key, value in wanted.items())
    ]


@pytest.fixture(params=["timeline.json", "timeline.json.gz"])
def content(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The file, packed or not."""
    return loaded(write_timeline(some_steps(), INFO, tmp_path / request.param))


# --- the format ------------------------------------------------------------------------------


def test_events_have_what_their_kind_needs(content: dict[str, Any]) -> None:
    assert content["displayTimeUnit"] in ("ms", "ns")
    kinds = {event["ph"] for event in content["traceEvents"]}
    assert {"M", "X"} <= kinds <= {"M", "X", "C"}
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert len(event["args"]) == 1
        else:
            assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int) and isinstance(event["dur"], int)
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())


def test_slices_of_a_thread_lie_within_each_other_or_apart(content: dict[str, Any]) -> None:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in slices(content["traceEvents"]):
        row = rows.setdefault((event["pid"], event["tid"]), [])
        row.append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 3
    for times in rows.values():
        for begin, end in times:
            for other_begin, other_end in times:
                if begin < other_begin < end:
                    assert other_end <= end


def test_every_thread_has_a_name(content: dict[str, Any]) -> None:
    events = content["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(events)} <= named


def test_a_replica_behind_the_host_keeps_its_own_times(tmp_path: Path) -> None:
    """Its steps take 1.5 s each while the host begins one each second."""
    steps = []
    for n in range(1, 4):
        slow = ReplicaStep(0, "cpu:0", 3, (Segment("forward", 0.0, 1.5),))
        steps.append(
            dataclasses.replace(a_step(n, 1e9 + n), replicas=(slow, *a_step().replicas[1:]))
        )
    events = loaded(write_timeline(steps, INFO, tmp_path / "all.json"))["traceEvents"]
    begins = [e["ts"] for e in slices(events, name="forward", tid=0)]
    first = (10**9 + 1) * SECOND
    assert begins == [first, first + 1_500_000, first + 3_000_000]
    # Where steps are missing there is nothing to go by but the host.
    events = loaded(write_timeline(steps[::2], INFO, tmp_path / "a.json"))["traceEvents"]
    begins = [e["ts"] for e in slices(events, name="forward", tid=0)]
    assert begins == [first, first + 2 * SECOND]


# --- one file --------------------------------------------------------------------------------


def test_the_timeline_has_a_thread_per_replica(tmp_path: Path) -> None:
    path = write_timeline(some_steps(2), INFO, tmp_path / "new" / "timeline.json", rank=3)
    events = loaded(path)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"].endswith("s_name")]
    assert names == ["rank 3: DataParallel of Net"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert rows == ["replica 0 (cpu:0)", "replica 1 (cpu:1)", "steps"]
    assert {e["pid"] for e in events} == {3}
    for index, replica in enumerate(a_step().replicas):
        shown = slices(events, tid=index)
        expected = [segment.phase for segment in replica.segments] * 2
        assert [e["name"] for e in shown] == expected
        assert sum(e["dur"] for e in shown) == 2 * SECOND
        assert shown[-1]["args"] == {"step": 2, "samples": replica.samples}
        assert all(e["cname"] for e in shown)
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"] for e in counters] == [{"samples": 5.0}] * 2
    first, second = slices(events, tid=2)
    assert first["name"] == "train step 1" and first["args"]["samples"] == 5
    assert second["ts"] == first["ts"] + first["dur"]


# --- files -----------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("before")
    broken = dataclasses.replace(some_steps(1)[0], replicas=())
    with pytest.raises(IndexError, match="tuple index out of range"):
        write_timeline([broken], INFO, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError, match="File exists"):
        write_timeline(some_steps(), INFO, path / "below.json")


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no steps to write; a step is recorded when"):
        write_timeline([], INFO, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_a_monitor_exports_what_it_has_seen(tmp_path: Path) -> None:
    model = dataparallel.DataParallel(
        torch.nn.Linear(2, 2, device="virtual:0"), ["virtual:0", "virtual:1"]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepMonitor(model, publish=False) as monitor:
        with pytest.raises(ValueError, match="no steps to write"):
            monitor.export_chrome_trace(tmp_path / "timeline.json")
        for _ in range(3):
            model(torch.ones(6, 2, device="virtual:0")).sum().backward()
            optimizer.step()
    path = monitor.export_chrome_trace(tmp_path / "timeline.json.gz")
    shown = loaded(path)["traceEvents"]
    for replica in (0, 1):
        phases = {e["name"] for e in slices(shown, tid=replica)}
        assert {"scatter", "forward", "backward"} <= phases
        steps = slices(shown, tid=2)
        total = sum(e["dur"] for e in slices(shown, tid=replica))
        assert total == pytest.approx(sum(e["dur"] for e in steps), rel=0.02)
