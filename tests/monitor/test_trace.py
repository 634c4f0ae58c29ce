"""Traces: the Trace Event Format, and what Holistic Trace Analysis 0.5 takes from a file.

It was run over such files: its temporal breakdown, idle time breakdown, overlap of communication,
kernel breakdown, user annotations, steps and stragglers gave the numbers that are asserted here.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataparallel
from dataparallel.monitor import ReplicaStep, Segment, StepMonitor, StepRecord
from dataparallel.monitor.trace import write_timeline, write_traces
from dataparallel.threads.timeline import PHASES
from tests.monitor.made_up_runs import INFO, a_step

SECOND = 1_000_000
#: What its reader looks for, line by line.
RANK = re.compile(r'"rank":\s+(\d+)')
COMMUNICATION = re.compile(r"^nccl.*Kernel")
MEMORY = re.compile(r"(^Memcpy)|(^Memset)|(^dma)")
NO_COMPUTATION = re.compile(r"(^nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")


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


@pytest.fixture(params=["traces", "timeline.json", "timeline.json.gz"])
def content(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Each kind of file."""
    if request.param == "traces":
        yield loaded(write_traces(some_steps(), INFO, tmp_path / "traces")[1])
    else:
        yield loaded(write_timeline(some_steps(), INFO, tmp_path / request.param))


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
    assert len(rows) in (2, 3)
    for times in rows.values():
        for begin, end in times:
            for other_begin, other_end in times:
                if begin < other_begin < end:
                    assert other_end <= end


