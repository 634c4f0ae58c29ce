"""Recorded steps as a timeline that Perfetto and chrome://tracing show.

Both read the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are whole microseconds since 1970: what begins where another thing ends then begins there
after rounding too, and files of several processes have one clock.

A replica's segments have no gaps. Where it is behind the host, its own steps begin later than the
host's, each where the one before ended.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dataparallel.monitor.record import ReplicaStep, StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.whole_file import written_whole
from dataparallel.threads.timeline import Phase

_Event = dict[str, Any]

#: Names of colors that chrome://tracing knows.
_COLORS: dict[Phase, str] = {
    "input": "grey",
    "scatter": "rail_load",
    "forward": "thread_state_running",
    "gather": "rail_idle",
    "loss": "good",
    "backward": "thread_state_runnable",
    "reduce local": "rail_animation",
    "reduce across processes": "thread_state_iowait",
    "optimizer": "rail_response",
    "idle": "white",
}


def write_timeline(
    steps: Sequence[StepRecord], info: RunInfo, path: str | os.PathLike[str], rank: int = 0
) -> Path:
    """Write one file with all replicas, for https://ui.perfetto.dev or chrome://tracing.

    The process is a row of threads, one per replica, beside one for the steps and the number of
    samples per second.

    Example::

        write_timeline(monitor.steps, info, "timeline.json.gz")

    Args:
        steps: The steps, in order.
        info: What is known of the run.
        path: Where to; compressed if the name ends with ``.gz``.
        rank: Rank of the process. Default: 0.

    Returns:
        The file.

    Raises:
        ValueError: There are no steps.
        OSError: The file cannot be written; one that was there before is kept.
    """
    if not steps:
        raise ValueError(
            "there are no steps to write; a step is recorded when the next one begins, or at "
            "the end of `with StepMonitor(model)`"
        )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target, {"model": info.model}, _of_process(steps, info, rank))
    return target


def _of_process(steps: Sequence[StepRecord], info: RunInfo, rank: int) -> Iterator[_Event]:
    yield _name("process_name", rank, 0, f"rank {rank}: {info.wrapper} of {info.model}")
    row_of_steps = len(info.devices)
    rows = [f"replica {i} ({device})" for i, device in enumerate(info.devices)]
    for row, name in enumerate([*rows, "steps"]):
        yield _name("thread_name", rank, row, name)
        order = {"sort_index": row}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": row, "args": order}
    for step in steps:
        about = {"samples": step.samples, "milliseconds": round(step.seconds * 1e3, 3)}
        when = _microseconds(step.time), _microseconds(step.time + step.seconds)
        name = f"{step.kind} step {step.number}"
        yield _slice(name, "step", *when, pid=rank, tid=row_of_steps, args=about)
        if step.seconds > 0:
            counted = {"samples": round(step.samples / step.seconds, 3)}
            count = {"name": "samples per second", "ph": "C", "pid": rank, "args": counted}
            yield {**count, "ts": _microseconds(step.time)}
    for index in range(row_of_steps):
        for step, replica, begin in _replica_steps(steps, index):
            about = {"step": step.number, "samples": replica.samples}
            for segment in replica.segments:
                when = _microseconds(begin + segment.begin), _microseconds(begin + segment.end)
                event = _slice(segment.phase, "phase", *when, pid=rank, tid=index, args=about)
                yield {**event, "cname": _COLORS[segment.phase]}


def _replica_steps(
    steps: Sequence[StepRecord], index: int
) -> Iterator[tuple[StepRecord, ReplicaStep, float]]:
    """The steps of a replica and when each began, in seconds since 1970."""
    number, end = None, 0.0
    for step in steps:
        replica = step.replicas[index]
        follows = number is not None and step.number == number + 1
        begin = max(end, step.time) if follows else step.time
        yield step, replica, begin
        number, end = step.number, begin + _length(replica)


def _length(replica: ReplicaStep) -> float:
    return replica.segments[-1].end if replica.segments else 0.0


def _name(kind: str, pid: int, tid: int, name: str) -> _Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, category: str, begin: int, end: int, **more: Any) -> _Event:
    return {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": end - begin, **more}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _write(path: Path, head: dict[str, Any], events: Iterable[_Event]) -> None:
    """Write a file whole or not at all; one event is one line."""
    with written_whole(path) as unfinished, open(unfinished, "wb") as raw:
        packed = gzip.GzipFile("", "wb", 6, raw, 0) if path.suffix == ".gz" else None
        with io.TextIOWrapper(packed or raw, encoding="utf-8") as file:
            file.write(json.dumps({"schemaVersion": 1, **head})[:-1])
            file.write(', "displayTimeUnit": "ms", "traceEvents": [')
            for count, event in enumerate(events):
                file.write((",\n" if count else "\n") + json.dumps(event))
            file.write("\n]}\n")
