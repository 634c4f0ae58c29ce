"""Recordings of machines and runs that never were."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor.reading import DeviceReading, HostReading, Sample

from .step_cases import Seconds, make_step

GIB = 2.0**30
BEGIN = 1_000_000.0

#: How long each phase takes where nothing is wrong, in seconds.
EVEN: Seconds = {
    "input": 0.002,
    "scatter": 0.001,
    "forward": 0.030,
    "backward": 0.060,
    "reduce local": 0.004,
}


@dataclasses.dataclass
class FakeRun:
    """A run whose steps a test makes; ``state`` is what would be published.

    Attributes:
        info: What does not change.
        pid: Its process.
        started: Seconds since 1970.
    """

    info: RunInfo
    pid: int = 100
    started: float = BEGIN - 60.0

    def __post_init__(self) -> None:
        self.totals: list[dict[Phase, float]] = [{} for _ in self.info.devices]
        self.num_steps = self.num_samples = 0
        self.last: StepRecord | None = None

    def steps(self, number: int, replicas: Sequence[Seconds], samples: Sequence[int]) -> float:
        """Make steps that are all alike; returns how long they take."""
        step = make_step(replicas, samples, number=self.num_steps + number, device="cuda")
        for total, replica in zip(self.totals, step.replicas, strict=True):
            for phase, seconds in replica.seconds.items():
                total[phase] = total.get(phase, 0.0) + number * seconds
        self.num_steps += number
        self.num_samples += number * sum(samples)
        self.last = step
        return number * step.seconds

    def state(self, time: float) -> RunState:
        return RunState(
            pid=self.pid,
            rank=0,
            time=time,
            started=self.started,
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            info=self.info,
            now=(("forward", 0.01),) * len(self.info.devices),
            totals=tuple(dict(total) for total in self.totals),
            memory=(int(8 * GIB),) * len(self.info.devices),
            last=self.last,
        )


def info_of(num_replicas: int) -> RunInfo:
    devices = tuple(f"cuda:{i}" for i in range(num_replicas))
    uuids = tuple(f"GPU-{i}" for i in range(num_replicas))
    return RunInfo("Net", "DistributedDataParallel", devices, uuids, num_buckets=4)


def device(i: int, *, throttle: Sequence[str] = (), **values: float | None) -> DeviceReading:
    return DeviceReading(
        f"cuda:{i}", "NVIDIA H200", "nvml", f"GPU-{i}", values=values, throttle=tuple(throttle)
    )


def sample(
    elapsed: float, devices: Sequence[DeviceReading] = (), run: RunState | None = None
) -> Sample:
    return Sample(
        time=BEGIN + elapsed,
        elapsed=elapsed,
        cost=0.002,
        devices=tuple(devices),
        host=HostReading(0.25, 8, 4 * GIB, 16 * GIB),
        run=run,
    )


def training(
    num_samples: int = 120,
    num_devices: int = 4,
    *,
    interval: float = 1.0,
    with_run: bool = True,
    change: Callable[[int, Sample], Sample] = lambda i, sample: sample,
) -> list[Sample]:
    """A run whose replica 2 is slow, whose device 2 is throttled later on, and whose loader is
    slow in the third quarter.

    Args:
        num_samples: How many samples.
        num_devices: How many devices, with a replica on each.
        interval: Seconds between samples.
        with_run: Whether the run is watched.
        change: What becomes of each sample.
    """
    run = FakeRun(info_of(num_devices))
    energy = [1e6 * i for i in range(num_devices)]
    found = []
    for i in range(num_samples):
        waits = num_samples // 2 <= i < num_samples * 3 // 4
        late = i >= num_samples // 3
        readings = []
        for d in range(num_devices):
            load = (0.35 if waits else 0.9) + 0.08 * math.sin(i / 3 + d)
            power = 250 + 400 * load - (150 if d == 2 and late else 0)
            energy[d] += power * interval
            readings.append(
                device(
                    d,
                    throttle=["power cap"] if d == 2 and late else (),
                    utilization=load,
                    memory_used=(30 + 8 * d + 2 * math.sin(i / 20)) * GIB,
                    memory_total=141 * GIB,
                    power=power,
                    power_limit=700.0,
                    energy=energy[d],
                    temperature=55.0 + 2 * d,
                )
            )
        if with_run:
            replicas: list[Seconds] = []
            for d in range(num_devices):
                factor = (2.0 if late else 1.25) if d == 2 else 1.0 + 0.03 * d
                own = {**EVEN, "input": 0.15 if waits else 0.002}
                own["forward"] = EVEN["forward"] * factor
                own["backward"] = EVEN["backward"] * factor
                if d == 0:
                    own |= {"loss": 0.003, "optimizer": 0.006}
                replicas.append(own)
            length = make_step(replicas).seconds
            run.steps(max(1, round(interval / length)), replicas, [16] * num_devices)
        state = run.state(BEGIN + i * interval) if with_run else None
        found.append(change(i, sample(i * interval, readings, state)))
    return found


def write_recording(path: pathlib.Path, samples: Sequence[Sample], **header: Any) -> pathlib.Path:
    first = {"format": "dataparallel monitor recording", "version": 1, **header}
    lines = [first, *(one.to_json() for one in samples)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
