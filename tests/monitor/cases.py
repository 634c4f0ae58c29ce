"""Steps, runs, machines and recordings that never were."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataparallel.monitor import attach
from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.monitor.record import Kind, ReplicaStep, Segment, StepRecord, StepTotals
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor import command, opening
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.recording import Recording

Seconds = dict[Phase, float]

GIB = 2.0**30
PID = 4242
BEGIN = 1_000_000.0
BUSY: Seconds = {"forward": 0.4, "backward": 0.6}
SLOW: Seconds = {"forward": 0.8, "backward": 1.2}


@pytest.fixture
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder with sockets; its name is short, as those of sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix="dp", dir="/tmp"))
    monkeypatch.setenv(attach.VARIABLE, str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# --- runs ------------------------------------------------------------------------------------


def make_info(
    num_replicas: int = 2, *, buckets: int = 4, device: str = "virtual", **more: Any
) -> RunInfo:
    devices = tuple(f"{device}:{i}" for i in range(num_replicas))
    uuids = tuple(f"GPU-{i}" if device == "cuda" else None for i in range(num_replicas))
    wrapper = "DistributedDataParallel" if buckets else "DataParallel"
    more = {"num_cpus": 64.0, **more}
    return RunInfo("Net", wrapper, devices, uuids, num_buckets=buckets, **more)


def make_step(
    replicas: Sequence[Seconds],
    samples: Sequence[int] = (),
    *,
    number: int = 2,
    device: str = "virtual",
    kind: Kind = "train",
) -> StepRecord:
    """Return a step as long as its longest replica; the others are idle to the end of it."""
    length = max(sum(seconds.values()) for seconds in replicas)
    samples = samples or [8] * len(replicas)
    found = []
    for i, seconds in enumerate(replicas):
        rest = length - sum(seconds.values())
        whole = {**seconds, "idle": seconds.get("idle", 0.0) + rest}
        begin, segments = 0.0, []
        for phase in sorted(PHASES, key=lambda phase: phase != "pause"):
            if whole.get(phase):
                segments.append(Segment(phase, begin, begin + whole[phase]))
                begin += whole[phase]
        found.append(ReplicaStep(i, f"{device}:{i}", samples[i], tuple(segments)))
    return StepRecord(number, kind, 1000.0 + number, length, sum(samples), tuple(found))


def make_steps(
    number: int, replicas: Sequence[Seconds], samples: Sequence[int] = ()
) -> list[StepRecord]:
    return [make_step(replicas, samples, number=i + 2) for i in range(number)]


class FakeRun:
    """A run whose steps a test makes; :meth:`state` is what it would tell."""

    def __init__(
        self,
        info: RunInfo | None = None,
        *,
        pid: int = PID,
        started: float = BEGIN - 60.0,
        **changes: Any,
    ) -> None:
        self.info = info or make_info(device="cuda")
        self.changes = changes
        self.pid = pid
        self.started = started
        self.kinds: dict[Kind, StepTotals] = {}
        self.last: StepRecord | None = None

    def steps(
        self,
        number: int,
        replicas: Sequence[Seconds],
        samples: Sequence[int] = (),
        kind: Kind = "train",
    ) -> None:
        """Make steps that are all alike."""
        place = number + sum(one.steps for one in self.kinds.values())
        step = make_step(replicas, samples, number=place, device="cuda", kind=kind)
        before = self.kinds.get(kind) or StepTotals.none(len(step.replicas))
        self.kinds[kind] = before.plus(step, number)
        self.last = step

    def state(self, time: float = BEGIN, **changes: Any) -> RunState:
        number = len(self.info.devices)
        state = RunState(
            job="node0:29500",
            rank=0,
            host="node0",
            pid=self.pid,
            number=0,
            time=time,
            started=self.started,
            info=self.info,
            now=(("forward", 0.01),) * number,
            kinds=dict(self.kinds),
            memory=(int(8 * GIB),) * number,
            last=self.last,
        )
        return dataclasses.replace(state, **{**self.changes, **changes})


def a_state(num_steps: int = 1, pid: int | None = None) -> RunState:
    """Return the state of a run after so many steps."""
    run = FakeRun(pid=os.getpid() if pid is None else pid)
    run.steps(num_steps, [BUSY, SLOW])
    return run.state()


# --- samples ---------------------------------------------------------------------------------


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
        runs=() if run is None else (run,),
    )


def training(num_samples: int = 24, num_devices: int = 4) -> list[Sample]:
    """Return a run whose last replica is slow and whose first waits for its input at the end.

    From the second third on the last device is slowed down.
    """
    run = FakeRun(make_info(num_devices, device="cuda"))
    found = []
    for i in range(num_samples):
        readings = []
        for d in range(num_devices):
            late = d == num_devices - 1 and i >= num_samples // 3
            readings.append(
                device(
                    d,
                    throttle=["power cap"] if late else [],
                    utilization=0.9,
                    memory_used=(30 + d) * GIB,
                    power=500.0 if late else 650.0,
                    energy=650.0 * i,
                )
            )
        waits: Seconds = {"input": 2.0} if i >= num_samples * 3 // 4 else {}
        replicas = [{**BUSY, **waits}] * (num_devices - 1)
        run.steps(2, [*replicas, {**SLOW, **waits}])
        found.append(sample(float(i), readings, run.state(BEGIN + i)))
    return found


def recording(samples: Sequence[Sample], host: str = "node0") -> Recording:
    return Recording({"host": host, "recording": host}, tuple(samples))


def write_recording(path: Path, samples: Sequence[Sample], **about: str) -> Path:
    lines = [
        {"format": "dataparallel monitor recording", "version": 3, "interval": 1.0, **about},
        *(one.to_json() for one in samples),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- a machine with everything that can happen to it -----------------------------------------

#: One step of replica 0, 170 ms; the others compute twice as fast, and wait.
_FIRST: Seconds = {
    "input": 0.004,
    "scatter": 0.006,
    "forward": 0.040,
    "loss": 0.004,
    "backward": 0.080,
    "reduce local": 0.010,
    "reduce across processes": 0.016,
    "optimizer": 0.010,
}
_OTHERS: Seconds = {**_FIRST, "forward": 0.020, "backward": 0.040}


def make_run(num_steps: int = 1000, **changes: Any) -> RunState:
    """Return the run on the first four devices of :func:`make_sample` after so many steps."""
    info = make_info(4, device="cuda", world_size=2, num_parameters=124_000_000)
    run = FakeRun(dataclasses.replace(info, model="TransformerLM"))
    run.steps(num_steps, [_FIRST, _OTHERS, _OTHERS, _OTHERS], [32, 28, 24, 20])
    now = tuple((PHASES[2 + i], 0.012 * (i + 1)) for i in range(4))
    return run.state(now=now, **changes)


def make_device(i: int, values: dict[str, float | None] | None = None, **more: Any) -> Any:
    """Return a device that is busy as one in training is."""
    usual: dict[str, float | None] = {
        "utilization": 0.82,
        "memory_used": 48 * GIB,
        "memory_total": 80 * GIB,
        "power": 611.0,
        "power_limit": 700.0,
        "temperature": 55.0,
        "sm_clock": 1.98e9,
        "sm_clock_max": 1.98e9,
        "pcie_sent": 1.2e9,
        "ecc_uncorrected_errors": 0.0,
    }
    more |= {"name": "NVIDIA H100 80GB HBM3", "values": {**usual, **(values or {})}}
    return dataclasses.replace(device(i), **more)


def make_sample(tick: int = 0, **changes: Any) -> Sample:
    """Return the machine at a second: one device is hot, one lost, one broken."""
    hot: dict[str, float | None] = {"temperature": 91.0, "sm_clock": 1.2e9, "power": 700.0}
    command = "python train.py --epochs 90"
    whole = Sample(
        time=BEGIN + tick,
        elapsed=float(tick),
        cost=0.0031,
        devices=(
            make_device(0),
            make_device(1, hot, throttle=("power cap", "thermal slowdown")),
            DeviceReading("cuda:2", "NVIDIA H100", "nvml", "GPU-2", error="GPU is lost; reset it"),
            make_device(3, {"utilization": None}),
            make_device(4, {"ecc_uncorrected_errors": 2.0}),
        ),
        processes=(
            *(
                ProcessReading(f"cuda:{i}", PID, command, "ada", 40 * GIB, 0.8, 5.2, 9 * GIB)
                for i in range(4)
            ),
            ProcessReading("cuda:4", 31337, None, None, None),
        ),
        host=HostReading(0.43, 64, 120 * GIB, 512 * GIB, {"main": 0.2, "replica-0": 0.98}),
        runs=(make_run(1000 + 6 * tick, time=BEGIN + tick),),
        notes=("NVLink counters need a driver from 535 on",),
    )
    return dataclasses.replace(whole, **changes)


def samples(count: int) -> Iterator[Sample]:
    """Return the machine second by second."""
    return (make_sample(tick) for tick in range(count))


# --- samplers --------------------------------------------------------------------------------


class FakeSampler(Sampler):
    """Gives samples that are made up, as fast as they are wanted, and then does something."""

    def __init__(self, then: Callable[[], object] = lambda: None, count: int = 3) -> None:
        super().__init__((), interval=0.01)
        self.closed = self.given = 0
        self.count = count
        self.then = then

    def samples(self) -> Iterator[Sample]:
        for tick in range(self.count):
            self.given += 1
            yield make_sample(tick)
        self.then()

    def close(self) -> None:
        super().close()
        self.closed += 1


def opened(*words: str) -> Sampler:
    """Return the sampler of a command with these options."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_sampler_options(parser)
    return opening.open_sampler(parser.parse_args(words))


def history_of(*shown: Sample) -> History:
    history = History()
    for one in shown:
        history.add(one)
    return history
