"""Conclusions from what a machine has played: the step and its parts, ports, memory, a timeline."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataparallel.tools.bench.simulate.player import (
    BlockLife,
    Played,
    PlayedSpan,
    union,
    within,
    without,
)


@dataclass(frozen=True)
class DeviceOutcome:
    """One device in a step: seconds and bytes.

    Attributes:
        busy: The time in which any kernel ran.
        exposed: The time in which none ran, and bytes were on their way between devices.
        idle: The rest: the device waits for the host, or for kernels of other devices.
        exposed_by_phase: ``exposed`` by the phase of the kernel that ran next.
        sent: The bytes that left it for other devices.
        received: The bytes that came from others.
        memory: The most bytes in use.
        staging: The most bytes of streams for copies that are given back in the same phase.
    """

    busy: float
    exposed: float
    idle: float
    exposed_by_phase: dict[str, float]
    sent: float
    received: float
    memory: int
    staging: int


@dataclass(frozen=True)
class StepOutcome:
    """One contestant: the seconds of a step, and what each device did."""

    name: str
    seconds: float
    devices: tuple[DeviceOutcome, ...]

    def worst(self, what: str) -> float:
        """Return the largest value of the devices but the first; of that if it is alone."""
        values = [getattr(device, what) for device in self.devices]
        return float(max(values[1:] or values))


def conclude(name: str, played: Played, devices: int, held: Sequence[int]) -> StepOutcome:
    """Conclude from all steps but the first, which nothing came before."""
    _, begin, *others = (mark.done for mark in played.marks if mark.name == "step")
    end, steps = others[-1], len(others)
    traffic = union((span.begin, span.end) for span in played.spans if _is_traffic(span))
    found = []
    for device in range(devices):
        kernels = [
            span
            for span in played.spans
            if span.task.kind == "kernel" and span.task.device == device and span.end > begin
        ]
        busy = within(union((span.begin, span.end) for span in kernels), begin, end)
        gaps = without([(begin, end)], busy)
        covered = [
            (one, other)
            for gap in gaps
            for one, other in within(traffic, *gap)
        ]  # fmt: skip
        idle = without(gaps, union(covered))
        sent = received = 0
        for span in played.spans:
            if _is_traffic(span) and begin < span.end <= end:
                out, into = _moved(span, devices)
                sent += out[device]
                received += into[device]
        blocks = [block for block in played.memory if block.device == device]
        found.append(
            DeviceOutcome(
                busy=_length(busy) / steps,
                exposed=_length(covered) / steps,
                idle=_length(idle) / steps,
                exposed_by_phase={
                    phase: seconds / steps for phase, seconds in _by_phase(covered, kernels).items()
                },
                sent=sent / steps,
                received=received / steps,
                memory=_peak(blocks, held[device]),
                staging=_peak([block for block in blocks if block.is_staging], 0),
            )
        )
    return StepOutcome(name, (end - begin) / steps, tuple(found))


def _is_traffic(span: PlayedSpan) -> bool:
    task = span.task
    is_between = task.kind == "copy" and task.source >= 0 and task.destination >= 0
    return is_between or task.kind == "collective"


def _moved(span: PlayedSpan, devices: int) -> tuple[Counter[int], Counter[int]]:
    """Return the bytes that each device sends and receives."""
    task = span.task
    if task.kind == "copy":
        return Counter({task.source: task.bytes}), Counter({task.destination: task.bytes})
    if task.name == "all-reduce":
        # Each member of a ring sends and receives as much; one of them is played.
        moved = Counter({task.device: task.moved})
        return moved, moved
    first = Counter({0: task.bytes})
    others = Counter(dict.fromkeys(range(1, devices), task.bytes))
    passed = Counter(dict.fromkeys(range(1, devices - 1), task.bytes))
    # A ring from the first device to the last one, or back: those between pass all of it on.
    return (first + passed, others) if task.name == "broadcast" else (others, first + passed)


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def _by_phase(
    intervals: Sequence[tuple[float, float]], kernels: Sequence[PlayedSpan]
) -> dict[str, float]:
    ordered = sorted(kernels, key=lambda span: span.begin)
    seconds: dict[str, float] = defaultdict(float)
    position = 0
    for begin, end in intervals:
        while position < len(ordered) and ordered[position].begin < end:
            position += 1
        phase = ordered[position].phase if position < len(ordered) else "end"
        seconds[phase] += end - begin
    return dict(seconds)


def _peak(blocks: Sequence[BlockLife], held: int) -> int:
    """Return the most bytes at a time; those held before are there until their blocks end."""
    changes = [(block.end, -block.bytes) for block in blocks]
    changes += [(block.begin, block.bytes) for block in blocks if block.begin >= 0]
    changes.sort()
    return max(itertools.accumulate((size for _, size in changes), initial=held))


# --- the timeline for Perfetto -------------------------------------------------------------------


def write_timeline(path: str, contestants: Mapping[str, Played], note: str) -> None:
    """Write a file that Perfetto and ``chrome://tracing`` open: a process per device."""
    events: list[dict[str, Any]] = []
    for number, (name, played) in enumerate(contestants.items()):
        places = sorted({(span.task.device, span.task.stream) for span in played.spans})
        for device, stream in places:
            process, thread = 1000 * number + device, stream
            label = f"{name}: device {device}, simulated"
            lane = "computation" if stream == 0 else f"stream {stream}"
            for what, text in (("process_name", label), ("thread_name", lane)):
                events.append(
                    {
                        "ph": "M",
                        "name": what,
                        "pid": process,
                        "tid": thread,
                        "args": {"name": text},
                    }
                )
        for span in played.spans:
            task = span.task
            route = f" {task.source} to {task.destination}" if task.kind == "copy" else ""
            events.append(
                {
                    "ph": "X",
                    "name": (task.kind if route else task.name) + route,
                    "cat": span.phase or "none",
                    "pid": 1000 * number + task.device,
                    "tid": task.stream,
                    "ts": span.begin * 1e6,
                    "dur": (span.end - span.begin) * 1e6,
                    "args": {"bytes": task.bytes, "phase": span.phase},
                }
            )
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}
    Path(path).write_text(json.dumps(content))
