"""Samples that nobody has measured: chosen ones, and any that can be."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.metrics import METRICS
from dataparallel.tools.monitor.reading import (
    DeviceReading,
    HostReading,
    ProcessReading,
    Sample,
)
from dataparallel.tools.monitor.recorder import Recorder

#: The devices of the replicas of :func:`run_state`; nobody reads the last one.
DEVICES = ("virtual:0", "virtual:0", "virtual:1", "virtual:7")


def sample(number: int = 0, run: RunState | None = None, **values: float | None) -> Sample:
    """The sample of a number, which tells all of them apart."""
    shown = {"utilization": number / 1000, "memory_used": 2.0**20 + number, **values}
    return Sample(
        time=1.7e9 + number,
        elapsed=float(number),
        cost=0.001,
        devices=tuple(
            DeviceReading(f"virtual:{index}", 'a, "b"\nc', "virtual", values=shown)
            for index in range(2)
        ),
        host=HostReading(0.5, 2, 1e9, 2e9),
        run=run,
    )


def run_state(
    *totals: dict[Phase, float],
    now: tuple[tuple[Phase, float], ...] | None = None,
    devices: tuple[str, ...] = DEVICES,
    time: float = 1.7e9,
    memory: tuple[int, ...] | None = None,
) -> RunState:
    """A run with a replica per device."""
    each: dict[Phase, float] = {"forward": 1.0, "reduce local": 0.5}
    return RunState(
        pid=4711,
        rank=0,
        time=time,
        started=1.6e9,
        num_steps=3,
        num_samples=24,
        info=RunInfo("Linear", "DataParallel", devices, (None,) * len(devices)),
        now=now or (("forward", 0.25),) * len(devices),
        totals=totals or (each,) * len(devices),
        memory=memory or tuple(range(len(devices))),
        last=None,
    )


def record(path: Path, *samples: Sample) -> None:
    """Record samples into a file."""
    with Recorder(path, about={"interval": 1.0}) as recorder:
        for one in samples:
            recorder.record(one)


_numbers = st.floats(allow_nan=False, allow_infinity=False)
_counts = st.integers(0, 2**53)
_texts = st.text(max_size=12)
_phases = st.sampled_from(PHASES)


def _tuples(
    elements: st.SearchStrategy[object], size: int
) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, min_size=size, max_size=size).map(tuple)


_device_readings = st.builds(
    DeviceReading,
    device=_texts,
    name=_texts,
    source=_texts,
    uuid=st.none() | _texts,
    values=st.dictionaries(
        st.sampled_from([metric.name for metric in METRICS]), st.none() | _numbers
    ),
    throttle=st.lists(_texts, max_size=2).map(tuple),
    parent=st.none() | _texts,
    error=st.none() | _texts,
)

_process_readings = st.builds(
    ProcessReading,
    device=_texts,
    pid=_counts,
    name=st.none() | _texts,
    memory=st.none() | _numbers,
    cpu=st.none() | _numbers,
)

_host_readings = st.builds(
    HostReading,
    utilization=_numbers,
    num_cpus=_counts,
    memory_used=_numbers,
    memory_total=_numbers,
    threads=st.dictionaries(_texts, _numbers, max_size=2),
)

_steps = st.builds(
    StepRecord,
    number=_counts,
    kind=st.sampled_from(["train", "inference"]),
    time=_numbers,
    seconds=_numbers,
    samples=_counts,
    replicas=st.lists(
        st.builds(
            ReplicaStep,
            index=_counts,
            device=_texts,
            samples=_counts,
            segments=st.lists(
                st.builds(Segment, phase=_phases, begin=_numbers, end=_numbers), max_size=2
            ).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)


@st.composite
def run_states(draw: st.DrawFn) -> RunState:
    """Any run."""
    size = draw(st.integers(0, 3))
    info = st.builds(
        RunInfo,
        model=_texts,
        wrapper=_texts,
        devices=_tuples(_texts, size),
        uuids=_tuples(st.none() | _texts, size),
    )
    return draw(
        st.builds(
            RunState,
            pid=_counts,
            rank=_counts,
            time=_numbers,
            started=_numbers,
            num_steps=_counts,
            num_samples=_counts,
            info=info,
            now=_tuples(st.tuples(_phases, _numbers), size),
            totals=_tuples(st.dictionaries(_phases, _numbers, max_size=3), size),
            memory=_tuples(_counts, size),
            last=st.none() | _steps,
        )
    )


#: Any sample.
SAMPLES = st.builds(
    Sample,
    time=_numbers,
    elapsed=_numbers,
    cost=_numbers,
    devices=st.lists(_device_readings, max_size=2).map(tuple),
    processes=st.lists(_process_readings, max_size=2).map(tuple),
    host=st.none() | _host_readings,
    run=st.none() | run_states(),
    notes=st.lists(_texts, max_size=2).map(tuple),
)
