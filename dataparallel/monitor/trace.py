"""Recorded steps as a timeline that Perfetto and chrome://tracing show.

Both read the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are whole microseconds since 1970. So events that meet still meet after rounding, and files of
several processes have one clock.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo

_Event = dict[str, Any]


def write_timeline(
    steps: Sequence[StepRecord], info: RunInfo, path: str | os.PathLike[str], rank: int
) -> Path:
    """Write one file; see :meth:`~dataparallel.monitor.StepMonitor.export_chrome_trace`."""
    if not steps:
        raise ValueError(
            "there are no steps to write; a step is recorded when the next one begins, or at "
            "the end of `with StepMonitor(model)`"
        )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    events = list(_events(steps, info, rank))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    target.write_bytes(gzip.compress(text, 6) if target.suffix == ".gz" else text)
    return target


def _events(steps: Sequence[StepRecord], info: RunInfo, rank: int) -> Iterator[_Event]:
    """Yield a process with a thread per replica, one for the steps, and the samples per second."""
    row_of_steps = len(info.devices)
    rows = [f"replica {i} ({device})" for i, device in enumerate(info.devices)]
    yield _about(rank, 0, "process_name", name=f"rank {rank}: {info.wrapper} of {info.model}")
    for row, name in enumerate([*rows, "steps"]):
        yield _about(rank, row, "thread_name", name=name)
        yield _about(rank, row, "thread_sort_index", sort_index=row)
    ends = [0.0] * row_of_steps
    last = 0
    for step in steps:
        name = f"{step.kind} step {step.number}"
        args = {"samples": step.samples, "milliseconds": round(step.seconds * 1e3, 3)}
        yield _slice(rank, row_of_steps, name, step.time, step.time + step.seconds, args)
        if step.seconds > 0:
            rate = {"samples": round(step.samples / step.seconds, 3)}
            count = {"name": "samples per second", "ph": "C", "pid": rank, "args": rate}
            yield {**count, "ts": _microseconds(step.time)}
        for replica in step.replicas:
            # A replica behind the host begins where its step before ended.
            follows = step.number == last + 1
            begin = max(ends[replica.index], step.time) if follows else step.time
            args = {"step": step.number, "samples": replica.samples}
            for segment in replica.segments:
                when = begin + segment.begin, begin + segment.end
                yield _slice(rank, replica.index, segment.phase, *when, args)
                ends[replica.index] = when[1]
        last = step.number


def _about(pid: int, tid: int, kind: str, **args: object) -> _Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, name: str, begin: float, end: float, args: dict[str, Any]) -> _Event:
    first, last = _microseconds(begin), _microseconds(end)
    times = {"ts": first, "dur": last - first}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
