"""Steps that never happened, with the times that a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.threads.timeline import PHASES, Phase

Seconds = Mapping[Phase, float]

BUSY: Seconds = {"forward": 0.4, "backward": 0.6}
SLOW: Seconds = {"forward": 0.8, "backward": 1.2}


def make_info(num_replicas: int, *, buckets: int = 4, world_size: int = 1, **more: int) -> RunInfo:
    devices = tuple(f"virtual:{i}" for i in range(num_replicas))
    return RunInfo(
        "Net",
        "DistributedDataParallel" if buckets else "DataParallel",
        devices,
        (None,) * num_replicas,
        world_size=world_size,
        num_buckets=buckets,
        **more,
    )


def make_step(
    replicas: Sequence[Seconds],
    samples: Sequence[int] | None = None,
    *,
    number: int = 2,
    device: str = "virtual",
    kind: Literal["train", "inference"] = "train",
) -> StepRecord:
    """A step as long as its longest replica; the others are idle to the end of it."""
    length = max(sum(seconds.values()) for seconds in replicas)
    samples = [8] * len(replicas) if samples is None else samples
    found = []
    for i, seconds in enumerate(replicas):
        rest = length - sum(seconds.values())
        whole = {**seconds, "idle": seconds.get("idle", 0.0) + rest}
        begin, segments = 0.0, []
        for phase in PHASES:
            if whole.get(phase):
                segments.append(Segment(phase, begin, begin + whole[phase]))
                begin += whole[phase]
        found.append(ReplicaStep(i, f"{device}:{i}", samples[i], tuple(segments)))
    return StepRecord(number, kind, 1000.0 + number, length, sum(samples), tuple(found))


def make_steps(
    number: int, replicas: Sequence[Seconds], *, samples: Sequence[int] | None = None
) -> list[StepRecord]:
    return [make_step(replicas, samples, number=i + 2) for i in range(number)]
