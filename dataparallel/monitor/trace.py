"""Recorded steps as traces that Perfetto and Holistic Trace Analysis read.

Note [Traces of replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~
Both read the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are microseconds since 1970, whole ones: what begins where another thing ends then begins
there after rounding too, and files of several processes have one clock.

Holistic Trace Analysis takes one file per rank, and each replica is a rank to it. It goes by what
torch.profiler writes: steps are called ``ProfilerStep#N``; what a device does has a stream and, by
``correlation``, an event on the host that has launched it; and the name tells the kind: ``nccl...``
is communication, ``Memcpy...`` is memory, all else is computation. Nothing stands for ``idle`` and
``input``, so that it finds the device idle then; it counts from the first work to the last, so
that work of no length, of the kind "other", stands at both ends. It leaves out the last step, which
may have been cut off; these have not, so that an empty one follows.

A replica's segments have no gaps. Where it is behind the host, its own steps begin later than the
host's, each where the one before ended.
"""

from __future__ import annotations

import gzip
import io
import itertools
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

#: What Holistic Trace Analysis tells the kind of work from; the others are computation.
_NAMES: dict[Phase, str] = {
    "scatter": "Memcpy scatter",
    "gather": "Memcpy gather",
    "reduce local": "ncclKernel reduce local",
    "reduce across processes": "ncclKernel reduce across processes",
}
_NO_WORK: tuple[Phase, ...] = ("input", "idle")

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

#: The number that torch.profiler shows for a device's default stream.
_STREAM = 7
#: Rows of a replica's file: the host, and the device.
_HOST, _DEVICE = 0, 1


def write_traces(
    steps: Sequence[StepRecord], info: RunInfo, directory: str | os.PathLike[str], rank: int = 0
) -> list[Path]:
    """Write one file per replica, for Holistic Trace Analysis.

    Each replica is a rank of its own: replica ``i`` of process ``rank`` is
    ``rank * number of replicas + i``, and the file is named after it. Files of all processes go to
    one directory, with nothing else in it.

    Example::

        write_traces(monitor.steps, info, "traces")
        # TraceAnalysis(trace_dir="traces").get_temporal_breakdown()

    Args:
        steps: The steps, in order.
        info: What is known of the run.
        directory: Where to; it is made if it is not there.
        rank: Rank of the process. Default: 0.

    Returns:
        The files.

    Raises:
        ValueError: There are no steps.
        OSError: A file cannot be written; those that are there are complete.
    """
    _check(steps)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    num_replicas = len(info.devices)
    written = []
    for index, device in enumerate(info.devices):
        number = rank * num_replicas + index
        path = folder / f"rank_{number}.json.gz"
        head = {
            # Its reader takes the first "rank" of the file.
            "distributedInfo": {
                "rank": number,
                "world_size": info.world_size * num_replicas,
                "backend": "dataparallel",
            },
            "replica": index,
            "device": device,
            "model": info.model,
        }
        _write(path, head, _of_replica(steps, index, device, number))
        written.append(path)
    return written


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
    _check(steps)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target, {"model": info.model}, _of_process(steps, info, rank))
    return target


def _check(steps: Sequence[StepRecord]) -> None:
    if not steps:
        raise ValueError(
            "there are no steps to write; a step is recorded when the next one begins, or at "
            "the end of `with StepMonitor(model)`"
        )


# --- a replica -------------------------------------------------------------------------------


def _of_replica(
    steps: Sequence[StepRecord], index: int, device: str, number: int
) -> Iterator[_Event]:
    yield _name("process_name", number, 0, f"replica {index} ({device})")
    yield _name("thread_name", number, _HOST, "host")
    yield _name("thread_name", number, _DEVICE, device)
    links = itertools.count(1)
    end = 0
    for place, (step, replica, start) in enumerate(_replica_steps(steps, index)):
        begin, end = _microseconds(start), _microseconds(start + _length(replica))
        name = f"ProfilerStep#{step.number}"
        yield _slice(name, "user_annotation", begin, end, pid=number, tid=_HOST)
        if not place:
            yield from _work("Sync begin", begin, begin, number, next(links))
        for segment in replica.segments:
            when = _microseconds(start + segment.begin), _microseconds(start + segment.end)
            phase = segment.phase
            yield _slice(phase, "gpu_user_annotation", *when, pid=number, tid=_DEVICE)
            if phase not in _NO_WORK:
                yield from _work(_NAMES.get(phase, phase), *when, number, next(links))
    yield from _work("Sync end", end, end, number, next(links), ahead=1)
    name = f"ProfilerStep#{steps[-1].number + 1}"
    yield _slice(name, "user_annotation", end, end, pid=number, tid=_HOST)


def _work(
    name: str, begin: int, end: int, number: int, link: int, ahead: int = 0
) -> Iterator[_Event]:
    """What a device does, and the event on the host that has launched it, so much earlier."""
    kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    host = {"pid": number, "tid": _HOST, "args": {"correlation": link}}
    yield _slice(f"launch {name}", "cpu_op", begin - ahead, begin - ahead + 1, **host)
    args = {"stream": _STREAM, "device": 0, "correlation": link}
    yield _slice(name, kind, begin, end, pid=number, tid=_DEVICE, args=args)


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


# --- a process -------------------------------------------------------------------------------


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


# --- events ----------------------------------------------------------------------------------


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