def test_every_thread_has_a_name(content: dict[str, Any]) -> None:
    events = content["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(events)} <= named


# --- a file per replica ----------------------------------------------------------------------


def test_each_replica_is_a_rank(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, world_size=3)
    paths = write_traces(some_steps(), info, tmp_path / "new" / "traces", rank=2)
    assert [path.name for path in paths] == ["rank_4.json.gz", "rank_5.json.gz"]
    for number, path in zip((4, 5), paths, strict=True):
        expected = {"rank": number, "world_size": 6, "backend": "dataparallel"}
        assert loaded(path)["distributedInfo"] == expected
        # It is read from the first line that matches.
        text = gzip.decompress(path.read_bytes()).decode()
        first = next(filter(None, map(RANK.search, text.splitlines())))
        assert int(first[1]) == number
    assert sorted(tmp_path.glob("new/traces/*")) == paths


def test_steps_are_named_as_the_profiler_does_and_none_is_left_out(tmp_path: Path) -> None:
    events = loaded(write_traces(some_steps(), INFO, tmp_path)[0])["traceEvents"]
    steps = [e for e in slices(events) if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in steps] == [f"ProfilerStep#{n}" for n in (1, 2, 3, 4)]
    assert [e["dur"] for e in steps] == [SECOND] * 3 + [0]
    assert all(e["cat"] == "user_annotation" and "args" not in e for e in steps)
    # The last one is left out, with all that is launched in it.
    last = steps[-1]["ts"]
    assert all(e["ts"] < last for e in slices(events, cat="cpu_op"))


def test_work_hangs_together_with_its_launch(tmp_path: Path) -> None:
    events = loaded(write_traces(some_steps(), INFO, tmp_path)[1])["traceEvents"]
    work = [e for e in slices(events) if "stream" in e.get("args", {})]
    launches = slices(events, cat="cpu_op")
    assert len(work) == len(launches) == 3 * 3 + 2
    steps = [e for e in slices(events, cat="user_annotation")]
    for one in work:
        assert one["args"]["stream"] > 0 and one["cat"] in ("kernel", "gpu_memcpy")
        (launch,) = [e for e in launches if e["args"]["correlation"] == one["args"]["correlation"]]
        assert launch["tid"] != one["tid"] and "stream" not in launch["args"]
        # Of the same step, and not at place 0, which stands for "none" there.
        assert any(s["ts"] <= launch["ts"] < s["ts"] + s["dur"] for s in steps)
        assert events.index(launch) > 0
        assert launch["ts"] <= one["ts"]


def test_idle_time_is_what_is_idle(tmp_path: Path) -> None:
    """As its temporal breakdown counts: from the first work to the last, without what is work."""
    for path, idle, computing in zip(
        write_traces(some_steps(), INFO, tmp_path), (0.0, 0.5), (0.9, 0.4), strict=True
    ):
        events = loaded(path)["traceEvents"]
        work = [e for e in slices(events) if "stream" in e.get("args", {})]
        begin = min(e["ts"] for e in work)
        end = max(e["ts"] + e["dur"] for e in work)
        assert end - begin == 3 * SECOND
        assert end - begin - sum(e["dur"] for e in work) == pytest.approx(3 * SECOND * idle, abs=2)
        computes = [e for e in work if not NO_COMPUTATION.match(e["name"])]
        assert sum(e["dur"] for e in computes) == pytest.approx(3 * SECOND * computing, abs=2)


def test_the_name_tells_the_kind_of_work(tmp_path: Path) -> None:
    segments = tuple(Segment(phase, i / 10, (i + 1) / 10) for i, phase in enumerate(PHASES))
    step = StepRecord(1, "train", 1e9, 1.0, 2, (ReplicaStep(0, "cpu", 2, segments),))
    info = dataclasses.replace(INFO, devices=("cpu",), uuids=(None,))
    events = loaded(write_traces([step], info, tmp_path)[0])["traceEvents"]
    of_kernels = [e["name"] for e in slices(events, cat="kernel")]
    copies = [e["name"] for e in slices(events, cat="gpu_memcpy")]
    assert all(map(MEMORY.match, copies)) and len(copies) == 2
    communication = [name for name in of_kernels if COMMUNICATION.match(name)]
    # That is how its search for stragglers finds them.
    assert all(name.startswith("ncclKernel") for name in communication) and len(communication) == 2
    computing = [name for name in of_kernels if not NO_COMPUTATION.match(name)]
    assert computing == ["forward", "loss", "backward", "optimizer"]
    annotations = [e["name"] for e in slices(events, cat="gpu_user_annotation")]
    assert annotations == list(PHASES)


def test_a_replica_behind_the_host_keeps_its_own_times(tmp_path: Path) -> None:
    """Its steps take 1.5 s each while the host begins one each second."""
    steps = []
    for n in range(1, 4):
        slow = ReplicaStep(0, "cpu:0", 3, (Segment("forward", 0.0, 1.5),))
        steps.append(
            dataclasses.replace(a_step(n, 1e9 + n), replicas=(slow, *a_step().replicas[1:]))
        )
    events = loaded(write_traces(steps, INFO, tmp_path)[0])["traceEvents"]
    begins = [e["ts"] for e in slices(events, name="forward", cat="kernel")]
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
    with pytest.raises(FileExistsError, match="File exists"):
        write_traces(some_steps(), INFO, path)


def test_no_steps_are_refused(tmp_path: Path) -> None:
    for write in (write_traces, write_timeline):
        with pytest.raises(ValueError, match="no steps to write; a step is recorded when"):
            write([], INFO, tmp_path / "x.json")
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
    (path,) = monitor.export_chrome_trace(tmp_path / "timeline.json.gz")
    shown = loaded(path)["traceEvents"]
    for replica in (0, 1):
        phases = {e["name"] for e in slices(shown, tid=replica)}
        assert {"scatter", "forward", "backward"} <= phases
        steps = slices(shown, tid=2)
        total = sum(e["dur"] for e in slices(shown, tid=replica))
        assert total == pytest.approx(sum(e["dur"] for e in steps), rel=0.02)
    files = monitor.export_chrome_trace(str(tmp_path / "traces"))
    assert [loaded(one)["distributedInfo"]["rank"] for one in files] == [0, 1]
    assert [loaded(one)["device"] for one in files] == ["virtual:0", "virtual:1"]
