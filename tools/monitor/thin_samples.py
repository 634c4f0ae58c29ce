"""The samples of a recording with what a report needs of them, which fits into memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.tools.monitor.reading import Sample

_Name = TypeVar("_Name", bound=str)
_Value = TypeVar("_Value")

#: So many steps are kept one by one at most; a report uses fewer.
_MAX_STEPS = 2000


def thin(samples: Iterable[Sample], max_steps: int = _MAX_STEPS) -> list[Sample]:
    """Keep of each sample what a report needs.

    Example::

        make_report(thin(RecordingReader("run.jsonl")))

    Args:
        samples: The oldest first; read one by one.
        max_steps: How many last steps keep what their replicas did. Default: 2000.

    Returns:
        The samples without processes and notes; in the last step of each, one segment per phase,
        and none where there would be too many steps.
    """
    found: list[Sample] = []
    infos: dict[RunInfo, RunInfo] = {}
    places: list[int] = []
    stride = 1
    for number, sample in enumerate(samples):
        run = sample.run
        if run is not None:
            last = run.last
            if last is not None and number % stride:
                last = dataclasses.replace(last, replicas=())
            elif last is not None:
                last = _without_order(last)
                places.append(number)
            run = dataclasses.replace(
                run,
                info=infos.setdefault(run.info, run.info),
                now=(),
                memory=(),
                totals=tuple(_shared(total) for total in run.totals),
                last=last,
            )
        devices = tuple(
            dataclasses.replace(device, values=_shared(device.values)) for device in sample.devices
        )
        host = None if sample.host is None else dataclasses.replace(sample.host, threads={})
        found.append(
            dataclasses.replace(sample, devices=devices, processes=(), notes=(), host=host, run=run)
        )
        if len(places) > max_steps:
            stride *= 2
            for place in places:
                if place % stride:
                    found[place] = _without_replicas(found[place])
            places = [place for place in places if not place % stride]
    return found


def _shared(values: Mapping[_Name, _Value]) -> dict[_Name, _Value]:
    """The same with names that all samples share: what is read from JSON has its own each."""
    return {cast("_Name", sys.intern(name)): value for name, value in values.items()}


def _without_order(step: StepRecord) -> StepRecord:
    """How long each replica was in each phase, but not when."""
    replicas = []
    for replica in step.replicas:
        segments, begin = [], 0.0
        for phase, seconds in replica.seconds.items():
            segments.append(Segment(phase, begin, begin + seconds))
            begin += seconds
        replicas.append(
            ReplicaStep(replica.index, replica.device, replica.samples, tuple(segments))
        )
    return dataclasses.replace(step, replicas=tuple(replicas))


def _without_replicas(sample: Sample) -> Sample:
    assert sample.run is not None and sample.run.last is not None
    last = dataclasses.replace(sample.run.last, replicas=())
    return dataclasses.replace(sample, run=dataclasses.replace(sample.run, last=last))
