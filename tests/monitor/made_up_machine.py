"""A machine that does not exist: eight GPUs, one of them cut up, one hot, one lost; and a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.reading import (
    DeviceReading,
    HostReading,
    ProcessReading,
    Sample,
)

GIB = 2.0**30
PID = 4242

#: Seconds of one step of replica 0; the others compute less, and wait.
PLAN: tuple[tuple[Phase, float], ...] = (
    ("input", 0.004),
    ("scatter", 0.006),
    ("forward", 0.040),
    ("loss", 0.004),
    ("backward", 0.080),
    ("reduce local", 0.010),
    ("reduce across processes", 0.016),
    ("optimizer", 0.010),
)


def make_device(index: int, tick: int = 0, **changes: object) -> DeviceReading:
    """One GPU, busy as a GPU in training is."""
    busy = min(1.0, max(0.0, 0.82 + 0.16 * math.sin(0.7 * tick + index)))
    values: dict[str, float | None] = {
        "utilization": busy,
        "memory_used": (48 + 3 * index) * GIB,
        "memory_total": 80 * GIB,
        "power": 300 + 380 * busy,
        "power_limit": 700.0,
        "temperature": 55.0 + 2 * index,
        "sm_clock": 1.98e9,
        "sm_clock_max": 1.98e9,
        "pcie_sent": 1.2e9,
        "pcie_received": 3.4e9,
        "nvlink_sent": 41e9,
        "nvlink_received": 40e9,
        "tensor_active": 0.61,
        "ecc_uncorrected": 0.0,
    }
    values.update(changes.pop("values", {}))  # type: ignore[call-overload]
    reading = DeviceReading(
        f"cuda:{index}", "NVIDIA H100 80GB HBM3", "nvml", f"GPU-{index:04}", values
    )
    return dataclasses.replace(reading, **changes)  # type: ignore[arg-type]


def make_devices(tick: int = 0) -> tuple[DeviceReading, ...]:
    """Eight GPUs with everything that can happen to them, and the parts of one of them."""
    devices = [make_device(i, tick) for i in range(8)]
    devices[1] = make_device(
        1,
        tick,
        values={"temperature": 91.0, "sm_clock": 1.2e9, "power": 700.0},
        throttle=("power cap", "thermal slowdown"),
    )
    devices[2] = make_device(2, tick, values={"utilization": 1.0, "power": 130.0})
    devices[3] = make_device(3, tick, values={"memory_used": 79 * GIB})
    devices[4] = make_device(4, tick, values={}, error="GPU is lost; reset it or restart")
    devices[5] = make_device(5, tick, values={"utilization": None})
    parts = [
        DeviceReading(
            f"nvml:5/{i}",
            "MIG 3g.40gb",
            "nvml",
            f"MIG-{i}",
            {"memory_used": 12 * GIB, "memory_total": 40 * GIB},
            parent="cuda:5",
        )
        for i in range(2)
    ]
    devices[6] = make_device(6, tick, values={"ecc_uncorrected": 2.0})
    # The parts come last: whoever shows them has to find where they belong.
    return (*devices, *parts)


def make_step(number: int, devices: tuple[str, ...], slow: float = 1.0) -> StepRecord:
    """A step in which replica 0 computes ``slow`` times as long as the others."""
    replicas = []
    length = sum(seconds for _, seconds in PLAN)
    for index, device in enumerate(devices):
        segments: list[Segment] = []
        for phase, planned in PLAN:
            begin = segments[-1].end if segments else 0.0
            own = planned
            if index and phase in ("forward", "backward"):
                own = planned / slow
            segments.append(Segment(phase, begin, begin + own))
            if own < planned:
                segments.append(Segment("idle", begin + own, begin + planned))
        replicas.append(ReplicaStep(index, device, 32 - 4 * index, tuple(segments)))
    samples = sum(replica.samples for replica in replicas)
    return StepRecord(number, "train", 1e9, length, samples, tuple(replicas))


def make_run(
    steps: int = 1000, *, time: float = 1e9, replicas: int = 4, **changes: object
) -> RunState:
    """The state of a run after so many steps."""
    devices = tuple(f"cuda:{i}" for i in range(replicas))
    last = make_step(steps, devices, slow=2.0)
    now: tuple[tuple[Phase, float], ...] = tuple(
        (PHASES[(2 + i) % len(PHASES)], 0.012 * (i + 1)) for i in range(replicas)
    )
    state = RunState(
        pid=PID,
        rank=0,
        time=time,
        started=1e9 - 754.0,
        num_steps=steps,
        num_samples=steps * last.samples,
        info=RunInfo(
            model="TransformerLM",
            wrapper="DistributedDataParallel",
            devices=devices,
            uuids=tuple(f"GPU-{i:04}" for i in range(replicas)),
            world_size=2,
            num_parameters=124_000_000,
            num_buckets=18,
            bucket_bytes=25 * 2**20,
        ),
        now=now,
        totals=tuple(
            {phase: seconds * steps for phase, seconds in replica.seconds.items()}
            for replica in last.replicas
        ),
        memory=(40 * 2**30,) * replicas,
        last=last,
    )
    return dataclasses.replace(state, **changes)  # type: ignore[arg-type]


def make_sample(tick: int = 0, **changes: object) -> Sample:
    """The machine at a second, with everything on it."""
    sample = Sample(
        time=1e9 + tick,
        elapsed=float(tick),
        cost=0.0031,
        devices=make_devices(tick),
        processes=(
            *(
                ProcessReading(
                    f"cuda:{i}",
                    PID,
                    "python train.py --epochs 90",
                    "ada",
                    40 * GIB,
                    0.8,
                    5.2,
                    9 * GIB,
                )
                for i in range(4)
            ),
            ProcessReading("cuda:6", 999, "jupyter-lab", "grace", 1.5 * GIB, None, 0.03, GIB),
            ProcessReading("cuda:7", 31337, None, None, None),
        ),
        host=HostReading(
            0.43, 64, 120 * GIB, 512 * GIB, {"main": 0.2, "replica-0": 0.98, "replica-1": 0.55}
        ),
        run=make_run(1000 + 6 * tick, time=1e9 + tick),
        notes=("NVLink counters need a driver from 535 on",),
    )
    return dataclasses.replace(sample, **changes)  # type: ignore[arg-type]


def samples(count: int) -> Iterator[Sample]:
    """The machine second by second."""
    return (make_sample(tick) for tick in range(count))
